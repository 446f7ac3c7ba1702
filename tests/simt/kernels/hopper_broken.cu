// Kernels of Hopper's copies that are wrong, one mistake each. `// <- name` marks the lines that a finding is to name.
#include "ptx_sm90.cuh"
#include "tensor_map.cuh"
#define ENTRY extern "C" void

// Rows of 32 floats, boxes of 8 rows.
static CUtensorMap rows_of_32(const float* x, int rows) {
    const uint64_t dims[] = {32, (uint64_t)rows}, strides[] = {128};
    const uint32_t box[] = {32, 8};
    return tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

#define SETUP(arrivals)                                                                                     \
    __shared__ __align__(1024) float tile[2][8][32];                                                        \
    __shared__ __align__(8) uint64_t full;                                                                  \
    const uint32_t bar = smem_u32(&full), dst = smem_u32(tile);                                             \
    if (threadIdx.x == 0) {                                                                                 \
        mbarrier_init(bar, arrivals);                                                                       \
        fence_mbarrier_init();                                                                              \
    }                                                                                                       \
    __syncthreads();

// mode: which mistake
__global__ void load_mistakes(const __grid_constant__ CUtensorMap map, float* out, int mode) {
    SETUP(mode == 8 ? 3 : 1)
    if (threadIdx.x == 0) {
        if (mode == 2) mbarrier_arrive_expect_tx(bar, 1024 - 16);  // <- too few
        else if (mode == 3) mbarrier_arrive_expect_tx(bar, 1024 + 16);
        else mbarrier_arrive_expect_tx(bar, mode == 10 ? 2048 : 1024);
        tma_load(dst, &map, bar, 0, 0);  // <- load
        if (mode == 7) mbarrier_arrive(bar);  // <- one too many
        if (mode == 10) tma_load(dst, &map, bar, 0, 8);  // <- second load
    }
    if (mode == 8 && threadIdx.x == 32) mbarrier_arrive(bar);
    float v = 0;
    if (mode == 0) v = tile[0][0][threadIdx.x % 32];  // <- no wait
    if (mode == 1) {
        if (threadIdx.x % 32 == 0) mbarrier_wait(bar, 0);
        v = tile[0][1][threadIdx.x % 32];  // <- only lane 0 waits
    }
    if (mode == 4) {
        mbarrier_wait(bar, 1);
        v = tile[0][2][threadIdx.x % 32];  // <- the phase before
    }
    if (mode == 5) {
        if (threadIdx.x == 0) mbarrier_wait(bar, 0);
        if (threadIdx.x < 32) __syncwarp();
        if (threadIdx.x == 32) v = tile[0][0][0];  // <- nobody told this warp
    }
    if (mode == 6) {
        tile[0][threadIdx.x % 8][0] = 1;  // <- store over a load
    }
    if (mode == 9) return;
    mbarrier_wait(bar, mode == 11 ? 2 : 0);  // <- wait
    if (mode == 12) mbarrier_wait(bar, 1);  // <- another phase
    out[threadIdx.x] = v + tile[0][3][threadIdx.x % 32];
}
ENTRY run_load(const float* x, float* out, int mode) { load_mistakes<<<1, 64>>>(rows_of_32(x, 16), out, mode); }

__global__ void setup_mistakes(const __grid_constant__ CUtensorMap map, float* out, int mode) {
    __shared__ __align__(1024) float tile[8][32];
    __shared__ __align__(16) uint64_t full[4];
    const uint32_t bar = smem_u32(full);
    const uintptr_t nowhere = (uintptr_t)(out + 31) & ~(uintptr_t)63;
    if (threadIdx.x == 0 && mode != 2) {
        mbarrier_init(bar, 1);
        if (mode != 0) fence_mbarrier_init();
        if (mode == 6) {
            mbarrier_inval(bar);
            mbarrier_arrive(bar);  // <- after inval
        }
    }
    if (mode != 1) __syncthreads();
    if (threadIdx.x == 32) {
        mbarrier_arrive_expect_tx(bar, 1024);
        if (mode == 11) tma_load(smem_u32(tile), (const CUtensorMap*)nowhere, bar, 0, 0);  // <- no map
        else if (mode == 12) tma_load(smem_u32(tile) + 128, &map, bar, 0, 0);  // <- beyond the array
        else if (mode == 14) bulk_load(smem_u32(tile), out + 1, 16, bar);  // <- off by 4
        else tma_load(smem_u32(tile), &map, bar, 0, 0);  // <- load of setup
    }
    mbarrier_wait(bar, 0);  // <- wait of setup
    out[threadIdx.x] = tile[0][threadIdx.x % 32];
}
ENTRY run_setup(const float* x, float* out, int mode) { setup_mistakes<<<1, 64>>>(rows_of_32(x, 16), out, mode); }

// A producer (warp 0) and a consumer (warp 1) with two stages.
__global__ void ring_mistakes(const __grid_constant__ CUtensorMap map, float* out, int mode) {
    __shared__ __align__(1024) float tile[2][8][32];
    __shared__ __align__(8) uint64_t full[2], empty[2];
    if (threadIdx.x == 0) {
        for (int s = 0; s < 2; s++) {
            mbarrier_init(smem_u32(&full[s]), 1);  // <- init full
            mbarrier_init(smem_u32(&empty[s]), mode == 3 ? 2 : 1);  // <- init empty
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        if (lane == 0)
            for (int t = 0; t < 6; t++) {
                const int s = t % 2, round = t / 2;
                mbarrier_wait(smem_u32(&empty[s]), mode == 0 ? round & 1 : (round & 1) ^ 1);  // <- producer waits
                mbarrier_arrive_expect_tx(smem_u32(&full[s]), 1024);
                tma_load(smem_u32(tile[s]), &map, smem_u32(&full[s]), 0, 8 * t);  // <- refill
            }
        return;
    }
    float sum = 0;
    for (int t = 0; t < 6; t++) {
        const int s = t % 2, round = t / 2;
        mbarrier_wait(smem_u32(&full[s]), mode == 4 ? t & 1 : round & 1);  // <- consumer waits
        if (mode == 1) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_u32(&empty[s]));
        }
        sum += tile[s][t][lane];  // <- consumer reads
        if (mode == 2 && lane == 0) mbarrier_arrive(smem_u32(&empty[s]));
        if (mode == 0 || mode >= 3) {
            __syncwarp();
            if (lane == 0) mbarrier_arrive(smem_u32(&empty[s]));
        }
    }
    out[lane] = sum;
}
ENTRY run_ring(const float* x, float* out, int mode) { ring_mistakes<<<1, 64>>>(rows_of_32(x, 48), out, mode); }

__global__ void store_mistakes(const __grid_constant__ CUtensorMap map, float* y, int mode) {
    __shared__ __align__(128) float tile[8][32];
    if (mode == 1) fence_proxy_async();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) tile[i / 32][i % 32] = i;  // <- fill
    if (mode > 2) fence_proxy_async();
    if (mode != 3) __syncthreads();
    if (threadIdx.x == 0) {
        if (mode == 2) fence_proxy_async();  // right: behind the barrier, by the thread that stores
        tma_store(&map, smem_u32(tile), 0, 0);  // <- store
        if (mode != 4) bulk_commit();
        if (mode == 7) bulk_wait_read<0>();
        if (mode != 4 && mode != 5 && mode != 6 && mode != 7) bulk_wait<0>();
    }
    if (mode == 6 || mode == 7) {
        __syncthreads();
        if (mode == 6) tile[threadIdx.x % 8][0] = 0;  // <- too early
        if (mode == 6 && threadIdx.x == 0) bulk_wait<0>();
        if (mode == 7 && threadIdx.x == 32) tile[0][0] = y[40];  // <- read of y
    }
}
ENTRY run_store(const float* x, float* y, int mode) {
    store_mistakes<<<mode == 9 ? 2 : 1, 64>>>(mode == 10 ? rows_of_32(x, 8) : rows_of_32(y, 8), y, mode);
}

// Zeros first, then a copy over them.
__global__ void zeros_first(const float* x, float* y, int mode) {
    __shared__ __align__(128) float zeros[64];
    SETUP(1)
    (void)dst;
    zeros[threadIdx.x] = 0;  // <- zero
    if (mode) fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, 256);
        bulk_load(smem_u32(zeros), x, 256, bar);  // <- over zeros
    }
    mbarrier_wait(bar, 0);
    y[threadIdx.x] = zeros[threadIdx.x];
}
ENTRY run_zeros_first(const float* x, float* y, int mode) { zeros_first<<<1, 64>>>(x, y, mode); }

__global__ void wrong_type(const __grid_constant__ CUtensorMap map) {
    __shared__ __align__(128) unsigned char tile[256];
    if (threadIdx.x == 0) tma_reduce_add(&map, smem_u32(tile), 0);  // <- reduce
}
ENTRY run_wrong_type(const float* x, float* y, int) {
    const uint64_t dims[] = {256};
    const uint32_t box[] = {256};
    const CUtensorMap map =
        tensor_map(y, CU_TENSOR_MAP_DATA_TYPE_UINT8, 1, dims, nullptr, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    wrong_type<<<1, 32>>>(map);
}

// A map of more rows than there are.
__global__ void beyond(const __grid_constant__ CUtensorMap map, float* y) {
    SETUP(1)
    if (threadIdx.x == 0) {
        mbarrier_arrive_expect_tx(bar, 1024);
        tma_load(dst, &map, bar, 0, 44);  // <- beyond the end
    }
    mbarrier_wait(bar, 0);
    y[threadIdx.x] = tile[0][0][threadIdx.x % 32];
}
ENTRY run_beyond(const float* x, float* y, int) { beyond<<<1, 32>>>(rows_of_32(x, 52), y); }

// numbers: rank, type, swizzle, shift of the base; sizes, strides, box, element strides: 2 each
ENTRY run_map(float* x, const long long* n) {
    const uint64_t dims[] = {(uint64_t)n[4], (uint64_t)n[5]}, strides[] = {(uint64_t)n[6]};
    const uint32_t box[] = {(uint32_t)n[8], (uint32_t)n[9]}, every[] = {(uint32_t)n[10], (uint32_t)n[11]};
    const CUtensorMapDataType type = (CUtensorMapDataType)n[1];
    tensor_map((char*)x + n[3], type, (int)n[0], dims, strides, box, (CUtensorMapSwizzle)n[2], every);  // <- map
}

// What a warp does after it has arrived, at a barrier of any kind, it has not released.
__global__ void after_arrival(int* out, int mode) {
    __shared__ int value[2];
    __shared__ __align__(8) uint64_t there;
    if (threadIdx.x == 0) mbarrier_init(smem_u32(&there), 32);
    __syncthreads();
    if (threadIdx.x < 32) {
        if (threadIdx.x == 0) value[0] = 1;
        if (mode == 0) named_barrier_arrive(1, 64);
        else mbarrier_arrive(smem_u32(&there));
        if (threadIdx.x == 0) value[1] = 2;  // <- after the arrival
    } else {
        if (mode == 0) named_barrier_sync(1, 64);
        else mbarrier_wait(smem_u32(&there), 0);
        out[threadIdx.x - 32] = value[0];
        out[threadIdx.x] = value[1];  // <- not released
    }
}
ENTRY run_after_arrival(const float* x, float* y, int mode) { after_arrival<<<1, 64>>>((int*)y, mode); }
