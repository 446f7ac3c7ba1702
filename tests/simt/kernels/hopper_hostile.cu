// What a kernel for Hopper can do to the emulator. `// expect: kinds; words` says what is found in that line, `// right`
// that it is right (if odd).
#include "ptx.cuh"
#include "tensor_map.cuh"
#include "wgmma.cuh"
#include <limits.h>

#define FIRST if (threadIdx.x == 0)
__device__ uint64_t in_global_memory[4];

__global__ void hostile(const __grid_constant__ CUtensorMap map, const float* x, float* y, int mode, uint32_t big) {
    extern __shared__ __align__(1024) unsigned char memory[];  // 8192 bytes
    __shared__ __align__(1024) float tile[16][32];
    __shared__ __align__(16) uint64_t bars[4];
    const uint32_t smem = smem_u32(memory), dst = smem_u32(tile), bar = smem_u32(bars), none = bar + 24, end = smem + 8192;
    float d[4] = {}, wide[128] = {};
    if (mode < 200) {
        FIRST mbarrier_init(bar, 1), mbarrier_init(bar + 8, 64), fence_mbarrier_init();
        __syncthreads();
    }
    switch (mode) {
    // ---- addresses and numbers of mbarriers
    case 1: FIRST mbarrier_init(end, 1); break;                      // expect: shared-out-of-bounds; dynamic shared memory
    case 2: FIRST mbarrier_init(big - 7, 1); break;                  // expect: shared-out-of-bounds; shared memory
    case 3: FIRST mbarrier_init(smem + 12, 1); break;                // expect: bulk-misaligned; 4 bytes beyond a multiple of 8
    case 4: FIRST mbarrier_init(none, 0); break;                     // expect: mbarrier-number; with 0 arrivals; they are 1 to 1048575
    case 5: FIRST mbarrier_init(none, -1); break;                    // expect: mbarrier-number; -1 arrivals
    case 6: FIRST mbarrier_init(none, 1 << 20); break;               // expect: mbarrier-number; 1048576 arrivals
    case 7: FIRST mbarrier_init(bar, 1); break;                      // expect: mbarrier-again; what is there already ends with mbarrier_inval
    case 8: mbarrier_init(none, 1); break;                           // expect: mbarrier-again; mbarrier
    case 9: mbarrier_arrive(none); break;                            // expect: mbarrier-missing; mbarrier
    case 10: mbarrier_wait(none, 0); break;                          // expect: mbarrier-missing; mbarrier
    case 11: (void)mbarrier_test_wait(none, 0); break;                     // expect: mbarrier-missing; mbarrier
    case 12: (void)mbarrier_try_wait(big, 0); break;                       // expect: mbarrier-missing; mbarrier
    case 13: mbarrier_arrive_expect_tx(none, 16); break;             // expect: mbarrier-missing; mbarrier
    case 14: mbarrier_expect_tx(bar + 4, 16); break;                 // expect: mbarrier-missing; mbarrier
    case 15: mbarrier_inval(none); break;                            // expect: mbarrier-missing; mbarrier
    case 16: mbarrier_wait(bar, 2); break;                           // expect: mbarrier-number; parity 2
    case 17: (void)mbarrier_test_wait(bar, big); break;                    // expect: mbarrier-number; parity
    case 18: FIRST mbarrier_expect_tx(bar, 0u - 16); break;          // expect: mbarrier-number; bytes
    case 19: FIRST mbarrier_arrive_expect_tx(bar, big); break;       // expect: mbarrier-number; bytes for one phase
    case 20: FIRST mbarrier_init(smem_u32(in_global_memory), 1); break;         // expect: not-shared; shared
    case 21: y[0] = *(volatile float*)bars; break;                   // expect: mbarrier-touched; mbarrier
    case 22: bars[1] = 0; break;                                     // expect: mbarrier-touched; that is an mbarrier, made by thread 0
    case 23: cp_async<16>(bar, x); cp_async_commit(), cp_async_wait<0>(); break;         // expect: mbarrier-touched; mbarrier
    case 24: FIRST mbarrier_arrive(bar), mbarrier_arrive_expect_tx(bar, 16); mbarrier_wait(bar, 1); break;  // expect: deadlock; 16 bytes expected, 0 brought
    case 25: if (threadIdx.x < 64) mbarrier_arrive(bar + 8); if (threadIdx.x < 63) mbarrier_arrive(bar + 8); mbarrier_wait(bar + 8, 1); break;  // expect: deadlock; 1 of 64 arrivals missing
    case 26: if (threadIdx.x > 31) mbarrier_wait(bar, 0); else if (threadIdx.x == 0) __nanosleep(1), mbarrier_inval(bar); break;  // expect: mbarrier-in-use; threads waited there
    case 27: while (!mbarrier_test_wait(bar, 0)) {} break;           // expect: timeout; a loop that does not end
    case 28: while (!mbarrier_try_wait(bar, 0)) {} break;            // expect: deadlock; 1 arrival missing
    case 29: mbarrier_arrive(bar); break;                            // expect: mbarrier-arrivals; by the same instruction
    case 30: mbarrier_arrive(bar + 8), __syncthreads(); break;       // right
    case 31: for (int i = 0; i < 4; i++, __syncwarp()) if (threadIdx.x == i) mbarrier_arrive(bar); break;  // right
    // ---- copies
    case 40: FIRST tma_load(end, &map, bar, 0, 0); break;            // expect: shared-out-of-bounds; dynamic shared memory
    case 41: FIRST tma_load(big - 127, &map, bar, 0, 0); break;      // expect: shared-out-of-bounds; shared memory
    case 42: FIRST tma_load(dst + 64, &map, bar, 0, 0); break;       // expect: bulk-misaligned; 64 bytes beyond a multiple of 128
    case 43: FIRST tma_load(dst, nullptr, bar, 0, 0); break;         // expect: tensor-map global-out-of-bounds; thread 0
    case 44: FIRST tma_load(dst, (const CUtensorMap*)0x7f0000000040ull, bar, 0, 0); break;  // expect: tensor-map global-out-of-bounds; thread 0
    case 45: FIRST tma_load(dst, &map, none, 0, 0); break;           // expect: mbarrier-missing; mbarrier
    case 46: FIRST tma_load(dst, &map, bar, 0, 0, 0); break;         // expect: tensor-map; 3 coordinates; the tensor map has 2
    case 47: FIRST mbarrier_arrive_expect_tx(bar, 1024), tma_load(dst, &map, bar, INT_MIN, INT_MAX); mbarrier_wait(bar, 0); break;  // right
    case 48: FIRST bulk_load(dst, x, 0u - 16, bar); break;           // expect: bulk-size; bytes
    case 49: FIRST bulk_load(dst, x, 1u << 31, bar); break;          // expect: bulk-size; bytes
    case 50: FIRST bulk_load(dst, x, 0, bar), mbarrier_arrive(bar); mbarrier_wait(bar, 0); break;  // right
    case 51: FIRST bulk_load(dst, nullptr, 16, bar); break;          // expect: global-out-of-bounds; null pointer
    case 52: FIRST bulk_load(dst, (const void*)0x123456789ab0ull, 16, bar); break;       // expect: global-out-of-bounds; belongs to no argument
    case 53: FIRST bulk_load(dst, x, 8, bar); break;                 // expect: bulk-misaligned; for 8 bytes; their number is a multiple of 16
    case 54: FIRST tma_load(bar, &map, bar, 0, 0); break;            // expect: bulk-misaligned mbarrier-touched shared-out-of-bounds; shared
    case 55: FIRST bulk_load(bar & ~15u, x, 16, bar); break;         // expect: mbarrier-touched; mbarrier
    case 56: FIRST bulk_store(y, end - 16, 32); break;               // expect: shared-out-of-bounds; dynamic shared memory
    case 57: FIRST bulk_store(nullptr, dst, 16), bulk_commit(), bulk_wait<0>(); break;   // expect: global-out-of-bounds; null pointer
    case 58: FIRST bulk_store(y, dst, 16), bulk_commit(), bulk_wait<0>(); break;         // expect: uninitialised-shared; nobody has written
    case 59: FIRST bulk_store((void*)x, dst, 16), bulk_commit(), bulk_wait<0>(); break;  // expect: read-only uninitialised-shared; x
    case 60: FIRST mbarrier_arrive_expect_tx(bar, 1024), tma_load(dst, &map, bar, 0, 0), mbarrier_inval(bar); break;  // expect: mbarrier-in-use; a copy that counts at it
    case 61: FIRST bulk_commit(), bulk_commit(), bulk_wait<0>(), bulk_wait_read<3>(); break;  // right
    case 62: tma_prefetch(nullptr); break;                           // right
    case 63: FIRST mbarrier_arrive(bar); mbarrier_wait(bar, 0); FIRST tma_load(dst, &map, bar, 0, 0); break;  // expect: never-waited; tma_load
    case 64: FIRST mbarrier_arrive_expect_tx(bar, 1008), tma_load(dst, &map, bar, 0, 0); mbarrier_wait(bar, 0); break;  // expect: mbarrier-bytes; (bars at byte 0)
    case 65: FIRST mbarrier_arrive_expect_tx(bar, 1040), tma_load(dst, &map, bar, 0, 0); mbarrier_wait(bar, 0); break;  // expect: deadlock; phase 0 is under way, 1040 bytes expected, 1024 brought
    case 66: FIRST mbarrier_arrive_expect_tx(bar, 1024), tma_load(dst, &map, bar, 0, 0), mbarrier_arrive(bar); break;  // expect: mbarrier-arrivals; has its one arrival already and waits for 1024 bytes
    case 67: FIRST mbarrier_arrive_expect_tx(bar, 1024), tma_load(dst, &map, bar, 0, 0); break;  // expect: never-waited; nobody has waited for its mbarrier
    case 68: FIRST mbarrier_arrive(bar); mbarrier_wait(bar, 0), mbarrier_wait(bar, 1); break;  // expect: deadlock; (1 arrival missing), and phase 0, of parity 0, has ended
    // ---- products
    case 80: wgmma_fence(), wgmma_ss<8>(d, ~0ull, ~0ull, false), wgmma_commit(), wgmma_wait<0>(); break;  // expect: shared-out-of-bounds; wgmma
    case 81: wgmma_fence(), wgmma_ss<256>(wide, smem_descriptor(end, SWIZZLE_128, 16, 1024), 0, false), wgmma_commit(), wgmma_wait<0>(); break;  // expect: shared-out-of-bounds; wgmma
    case 82: wgmma_fence(), wgmma_ss<8>(d, smem_descriptor(bar, SWIZZLE_NONE, 16, 16), smem_descriptor(bar, SWIZZLE_NONE, 16, 16), false), wgmma_commit(), wgmma_wait<0>(); break;  // expect: mbarrier-touched shared-out-of-bounds; wgmma
    case 83: wgmma_wait<0>(), wgmma_wait<7>(), wgmma_commit(), wgmma_wait<0>(), wgmma_fence(); break;  // right
    case 84: if (threadIdx.x < 33) wgmma_fence(); break;             // expect: lanes-missing divergent exited-lanes; wgmma_fence
    case 85: if (threadIdx.x == 5) wgmma_commit(); break;            // expect: lanes-missing divergent exited-lanes; wgmma_commit
    case 86: if (threadIdx.x == 5) wgmma_wait<0>(); break;           // expect: lanes-missing divergent exited-lanes; wgmma_wait
    case 87: if (threadIdx.x < 7) d[0] = elect_one(); break;         // expect: exited-lanes; elect
    case 88: if (threadIdx.x < 40) setmaxnreg_dec<24>(); break;      // expect: lanes-missing divergent exited-lanes; setmaxnreg
    case 89: setmaxnreg_inc<256>(); break;                           // right
    case 90: setmaxnreg_dec<256>(), setmaxnreg_dec<24>(), setmaxnreg_inc<256>(); break;  // right
    case 91: named_barrier_sync(16, 128); break;                     // expect: barrier-arguments; 16
    case 92: named_barrier_arrive(3, 33); break;                     // expect: barrier-arguments; 33
    case 93: named_barrier_sync(1, 256); break;                      // expect: deadlock; Barrier 1 has 128 of the 256 threads that it waits for: warps 0-3
    case 94: return wgmma_fence(), wgmma_ss<8>(d, 0, 0), wgmma_commit(); // expect: uninitialised-shared never-waited shared-out-of-bounds; wgmma
    }
    if (d[0] + wide[1] == 1234567) y[1] = d[0];
}
extern "C" int run_hostile(const float* x, float* y, int mode, int threads) {
    const uint64_t dims[] = {32, 8}, strides[] = {128};
    const uint32_t box[] = {32, 8};
    const CUtensorMap map = tensor_map(x, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    hostile<<<1, threads, 8192>>>(map, x, y, mode, ~0u);
    return cudaGetLastError();
}
