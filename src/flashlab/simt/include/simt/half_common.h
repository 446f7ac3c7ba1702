// What __half and __nv_bfloat16 share: 16 bits that hold a number, arithmetic as float arithmetic rounded once.
//
// Why float is enough: float carries 24 bits, and rounding first to 24 and then to p bits gives the correctly
// rounded p-bit result of +, -, *, / and sqrt when 24 >= 2p + 2. That holds for half (p = 11) and bfloat16 (p
// = 8). A fused multiply-add needs the exact sum instead: see simt_fma_to_odd.
#pragma once
#include "language.h"
#include "atomics.h"
#include "half_bits.h"

// Rounding to odd: of the two neighbours of an inexact result take the one whose last bit is 1. That bit then
// tells the next rounding, to fewer bits, that something was cut off below it.
SIMT_INLINE float simt_narrow_to_odd(double d) {
    float f = (float)d;
    if ((double)f == d || d != d) return f;
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f == 0) u |= 1;  // underflow: the smallest subnormal is odd
    else if (!(u & 1)) u += (d > (double)f) == (d > 0) ? 1 : -1;
    memcpy(&f, &u, 4);
    return f;
}
SIMT_INLINE float simt_fma_to_odd(float a, float b, float c) {
    double product = (double)a * b, sum = product + c;  // the product is exact, the sum need not be
    double back = sum - product, error = (product - (sum - back)) + (c - back);
    if (error != 0 && sum - sum == 0) {
        uint64_t bits;
        memcpy(&bits, &sum, 8);
        if (!(bits & 1)) bits += (error > 0) == (sum > 0) ? 1 : -1;
        memcpy(&sum, &bits, 8);
    }
    return simt_narrow_to_odd(sum);
}

// Every function on a pair is the function on each half of it. H is the number, H2 the pair; the names of the
// two headers differ only in the conversions.
#define SIMT_PAIR_1(H2, name2, name)                                                                        \
    SIMT_INLINE H2 name2(H2 a) { return {name(a.x), name(a.y)}; }
#define SIMT_PAIR_2(H2, name2, name)                                                                        \
    SIMT_INLINE H2 name2(H2 a, H2 b) { return {name(a.x, b.x), name(a.y, b.y)}; }
#define SIMT_ORDER(H, H2, suffix, op)                                                                       \
    SIMT_INLINE bool __h##suffix(H a, H b) { return (float)a op(float) b; }                                 \
    SIMT_INLINE H2 __h##suffix##2(H2 a, H2 b) {                                                             \
        return {H(__h##suffix(a.x, b.x) ? 1.f : 0.f), H(__h##suffix(a.y, b.y) ? 1.f : 0.f)};                \
    }                                                                                                       \
    SIMT_INLINE bool __hb##suffix##2(H2 a, H2 b) { return __h##suffix(a.x, b.x) && __h##suffix(a.y, b.y); } \
    SIMT_INLINE bool operator op(H a, H b) { return (float)a op(float) b; }
#define SIMT_ARITHMETIC(T, op, name)                                                                        \
    SIMT_INLINE T operator op(T a, T b) { return name(a, b); }                                              \
    SIMT_INLINE T& operator op##=(T& a, T b) { return a = a op b; }
#define SIMT_FUNCTION(H, H2, name, expression)                                                              \
    SIMT_INLINE H h##name(H h) {                                                                            \
        float x = (float)h;                                                                                 \
        return H(expression);                                                                               \
    }                                                                                                       \
    SIMT_PAIR_1(H2, h2##name, h##name)

// Both headers: the number H and the pair H2, and the functions that have `half` and `half2` in their names. to_bits and
// to_float: between a float and the 16 bits.
// clang-format off
#define SIMT_SIXTEEN_BITS(H, H2, half, half2, to_bits, to_float)                                            \
    struct H##_raw { unsigned short x; };                                                                   \
    struct H2##_raw { unsigned short x, y; };                                                               \
    struct __align__(2) H {                                                                                 \
        uint16_t bits;                                                                                      \
        H() = default;  /* uninitialised, so that it may live in shared memory */                           \
        H(float f) : bits(to_bits(f)) {}                                                                    \
        H(double d) : bits(to_bits(simt_narrow_to_odd(d))) {}                                               \
        H(int i) : bits(to_bits(simt_narrow_to_odd(i))) {}                                                  \
        H(unsigned i) : bits(to_bits(simt_narrow_to_odd(i))) {}                                             \
        H(long i) : bits(to_bits(simt_narrow_to_odd((double)i))) {}                                         \
        H(unsigned long i) : bits(to_bits(simt_narrow_to_odd((double)i))) {}                                \
        H(long long i) : bits(to_bits(simt_narrow_to_odd((double)i))) {}                                    \
        H(unsigned long long i) : bits(to_bits(simt_narrow_to_odd((double)i))) {}                           \
        constexpr H(H##_raw r) : bits(r.x) {}                                                               \
        operator float() const { return to_float(bits); }                                                   \
        operator H##_raw() const { return {bits}; }                                                         \
    };                                                                                                      \
    struct __align__(4) H2 {                                                                                \
        H x, y;                                                                                             \
        H2() = default;                                                                                     \
        constexpr H2(H x, H y) : x(x), y(y) {}                                                              \
    };                                                                                                      \
    SIMT_INLINE H __float2##half(float f) { return H(f); }                                                  \
    SIMT_INLINE H __float2##half##_rn(float f) { return H(f); }                                             \
    SIMT_INLINE H __double2##half(double d) { return H(d); }                                                \
    SIMT_INLINE H __int2##half##_rn(int i) { return H(i); }                                                 \
    SIMT_INLINE H __uint2##half##_rn(unsigned i) { return H(i); }                                           \
    SIMT_INLINE float __##half##2float(H h) { return (float)h; }                                            \
    SIMT_INLINE int __##half##2int_rn(H h) { return (int)__builtin_rintf((float)h); }                       \
    SIMT_INLINE int __##half##2int_rz(H h) { return (int)(float)h; }                                        \
    SIMT_INLINE H2 __float2##half2##_rn(float f) { return {H(f), H(f)}; }                                   \
    SIMT_INLINE H2 __floats2##half2##_rn(float a, float b) { return {H(a), H(b)}; }                         \
    SIMT_INLINE H2 __float22##half2##_rn(float2 f) { return {H(f.x), H(f.y)}; }                             \
    SIMT_INLINE float2 __##half2##2float2(H2 h) { return {(float)h.x, (float)h.y}; }                        \
    SIMT_INLINE float __low2float(H2 h) { return (float)h.x; }                                              \
    SIMT_INLINE float __high2float(H2 h) { return (float)h.y; }                                             \
    SIMT_INLINE H __low2##half(H2 h) { return h.x; }                                                        \
    SIMT_INLINE H __high2##half(H2 h) { return h.y; }                                                       \
    SIMT_INLINE H2 __low2##half2(H2 h) { return {h.x, h.x}; }                                               \
    SIMT_INLINE H2 __high2##half2(H2 h) { return {h.y, h.y}; }                                              \
    SIMT_INLINE H2 __lows2##half2(H2 a, H2 b) { return {a.x, b.x}; }                                        \
    SIMT_INLINE H2 __highs2##half2(H2 a, H2 b) { return {a.y, b.y}; }                                       \
    SIMT_INLINE H2 __halves2##half2(H a, H b) { return {a, b}; }                                            \
    SIMT_INLINE H2 make_##half2(H a, H b) { return {a, b}; }                                                \
    SIMT_INLINE H2 __##half##2##half2(H h) { return {h, h}; }                                               \
    SIMT_INLINE unsigned short __##half##_as_ushort(H h) { return h.bits; }                                 \
    SIMT_INLINE short __##half##_as_short(H h) { return (short)h.bits; }                                    \
    SIMT_INLINE H __ushort_as_##half(unsigned short u) { return H(H##_raw{u}); }                            \
    SIMT_INLINE H __short_as_##half(short s) { return H(H##_raw{(unsigned short)s}); }                      \
    SIMT_INLINE H __hadd(H a, H b) { return H((float)a + (float)b); }                                       \
    SIMT_INLINE H __hsub(H a, H b) { return H((float)a - (float)b); }                                       \
    SIMT_INLINE H __hmul(H a, H b) { return H((float)a * (float)b); }                                       \
    SIMT_INLINE H __hdiv(H a, H b) { return H((float)a / (float)b); }                                       \
    SIMT_INLINE H __hadd_rn(H a, H b) { return __hadd(a, b); }                                              \
    SIMT_INLINE H __hsub_rn(H a, H b) { return __hsub(a, b); }                                              \
    SIMT_INLINE H __hmul_rn(H a, H b) { return __hmul(a, b); }                                              \
    SIMT_INLINE H __hfma(H a, H b, H c) { return H(simt_fma_to_odd((float)a, (float)b, (float)c)); }        \
    SIMT_INLINE H __hneg(H a) { return H(H##_raw{(unsigned short)(a.bits ^ 0x8000)}); }                     \
    SIMT_INLINE H __habs(H a) { return H(H##_raw{(unsigned short)(a.bits & 0x7fff)}); }                     \
    SIMT_INLINE bool __hisnan(H a) { return (float)a != (float)a; }                                         \
    SIMT_INLINE int __hisinf(H a) {                                                                         \
        float x = (float)a;                                                                                 \
        return x == __builtin_inff() ? 1 : x == -__builtin_inff() ? -1 : 0;                                 \
    }                                                                                                       \
    /* the other operand where one is NaN, as the hardware's min and max */                                 \
    SIMT_INLINE H __hmax(H a, H b) {                                                                        \
        if (__hisnan(a) || __hisnan(b)) return __hisnan(a) ? b : a;                                         \
        return (float)a < (float)b || (a.bits == 0x8000 && b.bits == 0) ? b : a;      /* 0 is above -0 */   \
    }                                                                                                       \
    SIMT_INLINE H __hmin(H a, H b) {                                                                        \
        if (__hisnan(a) || __hisnan(b)) return __hisnan(a) ? b : a;                                         \
        return (float)b < (float)a || (a.bits == 0 && b.bits == 0x8000) ? b : a;                            \
    }                                                                                                       \
    SIMT_INLINE H __hmax_nan(H a, H b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmax(a, b); }         \
    SIMT_INLINE H __hmin_nan(H a, H b) { return __hisnan(a) ? a : __hisnan(b) ? b : __hmin(a, b); }         \
    SIMT_PAIR_2(H2, __hadd2, __hadd)                                                                        \
    SIMT_PAIR_2(H2, __hsub2, __hsub)                                                                        \
    SIMT_PAIR_2(H2, __hmul2, __hmul)                                                                        \
    SIMT_PAIR_2(H2, __hadd2_rn, __hadd)                                                                     \
    SIMT_PAIR_2(H2, __hsub2_rn, __hsub)                                                                     \
    SIMT_PAIR_2(H2, __hmul2_rn, __hmul)                                                                     \
    SIMT_PAIR_2(H2, __h2div, __hdiv)                                                                        \
    SIMT_PAIR_2(H2, __hmax2, __hmax)                                                                        \
    SIMT_PAIR_2(H2, __hmin2, __hmin)                                                                        \
    SIMT_PAIR_2(H2, __hmax2_nan, __hmax_nan)                                                                \
    SIMT_PAIR_2(H2, __hmin2_nan, __hmin_nan)                                                                \
    SIMT_PAIR_1(H2, __hneg2, __hneg)                                                                        \
    SIMT_PAIR_1(H2, __habs2, __habs)                                                                        \
    SIMT_INLINE H2 __hfma2(H2 a, H2 b, H2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }     \
    SIMT_INLINE H2 __lowhigh2highlow(H2 a) { return {a.y, a.x}; }                                           \
    SIMT_ORDER(H, H2, eq, ==)                                                                               \
    SIMT_ORDER(H, H2, ne, !=)                                                                               \
    SIMT_ORDER(H, H2, lt, <)                                                                                \
    SIMT_ORDER(H, H2, le, <=)                                                                               \
    SIMT_ORDER(H, H2, gt, >)                                                                                \
    SIMT_ORDER(H, H2, ge, >=)                                                                               \
    SIMT_FUNCTION(H, H2, exp, expf(x))                                                                      \
    SIMT_FUNCTION(H, H2, exp2, exp2f(x))                                                                    \
    SIMT_FUNCTION(H, H2, exp10, exp10f(x))                                                                  \
    SIMT_FUNCTION(H, H2, log, logf(x))                                                                      \
    SIMT_FUNCTION(H, H2, log2, log2f(x))                                                                    \
    SIMT_FUNCTION(H, H2, log10, log10f(x))                                                                  \
    SIMT_FUNCTION(H, H2, sqrt, sqrtf(x))                                                                    \
    SIMT_FUNCTION(H, H2, rsqrt, 1.f / sqrtf(x))                                                             \
    SIMT_FUNCTION(H, H2, rcp, 1.f / x)                                                                      \
    SIMT_FUNCTION(H, H2, sin, sinf(x))                                                                      \
    SIMT_FUNCTION(H, H2, cos, cosf(x))                                                                      \
    SIMT_FUNCTION(H, H2, tanh, tanhf(x))                                                                    \
    SIMT_FUNCTION(H, H2, floor, floorf(x))                                                                  \
    SIMT_FUNCTION(H, H2, ceil, ceilf(x))                                                                    \
    SIMT_FUNCTION(H, H2, trunc, truncf(x))                                                                  \
    SIMT_FUNCTION(H, H2, rint, rintf(x))                                                                    \
    SIMT_ARITHMETIC(H, +, __hadd)                                                                           \
    SIMT_ARITHMETIC(H, -, __hsub)                                                                           \
    SIMT_ARITHMETIC(H, *, __hmul)                                                                           \
    SIMT_ARITHMETIC(H, /, __hdiv)                                                                           \
    SIMT_ARITHMETIC(H2, +, __hadd2)                                                                         \
    SIMT_ARITHMETIC(H2, -, __hsub2)                                                                         \
    SIMT_ARITHMETIC(H2, *, __hmul2)                                                                         \
    SIMT_ARITHMETIC(H2, /, __h2div)                                                                         \
    SIMT_INLINE H operator-(H a) { return __hneg(a); }                                                      \
    SIMT_INLINE H operator+(H a) { return a; }                                                              \
    SIMT_INLINE H2 operator-(H2 a) { return __hneg2(a); }                                                   \
    SIMT_INLINE bool operator==(H2 a, H2 b) { return a.x == b.x && a.y == b.y; }                            \
    SIMT_INLINE bool operator!=(H2 a, H2 b) { return a.x != b.x && a.y != b.y; }
// clang-format on
