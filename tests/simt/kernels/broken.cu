// Kernels whose findings are read word by word. A comment `// <- name` marks the lines that the tests look for.
#include "ptx.cuh"
#include <assert.h>

#define ENTRY extern "C" int
#define DONE return cudaGetLastError()

// ---- races --------------------------------------------------------------------------------------
__global__ void missing_barrier(float* p) {
    __shared__ float tile[64];
    tile[threadIdx.x] = p[threadIdx.x];  // <- race: written
    p[threadIdx.x] = tile[63 - threadIdx.x];  // <- race: read
}
ENTRY run_missing_barrier(float* p) { missing_barrier<<<2, 64>>>(p); DONE; }

__global__ void both_write(int* p) {
    __shared__ int flag;
    flag = threadIdx.x;  // <- two writers
    __syncthreads();
    p[threadIdx.x] = flag;
}
ENTRY run_both_write(int* p) { both_write<<<1, 64>>>(p); DONE; }

// ---- cp.async -----------------------------------------------------------------------------------
__global__ void no_wait(const float* in, float* out) {
    __shared__ __align__(16) float tile[128];
    cp_async<16>(smem_u32(tile + threadIdx.x * 4), in + threadIdx.x * 4);  // <- issued
    cp_async_commit();
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];  // <- too early
    __syncthreads();
    cp_async_wait<0>();
}
ENTRY run_no_wait(const float* in, float* out) { no_wait<<<1, 32>>>(in, out); DONE; }

__global__ void barrier_before_wait(const float* in, float* out) {
    __shared__ __align__(16) float tile[256];
    cp_async<16>(smem_u32(tile + threadIdx.x * 4), in + threadIdx.x * 4);  // <- landed
    cp_async_commit();
    __syncthreads();
    cp_async_wait<0>();
    out[threadIdx.x] = tile[255 - threadIdx.x];  // <- not visible yet
}
ENTRY run_barrier_before_wait(const float* in, float* out) { barrier_before_wait<<<1, 64>>>(in, out); DONE; }

__global__ void never_waited(const float* in, float* out) {
    __shared__ __align__(16) float tile[128];
    cp_async<16>(smem_u32(tile + threadIdx.x * 4), in + threadIdx.x * 4);  // <- never waited for
    cp_async_commit();
    out[threadIdx.x] = 0;
}
ENTRY run_never_waited(const float* in, float* out) { never_waited<<<1, 32>>>(in, out); DONE; }
__global__ void never_committed(const float* in, float* out) {
    __shared__ __align__(16) float tile[128];
    cp_async<16>(smem_u32(tile + threadIdx.x * 4), in + threadIdx.x * 4);  // <- never committed
    cp_async_wait<0>();
    out[threadIdx.x] = 0;
}
ENTRY run_never_committed(const float* in, float* out) { never_committed<<<1, 32>>>(in, out); DONE; }

__global__ void copy_out_of_bounds(const float* in, float* out) {
    __shared__ __align__(16) float tile[128];
    cp_async<16>(smem_u32(tile + threadIdx.x * 4), in + 132 + threadIdx.x * 4);  // <- copy beyond the end
    cp_async_wait_all();
    out[threadIdx.x] = tile[threadIdx.x];
}
ENTRY run_copy_out_of_bounds(const float* in, float* out) { copy_out_of_bounds<<<1, 32>>>(in, out); DONE; }
__global__ void copy_misaligned(const float* in, float* out) {
    __shared__ __align__(16) float tile[132];
    cp_async<16>(smem_u32(tile + threadIdx.x * 4), in + 1 + threadIdx.x * 4);  // <- misaligned source
    cp_async_wait_all();
    out[threadIdx.x] = tile[threadIdx.x];
}
ENTRY run_copy_misaligned(const float* in, float* out) { copy_misaligned<<<1, 16>>>(in, out); DONE; }

// ---- shared memory: uninitialised, out of bounds ------------------------------------------------
__global__ void uninitialised(float* p) {
    __shared__ float tile[64];
    if (threadIdx.x < 32) tile[threadIdx.x] = 1;
    __syncthreads();
    p[threadIdx.x] = tile[threadIdx.x];  // <- nobody wrote
}
ENTRY run_uninitialised(float* p) { uninitialised<<<1, 64>>>(p); DONE; }
__global__ void ldmatrix_uninitialised(uint32_t* p) {
    extern __shared__ __align__(16) __half halves[];
    uint32_t r[1];
    ldmatrix_x1(r, smem_u32(halves + threadIdx.x % 8 * 8));  // <- ldmatrix of nothing
    p[threadIdx.x] = r[0];
}
ENTRY run_ldmatrix_uninitialised(uint32_t* p) { ldmatrix_uninitialised<<<1, 32, 128>>>(p); DONE; }
__global__ void dynamic_out_of_bounds(float* p, int shift) {
    extern __shared__ float tile[];
    tile[threadIdx.x + shift] = p[threadIdx.x];  // <- beyond the dynamic array
    __syncthreads();
    p[threadIdx.x] = tile[threadIdx.x + shift];
}
ENTRY run_dynamic_out_of_bounds(float* p, int shift) {
    dynamic_out_of_bounds<<<1, 64, 64 * sizeof(float)>>>(p, shift);
    DONE;
}
__global__ void static_index(float* p, int column) {
    __shared__ float tile[8][9];
    __shared__ float other[64];
    other[threadIdx.x] = 0;
    tile[threadIdx.x / 8][threadIdx.x % 8] = p[threadIdx.x];
    __syncthreads();
    p[threadIdx.x] = tile[threadIdx.x % 8][column] + other[threadIdx.x];  // <- index beyond the row
}
ENTRY run_static_index(float* p, int column) { static_index<<<1, 64>>>(p, column); DONE; }
__global__ void static_pointer(float* p, int n) {
    __shared__ float tile[64];
    float* at = tile;
    at[threadIdx.x + n] = p[threadIdx.x];  // <- beyond the static array
    __syncthreads();
    p[threadIdx.x] = tile[threadIdx.x];
}
ENTRY run_static_pointer(float* p, int n) { static_pointer<<<1, 64>>>(p, n); DONE; }
__global__ void ldmatrix_out_of_bounds(uint32_t* p) {
    extern __shared__ __align__(16) uint32_t words[];
    words[threadIdx.x] = threadIdx.x;
    __syncthreads();
    uint32_t r[2];
    ldmatrix_x2(r, smem_u32(words) + threadIdx.x % 16 * 16);  // <- rows 8 to 15
    p[threadIdx.x] = r[0] + r[1];
}
ENTRY run_ldmatrix_out_of_bounds(uint32_t* p) { ldmatrix_out_of_bounds<<<1, 32, 128>>>(p); DONE; }

// ---- global memory ------------------------------------------------------------------------------
__global__ void past_the_end(const float* in, float* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = in[i + n];  // <- beyond the end
}
ENTRY run_past_the_end(const float* in, float* out, int n) { past_the_end<<<2, 32>>>(in, out, n); DONE; }
__global__ void wild(float* p, long long where) {
    *(float*)((char*)p + where) = 1;  // <- wild
}
ENTRY run_wild(float* p, long long where) { wild<<<1, 32>>>(p, where); DONE; }
__global__ void read_only(const float* in, float* out) {
    ((float*)in)[threadIdx.x] = 0;  // <- const
    out[threadIdx.x] = 0;
}
ENTRY run_read_only(const float* in, float* out) { read_only<<<1, 32>>>(in, out); DONE; }
__global__ void misaligned(const float* in, float* out) {
    *(float4*)(out + threadIdx.x * 4) = *(const float4*)(in + 1 + threadIdx.x * 4);  // <- misaligned vector
}
ENTRY run_misaligned(const float* in, float* out) { misaligned<<<1, 16>>>(in, out); DONE; }

// ---- collectives --------------------------------------------------------------------------------
__global__ void shuffle_in_branch(float* p) {
    float v = p[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);  // <- half of the warp
    __syncwarp();  // <- the other half
    p[threadIdx.x] = v;
}
ENTRY run_shuffle_in_branch(float* p) { shuffle_in_branch<<<1, 32>>>(p); DONE; }
__global__ void two_shuffles(float* p) {
    float v = p[threadIdx.x];
    if (threadIdx.x < 16)
        v += __shfl_xor_sync(0xffffffffu, v, 1);  // <- one shuffle
    else
        v += __shfl_xor_sync(0xffffffffu, v, 2);  // <- another
    p[threadIdx.x] = v;
}
ENTRY run_two_shuffles(float* p) { two_shuffles<<<1, 32>>>(p); DONE; }
__global__ void shuffle_and_exit(float* p) {
    float v = p[threadIdx.x];
    if (threadIdx.x < 16) v += __shfl_xor_sync(0xffffffffu, v, 1);  // <- named, but gone
    p[threadIdx.x] = v;
}
ENTRY run_shuffle_and_exit(float* p) { shuffle_and_exit<<<1, 32>>>(p); DONE; }
__global__ void wrong_mask(float* p) {  // 0x10 where 0b10 was meant
    p[threadIdx.x] = threadIdx.x < 8 ? __shfl_sync(0x000000ffu, p[threadIdx.x], 0x10, 32) : 0;  // <- lane 16
}
ENTRY run_wrong_mask(float* p) { wrong_mask<<<1, 32>>>(p); DONE; }
__global__ void mask_without_self(float* p) {
    p[threadIdx.x] = __shfl_sync(0x0000ffffu, p[threadIdx.x], 0);  // <- upper lanes too
}
ENTRY run_mask_without_self(float* p) { mask_without_self<<<1, 32>>>(p); DONE; }
__global__ void half_a_warp(float* p) {
    float c[4] = {};
    const uint32_t a[4] = {};
    mma_m16n8k16(c, a, 0, 0);  // <- 16 lanes
    p[threadIdx.x] = c[0];
}
ENTRY run_half_a_warp(float* p) { half_a_warp<<<1, 16>>>(p); DONE; }
__global__ void barrier_in_branch(float* p) {
    if (threadIdx.x < 32) __syncthreads();  // <- one warp
    else p[threadIdx.x] = __shfl_sync(~0u, 1.f, 0);
    if (threadIdx.x >= 32) __syncthreads();  // <- the other warp
}
ENTRY run_barrier_in_branch(float* p) { barrier_in_branch<<<1, 64>>>(p); DONE; }
__global__ void deadlock(float* p) {
    if (threadIdx.x % 2) __syncthreads();  // <- odd lanes
    else p[threadIdx.x] = __shfl_sync(~0u, 1.f, 0);  // <- even lanes
}
ENTRY run_deadlock(float* p) { deadlock<<<1, 64>>>(p); DONE; }

// ---- a thread stops, or never does --------------------------------------------------------------
__global__ void asserts(int* p) {
    assert(p[threadIdx.x] >= 0);  // <- assertion
}
ENTRY run_asserts(int* p) { asserts<<<1, 32>>>(p); DONE; }
__global__ void traps(int* p) {
    if (p[0] == 0) __trap();  // <- trap
}
ENTRY run_traps(int* p) { traps<<<1, 32>>>(p); DONE; }
__global__ void divides(int* p, int by) {
    p[threadIdx.x] = 100 / (by - (int)threadIdx.x);  // <- division
}
ENTRY run_divides(int* p, int by) { divides<<<1, 32>>>(p, by); DONE; }
__global__ void for_ever(int* p) {
    int i = p[0];
    while (true) {  // <- loop
        i = i * 1664525 + 1013904223;
        if (i == 0 && p[1]) break;
        p[2] = i;
    }
}
ENTRY run_for_ever(int* p) { for_ever<<<1, 32>>>(p); DONE; }
__device__ __noinline__ int deep(int n, int* p) {
    volatile int pad[1024];
    pad[n % 1024] = n;
    return n ? deep(n - 1, p) + pad[n % 1024] : p[0];  // <- recursion
}
__global__ void overflows(int* p) { p[0] = deep(1000, p); }
ENTRY run_overflows(int* p) { overflows<<<1, 1>>>(p); DONE; }

// ---- the launch ---------------------------------------------------------------------------------
template <int> __global__ void big(float* p) {
    extern __shared__ float tile[];
    tile[threadIdx.x] = 1;
    p[threadIdx.x] = tile[threadIdx.x];
}
ENTRY run_no_opt_in(float* p) { big<0><<<1, 32, 64 * 1024>>>(p); DONE; }
ENTRY run_opt_in(float* p) {
    const auto which = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (cudaError_t e = cudaFuncSetAttribute(big<1>, which, 64 * 1024)) return e;
    big<1><<<1, 32, 64 * 1024>>>(p);
    DONE;
}
ENTRY run_own_error(float* p) { return p ? -3 : 0; }
