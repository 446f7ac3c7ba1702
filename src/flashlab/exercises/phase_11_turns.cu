// Exercise 11.10: consumers that take turns. Who has the turn writes its number into a list that nobody else guards.

#include "ptx_sm90.cuh"

constexpr int GROUP = 128;                                     // threads of a consumer; CONSUMERS of them, 2 or 3

// region: turns
__device__ void begin(int consumer);
__device__ void take_turn(int consumer);
__device__ void pass_turn(int consumer);
__device__ void end(int consumer);
// endregion

// region: kernel
//   order [CONSUMERS * rounds]: whose turn it was
__global__ void __launch_bounds__(CONSUMERS * GROUP) rounds_of_turns(int* order, int rounds) {
    __shared__ int turns;                                      // so far
    if (threadIdx.x == 0) turns = 0;
    __syncthreads();                                           // barrier 0
    const int consumer = threadIdx.x / GROUP;
    begin(consumer);
    for (int i = 0; i < rounds; i++) {
        take_turn(consumer);
        if (threadIdx.x % GROUP == 0) order[turns++] = consumer;           // in the lecture: issues its products
        pass_turn(consumer);
    }
    end(consumer);
}
// endregion

extern "C" int run(int* order, int rounds, void* stream) {
    rounds_of_turns<<<1, CONSUMERS * GROUP, 0, (cudaStream_t)stream>>>(order, rounds);
    return (int)cudaGetLastError();
}
