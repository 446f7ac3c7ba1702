// Kernels for Hopper that are right, in ways that the kernels of the series do not use: nothing may be found in them.
//
// All compute C = A B^T, with A [M, K], B [N, K] in fp16, C in float; K = 64 a tile, so rows of 128 bytes.
#include "ptx.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

constexpr int M = 64, N = 24, K = 64, ROW = K * 2, A_BYTES = M * ROW;

enum Style {
    ONE_BARRIER, LOADS_FIRST, EXPECT_THEN_ARRIVE, PRODUCERS, INIT_BY_ALL, INIT_PROXY_FENCE, ONE_LANE_WAITS,
    ELECT, WAIT_TWICE, MADE_AGAIN, NO_SWIZZLE, SWIZZLE_OF_64, STORES, STORES_LATE_FENCE,
    STORES_ONE_FENCE, CP_ASYNC, A_IN_REGISTERS, TWO_GROUPS, LAST_WARPGROUP, TWO_WARPGROUPS
};

// Rows of 128 bytes, as TMA swizzles them.
__device__ uint64_t operand(uint32_t tile) { return smem_descriptor(tile, SWIZZLE_128, 16, 8 * ROW); }
__device__ int swizzled(int row, int chunk) { return row * ROW + (chunk ^ row % 8) * 16; }

template <int COLUMNS>
__device__ void store(float* out, int thread, int first_row, const float (&d)[COLUMNS / 2]) {
    const int row = first_row + thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int i = 0; i < COLUMNS / 2; i++) out[(row + i / 2 % 2 * 8) * COLUMNS + column + i / 4 * 8 + i % 2] = d[i];
}

template <int STYLE>
__global__ void one_tile(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                         const __half* a_gmem, const __half* b_gmem, float* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int B_BYTES = N * ROW, ROWS = STYLE == TWO_WARPGROUPS ? 2 * M : M;
    unsigned char *a_tile = memory, *b_tile = memory + ROWS * ROW;
    const uint32_t a_smem = smem_u32(a_tile), b_smem = smem_u32(b_tile);
    const uint32_t bar = b_smem + B_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int producer = STYLE == ELECT ? 3 : 0, arrivals = STYLE == PRODUCERS ? 4 : 1;

    // The mbarriers
    if constexpr (STYLE == INIT_BY_ALL) {
        if (threadIdx.x < 2) mbarrier_init(bar + 8 * (threadIdx.x ^ 1), 1), fence_mbarrier_init();
    } else if (threadIdx.x == 0) {
        if (STYLE == MADE_AGAIN) {
            mbarrier_init(bar, 17);
            mbarrier_inval(bar);
            *(uint64_t*)(memory + (bar - a_smem)) = 7;  // memory like any other
        }
        mbarrier_init(bar, arrivals);
        STYLE == INIT_PROXY_FENCE ? fence_proxy_async() : fence_mbarrier_init();
    }
    __syncthreads();

    // Who asks for what
    const bool asks = STYLE == ELECT ? warp == producer && elect_one() : threadIdx.x == 0;
    if constexpr (STYLE == PRODUCERS) {  // a warp each brings a part
        if (lane == 5) {
            mbarrier_arrive_expect_tx(bar, warp == 3 ? B_BYTES : warp == 2 ? 0 : A_BYTES / 2);
            if (warp == 3) tma_load(b_smem, &b_map, bar, 0, 0);
            else if (warp < 2) tma_load(a_smem + warp * A_BYTES / 2, &a_map, bar, 0, warp * M / 2);
        }
    } else if constexpr (STYLE == STORES || STYLE == STORES_LATE_FENCE || STYLE == STORES_ONE_FENCE) {
        for (int i = threadIdx.x; i < (M + N) * 8; i += blockDim.x) {
            const int row = i / 8;
            const bool of_a = row < M;
            *(uint4*)(of_a ? a_tile + swizzled(row, i % 8) : b_tile + swizzled(row - M, i % 8)) =
                *(const uint4*)((of_a ? a_gmem + row * K : b_gmem + (row - M) * K) + i % 8 * 8);
        }
        if (STYLE == STORES) fence_proxy_async();
        __syncthreads();
        if (STYLE == STORES_LATE_FENCE) fence_proxy_async();
        if (STYLE == STORES_ONE_FENCE) {
            if (threadIdx.x == 77) fence_proxy_async();
            __syncthreads();
        }
    } else if constexpr (STYLE == CP_ASYNC) {
        if (asks) {
            mbarrier_arrive_expect_tx(bar, A_BYTES);
            tma_load(a_smem, &a_map, bar, 0, 0);
        }
        for (int i = threadIdx.x; i < N * 8; i += blockDim.x)
            cp_async<16>(b_smem + swizzled(i / 8, i % 8), b_gmem + i * 8);
        cp_async_commit();
        cp_async_wait<0>();
        fence_proxy_async();
        __syncthreads();
    } else if constexpr (STYLE == NO_SWIZZLE) {  // columns of 16 bytes, one after the other
        if (asks) {
            mbarrier_arrive_expect_tx(bar, A_BYTES + B_BYTES);
            for (int c = 0; c < K / 8; c++) {
                tma_load(a_smem + c * M * 16, &a_map, bar, c * 8, 0);
                tma_load(b_smem + c * N * 16, &b_map, bar, c * 8, 0);
            }
        }
    } else if constexpr (STYLE == SWIZZLE_OF_64) {  // two slabs of 32 columns
        if (asks) {
            mbarrier_arrive_expect_tx(bar, A_BYTES + B_BYTES);
            for (int c = 0; c < 2; c++) {
                tma_load(a_smem + c * M * 64, &a_map, bar, c * 32, 0);
                tma_load(b_smem + c * N * 64, &b_map, bar, c * 32, 0);
            }
        }
    } else if (asks) {
        const int bytes = ROWS * ROW + B_BYTES;
        if (STYLE == EXPECT_THEN_ARRIVE) mbarrier_expect_tx(bar, A_BYTES), mbarrier_expect_tx(bar, B_BYTES);
        else if (STYLE != LOADS_FIRST) mbarrier_arrive_expect_tx(bar, bytes);
        tma_load(a_smem, &a_map, bar, 0, 0);
        if (STYLE == TWO_WARPGROUPS) tma_load(a_smem + A_BYTES, &a_map, bar, 0, M);
        tma_load(b_smem, &b_map, bar, 0, 0);
        if (STYLE == LOADS_FIRST) mbarrier_arrive_expect_tx(bar, bytes);
        if (STYLE == EXPECT_THEN_ARRIVE) mbarrier_arrive(bar);
    }

    // Who waits, and how
    constexpr bool STORED = STYLE == STORES || STYLE == STORES_LATE_FENCE || STYLE == STORES_ONE_FENCE;
    if (STYLE == LAST_WARPGROUP && threadIdx.x < 128) return;
    if constexpr (STORED) {
    } else if constexpr (STYLE == ONE_LANE_WAITS) {
        if (lane == 9) mbarrier_wait(bar, 0);
        __syncwarp();
    } else {
        mbarrier_wait(bar, 0);
        if (STYLE == WAIT_TWICE) mbarrier_wait(bar, 0), mbarrier_wait(bar, 1 ^ 1);
    }

    // The product
    float d[N / 2];
    const int group = threadIdx.x / 128;
    if constexpr (STYLE == NO_SWIZZLE) {
        wgmma_fence();
        for (int k = 0; k < K / 16; k++)
            wgmma_ss<N>(d, smem_descriptor(a_smem + k * 2 * M * 16, SWIZZLE_NONE, M * 16, 128),
                        smem_descriptor(b_smem + k * 2 * N * 16, SWIZZLE_NONE, N * 16, 128), k > 0);
        wgmma_commit(), wgmma_wait<0>();
    } else if constexpr (STYLE == SWIZZLE_OF_64) {
        wgmma_fence();
        for (int k = 0; k < K / 16; k++)
            wgmma_ss<N>(d, smem_descriptor(a_smem + k / 2 * M * 64 + k % 2 * 32, SWIZZLE_64, 16, 512),
                        smem_descriptor(b_smem + k / 2 * N * 64 + k % 2 * 32, SWIZZLE_64, 16, 512), k > 0);
        wgmma_commit(), wgmma_wait<0>();
    } else if constexpr (STYLE == A_IN_REGISTERS) {  // which a thread reads itself, of what the copy engine wrote
        uint32_t a[K / 16][4];
        for (int k = 0; k < K / 16; k++) {
            const int row = warp * 16 + lane % 16;
            ldmatrix_x4(a[k], a_smem + swizzled(row, 2 * k + lane / 16));
        }
        for (float& x : d) x = 0;
        wgmma_fence();
        for (int k = 0; k < K / 16; k++) wgmma_rs<N>(d, a[k], operand(b_smem) + 2 * k);
        wgmma_commit(), wgmma_wait<0>();
    } else if constexpr (STYLE == TWO_GROUPS) {  // the sums of one are read while the other is under way
        float e[N / 2];
        wgmma_fence();
        wgmma_ss<N>(d, operand(a_smem), operand(b_smem), false);
        wgmma_ss<N>(d, operand(a_smem) + 2, operand(b_smem) + 2);
        wgmma_commit();
        wgmma_ss<N>(e, operand(a_smem) + 4, operand(b_smem) + 4, false);
        wgmma_ss<N>(e, operand(a_smem) + 6, operand(b_smem) + 6);
        wgmma_commit();
        wgmma_wait<1>();
        for (float& x : d) x *= 2;
        wgmma_wait<0>();
        for (int i = 0; i < N / 2; i++) d[i] = d[i] / 2 + e[i];
    } else {
        const int part = STYLE == TWO_WARPGROUPS ? group : 0;  // of the rows, of two warpgroups
        wgmma_fence();
        for (int k = 0; k < K / 16; k++)
            wgmma_ss<N>(d, operand(a_smem + part * A_BYTES) + 2 * k, operand(b_smem) + 2 * k, k > 0);
        wgmma_commit(), wgmma_wait<0>();
    }
    store<N>(out, threadIdx.x % 128, STYLE == TWO_WARPGROUPS ? group * M : 0, d);
}

// ---- a ring of stages -----------------------------------------------------------------------------------------------
enum Release { BY_ALL, BY_WARPS, ONE_TILE_LATER, NO_PRODUCER };
constexpr int RING = 2, RING_N = 16, STAGE = A_BYTES + RING_N * ROW;
template <int RELEASE>
__global__ void ring(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map, float* out,
                     int tiles) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t smem = smem_u32(memory), full = smem + RING * STAGE, empty = full + 8 * RING;
    if (threadIdx.x == 0) {
        for (int s = 0; s < RING; s++)
            mbarrier_init(full + 8 * s, 1),
                mbarrier_init(empty + 8 * s, RELEASE == BY_ALL ? 128 : RELEASE == BY_WARPS ? 4 : 1);
        fence_mbarrier_init();
    }
    __syncthreads();
    auto load = [&](int t) {
        const uint32_t bar = full + t % RING * 8, stage = smem + t % RING * STAGE;
        mbarrier_arrive_expect_tx(bar, STAGE);
        tma_load(stage, &a_map, bar, t * K, 0);
        tma_load(stage + A_BYTES, &b_map, bar, t * K, 0);
    };
    if (threadIdx.x >= 128) {
        if (threadIdx.x == 128)
            for (int t = 0; t < tiles; t++) {
                if (t >= RING) mbarrier_wait(empty + t % RING * 8, t / RING - 1 & 1);
                load(t);
            }
        return;
    }
    float d[RING_N / 2];
    for (float& x : d) x = 0;
    if (RELEASE == NO_PRODUCER && threadIdx.x == 0)
        for (int t = 0; t < min(RING, tiles); t++) load(t);
    for (int t = 0, stage = 0, parity = 0; t < tiles; t++) {
        mbarrier_wait(full + 8 * stage, parity);
        const uint64_t a = operand(smem + stage * STAGE), b = operand(smem + stage * STAGE + A_BYTES);
        wgmma_fence();
        for (int k = 0; k < K / 16; k++) wgmma_ss<RING_N>(d, a + 2 * k, b + 2 * k);
        wgmma_commit();
        if (RELEASE == ONE_TILE_LATER) {
            wgmma_wait<1>();
            if (t > 0 && threadIdx.x == 127) mbarrier_arrive(empty + (stage ^ 1) * 8);
        } else {
            wgmma_wait<0>();
        }
        if (RELEASE == BY_ALL) mbarrier_arrive(empty + 8 * stage);
        if (RELEASE == BY_WARPS && threadIdx.x % 32 == 31) mbarrier_arrive(empty + 8 * stage);
        if (RELEASE == NO_PRODUCER) {
            named_barrier_sync(1, 128);
            if (threadIdx.x == 64 && t + RING < tiles) load(t + RING);
        }
        if (++stage == RING) stage = 0, parity ^= 1;
    }
    wgmma_wait<0>();
    store<RING_N>(out, threadIdx.x, 0, d);
}

// ---- mbarriers between threads, and stores from two buffers ---------------------------------------------------------
__global__ void passed_on(float* out, int rounds) {
    __shared__ float line[2][128];
    __shared__ uint64_t bars[2];
    if (threadIdx.x == 64) mbarrier_init(smem_u32(bars), 128), mbarrier_init(smem_u32(bars + 1), 128);
    __syncthreads();
    float mine = threadIdx.x;
    for (int r = 0; r < rounds; r++) {
        line[r % 2][threadIdx.x] = mine;
        mbarrier_arrive(smem_u32(bars + r % 2));
        mine += 1;  // something else, before the wait
        mbarrier_wait(smem_u32(bars + r % 2), r / 2 % 2);
        mine += line[r % 2][127 - threadIdx.x];
    }
    out[threadIdx.x] = mine;
}
__global__ void two_buffers(const __grid_constant__ CUtensorMap map, int tiles) {
    __shared__ __align__(128) float buffer[2][8][32];
    for (int t = 0; t < tiles; t++) {
        if (threadIdx.x == 0) bulk_wait_read<1>();  // the store before the last one has read its buffer
        __syncthreads();
        for (int i = threadIdx.x; i < 256; i += blockDim.x) buffer[t % 2][i / 32][i % 32] = t * 256 + i;
        fence_proxy_async();
        __syncthreads();
        if (threadIdx.x == 0) {
            tma_store(&map, smem_u32(buffer[t % 2]), 0, t * 8);
            bulk_commit();
        }
    }
    if (threadIdx.x == 0) bulk_wait<0>();
}

static CUtensorMap map_of(const __half* x, int rows, int columns, int box_rows, int box_columns,
                          CUtensorMapSwizzle swizzle) {
    const uint64_t dims[] = {(uint64_t)columns, (uint64_t)rows}, strides[] = {(uint64_t)columns * 2};
    const uint32_t box[] = {(uint32_t)box_columns, (uint32_t)box_rows};
    return tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, dims, strides, box, swizzle);
}

template <int STYLE>
static void launch(const __half* a, const __half* b, float* out, int style) {
    if constexpr (STYLE <= TWO_WARPGROUPS) {
        if (style != STYLE) return launch<STYLE + 1>(a, b, out, style);
        const int columns = STYLE == NO_SWIZZLE ? 8 : STYLE == SWIZZLE_OF_64 ? 32 : K;
        const auto swizzle = STYLE == NO_SWIZZLE      ? CU_TENSOR_MAP_SWIZZLE_NONE
                             : STYLE == SWIZZLE_OF_64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                                      : CU_TENSOR_MAP_SWIZZLE_128B;
        const CUtensorMap a_map = map_of(a, 2 * M, K, STYLE == PRODUCERS ? M / 2 : M, columns, swizzle);
        const CUtensorMap b_map = map_of(b, N, K, N, columns, swizzle);
        const int shared = 2 * A_BYTES + N * ROW + 16;
        cudaFuncSetAttribute(one_tile<STYLE>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        const int threads = STYLE == LAST_WARPGROUP || STYLE == TWO_WARPGROUPS ? 256 : 128;
        one_tile<STYLE><<<1, threads, shared>>>(a_map, b_map, a, b, out);
    }
}
extern "C" {
// a [128, 64], b [24, 64], out [64, 24], or [128, 24] for TWO_WARPGROUPS
void run_style(const __half* a, const __half* b, float* out, int style) { launch<0>(a, b, out, style); }
// a [64, 64 tiles], b [16, 64 tiles], out [64, 16]
void run_ring(const __half* a, const __half* b, float* out, int tiles, int release) {
    const CUtensorMap a_map = map_of(a, M, tiles * K, M, K, CU_TENSOR_MAP_SWIZZLE_128B);
    const CUtensorMap b_map = map_of(b, RING_N, tiles * K, RING_N, K, CU_TENSOR_MAP_SWIZZLE_128B);
    const auto kernel = release == BY_ALL ? ring<BY_ALL> : release == BY_WARPS ? ring<BY_WARPS>
                      : release == ONE_TILE_LATER ? ring<ONE_TILE_LATER> : ring<NO_PRODUCER>;
    kernel<<<1, release == NO_PRODUCER ? 128 : 160, RING * STAGE + 16 * RING>>>(a_map, b_map, out, tiles);
}
void run_passed_on(float* out, int rounds) { passed_on<<<1, 128>>>(out, rounds); }
void run_two_buffers(float* y, int tiles) {
    const uint64_t dims[] = {32, (uint64_t)tiles * 8}, strides[] = {128};
    const uint32_t box[] = {32, 8};
    two_buffers<<<1, 64>>>(
        tensor_map(y, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE), tiles);
}
}
