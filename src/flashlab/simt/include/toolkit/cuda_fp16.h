// __half and __half2 for the emulator: the interface of CUDA's <cuda_fp16.h>, written for a CPU.
#pragma once
#include "simt/names.h"
#include "simt.h"
#include "simt/half_common.h"

#if defined(__F16C__) && !defined(SIMT_NO_F16C)  // the CPU has an instruction for it
SIMT_INLINE uint16_t simt_float_to_f16(float f) {
    typedef float V4 __attribute__((vector_size(16)));
    typedef short V8 __attribute__((vector_size(16)));
    if (f != f) return 0x7fff;  // CUDA's NaN
    V8 r = (V8)__builtin_ia32_vcvtps2ph(V4{f, 0, 0, 0}, 0);
    return (uint16_t)r[0];
}
SIMT_INLINE float simt_f16_to_float(uint16_t h) {
    typedef float V4 __attribute__((vector_size(16)));
    typedef short V8 __attribute__((vector_size(16)));
    V4 r = __builtin_ia32_vcvtph2ps(V8{(short)h, 0, 0, 0, 0, 0, 0, 0});
    return r[0];
}
#else
SIMT_INLINE uint16_t simt_float_to_f16(float f) { return simt_float_to_half(f); }
SIMT_INLINE float simt_f16_to_float(uint16_t h) { return simt_half_to_float(h); }
#endif

SIMT_SIXTEEN_BITS(__half, __half2, half, half2, simt_float_to_f16, simt_f16_to_float)
typedef __half half;
typedef __half __nv_half;
typedef __half2 half2;
#define CUDART_INF_FP16 __ushort_as_half((unsigned short)0x7C00U)
#define CUDART_NAN_FP16 __ushort_as_half((unsigned short)0x7FFFU)
#define CUDART_ZERO_FP16 __ushort_as_half((unsigned short)0x0000U)
#define CUDART_ONE_FP16 __ushort_as_half((unsigned short)0x3C00U)
#include "simt/names_end.h"
