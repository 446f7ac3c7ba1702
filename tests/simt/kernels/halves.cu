// __half and __nv_bfloat16 against numpy and torch: conversions of every pattern, arithmetic of many pairs.
#include "simt.h"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define STRIDE_LOOP(i, n) \
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)

template <class H>
__global__ void widen(const H* in, float* out, int n) {
    STRIDE_LOOP(i, n) out[i] = (float)in[i];
}
template <class F, class H>
__global__ void narrow(const F* in, H* out, int n) {
    STRIDE_LOOP(i, n) out[i] = H(in[i]);
}
extern "C" void half_to_float(const __half* in, float* out, int n) { widen<<<8, 256>>>(in, out, n); }
extern "C" void bf16_to_float(const __nv_bfloat16* in, float* out, int n) { widen<<<8, 256>>>(in, out, n); }
extern "C" void float_to_half(const float* in, __half* out, int n) { narrow<<<8, 256>>>(in, out, n); }
extern "C" void float_to_bf16(const float* in, __nv_bfloat16* out, int n) { narrow<<<8, 256>>>(in, out, n); }
extern "C" void double_to_half(const double* in, __half* out, int n) { narrow<<<8, 256>>>(in, out, n); }

// out [9, n]
template <class H>
__global__ void arithmetic(const H* a, const H* b, const H* c, H* out, int n) {
    STRIDE_LOOP(i, n) {
        out[i] = __hadd(a[i], b[i]);
        out[n + i] = a[i] - b[i];
        out[2 * n + i] = __hmul(a[i], b[i]);
        out[3 * n + i] = a[i] / b[i];
        out[4 * n + i] = __hfma(a[i], b[i], c[i]);
        out[5 * n + i] = __hmax(a[i], b[i]);
        out[6 * n + i] = __hmin(a[i], b[i]);
        out[7 * n + i] = -__habs(a[i]);
        out[8 * n + i] = hsqrt(__habs(a[i]));
    }
}
extern "C" void half_arithmetic(const __half* a, const __half* b, const __half* c, __half* out, int n) {
    arithmetic<<<8, 256>>>(a, b, c, out, n);
}
extern "C" void bf16_arithmetic(const __nv_bfloat16* a, const __nv_bfloat16* b, const __nv_bfloat16* c,
                               __nv_bfloat16* out, int n) {
    arithmetic<<<8, 256>>>(a, b, c, out, n);
}

// Pairs, the names that differ, comparisons, the exponentials. One thread; out [24]
__global__ void half_names(float* out) {
    const __half2 a = __floats2half2_rn(1.5f, -2.f), b = make_half2(__float2half(0.5f), __int2half_rn(3));
    __half2 sum = __hadd2(a, b);
    sum += __half2half2(__float2half_rn(1.f));            // 3, 2
    const float2 f = __half22float2(__hfma2(a, b, sum));  // 3.75, -4
    int i = 0;
    out[i++] = f.x, out[i++] = f.y;
    out[i++] = __low2float(sum), out[i++] = __high2float(sum);
    out[i++] = __half2float(__low2half(__lowhigh2highlow(a)));  // -2
    out[i++] = __hgt(__low2half(a), __high2half(a)), out[i++] = __low2half(a) < __high2half(a);
    out[i++] = __hbge2(a, a), out[i++] = __hbeq2(a, b);
    out[i++] = __half2float(hexp(__float2half(1.f))), out[i++] = __half2float(hexp2(__float2half(3.f)));
    out[i++] = __high2float(h2exp2(__floats2half2_rn(0.f, -1.f)));
    out[i++] = __half_as_ushort(__float2half(1.f)), out[i++] = __half2float(__ushort_as_half(0xc000));
    out[i++] = __half2int_rn(__float2half(2.5f)), out[i++] = __hisnan(CUDART_NAN_FP16),
    out[i++] = __hisinf(-CUDART_INF_FP16);
    const __half2 c = __float22half2_rn(make_float2(5.f, 6.f));
    out[i++] = __low2float(__lows2half2(a, c)) + 10 * __high2float(__lows2half2(a, c));    // 1.5 + 50
    out[i++] = __low2float(__highs2half2(a, c)) + 10 * __high2float(__highs2half2(a, c));  // -2 + 60
    out[i++] = __high2float(__halves2half2(__low2half(a), __low2half(c)));                 // 5
    out[i++] = __low2float(h2rcp(__float2half2_rn(4.f)));
    out[i++] = (float)(__half)7;
    __half2 masked = __hmax2(a, __float2half2_rn(0.f));
    out[i++] = __low2float(masked), out[i++] = __high2float(masked);
}
extern "C" void run_half_names(float* out) { half_names<<<1, 1>>>(out); }

__global__ void bf16_names(float* out) {
    const __nv_bfloat162 a = __floats2bfloat162_rn(1.5f, -2.f);
    __nv_bfloat162 sum = __hadd2(a, __float2bfloat162_rn(1.f));  // 2.5, -1
    const float2 f = __bfloat1622float2(__hfma2(a, a, sum));     // 4.75, 3
    int i = 0;
    out[i++] = f.x, out[i++] = f.y, out[i++] = __bfloat162float(__float2bfloat16(3.f)),
    out[i++] = __low2float(sum);
    out[i++] = __bfloat16_as_ushort(__float2bfloat16_rn(1.f)), out[i++] = (float)__ushort_as_bfloat16(0x4000);
    out[i++] = (float)__high2bfloat16(a), out[i++] = (float)hexp(__nv_bfloat16(0.f)),
    out[i++] = __hisinf(CUDART_INF_BF16);
}
extern "C" void run_bf16_names(float* out) { bf16_names<<<1, 1>>>(out); }
