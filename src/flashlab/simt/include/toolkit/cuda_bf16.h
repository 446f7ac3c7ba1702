// __nv_bfloat16 and __nv_bfloat162 for the emulator: the interface of CUDA's <cuda_bf16.h>, written for a
// CPU.
#pragma once
#include "simt/names.h"
#include "simt.h"
#include "simt/half_common.h"

// ---- float <-> bfloat16, the upper half of a float ----------------------------------------------
SIMT_INLINE uint16_t simt_float_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;                              // CUDA's NaN
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);  // to nearest, ties to even
}
SIMT_INLINE float simt_bf16_to_float(uint16_t b) {
    uint32_t u = (uint32_t)b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}

struct __nv_bfloat16_raw {
    unsigned short x;
};
struct __nv_bfloat162_raw {
    unsigned short x, y;
};

struct __align__(2) __nv_bfloat16 {
    uint16_t bits;
    __nv_bfloat16() = default;  // uninitialised, so that it may live in shared memory
    __nv_bfloat16(float f) : bits(simt_float_to_bf16(f)) {}
    __nv_bfloat16(double d) : bits(simt_float_to_bf16(simt_narrow_to_odd(d))) {}
    __nv_bfloat16(int i) : bits(simt_float_to_bf16(simt_narrow_to_odd(i))) {}
    __nv_bfloat16(unsigned i) : bits(simt_float_to_bf16(simt_narrow_to_odd(i))) {}
    __nv_bfloat16(long i) : bits(simt_float_to_bf16(simt_narrow_to_odd((double)i))) {}
    __nv_bfloat16(unsigned long i) : bits(simt_float_to_bf16(simt_narrow_to_odd((double)i))) {}
    __nv_bfloat16(long long i) : bits(simt_float_to_bf16(simt_narrow_to_odd((double)i))) {}
    __nv_bfloat16(unsigned long long i) : bits(simt_float_to_bf16(simt_narrow_to_odd((double)i))) {}
    constexpr __nv_bfloat16(__nv_bfloat16_raw r) : bits(r.x) {}
    operator float() const { return simt_bf16_to_float(bits); }
    operator __nv_bfloat16_raw() const { return {bits}; }
};
typedef __nv_bfloat16 nv_bfloat16;

struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
    __nv_bfloat162() = default;
    constexpr __nv_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) : x(x), y(y) {}
};
typedef __nv_bfloat162 nv_bfloat162;

SIMT_SIXTEEN_BITS(__nv_bfloat16, __nv_bfloat162, make_bfloat162)

// ---- conversions --------------------------------------------------------------------------------
SIMT_INLINE __nv_bfloat16 __float2bfloat16(float f) { return __nv_bfloat16(f); }
SIMT_INLINE __nv_bfloat16 __float2bfloat16_rn(float f) { return __nv_bfloat16(f); }
SIMT_INLINE __nv_bfloat16 __double2bfloat16(double d) { return __nv_bfloat16(d); }
SIMT_INLINE float __bfloat162float(__nv_bfloat16 h) { return (float)h; }
SIMT_INLINE __nv_bfloat162 __float2bfloat162_rn(float f) { return {__nv_bfloat16(f), __nv_bfloat16(f)}; }
SIMT_INLINE __nv_bfloat162 __floats2bfloat162_rn(float a, float b) {
    return {__nv_bfloat16(a), __nv_bfloat16(b)};
}
SIMT_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 f) {
    return {__nv_bfloat16(f.x), __nv_bfloat16(f.y)};
}
SIMT_INLINE float2 __bfloat1622float2(__nv_bfloat162 h) { return {(float)h.x, (float)h.y}; }
SIMT_INLINE float __low2float(__nv_bfloat162 h) { return (float)h.x; }
SIMT_INLINE float __high2float(__nv_bfloat162 h) { return (float)h.y; }
SIMT_INLINE __nv_bfloat16 __low2bfloat16(__nv_bfloat162 h) { return h.x; }
SIMT_INLINE __nv_bfloat16 __high2bfloat16(__nv_bfloat162 h) { return h.y; }
SIMT_INLINE __nv_bfloat162 __low2bfloat162(__nv_bfloat162 h) { return {h.x, h.x}; }
SIMT_INLINE __nv_bfloat162 __high2bfloat162(__nv_bfloat162 h) { return {h.y, h.y}; }
SIMT_INLINE __nv_bfloat162 __lows2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.x, b.x}; }
SIMT_INLINE __nv_bfloat162 __highs2bfloat162(__nv_bfloat162 a, __nv_bfloat162 b) { return {a.y, b.y}; }
SIMT_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) { return {a, b}; }
SIMT_INLINE __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 h) { return {h, h}; }
SIMT_INLINE __nv_bfloat16 __int2bfloat16_rn(int i) { return __nv_bfloat16(i); }
SIMT_INLINE int __bfloat162int_rn(__nv_bfloat16 h) { return (int)__builtin_rintf((float)h); }
SIMT_INLINE int __bfloat162int_rz(__nv_bfloat16 h) { return (int)(float)h; }
SIMT_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
SIMT_INLINE short __bfloat16_as_short(__nv_bfloat16 h) { return (short)h.bits; }
SIMT_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    return __nv_bfloat16(__nv_bfloat16_raw{u});
}
SIMT_INLINE __nv_bfloat16 __short_as_bfloat16(short s) {
    return __nv_bfloat16(__nv_bfloat16_raw{(unsigned short)s});
}
#define CUDART_INF_BF16 __ushort_as_bfloat16((unsigned short)0x7F80U)
#define CUDART_NAN_BF16 __ushort_as_bfloat16((unsigned short)0x7FFFU)
#define CUDART_ZERO_BF16 __ushort_as_bfloat16((unsigned short)0x0000U)
#define CUDART_ONE_BF16 __ushort_as_bfloat16((unsigned short)0x3F80U)
#include "simt/names_end.h"
