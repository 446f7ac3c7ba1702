// What one multiprocessor does per clock: MMAs of mma.sync, exponentials, multiply-adds, wavefronts of ldmatrix.
//
// One block per multiprocessor. Every warp repeats one instruction on registers of its own, CHAINS independent ones in
// turn, so that no result is waited for; `clocks` gets each block's clock cycles from its first instruction to its last.
#include "ptx.cuh"
#include "problem.cuh"

constexpr int CHAINS = 8, UNROLL = 4, WARP = 32;

// Some number between 0.5 and 1 for each lane and index, as two halves.
__device__ __forceinline__ uint32_t two_halves(int index) {
    const uint32_t bits = (threadIdx.x * 2654435761u + index * 40503u) >> 7;
    return 0x38003800u | (bits & 0x03ff03ffu);
}

template <class Work> __device__ __forceinline__ void timed(long long* clocks, int rounds, const Work& work) {
    __syncthreads();                                           // all warps of the block begin together
    const long long begin = clock64();
    for (int i = 0; i < rounds; i++) {
#pragma unroll
        for (int u = 0; u < UNROLL; u++) work();
    }
    __syncthreads();                                           // the last warp has finished
    if (threadIdx.x == 0) clocks[blockIdx.x] = clock64() - begin;
}

__global__ void mma_f32(long long* clocks, float* out, int rounds) {
    uint32_t a[4] = {two_halves(0), two_halves(1), two_halves(2), two_halves(3)};
    const uint32_t b0 = two_halves(4), b1 = two_halves(5);
    float c[CHAINS][4] = {};
    timed(clocks, rounds, [&] {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) mma_m16n8k16<__half>(c[i], a, b0, b1);
    });
    float sum = 0.f;
    for (int i = 0; i < CHAINS; i++) sum += c[i][0] + c[i][1] + c[i][2] + c[i][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__global__ void mma_f16(long long* clocks, float* out, int rounds) {
    uint32_t a[4] = {two_halves(0), two_halves(1), two_halves(2), two_halves(3)};
    const uint32_t b0 = two_halves(4), b1 = two_halves(5);
    uint32_t c[CHAINS][2] = {};
    timed(clocks, rounds, [&] {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) mma_m16n8k16_f16(c[i], a, b0, b1);
    });
    uint32_t mixed = 0;
    for (int i = 0; i < CHAINS; i++) mixed ^= c[i][0] ^ c[i][1];
    out[blockIdx.x * blockDim.x + threadIdx.x] = (float)mixed;
}

__global__ void ex2(long long* clocks, float* out, int rounds) {
    float x[CHAINS];
    for (int i = 0; i < CHAINS; i++) x[i] = -(float)((threadIdx.x + i) % 7) / 8;
    timed(clocks, rounds, [&] {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) asm volatile("ex2.approx.ftz.f32 %0, %0;" : "+f"(x[i]));
    });
    float sum = 0.f;
    for (int i = 0; i < CHAINS; i++) sum += x[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

__global__ void ffma(long long* clocks, float* out, int rounds) {
    float x[CHAINS];
    const float scale = 0.999f, shift = (float)threadIdx.x / 64;
    for (int i = 0; i < CHAINS; i++) x[i] = (float)i;
    timed(clocks, rounds, [&] {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) asm volatile("fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[i]) : "f"(scale), "f"(shift));
    });
    float sum = 0.f;
    for (int i = 0; i < CHAINS; i++) sum += x[i];
    out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Four wavefronts each: 32 rows of 16 bytes, in the order in which they lie.
__global__ void ldmatrix_x4_rate(long long* clocks, float* out, int rounds) {
    __shared__ __align__(1024) uint4 tile[WARP * CHAINS];
    const uint32_t zero = rounds < 0;                          // which the compiler cannot know
    for (int i = threadIdx.x; i < WARP * CHAINS; i += blockDim.x) tile[i] = make_uint4(zero, zero, zero, zero);
    __syncthreads();                                           // the whole tile is written
    uint32_t r[CHAINS][4], row[CHAINS];
    for (int i = 0; i < CHAINS; i++) row[i] = smem_u32(tile + i * WARP + threadIdx.x % WARP);
    timed(clocks, rounds, [&] {
#pragma unroll
        for (int i = 0; i < CHAINS; i++) {
            ldmatrix_x4(r[i], row[i]);
            row[i] += r[i][0];                                 // or it would be loaded once for all rounds
        }
    });
    uint32_t mixed = 0;
    for (int i = 0; i < CHAINS; i++) mixed ^= r[i][0] ^ r[i][1] ^ r[i][2] ^ r[i][3];
    out[blockIdx.x * blockDim.x + threadIdx.x] = (float)mixed;
}

// which: 0 mma, fp32 sums; 1 mma, fp16 sums; 2 ex2; 3 fma; 4 ldmatrix.x4
extern "C" int rate(int which, int blocks, int threads, int rounds, long long* clocks, float* out, void* stream) {
    const auto s = (cudaStream_t)stream;
    if (which == 0) mma_f32<<<blocks, threads, 0, s>>>(clocks, out, rounds);
    if (which == 1) mma_f16<<<blocks, threads, 0, s>>>(clocks, out, rounds);
    if (which == 2) ex2<<<blocks, threads, 0, s>>>(clocks, out, rounds);
    if (which == 3) ffma<<<blocks, threads, 0, s>>>(clocks, out, rounds);
    if (which == 4) ldmatrix_x4_rate<<<blocks, threads, 0, s>>>(clocks, out, rounds);
    return (int)cudaGetLastError();
}

// ---- a copy of no bytes ---------------------------------------------------------------------------------------------
__global__ void copy_no_bytes(const char* from, uint32_t* out) {
    __shared__ __align__(16) uint4 tile[WARP];
    tile[threadIdx.x] = make_uint4(1, 1, 1, 1);
    __syncthreads();                                           // the ones are there before the copies
    cp_async<16>(smem_u32(tile + threadIdx.x), from + threadIdx.x * 16, 0);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();                                           // every lane's copy has landed
    out[threadIdx.x] = tile[threadIdx.x].x | tile[threadIdx.x].w;
}

// `address` is a number: it need not be that of any memory. out [32]: 0 where the copy wrote zeros.
extern "C" int zero_copy(long long address, uint32_t* out, void* stream) {
    copy_no_bytes<<<1, WARP, 0, (cudaStream_t)stream>>>((const char*)address, out);
    return (int)cudaGetLastError();
}
