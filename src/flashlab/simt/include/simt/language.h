// The CUDA dialect of C++, spelled for a host compiler: keywords, built-in variables, vector types.
#pragma once
// <math.h> without the special functions of C++17, which no GPU has: they are half of what a kernel's build reads.
#if __has_include(<bits/c++config.h>)
#include <bits/c++config.h>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS
#endif
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef __SANITIZE_THREAD__  // -fsanitize=thread
#define SIMT_CHECKED 1
#else
#define SIMT_CHECKED 0
#endif

// ---- keywords -----------------------------------------------------------------------------------
// The annotation is how flashlab.simt.source knows a kernel; the compiler never sees it. In a watched build all that
// a kernel calls becomes part of it, as on a GPU: g++ does not instrument a store of what a function returns.
#if SIMT_CHECKED
#define __global__ __attribute__((annotate("simt_kernel"), flatten))
#else
#define __global__ __attribute__((annotate("simt_kernel")))
#endif
#define __device__
#define __host__
#define __constant__
#define __grid_constant__ __attribute__((annotate("simt_grid_constant")))  // flashlab.simt.source looks for it
#define __managed__
#define __launch_bounds__(...) __simt_bounds__(__VA_ARGS__)  // flashlab.simt.source makes it simt_bounds(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define SIMT_INLINE static inline __attribute__((always_inline))

// What flashlab.simt.source makes of a reader's memcpy, memmove and memset in a watched build: g++ looks at none but
// those that are one load and one store.
#if SIMT_CHECKED
extern "C" {
void* __tsan_memcpy(void* to, const void* from, size_t n);
void* __tsan_memmove(void* to, const void* from, size_t n);
void* __tsan_memset(void* to, int byte, size_t n);
}
SIMT_INLINE void* simt_memcpy(void* to, const void* from, size_t n) {
    return __builtin_constant_p(n) && n <= 16 && !(n & (n - 1)) ? memcpy(to, from, n) : __tsan_memcpy(to, from, n);
}
SIMT_INLINE void* simt_memmove(void* to, const void* from, size_t n) { return __tsan_memmove(to, from, n); }
SIMT_INLINE void* simt_memset(void* to, int byte, size_t n) { return __tsan_memset(to, byte, n); }
#endif

// One thread block runs on one OS thread, so that "one copy a block" is "one copy an OS thread". The arrays
// named by `extern __shared__ T name[]` all get the address of the block's dynamic shared memory, when the
// module is linked.
// __constinit tells g++ that it need not ask at each use whether a constructor has run.
#define __shared__ __constinit thread_local

// ---- vector types -------------------------------------------------------------------------------
// Their alignment is what makes one 8- or 16-byte access of a lane: it is CUDA's.
#define SIMT_VECTOR(T, name, a1, a2, a3, a4) \
    struct name##1 { T x; }; \
    struct __align__(a2) name##2 { T x, y; }; \
    struct name##3 { T x, y, z; }; \
    struct __align__(a4) name##4 { T x, y, z, w; }; \
    SIMT_INLINE constexpr name##1 make_##name##1(T x) { return {x}; } \
    SIMT_INLINE constexpr name##2 make_##name##2(T x, T y) { return {x, y}; } \
    SIMT_INLINE constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
    SIMT_INLINE constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SIMT_VECTOR(signed char, char, 1, 2, 1, 4)
SIMT_VECTOR(unsigned char, uchar, 1, 2, 1, 4)
SIMT_VECTOR(short, short, 2, 4, 2, 8)
SIMT_VECTOR(unsigned short, ushort, 2, 4, 2, 8)
SIMT_VECTOR(int, int, 4, 8, 4, 16)
SIMT_VECTOR(unsigned, uint, 4, 8, 4, 16)
SIMT_VECTOR(float, float, 4, 8, 4, 16)
SIMT_VECTOR(long long, longlong, 8, 16, 8, 16)
SIMT_VECTOR(unsigned long long, ulonglong, 8, 16, 8, 16)
SIMT_VECTOR(double, double, 8, 16, 8, 16)
#undef SIMT_VECTOR

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

// ---- built-in variables -------------------------------------------------------------------------
// Set whenever a lane goes on (runtime/scheduler.cpp). `const` tells the compiler that a thread sees one value.
#ifdef SIMT_RUNTIME
#define SIMT_INDEX extern __thread uint3
#else
#define SIMT_INDEX extern __thread const uint3
#endif
extern "C" {
SIMT_INDEX threadIdx, blockIdx, blockDim, gridDim;
}
constexpr int warpSize = 32;
#define CUDART_VERSION 13000

// ---- odds and ends ------------------------------------------------------------------------------
extern "C" {
long long clock64();  // nanoseconds of the CPU: they order events, they measure nothing of a GPU
void simt_bounds(long long threads, ...);  // the launch may have so many in a block
void simt_fence();
void simt_yield();    // let the other threads of the block run
void simt_trap() __attribute__((noreturn));
}
SIMT_INLINE long long wall_clock64() { return clock64(); }
SIMT_INLINE void __nanosleep(unsigned) { simt_yield(); }
SIMT_INLINE void __threadfence_block() { asm volatile("" ::: "memory"); }  // a block is one OS thread
SIMT_INLINE void __threadfence() { simt_fence(); }
SIMT_INLINE void __threadfence_system() { simt_fence(); }
SIMT_INLINE void __trap() { simt_trap(); }

// Loads and stores with a cache hint are loads and stores.
#define SIMT_HINTED_LOAD(name) \
    template <class T> \
    SIMT_INLINE T name(const T* p) { \
        return *p; \
    }
#define SIMT_HINTED_STORE(name) \
    template <class T> \
    SIMT_INLINE void name(T* p, T v) { \
        *p = v; \
    }
SIMT_HINTED_LOAD(__ldg)
SIMT_HINTED_LOAD(__ldca)
SIMT_HINTED_LOAD(__ldcg)
SIMT_HINTED_LOAD(__ldcs)
SIMT_HINTED_STORE(__stcg)
SIMT_HINTED_STORE(__stcs)
