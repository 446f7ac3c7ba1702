// One small kernel for each part of the language that the emulator speaks.
#include "simt.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <assert.h>

#define ENTRY extern "C" void

// ---- indices ------------------------------------------------------------------------------------
__global__ void indices(int* out) {  // out [blocks, threads, 6]
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    int* to = out + (block * (blockDim.x * blockDim.y * blockDim.z) + thread) * 6;
    to[0] = threadIdx.x, to[1] = threadIdx.y, to[2] = threadIdx.z;
    to[3] = blockIdx.x, to[4] = blockIdx.y, to[5] = blockIdx.z;
}
ENTRY run_indices(int* out, int gx, int gy, int gz, int bx, int by, int bz) {
    indices<<<dim3(gx, gy, gz), dim3(bx, by, bz)>>>(out);
}

// ---- shared memory: static, dynamic, of a template; constant memory; a __device__ variable ------
__constant__ float weights[4];
__device__ int launches = 0;

template <typename T, int N>
__device__ __forceinline__ T reversed(const T (&array)[N], int i) {
    return array[N - 1 - i];
}
template <typename T, int N>
__global__ void __launch_bounds__(N) reverse(const T* __restrict__ in, T* __restrict__ out) {
    __shared__ T tile[N];
    tile[threadIdx.x] = in[blockIdx.x * N + threadIdx.x];
    __syncthreads();
    out[blockIdx.x * N + threadIdx.x] = reversed(tile, threadIdx.x);
}
__global__ void dynamic_pair(const float* in, float* out) {
    extern __shared__ float first[];  // two arrays in one allocation
    float* second = first + blockDim.x;
    first[threadIdx.x] = in[threadIdx.x];
    second[threadIdx.x] = 2 * in[threadIdx.x];
    __syncthreads();
    const int other = (threadIdx.x + 1) % blockDim.x;
    out[threadIdx.x] = first[other] + second[other] + weights[threadIdx.x % 4];
    if (threadIdx.x == 0) launches++;
}
ENTRY run_reverse(const float* in, float* out, int blocks) { reverse<float, 64><<<blocks, 64>>>(in, out); }
ENTRY run_dynamic(const float* in, float* out, int n) {
    const float host[4] = {10, 20, 30, 40};
    cudaMemcpyToSymbol(weights, host, sizeof host);
    dynamic_pair<<<1, n, 2 * n * sizeof(float)>>>(in, out);
}

// ---- barriers with a predicate ------------------------------------------------------------------
__global__ void predicates(int* out) {
    const int count = __syncthreads_count(threadIdx.x % 3 == 0);
    const int all = __syncthreads_and(threadIdx.x < 1000), some = __syncthreads_and(threadIdx.x < 10);
    const int any = __syncthreads_or(threadIdx.x == 70), none = __syncthreads_or(0);
    if (threadIdx.x == 95)
        out[0] = count, out[1] = all != 0, out[2] = some != 0, out[3] = any != 0, out[4] = none != 0;
}
ENTRY run_predicates(int* out) { predicates<<<1, 96>>>(out); }

// ---- shuffles -----------------------------------------------------------------------------------
template <typename T>
__global__ void shuffles(const T* in, T* out, int arg, int width) {  // out [4, 32]
    const unsigned all = 0xffffffffu;
    const T v = in[threadIdx.x];
    out[threadIdx.x] = __shfl_sync(all, v, arg, width);
    out[32 + threadIdx.x] = __shfl_xor_sync(all, v, arg, width);
    out[64 + threadIdx.x] = __shfl_up_sync(all, v, arg, width);
    out[96 + threadIdx.x] = __shfl_down_sync(all, v, arg, width);
}
ENTRY run_shuffle_int(const int* in, int* out, int arg, int width) { shuffles<<<1, 32>>>(in, out, arg, width); }
ENTRY run_shuffle_double(const double* in, double* out, int arg, int width) {
    shuffles<<<1, 32>>>(in, out, arg, width);
}
ENTRY run_shuffle_half(const __half* in, __half* out, int arg, int width) { shuffles<<<1, 32>>>(in, out, arg, width); }
__global__ void shuffle_in_halves(int* out) {  // two groups of lanes, each with a mask of its own
    int v = threadIdx.x;
    if (threadIdx.x < 16) v = __shfl_xor_sync(0x0000ffffu, v, 1);
    else v = __shfl_sync(0xffff0000u, v, 31);
    out[threadIdx.x] = v;
}
ENTRY run_shuffle_in_halves(int* out) { shuffle_in_halves<<<1, 32>>>(out); }

// ---- votes, matches, reductions, the active mask ------------------------------------------------
__global__ void votes(unsigned* out, const int* keys) {  // out [12]
    const int lane = threadIdx.x;
    const unsigned all = ~0u;
    const unsigned r[] = {__ballot_sync(all, lane % 4 == 1),
                          (unsigned)__any_sync(all, lane == 9),
                          (unsigned)__any_sync(all, 0),
                          (unsigned)__all_sync(all, lane < 32),
                          (unsigned)__all_sync(all, lane < 31),
                          (unsigned)__uni_sync(all, 1),
                          __match_any_sync(all, keys[lane]),
                          __reduce_add_sync(all, (unsigned)lane),
                          (unsigned)__reduce_min_sync(all, lane - 5),
                          __reduce_max_sync(all, (unsigned)lane),
                          __reduce_or_sync(all, 1u << lane),
                          __reduce_xor_sync(all, (unsigned)lane)};
    if (lane == 3)
        for (int i = 0; i < 12; i++) out[i] = r[i];
    unsigned active = 0;
    if (lane % 2) active = __activemask();
    if (lane == 1) out[12] = active;
    int same;
    const unsigned match = __match_all_sync(all, 7, &same);
    if (lane == 0) out[13] = match, out[14] = same;
}
ENTRY run_votes(unsigned* out, const int* keys) { votes<<<1, 32>>>(out, keys); }

// ---- atomics ------------------------------------------------------------------------------------
__global__ void atomics(int* i, float* f, __half2* h, unsigned* u) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, 1);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&i[0], total);
    atomicMax(&i[1], (int)(blockIdx.x * blockDim.x + threadIdx.x));
    atomicMin(&i[2], -(int)threadIdx.x);
    atomicCAS(&i[3], 0, (int)threadIdx.x + 1);  // the first one wins
    atomicAdd(f, 0.5f);
    atomicAdd(h, __floats2half2_rn(1.f, 2.f));
    atomicOr(&u[0], 1u << (threadIdx.x % 32));
    atomicInc(&u[1], 9);
    if (threadIdx.x == 0) atomicExch(&u[2], 77u);
    atomicSub(&u[3], 1u);
}
ENTRY run_atomics(int* i, float* f, void* h, unsigned* u) { atomics<<<4, 64>>>(i, f, (__half2*)h, u); }

__global__ void spin_lock(int* lock, int* sum) {  // needs each lane to make progress on its own
    while (atomicCAS(lock, 0, 1) != 0) {}
    *(volatile int*)sum = *(volatile int*)sum + 1;
    __threadfence();
    atomicExch(lock, 0);
}
ENTRY run_spin_lock(int* lock, int* sum) { spin_lock<<<1, 64>>>(lock, sum); }

// ---- maths --------------------------------------------------------------------------------------
__global__ void maths(const float* x, float* out, int n) {  // out [12, n]
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    const float v = x[i];
    const float r[] = {__expf(v),
                       exp2f(v),
                       __fdividef(1.f, v),
                       rsqrtf(fabsf(v)),
                       __frcp_rn(v),
                       __logf(fabsf(v)),
                       __saturatef(v),
                       fmaxf(v, 0.5f),
                       __fmaf_rn(v, v, 1.f),
                       (float)__float2int_rn(v),
                       max(v, 0.25f),
                       (float)__popc(__float_as_uint(v))};
    for (int k = 0; k < 12; k++) out[k * n + i] = r[k];
}
ENTRY run_maths(const float* x, float* out, int n) { maths<<<(n + 63) / 64, 64>>>(x, out, n); }
__global__ void bits(const unsigned* x, unsigned* out) {  // out [8]
    out[0] = __brev(x[0]), out[1] = (unsigned)__clz((int)x[0]), out[2] = (unsigned)__ffs((int)x[0]);
    out[3] = __byte_perm(x[0], x[1], 0x7210), out[4] = __umulhi(x[0], x[1]),
    out[5] = __funnelshift_l(x[0], x[1], 8);
    out[6] = min(3u, 5), out[7] = (unsigned)__mulhi(-2, 0x40000000);
}
ENTRY run_bits(const unsigned* x, unsigned* out) { bits<<<1, 1>>>(x, out); }

// ---- printf, assert, clock, a call that is not inlined ------------------------------------------
__device__ __noinline__ int twice(int x) { return 2 * x; }
__global__ void talk(int* out) {
    const long long begin = clock64();
    if (threadIdx.x == 0) printf("block %d of %d\n", blockIdx.x, gridDim.x);
    assert(threadIdx.x < 64);
    out[blockIdx.x] = twice(blockIdx.x);
    if (clock64() < begin) out[0] = -1;
}
ENTRY run_talk(int* out, int blocks) { talk<<<blocks, 32>>>(out); }

// ---- volatile flags between warps ----------------------------------------------------------------
__global__ void handshake(int* out) {  // warp 1 waits for warp 0, on a flag in global memory
    volatile int* flag = out + 1;
    if (threadIdx.x == 0) out[0] = 42, __threadfence(), *flag = 1;
    if (threadIdx.x == 32) {
        while (!*flag) __nanosleep(20);
        out[2] = out[0] + 1;
    }
}
ENTRY run_handshake(int* out) { handshake<<<1, 64>>>(out); }

// ---- early exit: barriers and shuffles of those that are left -----------------------------------
__global__ void early_exit(const int* in, int* out, int n) {
    __shared__ int tile[64];
    if ((int)threadIdx.x >= n) return;
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[n - 1 - threadIdx.x];
}
ENTRY run_early_exit(const int* in, int* out, int n) { early_exit<<<1, 64>>>(in, out, n); }

extern "C" int query(int* out) {
    cudaDeviceGetAttribute(out, cudaDevAttrMultiProcessorCount, 0);
    cudaDeviceGetAttribute(out + 1, cudaDevAttrMaxSharedMemoryPerBlockOptin, 0);
    return 0;
}
