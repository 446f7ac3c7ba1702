// __half and __half2 for the emulator: the interface of CUDA's <cuda_fp16.h>, written for a CPU.
#pragma once
#include "simt/names.h"
#include "simt.h"
#include "simt/half_common.h"

// ---- float <-> the 16 bits of IEEE binary16 -----------------------------------------------------
SIMT_INLINE uint16_t simt_float_to_half(float f) {
#if defined(__F16C__) && !defined(SIMT_NO_F16C)  // the CPU has an instruction for it
    typedef float V4 __attribute__((vector_size(16)));
    typedef short V8 __attribute__((vector_size(16)));
    if (f != f) return 0x7fff;  // CUDA's NaN
    V8 r = (V8)__builtin_ia32_vcvtps2ph(V4{f, 0, 0, 0}, 0);
    return (uint16_t)r[0];
#else
    uint32_t u;
    memcpy(&u, &f, 4);
    uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return 0x7fff;                      // CUDA's NaN
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and up round to infinity
    if (a < 0x38800000) {                                   // below 2^-14: a multiple of 2^-24
        float magnitude, shifted;
        memcpy(&magnitude, &a, 4);
        shifted = magnitude + 0.5f;  // 0.5 has 2^-24 as its last bit: the sum rounds there
        uint32_t r;
        memcpy(&r, &shifted, 4);
        return (uint16_t)(sign | (r - 0x3f000000));
    }
    a += 0xc8000fff + (a >> 13 & 1);  // exponent bias 127 -> 15, round to nearest even
    return (uint16_t)(sign | a >> 13);
#endif
}
SIMT_INLINE float simt_half_to_float(uint16_t h) {
#if defined(__F16C__) && !defined(SIMT_NO_F16C)  // the CPU has an instruction for it
    typedef float V4 __attribute__((vector_size(16)));
    typedef short V8 __attribute__((vector_size(16)));
    V4 r = __builtin_ia32_vcvtph2ps(V8{(short)h, 0, 0, 0, 0, 0, 0, 0});
    return r[0];
#else
    uint32_t u = (uint32_t)(h & 0x7fff) << 13;
    float f;
    memcpy(&f, &u, 4);
    f *= 0x1p112f;  // exponent bias 15 -> 127; right for subnormals too
    memcpy(&u, &f, 4);
    if ((h & 0x7c00) == 0x7c00) u |= 0x7f800000;  // infinity and NaN keep their fraction
    u |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &u, 4);
    return f;
#endif
}

struct __half_raw {
    unsigned short x;
};
struct __half2_raw {
    unsigned short x, y;
};

struct __align__(2) __half {
    uint16_t bits;
    __half() = default;  // uninitialised, so that it may live in shared memory
    __half(float f) : bits(simt_float_to_half(f)) {}
    __half(double d) : bits(simt_float_to_half(simt_narrow_to_odd(d))) {}
    __half(int i) : bits(simt_float_to_half(simt_narrow_to_odd(i))) {}
    __half(unsigned i) : bits(simt_float_to_half(simt_narrow_to_odd(i))) {}
    __half(long i) : bits(simt_float_to_half(simt_narrow_to_odd((double)i))) {}
    __half(unsigned long i) : bits(simt_float_to_half(simt_narrow_to_odd((double)i))) {}
    __half(long long i) : bits(simt_float_to_half(simt_narrow_to_odd((double)i))) {}
    __half(unsigned long long i) : bits(simt_float_to_half(simt_narrow_to_odd((double)i))) {}
    constexpr __half(__half_raw r) : bits(r.x) {}
    operator float() const { return simt_half_to_float(bits); }
    operator __half_raw() const { return {bits}; }
};
typedef __half half;
typedef __half __nv_half;

struct __align__(4) __half2 {
    __half x, y;
    __half2() = default;
    constexpr __half2(__half x, __half y) : x(x), y(y) {}
};
typedef __half2 half2;

SIMT_SIXTEEN_BITS(__half, __half2, make_half2)

// ---- conversions --------------------------------------------------------------------------------
SIMT_INLINE __half __float2half(float f) { return __half(f); }
SIMT_INLINE __half __float2half_rn(float f) { return __half(f); }
SIMT_INLINE __half __double2half(double d) { return __half(d); }
SIMT_INLINE float __half2float(__half h) { return (float)h; }
SIMT_INLINE __half2 __float2half2_rn(float f) { return {__half(f), __half(f)}; }
SIMT_INLINE __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
SIMT_INLINE __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
SIMT_INLINE float2 __half22float2(__half2 h) { return {(float)h.x, (float)h.y}; }
SIMT_INLINE float __low2float(__half2 h) { return (float)h.x; }
SIMT_INLINE float __high2float(__half2 h) { return (float)h.y; }
SIMT_INLINE __half __low2half(__half2 h) { return h.x; }
SIMT_INLINE __half __high2half(__half2 h) { return h.y; }
SIMT_INLINE __half2 __low2half2(__half2 h) { return {h.x, h.x}; }
SIMT_INLINE __half2 __high2half2(__half2 h) { return {h.y, h.y}; }
SIMT_INLINE __half2 __lows2half2(__half2 a, __half2 b) { return {a.x, b.x}; }
SIMT_INLINE __half2 __highs2half2(__half2 a, __half2 b) { return {a.y, b.y}; }
SIMT_INLINE __half2 __halves2half2(__half a, __half b) { return {a, b}; }
SIMT_INLINE __half2 __half2half2(__half h) { return {h, h}; }
SIMT_INLINE __half __int2half_rn(int i) { return __half(i); }
SIMT_INLINE __half __uint2half_rn(unsigned i) { return __half(i); }
SIMT_INLINE int __half2int_rn(__half h) { return (int)__builtin_rintf((float)h); }
SIMT_INLINE int __half2int_rz(__half h) { return (int)(float)h; }
SIMT_INLINE unsigned short __half_as_ushort(__half h) { return h.bits; }
SIMT_INLINE short __half_as_short(__half h) { return (short)h.bits; }
SIMT_INLINE __half __ushort_as_half(unsigned short u) { return __half(__half_raw{u}); }
SIMT_INLINE __half __short_as_half(short s) { return __half(__half_raw{(unsigned short)s}); }
#define CUDART_INF_FP16 __ushort_as_half((unsigned short)0x7C00U)
#define CUDART_NAN_FP16 __ushort_as_half((unsigned short)0x7FFFU)
#define CUDART_ZERO_FP16 __ushort_as_half((unsigned short)0x0000U)
#define CUDART_ONE_FP16 __ushort_as_half((unsigned short)0x3C00U)
#include "simt/names_end.h"
