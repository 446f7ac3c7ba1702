// Copies of the async proxy: boxes of every layout, bytes in a row, and a ring of stages, right and wrong (`// <- name`).
#include "ptx_sm90.cuh"
#include "tensor_map.cuh"

// ---- one box, from global to shared memory and out again --------------------------------------------
// how: 0 the box as it lies in shared memory goes to `out`; 1 it is stored through the map `to`; 2 it is added there.
struct Corner {
    int at[5];
};
template <int... D>  // the dimensions: 0, 1 ...
__global__ void one_box(const __grid_constant__ CUtensorMap from, const __grid_constant__ CUtensorMap to, Corner corner,
                        Corner corner_to, uint32_t* out, int bytes, int shift, int how) {
    extern __shared__ __align__(1024) unsigned char smem[];
    __shared__ __align__(8) uint64_t full;
    const uint32_t box = smem_u32(smem) + shift, bar = smem_u32(&full);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_mbarrier_init();
        tma_prefetch(&from);
        mbarrier_arrive_expect_tx(bar, bytes);
        tma_load(box, &from, bar, corner.at[D]...);
    }
    __syncthreads();
    mbarrier_wait(bar, 0);
    if (how == 0) {
        for (int i = threadIdx.x; i < bytes / 4; i += blockDim.x) out[i] = ((uint32_t*)(smem + shift))[i];
    } else if (threadIdx.x == 0) {
        if (how == 1) tma_store(&to, box, corner_to.at[D]...);
        else tma_reduce_add(&to, box, corner_to.at[D]...);
        bulk_commit();
        bulk_wait<0>();
    }
}

template <int... D>
void launch(int rank, const CUtensorMap& from, const CUtensorMap& to, const Corner& corner, const Corner& corner_to,
            uint32_t* out, int bytes, int shift, int how) {
    if constexpr (constexpr int next = sizeof...(D); next < 5)
        if (next < rank) return launch<D..., next>(rank, from, to, corner, corner_to, out, bytes, shift, how);
    if constexpr (sizeof...(D) > 0) {
        const int shared = 65536;
        cudaFuncSetAttribute(one_box<D...>, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
        one_box<D...><<<1, 64, shared>>>(from, to, corner, corner_to, out, bytes, shift, how);
    }
}

// numbers: rank, swizzle, type, then 5 each of: sizes, strides in bytes (4), box, element strides, corner, corner_to;
// then shift, how.
extern "C" int run_box(const unsigned char* x, unsigned char* y, uint32_t* out, const int* numbers) {
    const int rank = numbers[0];
    const CUtensorMapSwizzle swizzle = (CUtensorMapSwizzle)numbers[1];
    const CUtensorMapDataType type = (CUtensorMapDataType)numbers[2];
    const int* n = numbers + 3;
    uint64_t dims[5], strides[5];
    uint32_t box[5], every[5];
    Corner corner, corner_to;
    int bytes = tensor_map_item(type);
    for (int d = 0; d < 5; d++) {
        dims[d] = n[d], strides[d] = n[5 + d], box[d] = n[10 + d], every[d] = n[15 + d];
        corner.at[d] = n[20 + d], corner_to.at[d] = n[25 + d];
        if (d < rank) bytes *= d ? (box[d] + every[d] - 1) / every[d] : box[d];
    }
    const int shift = n[30], how = n[31];
    const CUtensorMap from = tensor_map(x, type, rank, dims, strides, box, swizzle, every);
    const CUtensorMap to = tensor_map(y, type, rank, dims, strides, box, swizzle, every);
    launch<>(rank, from, to, corner, corner_to, out, bytes, shift, how);
    return (int)cudaGetLastError();
}

// ---- bytes in a row ---------------------------------------------------------------------------------
__global__ void rows(const float* x, float* y, int n) {
    __shared__ __align__(128) float tile[256];
    __shared__ __align__(8) uint64_t full;
    const uint32_t bar = smem_u32(&full);
    if (threadIdx.x == 0) {
        mbarrier_init(bar, 1);
        fence_proxy_async();
    }
    __syncthreads();
    if (threadIdx.x < 32 && elect_one()) {
        bulk_load(smem_u32(tile), x + blockIdx.x * 256, 512, bar);
        bulk_load(smem_u32(tile + 128), x + blockIdx.x * 256 + 128, 512, bar);
        mbarrier_arrive_expect_tx(bar, 1024);
    }
    while (!mbarrier_test_wait(bar, 0)) {}
    for (int i = threadIdx.x; i < 256; i += blockDim.x) tile[i] *= 2;
    fence_proxy_async();
    __syncthreads();
    if (threadIdx.x == 0) {
        bulk_store(y + blockIdx.x * 256, smem_u32(tile), 1024);
        bulk_commit();
        bulk_wait_read<0>();
    }
}
extern "C" void run_rows(const float* x, float* y, int n) { rows<<<n / 256, 64>>>(x, y, n); }

// ---- a ring: a producer warp fills STAGES stages, two consumer warps sum them up --------------------
// mistake: 0 none. The producer waits for the other parity (1); a stage is released before it is read (2), by lane 0 while
// others read (3), by fewer than are counted (4); a consumer waits for the parity of the tile (5).
constexpr int STAGES = 3, ROWS = 16;
__global__ void ring(const __grid_constant__ CUtensorMap map, float* sums, int tiles, int mistake) {
    __shared__ __align__(1024) float stage[STAGES][ROWS][32];
    __shared__ __align__(8) uint64_t full[STAGES], empty[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            mbarrier_init(smem_u32(&full[s]), 1);
            mbarrier_init(smem_u32(&empty[s]), mistake == 4 ? 3 : 2);  // <- init empty
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (warp == 0) {
        if (elect_one())
            for (int t = 0; t < tiles; t++) {
                const int s = t % STAGES, round = t / STAGES;
                mbarrier_wait(smem_u32(&empty[s]), (round & 1) ^ (mistake != 1));  // <- producer waits
                mbarrier_arrive_expect_tx(smem_u32(&full[s]), sizeof stage[s]);
                tma_load(smem_u32(stage[s]), &map, smem_u32(&full[s]), 0, (blockIdx.x * tiles + t) * ROWS);  // <- refill
            }
        return;
    }
    float sum = 0;
    for (int t = 0; t < tiles; t++) {
        const int s = t % STAGES, round = t / STAGES;
        mbarrier_wait(smem_u32(&full[s]), (mistake == 5 ? t : round) & 1);  // <- consumer waits
        if (mistake == 2) __syncwarp();
        if (mistake == 2 && lane == 0) mbarrier_arrive(smem_u32(&empty[s]));
        for (int r = warp - 1; r < ROWS; r += 2) {
            const int column = ((lane / 4) ^ (r % 8)) * 4 + lane % 4;  // the 128-byte swizzle
            sum += (float)(t + 1) * stage[s][r][column];  // <- consumer reads
        }
        if (mistake != 3) __syncwarp();
        if (mistake != 2 && lane == 0) mbarrier_arrive(smem_u32(&empty[s]));
    }
    sums[(blockIdx.x * 2 + warp - 1) * 32 + lane] = sum;
}
extern "C" void run_ring(const float* x, float* sums, int blocks, int tiles, int mistake) {
    const uint64_t dims[] = {32, (uint64_t)blocks * tiles * ROWS}, strides[] = {128};
    const uint32_t box[] = {32, ROWS};
    const CUtensorMap map =
        tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
    ring<<<blocks, 96>>>(map, sums, tiles, mistake);
}

// ---- a map alone: rank, type, swizzle, shift of the base; sizes, strides, box, element strides: 2 each --------------
extern "C" void run_map(float* x, const long long* n) {
    const uint64_t dims[] = {(uint64_t)n[4], (uint64_t)n[5]}, strides[] = {(uint64_t)n[6]};
    const uint32_t box[] = {(uint32_t)n[8], (uint32_t)n[9]}, every[] = {(uint32_t)n[10], (uint32_t)n[11]};
    const CUtensorMapDataType type = (CUtensorMapDataType)n[1];
    tensor_map((char*)x + n[3], type, (int)n[0], dims, strides, box, (CUtensorMapSwizzle)n[2], every);
}
