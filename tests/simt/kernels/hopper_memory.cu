// What Hopper's memory model asks of a kernel, and what it allows. A case a row; the block has 64 threads, `blocks` of
// them run. `// expect: KIND; words` stands where a mistake is found, `// right` where nothing is.
#include "ptx_sm90.cuh"
#include "tensor_map.cuh"

struct Maps {
    int rows;
    CUtensorMap x, y, beyond, bytes;  // more rows of x than there are; y in a type that TMA does not add
};
__constant__ CUtensorMap constant_map;
__device__ CUtensorMap global_map;
constexpr int BYTES = 256;  // two rows of 32 floats: a box

#define FIRST if (threadIdx.x == 0)
#define BAR smem_u32(bar_smem)
#define TILE smem_u32(tile)
#define LOAD(map) FIRST mbarrier_arrive_expect_tx(BAR, BYTES), tma_load(TILE, map, BAR, 0, 0)
#define ROW(from) FIRST mbarrier_arrive_expect_tx(BAR, BYTES), bulk_load(TILE, from, BYTES, BAR)
#define WAIT mbarrier_wait(BAR, 0)
#define OUT y[threadIdx.x] = tile[threadIdx.x]
#define FILL tile[threadIdx.x] = threadIdx.x, fence_proxy_async(), __syncthreads()
#define STORE FIRST bulk_store(y, TILE, BYTES), bulk_commit()
#define WRITE_Y y[threadIdx.x] = threadIdx.x
#define FLAG ((volatile int*)z)
#define COUNT(p) (*(volatile int*)(p))++

__device__ void by_value(uint32_t to, CUtensorMap map, uint32_t bar) {
    mbarrier_arrive_expect_tx(bar, BYTES);
    tma_load(to, &map, bar, 0, 0);  // <- by value
}
__device__ void by_address(uint32_t to, const CUtensorMap& map, uint32_t bar) {
    mbarrier_arrive_expect_tx(bar, BYTES);
    tma_load(to, &map, bar, 0, 0);
}
__global__ void memory(const __grid_constant__ Maps maps, const CUtensorMap* in_memory, const float* x, float* y, int* z,
                       int mode) {
    __shared__ __align__(1024) float tile[128];
    __shared__ __align__(64) CUtensorMap map_smem;
    __shared__ __align__(8) uint64_t bar_smem[2];
    FIRST mbarrier_init(BAR, mode == 9 || mode == 10 || mode == 129 ? 32 : mode == 97 ? 2 : mode == 103 ? 64 : 1), fence_mbarrier_init();
    __syncthreads();
    switch (mode) {
    // ---- the answer of a wait
    case 0: LOAD(&maps.x); (void)mbarrier_test_wait(BAR, 0); OUT; WAIT; break;      // expect: read-before-wait; without having
    case 1: LOAD(&maps.x); (void)mbarrier_try_wait(BAR, 0); OUT; WAIT; break;       // expect: read-before-wait; without having
    case 2: LOAD(&maps.x); (void)mbarrier_try_wait(BAR, 0, 100); OUT; WAIT; break;  // expect: read-before-wait; without having
    case 3: LOAD(&maps.x); while (!mbarrier_test_wait(BAR, 0)) {} OUT; break;       // right
    case 4: LOAD(&maps.x); while (!mbarrier_try_wait(BAR, 0)) {} OUT; break;        // right
    case 5: LOAD(&maps.x); while (!mbarrier_try_wait(BAR, 0, 1000000)) {} OUT; break;  // right
    case 6: LOAD(&maps.x); if (!mbarrier_test_wait(BAR, 0)) WAIT; OUT; break;       // right
    case 7: LOAD(&maps.x); FIRST while (!mbarrier_test_wait(BAR, 0)) __nanosleep(20); __syncthreads(); OUT; break;  // right
    case 8: LOAD(&maps.x); for (bool done = false; !done; done = mbarrier_try_wait(BAR, 0)) {} OUT; break;  // right
    case 9:
        if (threadIdx.x >= 32) tile[threadIdx.x - 32] = 1, mbarrier_arrive(BAR);
        else (void)mbarrier_try_wait(BAR, 0), y[threadIdx.x] = tile[threadIdx.x];   // expect: race; no barrier between
        break;
    case 10:
        if (threadIdx.x >= 32) tile[threadIdx.x - 32] = 1, mbarrier_arrive(BAR);
        else { while (!mbarrier_try_wait(BAR, 0)) {} y[threadIdx.x] = tile[threadIdx.x]; }  // right
        break;
    // ---- where a tensor map lies
    case 11: { CUtensorMap copy = maps.x; LOAD(&copy); WAIT; OUT; break; }          // expect: tensor-map; a tensor map in local memory
    case 12: FIRST map_smem = maps.x; __syncthreads(); LOAD(&map_smem); WAIT; break;  // expect: tensor-map; a tensor map in shared memory
    case 13: FIRST by_value(TILE, maps.x, BAR); WAIT; OUT; break;                   // expect: tensor-map at by value; local memory
    case 14: { Maps copy = maps; tma_prefetch(&copy.y); break; }                    // expect: tensor-map; gives tma_prefetch
    case 15: { CUtensorMap copy = maps.y; FILL; FIRST tma_store(&copy, TILE, 0, 0); break; }  // expect: tensor-map; gives tma_store
    case 16: FIRST by_address(TILE, maps.x, BAR); WAIT; OUT; break;                 // right
    case 17: LOAD(&constant_map); WAIT; OUT; break;                                 // right
    case 18: LOAD(&global_map); WAIT; OUT; break;                                   // right
    case 19: LOAD(in_memory + 1); WAIT; OUT; break;                                 // right
    case 20: { const CUtensorMap* chosen = blockIdx.x ? &maps.y : &maps.x; tma_prefetch(chosen); LOAD(chosen); WAIT; OUT; break; }  // right
    // ---- a store that has not been waited for
    case 21: FILL; STORE; FIRST { bulk_wait_read<0>(); z[0] = y[3]; bulk_wait<0>(); } break;      // expect: read-before-wait; element 3 of y, where a bulk_store
    case 22: FILL; STORE; FIRST { bulk_wait<1>(); z[0] = y[3]; bulk_wait<0>(); } break;           // expect: read-before-wait; bulk_wait<0>
    case 23: FILL; STORE; FIRST bulk_wait_read<0>(); __syncthreads(); z[threadIdx.x] = y[threadIdx.x]; break;  // expect: read-before-wait; thread 0
    case 24: FILL; STORE; FIRST { y[5] = 1; bulk_wait<0>(); } break;                              // expect: global-race; may still be going to
    case 25: FILL; FIRST { tma_store(&maps.y, TILE, 0, 0); bulk_commit(); bulk_wait_read<0>(); z[0] = y[3]; } break;  // expect: read-before-wait; a tma_store
    case 26: FILL; FIRST { tma_reduce_add(&maps.y, TILE, 0, 0); bulk_commit(); bulk_wait_read<0>(); z[0] = y[3]; } break;  // expect: read-before-wait; a tma_reduce_add
    case 27: FILL; STORE; STORE; FIRST bulk_wait<0>(); break;                                     // expect: global-race; may still be going to
    case 28: FILL; STORE; FIRST bulk_wait<0>(); __syncthreads(); z[threadIdx.x] = y[threadIdx.x]; break;  // right
    case 29:
        FILL; STORE;
        FIRST { bulk_store(y + 64, TILE, BYTES), bulk_commit(), bulk_wait<1>(); z[0] = y[3]; bulk_wait<0>(); z[1] = y[67]; }  // right
        break;
    case 30: FILL; STORE; z[threadIdx.x] = y[64 + threadIdx.x] == 0; FIRST bulk_wait<0>(); break;  // right
    case 31: FILL; FIRST { tma_reduce_add(&maps.y, TILE, 0, 0), tma_reduce_add(&maps.y, TILE, 0, 0), bulk_commit(), bulk_wait<0>(); z[0] = y[3]; } break;  // right
    case 32: FILL; STORE; FIRST bulk_wait<0>(); __syncthreads(); ROW(y); WAIT; z[threadIdx.x] = tile[threadIdx.x]; break;  // right
    // ---- global memory, and the async proxy
    case 33: WRITE_Y; __syncthreads(); ROW(y); WAIT; break;                                       // expect: proxy-fence; fence_proxy_async_global
    case 34: WRITE_Y; __syncthreads(); LOAD(&maps.y); WAIT; break;                                // expect: proxy-fence; reads with tma_load
    case 35: WRITE_Y; fence_proxy_async(); __syncthreads(); ROW(y); WAIT; break;                  // expect: proxy-fence; fence_proxy_async_global
    case 36: fence_proxy_async_global(); WRITE_Y; __syncthreads(); ROW(y); WAIT; break;           // expect: proxy-fence; fence_proxy_async_global
    case 37: WRITE_Y; FILL; STORE; FIRST bulk_wait<0>(); break;                                   // expect: proxy-fence; nor come after it
    case 38: FIRST y[0] = 1; ROW(y); WAIT; break;                                                 // expect: proxy-fence; thread 0
    case 39:
        if (blockIdx.x == 0) { WRITE_Y; __threadfence(); __syncthreads(); FIRST { __threadfence(); atomicExch(z, 1); } }
        else { FIRST while (atomicAdd(z, 0) == 0) {} __syncthreads(); ROW(y); WAIT; }             // expect: proxy-fence; of block 0
        break;
    case 40: FIRST atomicAdd(y, 1.f); ROW(y); WAIT; break;                                        // expect: proxy-fence; with an atomic
    case 41: WRITE_Y; fence_proxy_async_global(); __syncthreads(); ROW(y); WAIT; break;           // right
    case 42: WRITE_Y; __syncthreads(); FIRST fence_proxy_async_global(); LOAD(&maps.y); WAIT; break;  // right
    case 43: FIRST { y[0] = 1; fence_proxy_async_global(); } ROW(y); WAIT; break;                 // right
    case 44: WRITE_Y; __syncthreads(); if (threadIdx.x == 40) fence_proxy_async_global(); __syncthreads(); ROW(y); WAIT; break;  // right
    case 45: WRITE_Y; fence_proxy_async_global(); FILL; STORE; FIRST bulk_wait<0>(); break;       // right
    case 46:
        if (blockIdx.x == 0) { WRITE_Y; __threadfence(); __syncthreads(); FIRST { __threadfence(); atomicExch(z, 1); } }
        else { FIRST { while (atomicAdd(z, 0) == 0) {} fence_proxy_async_global(); } __syncthreads(); ROW(y); WAIT; }  // right
        break;
    case 47:
        if (blockIdx.x == 0) { WRITE_Y; fence_proxy_async_global(); __syncthreads(); FIRST { __threadfence(); atomicExch(z, 1); } }
        else { FIRST while (atomicAdd(z, 0) == 0) {} __syncthreads(); ROW(y); WAIT; }             // right
        break;
    case 48: z[threadIdx.x] = (int)y[threadIdx.x]; FILL; STORE; FIRST bulk_wait<0>(); break;      // right
    // ---- shared memory, and the async proxy
    case 49: tile[threadIdx.x] = 1; __syncthreads(); STORE; FIRST bulk_wait<0>(); break;          // expect: proxy-fence; no fence_proxy_async
    case 50: tile[threadIdx.x] = 1; fence_proxy_async_global(); __syncthreads(); STORE; FIRST bulk_wait<0>(); break;  // expect: proxy-fence; no fence_proxy_async
    case 51: tile[threadIdx.x] = 1; __syncthreads(); FIRST fence_proxy_async(); STORE; FIRST bulk_wait<0>(); break;  // right
    case 52: if (threadIdx.x < 32) { tile[threadIdx.x] = tile[threadIdx.x + 32] = 1; fence_proxy_async(); __syncwarp(); STORE; FIRST bulk_wait<0>(); } break;  // right
    case 53: tile[threadIdx.x] = 1; fence_proxy_async(); named_barrier_sync(1, 64); STORE; FIRST bulk_wait<0>(); break;  // right
    // ---- volatile
    case 54: FIRST COUNT(z); break;                                                               // expect: global-race; an update between the two is lost
    case 55: FIRST *FLAG = *FLAG + 3; break;                                                      // expect: global-race; updates through a volatile
    case 56: if (threadIdx.x % 32 == 0 && blockIdx.x == 0) COUNT(z); break;                       // expect: global-race; Use atomicAdd
    case 57: if (blockIdx.x == 0) { FIRST *FLAG = 1; } else { FIRST while (*FLAG == 0) {} } break;  // right
    case 58:
        if (blockIdx.x == 0) { FIRST { y[7] = 1; __threadfence(); *FLAG = 1; } }
        else { FIRST { while (*FLAG == 0) {} __threadfence(); y[8 + blockIdx.x] = y[7]; } }                    // right
        break;
    case 59: if (blockIdx.x == 0) { FIRST COUNT(z), COUNT(z); } break;                            // right
    // ---- the same value, and others
    case 63: FIRST z[0] = 7; break;                                                               // expect: warning global-race; Both store the same value
    case 64: FIRST z[0] = blockIdx.x + 1; break;                                                  // expect: global-race; only one of the two is kept
    case 65: FIRST z[0] = blockIdx.x ? 9 : 7; FIRST z[0] = 7; break;                              // expect: global-race; only one of the two is kept
    case 66: y[threadIdx.x] = 7; y[threadIdx.x + 64] = 1; break;                                  // expect: warning global-race; Both store the same value
    // ---- and in other spellings
    case 67: LOAD(&maps.x); for (int i = 0; i < 3 && !mbarrier_try_wait(BAR, 0); i++) {} OUT; WAIT; break;  // expect: read-before-wait; without having
    case 68: LOAD(&maps.x); if (!mbarrier_test_wait(BAR, 0) && !mbarrier_test_wait(BAR, 0)) OUT; WAIT; break;  // expect: read-before-wait; without having
    case 69: FILL; STORE; FIRST { bulk_wait_read<0>(); z[0] = (int)((volatile float*)y)[3]; bulk_wait<0>(); } break;  // expect: read-before-wait; a bulk_store
    case 70: FIRST memset(y, 0, 64); ROW(y); WAIT; break;                                         // expect: proxy-fence; fence_proxy_async_global
    case 71: FIRST { memset(y, 0, 64); fence_proxy_async_global(); } ROW(y); WAIT; break;         // right
    case 72: FIRST { if (blockIdx.x == 0) COUNT(z); else atomicAdd(z, 1); } break;                // expect: global-race; Use atomicAdd
    case 73: FIRST { __threadfence(); COUNT(z); __threadfence(); } break;                         // expect: global-race; Use atomicAdd
    case 74: FIRST { while (*FLAG != (int)blockIdx.x) {} __threadfence(); COUNT(z); } break;      // right
    case 75: FIRST { if (blockIdx.x < 3) z[0] = 7; else z[0] = 8; } break;                        // expect: global-race; only one of the two is kept
    case 76:
        FIRST {
            if (blockIdx.x < 3) z[0] = 7;
            else z[0] = 8;                                                                        // expect: global-race; of block 3 writes
        }
        break;
    case 77: FIRST { if (blockIdx.x == 0) z[0]++; else atomicAdd(z, 1); } break;                  // expect: global-race; nothing orders two blocks
    // ---- a load and a store of a volatile, apart
    case 78: FIRST { int x = *FLAG; y[blockIdx.x] = 1; *FLAG = x + 1; } break;                    // expect: global-race; Use atomicAdd
    case 79: FIRST { int x = *FLAG; y[blockIdx.x] = 1; z[0] = x + 1; } break;                     // expect: global-race; Use atomicAdd
    case 80: FIRST for (int i = 0; i < 9 && !*FLAG; i++) { y[blockIdx.x] = i; if (i == 5) *FLAG = 1; } break;  // right
    case 81: FIRST { while (*FLAG != (int)blockIdx.x) {} __threadfence(); y[0] += 1; __threadfence(); *FLAG = blockIdx.x + 1; } break;  // right
    case 82:
        for (int round = 0; round < 3; round++) {
            __syncthreads();
            FIRST {
                const int sense = *FLAG;
                __threadfence();
                if (atomicAdd(z + 1, 1) == (int)gridDim.x - 1) z[1] = 0, __threadfence(), *FLAG = sense + 1;
                else while (*FLAG == sense) {}
                __threadfence();
            }
            __syncthreads();
        }                                                                                         // right
        break;
    // ---- what has been published, and who acquires it
    case 83:
        if (blockIdx.x == 0) { FIRST { y[7] = 1; __threadfence(); *FLAG = 1; } }
        else { FIRST { while (*FLAG == 0) {} y[8 + blockIdx.x] = y[7]; } }                        // expect: acquire-missing; behind that look
        break;
    case 84:
        FIRST { y[blockIdx.x] = 1; __threadfence(); tile[0] = atomicAdd(z, 1) + 1 == (int)gridDim.x; }
        __syncthreads();
        if (tile[0] != 0 && threadIdx.x < gridDim.x) y[64 + threadIdx.x] = y[threadIdx.x];            // expect: acquire-missing; (acquire)
        break;
    case 85:
        if (blockIdx.x == 0) { WRITE_Y; __syncthreads(); FIRST { __threadfence(); *FLAG = 1; } }  // expect: global-race; nothing orders
        else { FIRST { while (*FLAG == 0) {} __threadfence(); } y[64 + threadIdx.x] = y[threadIdx.x]; }  // and no barrier
        break;
    case 86:
        if (blockIdx.x == 0) { WRITE_Y; __syncthreads(); FIRST { __threadfence(); atomicExch(z, 1); } }
        else { FIRST while (atomicAdd(z, 0) == 0) {} z[1] = 0; __syncthreads(); z[2 + threadIdx.x] = y[threadIdx.x]; }  // <- by the atomic
        break;                                                                                    // expect: acquire-missing at by the atomic; (acquire)
    case 87:
        if (blockIdx.x == 0) { WRITE_Y; __syncthreads(); FIRST { __threadfence(); *FLAG = 1; } }
        else { FIRST while (*FLAG == 0) {} __syncthreads(); __threadfence(); y[64 + threadIdx.x] = y[threadIdx.x]; }  // right
        break;
    case 88:
        FIRST {
            while (*FLAG != (int)blockIdx.x) {}
            __threadfence();
            for (int i = 0; i < (int)blockIdx.x; i++) y[8 + blockIdx.x] += y[i];
            y[blockIdx.x] = 1;
            __threadfence();
            *FLAG = blockIdx.x + 1;
        }                                                                                         // right
        break;
    case 89:
        if (blockIdx.x == 0) { FIRST { while (*FLAG == 0) {} y[7] = 1; } }
        else { FIRST { y[8] = y[7]; __threadfence(); *FLAG = 1; } }                               // right
        break;
    case 90: FIRST { y[blockIdx.x] = 1; __threadfence(); if (atomicAdd(z, 1) + 1 == (int)gridDim.x) *z = 0; } break;  // right
    // ---- an update in two steps, with a fence between
    case 91: FIRST { int x = *FLAG; __threadfence(); *FLAG = x + 1; } break;                      // expect: global-race; Use atomicAdd
    case 92: FIRST { int x = *FLAG; __threadfence(); y[blockIdx.x] = x; __threadfence(); z[0] = x + 1; } break;  // expect: global-race; Use atomicAdd
    case 93: FIRST { volatile int* own = z + blockIdx.x; for (int i = 0; i < 5; i++) { int x = *own; __threadfence(); *own = x + 1; } } break;  // right
    case 94:
        FIRST {
            while (atomicCAS(z, 0, 1) != 0) {}
            __threadfence();
            int x = FLAG[1];
            __threadfence();
            FLAG[1] = x + 1;
            __threadfence();
            atomicExch(z, 0);
        }                                                                                         // right
        break;
    case 95: if (threadIdx.x % 32 == 0 && blockIdx.x == 0) { int x = *FLAG; __threadfence(); *FLAG = x + 1; } break;  // expect: global-race; Use atomicAdd
    // ---- mbarriers, waits, fences and buffers in ways that the series does not use
    case 96: FIRST { mbarrier_expect_tx(BAR, 64), mbarrier_expect_tx(BAR, BYTES - 64), tma_load(TILE, &maps.x, BAR, 0, 0), mbarrier_arrive(BAR); } WAIT; OUT; break;  // right
    case 97: if (threadIdx.x % 32 == 5) mbarrier_arrive_expect_tx(BAR, 128), bulk_load(TILE + threadIdx.x / 32 * 128, x + threadIdx.x / 32 * 32, 128, BAR); WAIT; OUT; break;  // right
    case 98: LOAD(&maps.x); if (threadIdx.x % 32 == 9) WAIT; __syncwarp(); OUT; break;            // right
    case 99: LOAD(&maps.x); WAIT; WAIT; OUT; break;                                               // right
    case 100: FIRST mbarrier_inval(BAR), *bar_smem = 7, mbarrier_init(BAR, 1), fence_mbarrier_init(); __syncthreads(); LOAD(&maps.x); WAIT; OUT; break;  // right
    case 101:
        FIRST mbarrier_inval(BAR);
        __syncthreads();
        if (threadIdx.x < 2) mbarrier_init(BAR + 8 * (threadIdx.x ^ 1), 1), fence_mbarrier_init();
        __syncthreads(); LOAD(&maps.x); WAIT; OUT;                                                // right
        break;
    case 102: tile[threadIdx.x] = 1; __syncthreads(); if (threadIdx.x == 40) fence_proxy_async(); __syncthreads(); STORE; FIRST bulk_wait<0>(); break;  // right
    case 103:
        FIRST mbarrier_init(BAR + 8, 64);
        __syncthreads();
        for (int r = 0; r < 4; r++) {
            tile[r % 2 * 64 + threadIdx.x] = r, mbarrier_arrive(BAR + r % 2 * 8), mbarrier_wait(BAR + r % 2 * 8, r / 2);
            y[threadIdx.x] = tile[r % 2 * 64 + (threadIdx.x ^ 63)];                               // right
        }
        break;
    case 104:
        for (int t = 0; t < 4; t++) {
            FIRST bulk_wait_read<1>();  // the store before the last one has read its buffer
            __syncthreads();
            tile[t % 2 * 64 + threadIdx.x] = t, fence_proxy_async(), __syncthreads();
            FIRST bulk_store(y + 32 * t, TILE + t % 2 * BYTES, 128), bulk_commit();               // right
        }
        FIRST bulk_wait<0>();
        break;
    // ---- copies that nobody waits for, or into what is in use
    case 105:
        LOAD(&maps.x);  // <- load
        OUT;                                                                                      // expect: read-before-wait from load; fills, without having waited
        WAIT;
        break;
    case 106: LOAD(&maps.x); if (threadIdx.x % 32 == 0) WAIT; OUT; WAIT; break;                   // expect: read-before-wait; without having waited
    case 107: LOAD(&maps.x); mbarrier_wait(BAR, 1); OUT; WAIT; break;                             // expect: read-before-wait; without having waited for the phase
    case 108: LOAD(&maps.x); FIRST WAIT; if (threadIdx.x == 32) OUT; WAIT; break;                 // expect: read-before-wait uninitialised-shared; thread 32
    case 109: LOAD(&maps.x); tile[threadIdx.x] = 1; WAIT; break;                                  // expect: stage-overwritten; without having
    case 110:
        FIRST mbarrier_arrive_expect_tx(BAR, 2 * BYTES), tma_load(TILE, &maps.x, BAR, 0, 0);  // <- first of two
        FIRST tma_load(TILE, &maps.x, BAR, 0, 2);                                                 // expect: stage-overwritten from first of two; fills with tma_load
        WAIT;
        break;
    case 111: FIRST mbarrier_init(BAR + 8, 1); __syncthreads(); if (threadIdx.x == 32) mbarrier_arrive_expect_tx(BAR + 8, BYTES), tma_load(TILE, &maps.x, BAR + 8, 0, 0); mbarrier_wait(BAR + 8, 0); break;  // expect: mbarrier-fence; no fence_mbarrier_init since thread 0 made it
    case 112: FIRST mbarrier_init(BAR + 8, 1), fence_mbarrier_init(), *FLAG = 1; if (threadIdx.x == 32) { while (*FLAG == 0) {} mbarrier_arrive(BAR + 8); } break;  // expect: mbarrier-too-early; with no barrier since thread 0 made it
    case 113: FIRST mbarrier_inval(BAR), mbarrier_arrive(BAR); break;                             // expect: mbarrier-missing; there is no mbarrier
    case 114: LOAD((const CUtensorMap*)y); WAIT; break;                                           // expect: tensor-map; something that is no tensor map
    case 115: FIRST mbarrier_arrive_expect_tx(BAR, BYTES), tma_load(TILE + 384, &maps.x, BAR, 0, 0); WAIT; break;  // expect: shared-out-of-bounds; the last 128 of 256 lie beyond the end of tile
    case 116: ROW(x + 1); WAIT; break;                                                            // expect: bulk-misaligned; of global memory 4 bytes beyond a multiple of 16
    case 117: fence_proxy_async(); tile[threadIdx.x] = 1; __syncthreads(); STORE; FIRST bulk_wait<0>(); break;  // expect: proxy-fence; no fence_proxy_async
    case 118: tile[threadIdx.x] = 1; fence_proxy_async(); STORE; FIRST bulk_wait<0>(); break;     // expect: race; no barrier between
    case 119: FILL; FIRST bulk_store(y, TILE, BYTES); break;                                      // expect: never-waited; was never committed
    case 120: FILL; STORE; break;                                                                 // expect: never-waited; was never waited for (bulk_wait_read)
    case 121: FILL; STORE; __syncthreads(); tile[threadIdx.x] = 0; FIRST bulk_wait<0>(); break;   // expect: stage-overwritten; only after bulk_wait_read is it free
    case 122: FILL; STORE; FIRST bulk_wait<0>(); break;                                           // expect: global-race; nothing orders two blocks
    case 123: FILL; FIRST tma_store(&maps.x, TILE, 0, 0), bulk_commit(), bulk_wait<0>(); break;   // expect: read-only; x, which the entry declares const
    case 124: tile[threadIdx.x] = 0; __syncthreads(); ROW(x); WAIT; break;                        // expect: proxy-fence; nor come after it
    case 125: tile[threadIdx.x] = 0; fence_proxy_async(); __syncthreads(); ROW(x); WAIT; OUT; break;  // right
    case 126: FILL; FIRST tma_reduce_add(&maps.bytes, TILE, 0, 0), bulk_commit(), bulk_wait<0>(); break;  // expect: reduce-type; type that it cannot add
    case 127: FIRST mbarrier_arrive_expect_tx(BAR, BYTES), tma_load(TILE, &maps.beyond, BAR, 0, 3); WAIT; break;  // expect: global-out-of-bounds; element 128 of x
    case 128:
        if (threadIdx.x < 32) named_barrier_arrive(1, 64), tile[threadIdx.x] = 2;  // <- behind an arrival
        else named_barrier_sync(1, 64), y[threadIdx.x] = tile[threadIdx.x - 32];                  // expect: race from behind an arrival; no barrier between
        break;
    case 129:
        if (threadIdx.x < 32) mbarrier_arrive(BAR), tile[threadIdx.x] = 2;  // <- behind an mbarrier's
        else WAIT, y[threadIdx.x] = tile[threadIdx.x - 32];                                       // expect: race from behind an mbarrier's; no barrier between
        break;
    case 130:  // the wait is for the first phase; that the third one ends too before it passes orders nothing
        FILL;
        if (threadIdx.x < 32) WAIT, tile[threadIdx.x] = 2;                                        // expect: race from of a later phase; no barrier between
        else if (threadIdx.x == 32) mbarrier_arrive(BAR), y[0] = tile[0], mbarrier_arrive(BAR), mbarrier_arrive(BAR);  // <- of a later phase
        break;
    // ---- a word hands on within a block, too
    case 131:
        if (threadIdx.x == 0) { y[7] = 1; __threadfence(); *FLAG = 1; }
        else if (threadIdx.x == 32) { while (*FLAG == 0) __nanosleep(20); __threadfence(); y[8] = y[7]; y[7] = 2; }  // right
        break;
    case 132:
        if (threadIdx.x == 0) { y[7] = 1; __threadfence(); *FLAG = 1; }
        else if (threadIdx.x == 32) { while (*FLAG == 0) __nanosleep(20); y[8] = y[7]; }                        // expect: acquire-missing; behind that look
        break;
    case 133:
        if (threadIdx.x == 0) { y[7] = 1; *FLAG = 1; }
        else if (threadIdx.x == 32) { while (*FLAG == 0) __nanosleep(20); __threadfence(); y[8] = y[7]; }       // expect: global-race; no barrier between
        break;
    case 134:
        if (threadIdx.x == 0) { y[8] = y[7]; __threadfence(); *FLAG = 1; }
        else if (threadIdx.x == 32) { while (*FLAG == 0) __nanosleep(20); y[7] = 2; }                           // right
        break;
    case 135:
        if (threadIdx.x == 0) { y[7] = 1; __threadfence(); *FLAG = 1; }  // <- before a flag that another looks at
        else if (threadIdx.x == 32) while (*FLAG == 0) __nanosleep(20);
        else if (threadIdx.x == 33) y[8] = y[7];                                                  // expect: global-race from before a flag that another looks at; no barrier between
        break;
    case 136:
        if (threadIdx.x == 32) y[threadIdx.x] = 1, fence_proxy_async_global(), __threadfence(), *FLAG = 1;
        else if (threadIdx.x == 0) { while (*FLAG == 0) __nanosleep(20); mbarrier_arrive_expect_tx(BAR, BYTES), bulk_load(TILE, y, BYTES, BAR); }
        WAIT;                                                                                     // right
        break;
    case 137:
        if (threadIdx.x == 32) y[threadIdx.x] = 1, __threadfence(), *FLAG = 1;
        else if (threadIdx.x == 0) { while (*FLAG == 0) __nanosleep(20); mbarrier_arrive_expect_tx(BAR, BYTES), bulk_load(TILE, y, BYTES, BAR); }  // expect: proxy-fence; fence_proxy_async
        WAIT;
        break;
    case 138:  // the lane that arrives for its warp comes last here: that hides nothing
        if (threadIdx.x >= 32) {
            tile[threadIdx.x] = tile[threadIdx.x - 32] = 1;  // <- fenced behind an arrival
            __syncwarp();
            if (threadIdx.x != 63) fence_proxy_async();
            else mbarrier_arrive(BAR), fence_proxy_async();
        } else if (threadIdx.x == 0) { WAIT; bulk_store(y, TILE, BYTES), bulk_commit(), bulk_wait<0>(); }   // expect: proxy-fence from fenced behind an arrival; fence_proxy_async
        break;
    default: break;
    }
}
extern "C" void run_memory(unsigned char* memory_of_maps, const float* x, float* y, int* z, int mode, int blocks) {
    auto rows = [](const float* p, uint64_t count = 4, CUtensorMapDataType type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32) {
        const uint64_t dims[] = {32, count}, strides[] = {128};
        const uint32_t box[] = {32, 2};
        return tensor_map(p, type, 2, dims, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
    };
    const Maps maps{4, rows(x), rows(y), rows(x, 8), rows(y, 4, CU_TENSOR_MAP_DATA_TYPE_UINT8)};
    CUtensorMap* in_memory = (CUtensorMap*)memory_of_maps;
    cudaMemcpy(in_memory + 1, &maps.x, sizeof(CUtensorMap), cudaMemcpyHostToDevice);
    cudaMemcpyToSymbol(constant_map, &maps.x, sizeof(CUtensorMap));
    cudaMemcpyToSymbol(global_map, &maps.x, sizeof(CUtensorMap));
    memory<<<blocks, 64>>>(maps, in_memory, x, y, z, mode);
}
