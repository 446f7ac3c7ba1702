// wgmma, used well and used wrongly. A mistake is one line, marked `<- its name`; without it the kernel is right, as it
// is with the last two.
#include "ptx.cuh"
#include "wgmma.cuh"

constexpr int N = 64, TILE = 64 * 16 * 2, STAGES = 2;

// Tiles of 64 x 16, K-major without a swizzle: 8 rows of 8 numbers in 128 bytes.
__device__ uint64_t tile(const void* p) { return smem_descriptor(smem_u32(p), SWIZZLE_NONE, 128, 256); }
__device__ void fill(unsigned char* tile) {
    for (int i = threadIdx.x; i < TILE / 2; i += blockDim.x) ((__half*)tile)[i] = __float2half(1.f);
}
__device__ void store(float* out, const float (&d)[N / 2]) {
    for (int i = 0; i < N / 2; i++) out[threadIdx.x * (N / 2) + i] = d[i];
}

enum Mistake {
    NONE, READ_EARLY, NEVER_COMMITTED, WRITE_EARLY, A_REWRITTEN, NO_FENCE, SUMS_CHANGED, A_CHANGED, OVERWRITTEN, NO_PROXY_FENCE,
    UNINITIALISED, NO_BARRIER, COPY_IN_FLIGHT, THREE_WARPS, ANOTHER_DESCRIPTOR, ANOTHER_SHAPE, HALF_A_WARP, NEVER_WAITED,
    OUT_OF_BOUNDS, SUMS_NEVER_SET, A_NEVER_SET, ANOTHER_ORDER, LATE_FENCE, COPIED
};

// D = 2 A B, twice the sum of 16 ones: 32 everywhere.
template <int MISTAKE>
__global__ void __launch_bounds__(128) one_warpgroup(const float* in, float* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    unsigned char *a = memory, *b = memory + TILE;
    const int warp = threadIdx.x / 32;
    if (MISTAKE != UNINITIALISED) fill(a);
    fill(b);  // <- written here
    if (MISTAKE == COPY_IN_FLIGHT || MISTAKE == COPIED) {
        __syncthreads();
        cp_async<16>(smem_u32(b) + threadIdx.x * 16, in);  // <- the copy
        cp_async_commit();
    }
    if (MISTAKE == COPIED) cp_async_wait<0>();
    if (MISTAKE != NO_PROXY_FENCE && MISTAKE != LATE_FENCE) fence_proxy_async();
    if (MISTAKE != NO_BARRIER) __syncthreads();
    if (MISTAKE == LATE_FENCE) fence_proxy_async();
    uint64_t da = tile(a);
    if (MISTAKE == ANOTHER_DESCRIPTOR && warp == 2) da += 8;
    float d[N / 2];
    uint32_t ra[4], unset[4];
    for (int i = 0; i < 4; i++) ra[i] = pack(1.f, 1.f);
    if (MISTAKE != SUMS_NEVER_SET)
        for (int i = 0; i < N / 2; i++) d[i] = 0;
    if (MISTAKE != NO_FENCE) wgmma_fence();
    if (MISTAKE == A_CHANGED) {
        wgmma_rs<N>(d, ra, tile(b), false), wgmma_commit(), wgmma_wait<0>(), wgmma_fence();
        for (int i = 0; i < 4; i++) ra[i] = pack(2.f, 1.f);
    }
    if (MISTAKE == THREE_WARPS) {
        if (warp < 3) wgmma_ss<N>(d, da, tile(b));  // <- three warps
    } else if (MISTAKE == ANOTHER_SHAPE) {
        float small[4] = {};
        if (warp == 1) wgmma_ss<8>(small, da, tile(b));  // <- one shape
        else wgmma_ss<N>(d, da, tile(b));                // <- another shape
    } else if (MISTAKE == HALF_A_WARP) {
        if (threadIdx.x % 32 < 16) wgmma_ss<N>(d, da, tile(b));  // <- half a warp
    } else if (MISTAKE == ANOTHER_ORDER) {
        if (warp % 2) wgmma_ss<N>(d, da, tile(b));  // <- one place
        else wgmma_ss<N>(d, da, tile(b));           // <- another place
    } else if (MISTAKE == OUT_OF_BOUNDS) {
        wgmma_ss<N>(d, da, tile(b + TILE));  // <- beyond the end
    } else if (MISTAKE == A_NEVER_SET) {
        wgmma_rs<N>(d, unset, tile(b));  // <- registers of nothing
    } else {
        wgmma_ss<N>(d, da, tile(b));  // <- first product
    }
    if (MISTAKE != THREE_WARPS) wgmma_rs<N>(d, ra, tile(b));  // <- second product
    if (MISTAKE == A_REWRITTEN) ra[1] = 0;  // <- A rewritten
    if (MISTAKE != NEVER_COMMITTED) wgmma_commit();
    if (MISTAKE == READ_EARLY) out[threadIdx.x] = d[0];  // <- read early
    if (MISTAKE == WRITE_EARLY) d[3] *= 2;  // <- written early
    if (MISTAKE == OVERWRITTEN && threadIdx.x == 5) ((__half*)b)[9] = __float2half(0.f);  // <- overwritten
    if (MISTAKE != NEVER_WAITED) wgmma_wait<0>();
    if (MISTAKE == SUMS_CHANGED) {
        for (int i = 0; i < N / 2; i++) d[i] /= 2;
        wgmma_ss<N>(d, da, tile(b));  // <- sums changed
        wgmma_commit();
        wgmma_wait<0>();
    }
    if (MISTAKE == NEVER_COMMITTED) out[threadIdx.x] = d[0];  // <- read though never committed
    else if (MISTAKE != NEVER_WAITED) store(out, d);
}

// A producer warp fills stages by bulk copies, `consumers` warpgroups multiply, one thread of each releases the stage.
enum Release { RIGHT, BEFORE_THE_WAIT, ONE_TOO_FEW, BY_THE_LAST_WARP, NOT_FILLED };
template <int RELEASE>
__global__ void stages(const __half* tiles, float* out, int count, int consumers) {
    extern __shared__ __align__(1024) unsigned char memory[];
    __shared__ uint64_t full[STAGES], empty[STAGES];
    unsigned char* a = memory + STAGES * TILE;
    for (int i = threadIdx.x; i < TILE / 2; i += blockDim.x) ((__half*)a)[i] = __float2half(1.f);
    fence_proxy_async();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(smem_u32(&full[s]), 1);
            mbarrier_init(smem_u32(&empty[s]), RELEASE == ONE_TOO_FEW ? consumers - 1 : consumers);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int group = threadIdx.x / 128;
    if (group == consumers) {
        if (threadIdx.x % 128 == 0)
            for (int t = 0; t < count; t++) {
                const int s = t % STAGES;
                if (t >= STAGES) mbarrier_wait(smem_u32(&empty[s]), (t / STAGES - 1) % 2);
                mbarrier_arrive_expect_tx(smem_u32(&full[s]), TILE);
                bulk_load(smem_u32(memory + s * TILE), tiles + t * TILE / 2, TILE, smem_u32(&full[s]));  // <- refill
            }
        return;
    }
    float d[N / 2];
    for (int t = 0; t < count; t++) {
        const int s = t % STAGES;
        if (RELEASE != NOT_FILLED) mbarrier_wait(smem_u32(&full[s]), t / STAGES % 2);
        wgmma_fence();
        wgmma_ss<N>(d, tile(a), tile(memory + s * TILE), t > 0);  // <- consume
        wgmma_commit();
        const bool releases = RELEASE == ONE_TOO_FEW ? group < consumers - 1 && threadIdx.x % 128 == 0
                                                     : threadIdx.x % 128 == (RELEASE == BY_THE_LAST_WARP ? 96 : 0);
        if (RELEASE == BEFORE_THE_WAIT && releases) mbarrier_arrive(smem_u32(&empty[s]));
        wgmma_wait<0>();
        if (RELEASE != BEFORE_THE_WAIT && releases) mbarrier_arrive(smem_u32(&empty[s]));
    }
    store(out, d);
}

// How many registers: `most` for the first warpgroups, 24 for the last.
template <int MOST, int MISTAKE>
__global__ void registers(float* out) {
    const bool last = threadIdx.x / 128 == blockDim.x / 128 - 1;
    if (last) {
        if (MISTAKE == 1) setmaxnreg_inc<24>();  // <- wrong direction
        else if (MISTAKE == 0 || MISTAKE == 2 && threadIdx.x % 128 < 32) setmaxnreg_dec<24>();  // <- one warp
    } else {
        setmaxnreg_inc<MOST>();  // <- too many
    }
    out[threadIdx.x] = 1;
}

// Every N: C [64, n] = ones; out = C + A B, with A [64, 16] and B [n, 16] in shared memory as they come, K-major pieces.
template <int COLUMNS>
__global__ void __launch_bounds__(128) every_n(const uint16_t* a, const uint16_t* b, float* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    uint16_t *as = (uint16_t*)memory, *bs = as + 64 * 16;
    for (int i = threadIdx.x; i < 64 * 16; i += 128) as[i / 16 / 8 * 128 + i % 16 / 8 * 64 + i / 16 % 8 * 8 + i % 8] = a[i];
    for (int i = threadIdx.x; i < COLUMNS * 16; i += 128)
        bs[i / 16 / 8 * 128 + i % 16 / 8 * 64 + i / 16 % 8 * 8 + i % 8] = b[i];
    fence_proxy_async();
    __syncthreads();
    float d[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; i++) d[i] = 1;
    wgmma_fence();
    wgmma_ss<COLUMNS>(d, tile(as), tile(bs));
    wgmma_commit();
    wgmma_wait<0>();
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < COLUMNS / 2; i++) out[(row + i / 2 % 2 * 8) * COLUMNS + column + i / 4 * 8 + i % 2] = d[i];
}

template <int MISTAKE>
void run_one(const float* in, float* out, int mistake, int threads) {
    if constexpr (MISTAKE <= COPIED) {
        if (mistake != MISTAKE) return run_one<MISTAKE + 1>(in, out, mistake, threads);
        one_warpgroup<MISTAKE><<<1, threads, 2 * TILE>>>(in, out);
    }
}
extern "C" {
void run_mistake(const float* in, float* out, int mistake, int threads) { run_one<0>(in, out, mistake, threads); }
void run_stages(const __half* tiles, float* out, int count, int consumers, int release) {
    const auto kernel = release == BEFORE_THE_WAIT ? stages<BEFORE_THE_WAIT>
                      : release == ONE_TOO_FEW ? stages<ONE_TOO_FEW>
                      : release == BY_THE_LAST_WARP ? stages<BY_THE_LAST_WARP>
                      : release == NOT_FILLED ? stages<NOT_FILLED> : stages<RIGHT>;
    kernel<<<1, 128 * (consumers + 1), (STAGES + 1) * TILE>>>(tiles, out, count, consumers);
}
void run_registers(float* out, int threads, int which) {
    const auto kernel = which == 1   ? registers<240, 1>
                        : which == 2 ? registers<168, 2>
                        : which == 3 ? registers<248, 0>
                        : which == 4 ? registers<240, 4>
                        : which == 5 ? registers<240, 2>
                                     : registers<240, 0>;
    kernel<<<1, threads>>>(out);
}
}
template <int COLUMNS>
void run_columns(const uint16_t* a, const uint16_t* b, float* out, int n) {
    if constexpr (COLUMNS <= 256) {
        if (n != COLUMNS) return run_columns<COLUMNS + 8>(a, b, out, n);
        every_n<COLUMNS><<<1, 128, (64 + COLUMNS) * 32>>>(a, b, out);
    }
}
#ifdef EVERY_N
extern "C" void run_every_n(const uint16_t* a, const uint16_t* b, float* out, int n) { run_columns<8>(a, b, out, n); }
#endif
