// CUDA C++ as people write it: launches wherever C++ lets them stand, and what nvcc takes for granted.
#include "dialect.cuh"
#include "simt.h"

#define ENTRY extern "C" void

// ---- which function is launched, and with what ----------------------------------------------------
__global__ void with_default(int* p, int n = 7, int m = 2) { p[threadIdx.x] = n * m; }
ENTRY run_default(int* p) { with_default<<<1, 32>>>(p); }
ENTRY run_half_default(int* p) { with_default<<<1, 32>>>(p, 5); }

__global__ void scale(float* p, float a) { p[threadIdx.x] *= a; }
__global__ void scale(int* p, int a) { p[threadIdx.x] += a; }
void scale(float* p, float a, int threads) { scale<<<1, threads>>>(p, a); }
ENTRY run_overloads(float* p, int* q) {
    scale(p, 2.f, 32);
    scale<<<1, 32>>>(q, 3);
}

__global__ void biased(float* p, const float* bias, const int* rows) {
    p[threadIdx.x] = (bias ? bias[threadIdx.x] : 1.f) + (rows ? 1.f : 0.f);
}
ENTRY run_null(float* p) { biased<<<1, 32>>>(p, NULL, 0); }
template <class T> __global__ void deduced(T* p, const T* bias, T a) { p[threadIdx.x] = bias ? bias[0] : a; }
ENTRY run_null_deduced(float* p) { deduced<float><<<1, 32>>>(p, NULL, 4.f); }
template <int N, class T> __global__ void half_given(T* p) { p[threadIdx.x] = N; }
ENTRY run_half_given(float* p) { half_given<6><<<1, 32>>>(p); }
struct Shape {
    int rows, columns;
};
__global__ void shaped(float* p, Shape s) { p[threadIdx.x] = s.rows * s.columns; }
ENTRY run_braces(float* p) { shaped<<<1, 32>>>(p, {3, 4}); }
ENTRY run_pointer(float* p) {
    void (*kernel)(float*, Shape) = shaped;
    (*kernel)<<<1, 32>>>(p, Shape{2, 5});
}

// ---- where a launch may stand ---------------------------------------------------------------------
template <int N> __global__ void filled(float* p) { p[threadIdx.x] = N; }
#define RUN(n)  \
    filled<(n)> \
        <<<1, 32>>>(p)
ENTRY run_macro(float* p) { RUN(3); }
__global__ void add_f32_kernel(float* p) { p[threadIdx.x] += 1; }
#define BIND(tag) void add_##tag(float* p) { add_##tag##_kernel<<<1, 32>>>(p); }
BIND(f32)
ENTRY run_pasted(float* p) { add_f32(p); }
ENTRY run_header(float* p) { launch_in_header(add_f32_kernel, 1, 32, p); }
#define DEFINE(name) ENTRY run_##name(float* p) { name<<<1, 32>>>(p); }
DEFINE(add_f32_kernel)
ENTRY run_text(float* p) {
    const char* text = R"(add<<<1, 2>>>("x"))";
    for (char c = '<'; *text && c != '\''; c = *text++) {}  // k<<<1, 1>>>(p)
    p[0] = 1 << 2 >> 1;
}

// ---- names ----------------------------------------------------------------------------------------
__global__ void ones(float* p) { p[blockIdx.x * blockDim.x + threadIdx.x] = gridDim.x; }
ENTRY run_host_variables(float* p, int n) {
    dim3 blockDim(32);
    dim3 gridDim((n + blockDim.x - 1) / blockDim.x);
    ones<<<gridDim, blockDim>>>(p);
}
__device__ __attribute__((__noinline__)) float twice(float x) { return 2 * x; }
__noinline__ __device__ float thrice(float x) { return 3 * x; }
__global__ void called(float* p) { p[threadIdx.x] = twice(1) + thrice(1); }
DEFINE(called)
__global__ void arch(float* p) {
#if __CUDA_ARCH__ >= 700 && CUDART_VERSION >= 11000
    p[threadIdx.x] = __CUDA_ARCH__;
#endif
}
DEFINE(arch)
__global__ void bytes(int* p) {
    const bool b = p[threadIdx.x] > 3;
    const unsigned char c = (unsigned char)p[threadIdx.x];
    p[threadIdx.x] = 100 * __shfl_sync(~0u, b, 9) + __shfl_xor_sync(~0u, c, 1);
}
ENTRY run_bytes(int* p) { bytes<<<1, 32>>>(p); }

// ---- what comes back ------------------------------------------------------------------------------
extern "C" long long returns_long() { return 1ll << 40; }
extern "C" float returns_float(float a, double b, int c) { return a + (float)b + c; }
extern "C" double many(int a, float b, long long c, double d, int e, float f, int g, int h, int i, int j, float k,
                       float l, float m, float n, float o, double p, char q, bool r, const float* s, float t) {
    return a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r + s[0] + t;
}
