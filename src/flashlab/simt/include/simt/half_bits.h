// Floats and the bits of 16-bit numbers, in plain C++: for the emulator's own arithmetic, and for __half and __nv_bfloat16
// where the CPU has no instruction. Branch-free where it can be, so that loops over it become vector code.
#pragma once
#include "language.h"

SIMT_INLINE float simt_half_to_float(uint32_t h) {
    uint32_t u = (h & 0x7fff) << 13;
    float f;
    memcpy(&f, &u, 4);
    f *= 0x1p112f;  // exponent bias 15 -> 127; right for subnormals too
    memcpy(&u, &f, 4);
    u |= (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;  // infinity and NaN keep their fraction
    u |= (h & 0x8000) << 16;
    memcpy(&f, &u, 4);
    return f;
}
SIMT_INLINE float simt_bf16_to_float(uint32_t b) {  // the upper half of a float
    uint32_t u = b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
SIMT_INLINE uint16_t simt_float_to_half(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return 0x7fff;  // CUDA's NaN
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // 65520 and up round to infinity
    if (a < 0x38800000) {  // below 2^-14: a multiple of 2^-24
        float magnitude;
        memcpy(&magnitude, &a, 4);
        magnitude += 0.5f;  // 0.5 has 2^-24 as its last bit: the sum rounds there
        memcpy(&u, &magnitude, 4);
        return (uint16_t)(sign | (u - 0x3f000000));
    }
    return (uint16_t)(sign | (a + 0xc8000fff + (a >> 13 & 1)) >> 13);  // exponent bias 127 -> 15, to nearest even
}
SIMT_INLINE uint16_t simt_float_to_bf16(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;  // CUDA's NaN
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);  // to nearest, ties to even
}
