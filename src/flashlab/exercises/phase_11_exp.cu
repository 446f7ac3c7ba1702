// Exercise 11.9: 2^x of many numbers, by the learner's function in "operands".

#include "ptx.cuh"

// region: operands
__device__ float exp2_polynomial(float x);
// endregion

__global__ void __launch_bounds__(128) powers(const float* x, float* y, int n) {
    const int i = blockIdx.x * 128 + threadIdx.x;
    if (i < n) y[i] = exp2_polynomial(x[i]);
}
extern "C" int run(const float* x, float* y, int n, void* stream) {
    powers<<<(n + 127) / 128, 128, 0, (cudaStream_t)stream>>>(x, y, n);
    return (int)cudaGetLastError();
}
