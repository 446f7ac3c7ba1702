// One access to shared memory by one warp, at offsets that the caller chooses: what does it cost? The
// emulator and the profiler of a real GPU are asked the same (tests/simt/data/bank_probe_h200.json).
#include "ptx.cuh"

constexpr int BYTES = 32 * 1024;

template <class T>
__global__ void probe_load(const int* offsets, T* out) {  // offsets [32]; negative: the lane stays out
    extern __shared__ __align__(1024) unsigned char memory[];
    for (int i = threadIdx.x * 4; i < BYTES; i += 128) *(int*)(memory + i) = 0;
    const int offset = offsets[threadIdx.x];
    __syncthreads();
    if (offset >= 0) out[threadIdx.x] = *(T*)(memory + offset);
}
template <class T>
__global__ void probe_store(const int* offsets, const T* in) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int offset = offsets[threadIdx.x];
    const T value = in[threadIdx.x];
    __syncthreads();
    if (offset >= 0) *(T*)(memory + offset) = value;
    __syncthreads();
    if (offset == -2) ((T*)in)[threadIdx.x] = *(T*)memory;  // never: keeps the store alive
}
template <int COUNT>
__global__ void probe_ldmatrix(const int* offsets, uint32_t* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    for (int i = threadIdx.x * 4; i < BYTES; i += 128) *(int*)(memory + i) = 0;
    const int offset = offsets[threadIdx.x];
    __syncthreads();
    uint32_t r[COUNT];
    if constexpr (COUNT == 1) ldmatrix_x1(r, smem_u32(memory) + offset);
    if constexpr (COUNT == 2) ldmatrix_x2(r, smem_u32(memory) + offset);
    if constexpr (COUNT == 4) ldmatrix_x4(r, smem_u32(memory) + offset);
    for (int i = 0; i < COUNT; i++) out[threadIdx.x * COUNT + i] = r[i];
}
template <int COUNT>
__global__ void probe_stmatrix(const int* offsets, uint32_t* in) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const int offset = offsets[threadIdx.x];
    uint32_t r[COUNT];
    for (int i = 0; i < COUNT; i++) r[i] = in[threadIdx.x * COUNT + i];
    __syncthreads();
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    if constexpr (COUNT == 1) stmatrix_x1(smem_u32(memory) + offset, r);
    if constexpr (COUNT == 2) stmatrix_x2(smem_u32(memory) + offset, r);
    if constexpr (COUNT == 4) stmatrix_x4(smem_u32(memory) + offset, r);
#endif
    __syncthreads();
    if (offset == -2) in[threadIdx.x] = *(uint32_t*)memory;
}

// operation: 0 load, 1 store, 2 ldmatrix, 3 stmatrix; size: bytes a lane, or the number of matrices. buffer:
// [32, 16] bytes
extern "C" int probe(int operation, int size, const int* offsets, void* buffer, cudaStream_t stream) {
#define PROBE(o, s, kernel, T)                                 \
    if (operation == o && size == s) {                         \
        kernel<<<1, 32, BYTES, stream>>>(offsets, (T*)buffer); \
        return cudaGetLastError();                             \
    }
    PROBE(0, 2, probe_load<unsigned short>, unsigned short)
    PROBE(0, 4, probe_load<int>, int)
    PROBE(0, 8, probe_load<int2>, int2)
    PROBE(0, 16, probe_load<int4>, int4)
    PROBE(1, 2, probe_store<unsigned short>, unsigned short)
    PROBE(1, 4, probe_store<int>, int)
    PROBE(1, 8, probe_store<int2>, int2)
    PROBE(1, 16, probe_store<int4>, int4)
    PROBE(2, 1, probe_ldmatrix<1>, uint32_t)
    PROBE(2, 2, probe_ldmatrix<2>, uint32_t)
    PROBE(2, 4, probe_ldmatrix<4>, uint32_t)
    PROBE(3, 1, probe_stmatrix<1>, uint32_t)
    PROBE(3, 2, probe_stmatrix<2>, uint32_t)
    PROBE(3, 4, probe_stmatrix<4>, uint32_t)
    return -1;
}
