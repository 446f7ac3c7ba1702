// Kernels for Hopper that are right, in ways that the kernels of the series do not use: nothing may be found in them.
//
// A tile each: C = A B^T, with A [M, K], B [N, K] in fp16, C in float; rows of 128 bytes.
#include "ptx.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"

constexpr int M = 64, N = 24, K = 64, ROW = K * 2, A_BYTES = M * ROW;

enum Style {
    EXPECT_THEN_ARRIVE, PRODUCERS, INIT_BY_ALL, ONE_LANE_WAITS, WAIT_TWICE, MADE_AGAIN, STORES_LATE_FENCE,
    STORES_ONE_FENCE, CP_ASYNC, LAST_WARPGROUP
};

// Rows of 128 bytes, as TMA swizzles them.
__device__ uint64_t operand(uint32_t tile) { return smem_descriptor(tile, SWIZZLE_128, 16, 8 * ROW); }
__device__ int swizzled(int row, int chunk) { return row * ROW + (chunk ^ row % 8) * 16; }

__device__ void store(float* out, int thread, const float (&d)[N / 2]) {
    const int row = thread / 32 * 16 + thread % 32 / 4, column = thread % 4 * 2;
    for (int i = 0; i < N / 2; i++) out[(row + i / 2 % 2 * 8) * N + column + i / 4 * 8 + i % 2] = d[i];
}

template <int STYLE>
__global__ void one_tile(const __grid_constant__ CUtensorMap a_map, const __grid_constant__ CUtensorMap b_map,
                         const __half* a_gmem, const __half* b_gmem, float* out) {
    extern __shared__ __align__(1024) unsigned char memory[];
    constexpr int B_BYTES = N * ROW;
    unsigned char *a_tile = memory, *b_tile = memory + A_BYTES;
    const uint32_t a_smem = smem_u32(a_tile), b_smem = smem_u32(b_tile);
    const uint32_t bar = b_smem + B_BYTES;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    // The mbarriers
    if constexpr (STYLE == INIT_BY_ALL) {
        if (threadIdx.x < 2) mbarrier_init(bar + 8 * (threadIdx.x ^ 1), 1), fence_mbarrier_init();
    } else if (threadIdx.x == 0) {
        if (STYLE == MADE_AGAIN) {
            mbarrier_init(bar, 17);
            mbarrier_inval(bar);
            *(uint64_t*)(memory + (bar - a_smem)) = 7;  // memory like any other
        }
        mbarrier_init(bar, STYLE == PRODUCERS ? 4 : 1);
        fence_mbarrier_init();
    }
    __syncthreads();

    // Who asks for what
    constexpr bool STORED = STYLE == STORES_LATE_FENCE || STYLE == STORES_ONE_FENCE;
    const bool asks = threadIdx.x == 0;
    if constexpr (STYLE == PRODUCERS) {  // a warp each brings a part
        if (lane == 5) {
            mbarrier_arrive_expect_tx(bar, warp == 3 ? B_BYTES : warp == 2 ? 0 : A_BYTES / 2);
            if (warp == 3) tma_load(b_smem, &b_map, bar, 0, 0);
            else if (warp < 2) tma_load(a_smem + warp * A_BYTES / 2, &a_map, bar, 0, warp * M / 2);
        }
    } else if constexpr (STORED) {
        for (int i = threadIdx.x; i < (M + N) * 8; i += blockDim.x) {
            const int row = i / 8;
            const bool of_a = row < M;
            *(uint4*)(of_a ? a_tile + swizzled(row, i % 8) : b_tile + swizzled(row - M, i % 8)) =
                *(const uint4*)((of_a ? a_gmem + row * K : b_gmem + (row - M) * K) + i % 8 * 8);
        }
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
    } else if (asks) {
        if (STYLE == EXPECT_THEN_ARRIVE) mbarrier_expect_tx(bar, A_BYTES), mbarrier_expect_tx(bar, B_BYTES);
        else mbarrier_arrive_expect_tx(bar, A_BYTES + B_BYTES);
        tma_load(a_smem, &a_map, bar, 0, 0);
        tma_load(b_smem, &b_map, bar, 0, 0);
        if (STYLE == EXPECT_THEN_ARRIVE) mbarrier_arrive(bar);
    }

    // Who waits, and how
    if (STYLE == LAST_WARPGROUP && threadIdx.x < 128) return;
    if constexpr (STYLE == ONE_LANE_WAITS) {
        if (lane == 9) mbarrier_wait(bar, 0);
        __syncwarp();
    } else if (!STORED) {
        mbarrier_wait(bar, 0);
        if (STYLE == WAIT_TWICE) mbarrier_wait(bar, 0), mbarrier_wait(bar, 1 ^ 1);
    }

    // The product
    float d[N / 2];
    wgmma_fence();
    for (int k = 0; k < K / 16; k++) wgmma_ss<N>(d, operand(a_smem) + 2 * k, operand(b_smem) + 2 * k, k > 0);
    wgmma_commit(), wgmma_wait<0>();
    store(out, threadIdx.x % 128, d);
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

static CUtensorMap map_of(const __half* x, int rows, int box_rows) {
    const uint64_t dims[] = {K, (uint64_t)rows}, strides[] = {ROW};
    const uint32_t box[] = {K, (uint32_t)box_rows};
    return tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

template <int STYLE>
static void launch(const __half* a, const __half* b, float* out, int style) {
    if constexpr (STYLE <= LAST_WARPGROUP) {
        if (style != STYLE) return launch<STYLE + 1>(a, b, out, style);
        one_tile<STYLE><<<1, STYLE == LAST_WARPGROUP ? 256 : 128, A_BYTES + N * ROW + 16>>>(
            map_of(a, M, STYLE == PRODUCERS ? M / 2 : M), map_of(b, N, N), a, b, out);
    }
}
extern "C" {
// a [64, 64], b [24, 64], out [64, 24]
void run_style(const __half* a, const __half* b, float* out, int style) { launch<0>(a, b, out, style); }
void run_passed_on(float* out, int rounds) { passed_on<<<1, 128>>>(out, rounds); }
void run_two_buffers(float* y, int tiles) {
    const uint64_t dims[] = {32, (uint64_t)tiles * 8}, strides[] = {128};
    const uint32_t box[] = {32, 8};
    two_buffers<<<1, 64>>>(
        tensor_map(y, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE), tiles);
}
}
