// Exercise 11.11: a producer takes the numbers of parts from a counter, and hands them on to its consumers.

#include "ptx_sm90.cuh"

// region: constants
constexpr int GROUP = 128, CONSUMERS = 2, THREADS = (CONSUMERS + 1) * GROUP;
constexpr int PLACES = 3;                                      // for parts that are handed on
struct Hand {
    int* counter;                                              // in global memory, 0 at first: the next part
    int* place;                                                // [PLACES], in shared memory
    uint32_t full, empty;                                      // PLACES mbarriers each, 8 bytes apart
};
// endregion

// region: hand
__device__ int hand_on(const Hand& h, int n);
__device__ int take(const Hand& h, int n);
// endregion

// region: kernel
//   done [parts, CONSUMERS]: how often each consumer has worked on a part
__global__ void __launch_bounds__(THREADS) work(int* counter, int* done, int parts) {
    __shared__ int place[PLACES];
    __shared__ __align__(8) uint64_t barriers[2 * PLACES];
    const Hand h{counter, place, smem_u32(barriers), smem_u32(barriers + PLACES)};
    if (threadIdx.x == 0) {
        for (int i = 0; i < PLACES; i++) {
            mbarrier_init(h.full + 8 * i, 1);                  // one thread hands a part on
            mbarrier_init(h.empty + 8 * i, CONSUMERS * GROUP); // every thread of every consumer reads it
        }
    }
    __syncthreads();
    const int consumer = threadIdx.x / GROUP;
    if (consumer == CONSUMERS) {                               // the producer: one thread of it
        if (threadIdx.x % GROUP == 0)
            for (int n = 0; hand_on(h, n) < parts; n++) {}
    } else {
        for (int n = 0;; n++) {
            const int part = take(h, n);
            if (part >= parts) break;                          // such a number says: no more
            if (threadIdx.x % GROUP == 0) atomicAdd(&done[part * CONSUMERS + consumer], 1);
        }
    }
}
// endregion

extern "C" int run(int* counter, int* done, int parts, int blocks, void* stream) {
    work<<<blocks, THREADS, 0, (cudaStream_t)stream>>>(counter, done, parts);
    return (int)cudaGetLastError();
}
