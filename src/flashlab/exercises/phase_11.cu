// What the checks of phase 11 run in the emulator: scripts on an mbarrier, and a pipeline with given parities.

#include "ptx_sm90.cuh"

// ---- 11.1 -----------------------------------------------------------------------------------------------------------
// Each block works through a script on an mbarrier of its own, and looks at both parities after each operation.
//   script [blocks, steps, 2]: operation (-1: none) and bytes; arrivals [blocks]; seen [blocks, steps, 2]
enum { ARRIVE, ARRIVE_EXPECT_TX, EXPECT_TX, COPY };
constexpr int MOST_BYTES = 4096;                               // of one copy
__global__ void __launch_bounds__(32) run_scripts(const int* script, const int* arrivals, int* seen, const char* source,
                                                  int steps) {
    __shared__ __align__(128) char buffer_smem[MOST_BYTES];
    __shared__ __align__(8) uint64_t barrier_smem;
    if (threadIdx.x > 0) return;
    const uint32_t barrier = smem_u32(&barrier_smem);
    mbarrier_init(barrier, arrivals[blockIdx.x]);
    fence_mbarrier_init();
    for (int i = blockIdx.x * steps; i < (blockIdx.x + 1) * steps; i++) {
        const int operation = script[2 * i], bytes = script[2 * i + 1];
        if (operation == ARRIVE) mbarrier_arrive(barrier);
        if (operation == ARRIVE_EXPECT_TX) mbarrier_arrive_expect_tx(barrier, bytes);
        if (operation == EXPECT_TX) mbarrier_expect_tx(barrier, bytes);
        if (operation == COPY) bulk_load(smem_u32(buffer_smem), source, bytes, barrier);
        for (int look = 0; look < 40; look++)                  // a copy lands when one looks often enough
            if (mbarrier_test_wait(barrier, look % 2)) continue;
        seen[2 * i] = mbarrier_test_wait(barrier, 0);
        seen[2 * i + 1] = mbarrier_test_wait(barrier, 1);
    }
}
extern "C" int scripts(const int* script, const int* arrivals, int* seen, const char* source, int blocks, int steps,
                       void* stream) {
    run_scripts<<<blocks, 32, 0, (cudaStream_t)stream>>>(script, arrivals, seen, source, steps);
    return (int)cudaGetLastError();
}

// ---- 11.2 and 11.5 --------------------------------------------------------------------------------------------------
// Warps 0 to consumers - 1 read tiles, those after them ask for them in turns: one thread of each.
//   table [tiles, 3]: of tile i its stage, the parity that a consumer waits for, and that of the producer
//   pauses [consumers, tiles]: how often a consumer lets others go first before it releases tile i
//   ready: whether the consumers arrive at each `empty` before their first tile
//   source [tiles, TILE]; out [consumers, tiles]: the first number of each tile, as the consumer found it
constexpr int TILE = 128, MOST_STAGES = 8;                     // bytes; stages
__global__ void run_pipeline(const int* table, const int* pauses, const int* source, int* out, int tiles, int stages,
                             int consumers, int producers, bool ready) {
    __shared__ __align__(128) char stage_smem[MOST_STAGES][TILE];
    __shared__ __align__(8) uint64_t full_smem[MOST_STAGES], empty_smem[MOST_STAGES];
    const int warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (int s = 0; s < stages; s++)
            mbarrier_init(smem_u32(&full_smem[s]), 1), mbarrier_init(smem_u32(&empty_smem[s]), consumers);
        fence_mbarrier_init();
    }
    __syncthreads();
    if (threadIdx.x % 32 > 0) return;
    for (int s = 0; ready && warp < consumers && s < stages; s++) mbarrier_arrive(smem_u32(&empty_smem[s]));
    for (int i = 0; i < tiles; i++) {
        const int stage = table[3 * i];
        const uint32_t full = smem_u32(&full_smem[stage]), empty = smem_u32(&empty_smem[stage]);
        if (warp >= consumers) {
            if (i % producers != warp - consumers) continue;
            mbarrier_wait(empty, table[3 * i + 2]);
            mbarrier_arrive_expect_tx(full, TILE);
            bulk_load(smem_u32(stage_smem[stage]), source + i * TILE / 4, TILE, full);
        } else {
            mbarrier_wait(full, table[3 * i + 1]);
            out[warp * tiles + i] = *(const int*)stage_smem[stage];
            for (int n = pauses[warp * tiles + i]; n > 0; n--) __nanosleep(20);
            mbarrier_arrive(empty);
        }
    }
}
extern "C" int pipeline(const int* table, const int* pauses, const int* source, int* out, int tiles, int stages,
                        int consumers, int producers, int ready, void* stream) {
    run_pipeline<<<1, 32 * (consumers + producers), 0, (cudaStream_t)stream>>>(table, pauses, source, out, tiles,
                                                                               stages, consumers, producers, ready);
    return (int)cudaGetLastError();
}
