// exponential.cuh - phase 11, what step 12 has built and no later one changes. A step includes it behind its constants.

// region: exponential
#ifndef POLYNOMIAL                                             // of how many MMA tiles of S one is computed so
#define POLYNOMIAL 0
#endif
// 2^x with a relative error of 1e-4, up to x = 127: a rounding to fp16 errs by up to 5e-4. 2^x = 2^n 2^f, where
// n is the nearest integer. Adding 1.5 * 2^23 rounds to it, and leaves it in the sum's last bits; shifted, they are the
// exponent of 2^n. n = -127 gives 0, n = 128 infinity, and n goes no further. NaN stays NaN, in f.
__device__ __forceinline__ float exp2_polynomial(float x) {
    x = x < -127.f ? -127.f : x;
    const float shifted = fminf(x, 128.f) + 12582912.f, f = x - (shifted - 12582912.f);
    const float power = __uint_as_float((__float_as_uint(shifted) << 23) + 0x3f800000u);
    return fmaf(f, fmaf(f, fmaf(f, 0.0550089516f, 0.242211014f), 0.693282902f), 1.f) * power;
}
// endregion
