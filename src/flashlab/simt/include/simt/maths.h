// Device functions that a host compiler has no name for. The "fast" ones return what the accurate one
// returns: a GPU's answer differs in the last bits, and no test should depend on them.
#pragma once
#include "language.h"

// ---- min and max: CUDA has them for every mix of arithmetic types -------------------------------
#define SIMT_MIN_MAX(T) \
    SIMT_INLINE constexpr T min(T a, T b) { return b < a ? b : a; } \
    SIMT_INLINE constexpr T max(T a, T b) { return a < b ? b : a; }
SIMT_MIN_MAX(int)
SIMT_MIN_MAX(unsigned)
SIMT_MIN_MAX(long)
SIMT_MIN_MAX(unsigned long)
SIMT_MIN_MAX(long long)
SIMT_MIN_MAX(unsigned long long)
#undef SIMT_MIN_MAX
#define SIMT_MIXED(constexpr_, T, A, B) \
    SIMT_INLINE constexpr_ T min(A a, B b) { return min((T)a, (T)b); } \
    SIMT_INLINE constexpr_ T min(B a, A b) { return min((T)a, (T)b); } \
    SIMT_INLINE constexpr_ T max(A a, B b) { return max((T)a, (T)b); } \
    SIMT_INLINE constexpr_ T max(B a, A b) { return max((T)a, (T)b); }
SIMT_MIXED(constexpr, unsigned, int, unsigned)
SIMT_MIXED(constexpr, long, int, long)
SIMT_MIXED(constexpr, long long, int, long long)
SIMT_INLINE float min(float a, float b) { return __builtin_fminf(a, b); }
SIMT_INLINE float max(float a, float b) { return __builtin_fmaxf(a, b); }
SIMT_INLINE double min(double a, double b) { return __builtin_fmin(a, b); }
SIMT_INLINE double max(double a, double b) { return __builtin_fmax(a, b); }
SIMT_MIXED(, double, float, double)
#undef SIMT_MIXED

// ---- bits ---------------------------------------------------------------------------------------
#define SIMT_BITS(to, name, from) \
    SIMT_INLINE to name(from x) { \
        static_assert(sizeof(to) == sizeof(from), "the same bits"); \
        to r; \
        memcpy(&r, &x, sizeof r); \
        return r; \
    }
SIMT_BITS(int, __float_as_int, float)
SIMT_BITS(unsigned, __float_as_uint, float)
SIMT_BITS(float, __int_as_float, int)
SIMT_BITS(float, __uint_as_float, unsigned)
SIMT_BITS(long long, __double_as_longlong, double)
SIMT_BITS(double, __longlong_as_double, long long)
#undef SIMT_BITS
SIMT_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
SIMT_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
SIMT_INLINE int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
SIMT_INLINE int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
SIMT_INLINE int __ffs(int x) { return __builtin_ffs(x); }
SIMT_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
SIMT_INLINE unsigned __brev(unsigned x) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++) r |= (x >> i & 1) << (31 - i);
    return r;
}
SIMT_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned s) {
    uint64_t v = x | (uint64_t)y << 32;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        unsigned byte = (unsigned)(v >> (s >> 4 * i & 7) * 8) & 0xff;
        if (s >> 4 * i & 8) byte = byte & 0x80 ? 0xff : 0;  // the selector's top bit: replicate the sign
        r |= byte << 8 * i;
    }
    return r;
}
SIMT_INLINE unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((uint64_t)hi << 32 | lo) << (n & 31) >> 32);
}
SIMT_INLINE unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
    return (unsigned)(((uint64_t)hi << 32 | lo) >> (n & 31));
}
SIMT_INLINE int __mulhi(int a, int b) { return (int)((int64_t)a * b >> 32); }
SIMT_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }
SIMT_INLINE int __mul24(int a, int b) { return (a << 8 >> 8) * (b << 8 >> 8); }

// ---- float: named roundings and fast versions ---------------------------------------------------
SIMT_INLINE float __fadd_rn(float a, float b) { return a + b; }
SIMT_INLINE float __fsub_rn(float a, float b) { return a - b; }
SIMT_INLINE float __fmul_rn(float a, float b) { return a * b; }
SIMT_INLINE float __fdiv_rn(float a, float b) { return a / b; }
SIMT_INLINE float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
SIMT_INLINE float __frcp_rn(float x) { return 1.f / x; }
SIMT_INLINE float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
SIMT_INLINE float __frsqrt_rn(float x) { return 1.f / __builtin_sqrtf(x); }
SIMT_INLINE float rsqrtf(float x) { return 1.f / __builtin_sqrtf(x); }
SIMT_INLINE double rsqrt(double x) { return 1. / __builtin_sqrt(x); }
SIMT_INLINE float __fdividef(float a, float b) { return a / b; }
// Macros: glibc declares functions of these names for itself.
#define __expf(...) expf(__VA_ARGS__)
#define __exp2f(...) exp2f(__VA_ARGS__)
#define __exp10f(...) exp10f(__VA_ARGS__)
#define __logf(...) logf(__VA_ARGS__)
#define __log2f(...) log2f(__VA_ARGS__)
#define __log10f(...) log10f(__VA_ARGS__)
#define __powf(...) powf(__VA_ARGS__)
#define __sinf(...) sinf(__VA_ARGS__)
#define __cosf(...) cosf(__VA_ARGS__)
#define __tanf(...) tanf(__VA_ARGS__)
#define __sincosf(...) sincosf(__VA_ARGS__)
SIMT_INLINE float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }  // NaN becomes 0, as on a GPU
SIMT_INLINE float fdividef(float a, float b) { return a / b; }

// ---- conversions between numbers ----------------------------------------------------------------
// Out of range a GPU saturates and NaN is 0; a plain C++ cast on a CPU would do neither.
template <class T>
SIMT_INLINE T simt_to_integer(double x, double low, double high) {
    return x != x ? T(0) : x <= low ? (T)low : x >= high ? (T)high : (T)x;
}
#define SIMT_FLOAT_TO(T, name, rounded, low, high) \
    SIMT_INLINE T name(float x) { return simt_to_integer<T>(rounded(x), low, high); }
SIMT_FLOAT_TO(int, __float2int_rn, __builtin_rint, -2147483648., 2147483647.)
SIMT_FLOAT_TO(int, __float2int_rz, __builtin_trunc, -2147483648., 2147483647.)
SIMT_FLOAT_TO(int, __float2int_rd, __builtin_floor, -2147483648., 2147483647.)
SIMT_FLOAT_TO(int, __float2int_ru, __builtin_ceil, -2147483648., 2147483647.)
SIMT_FLOAT_TO(unsigned, __float2uint_rn, __builtin_rint, 0., 4294967295.)
SIMT_FLOAT_TO(unsigned, __float2uint_rz, __builtin_trunc, 0., 4294967295.)
#undef SIMT_FLOAT_TO
SIMT_INLINE float __int2float_rn(int x) { return (float)x; }
SIMT_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
SIMT_INLINE float __double2float_rn(double x) { return (float)x; }
