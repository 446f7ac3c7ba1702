# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Phase 11c · Optional: tuned on an H200, exercises
#
# The answer is a few lines of CUDA in a Python string, which the emulator compiles and runs: no GPU is needed. A check that fails says in one sentence
# what is wrong. `hint("11c.1")` gives the next hint, `progress("11c")` shows where you are.

# %%
from flashlab.exercises import check, hint, progress

# %% [markdown]
# ## 11c.1
#
# Exponentials have units of their own, and few of them: with `head_dim` 64 they take as long as both products. Multiply-adds go eight
# times as fast. Compute $2^x$ with multiply-adds and integer operations (the lecture's page closed: its section 3 does it), for any $x$. The relative
# error is at most $2^{-12}$ from −126 to 126. Below that the result is from 0 to $2^{-120}$, for $-\infty$ too. Above 126 it is $2^{126}$ or
# more, or infinity: with trust (step 14) the maximum may be far too low, and a huge number is what tells. NaN stays NaN. You may use +, −, ×, `fmaf`,
# `fminf`, `fmaxf`, `rintf`, comparisons, `__float_as_uint`, `__uint_as_float`, conversions.

# %% tags=["exercise"]
# BEGIN STARTER
exp2_polynomial = r"""
__device__ __forceinline__ float exp2_polynomial(float x) {
    return // YOUR CODE HERE
}
"""
# END STARTER
# BEGIN SOLUTION
exp2_polynomial = r"""
__device__ __forceinline__ float exp2_polynomial(float x) {
    x = x < -127.f ? -127.f : x > 128.f ? 128.f : x;           // NaN stays NaN
    const float n = rintf(x), f = x - n;                       // 2^x = 2^n 2^f
    const float power = __uint_as_float((uint32_t)((int)n + 127) << 23);
    return fmaf(f, fmaf(f, fmaf(f, 0.0550089516f, 0.242211014f), 0.693282902f), 1.f) * power;
}
"""
# END SOLUTION

# %% tags=["check"]
# hint("11c.1")
check("11c.1", exp2_polynomial)

# %% [markdown]
# ## Where you are
#
# You can trade one unit of the chip for another, and say what that costs in digits.

# %% tags=["nbval-ignore-output"]
progress("11c")
