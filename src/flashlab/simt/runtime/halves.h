// 16-bit numbers and floats.
#pragma once
#include <stdint.h>
#include <string.h>

namespace simt {

// Branch-free, so that the compiler turns the loops over it into vector code.
static inline float half_bits_to_float(uint32_t h) {
    uint32_t u = (h & 0x7fff) << 13;
    float f;
    memcpy(&f, &u, 4);
    f *= 0x1p112f;
    memcpy(&u, &f, 4);
    u |= (h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u;
    u |= (h & 0x8000) << 16;
    memcpy(&f, &u, 4);
    return f;
}
static inline float bf16_bits_to_float(uint32_t b) {
    uint32_t u = b << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t float_to_half_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return 0x7fff;
    if (a >= 0x477ff000) return sign | 0x7c00;
    if (a < 0x38800000) {
        float magnitude;
        memcpy(&magnitude, &a, 4);
        magnitude += 0.5f;
        memcpy(&u, &magnitude, 4);
        return sign | (u - 0x3f000000);
    }
    return sign | (a + 0xc8000fff + (a >> 13 & 1)) >> 13;
}
static inline uint32_t float_to_bf16_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    if (f != f) return 0x7fff;
    return (u + 0x7fff + (u >> 16 & 1)) >> 16;
}

}  // namespace simt
