"""Small kernels whose right result is known: run by test_interpreter.py in processes of their own.

    python interpreter_cases.py plain      Triton's interpreter as it comes
    python interpreter_cases.py repaired   with flashlab's repairs

prints one JSON object, case -> [right, what was wrong].
"""

import json
import os
import sys
import warnings

MODE = sys.argv[1] if len(sys.argv) > 1 else "plain"
os.environ["TRITON_INTERPRET" if MODE == "plain" else "FLASHLAB_INTERPRET"] = "1"
if MODE == "repaired":
    import flashlab  # noqa: F401

import torch  # noqa: E402 (which Triton is imported is decided above)
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

BF16 = torch.bfloat16
N = 64


@triton.jit
def of_one_tensor(x_ptr, y_ptr, n: tl.constexpr, what: tl.constexpr):
    i = tl.arange(0, n)
    x = tl.load(x_ptr + i)
    if what == "convert":
        y = x.to(y_ptr.dtype.element_ty)
    elif what == "clamp":
        y = tl.clamp(x, tl.full([n], -0.5, tl.bfloat16), tl.full([n], 0.75, tl.bfloat16))
    elif what == "absolute":
        y = tl.abs(x)
    elif what == "exponentials":
        y = (tl.exp2(x.to(tl.float32)) + tl.log2(tl.abs(x.to(tl.float32)))).to(tl.bfloat16)
    tl.store(y_ptr + i, y)


@triton.jit
def of_two_tensors(x_ptr, y_ptr, z_ptr, n: tl.constexpr, what: tl.constexpr):
    i = tl.arange(0, n)
    x, y = tl.load(x_ptr + i), tl.load(y_ptr + i)
    if what == "arithmetic":
        z = (x * 2 + y) - x / y
    elif what == "subtract":
        z = x - y
    elif what == "fused":
        z = tl.fma(x, y, tl.full([n], 0.5, tl.bfloat16))
    elif what == "less":
        z = (x < y).to(tl.int32)
    elif what == "greater":
        z = tl.maximum(x, y)
    elif what == "lesser":
        z = tl.minimum(x, y)
    elif what == "choose":
        z = tl.where(i < 20, x, -y)
    tl.store(z_ptr + i, z)


@triton.jit
def reductions(x_ptr, y_ptr, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, n))
    tl.store(y_ptr, tl.max(x, 0))
    tl.store(y_ptr + 1, tl.min(x, 0))
    tl.store(y_ptr + 2, tl.sum(x, 0))


@triton.jit
def larger_of(a, b):
    return tl.where(a > b, a, b)


@triton.jit
def own_reduction(x_ptr, y_ptr, n: tl.constexpr):
    tl.store(y_ptr, tl.reduce(tl.load(x_ptr + tl.arange(0, n)), 0, larger_of))


@triton.jit
def dot(a_ptr, b_ptr, c_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    at = i[:, None] * n + i[None, :]
    c = tl.zeros([n, n], tl.float32)
    tl.store(c_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at).T, c))


@triton.jit
def add_atomically(x_ptr, y_ptr, n: tl.constexpr):
    i = tl.arange(0, n)
    tl.atomic_add(y_ptr + i // 2, tl.load(x_ptr + i), mask=i < n - 2)


@triton.jit
def count_to(y_ptr, n, block: tl.constexpr):
    total = tl.zeros([block], tl.float32)
    for start in range(0, n, block):
        total += start
    tl.store(y_ptr + tl.arange(0, block), total)


def run(kernel, *tensors, out, size=N):
    """kernel: one of these, or what one of the first two does."""
    result = torch.zeros(size, dtype=out)
    if isinstance(kernel, str):
        (of_one_tensor, of_two_tensors)[len(tensors) - 1][(1,)](*tensors, result, N, kernel)
    else:
        kernel[(1,)](*tensors, result, N)
    return result


generator = torch.Generator().manual_seed(0)
X, Y = (torch.randn(N, generator=generator).to(BF16) for _ in range(2))
A, B = (torch.randn(N, N, generator=generator) for _ in range(2))


def atomic_add():
    y = torch.full((N,), 0.25, dtype=BF16)
    add_atomically[(1,)](X, y, N)
    want = torch.full((N,), 0.25, dtype=BF16)
    for i in range(N - 2):
        want[i // 2] += X[i]
    return y, want


def range_over_an_argument():
    y = torch.zeros(16)
    count_to[(1,)](y, 40, 16)
    return y, torch.full((16,), 48.0)


@triton.jit
def by_methods(x_ptr, y_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    y = x.exp().log() + x.exp2().log2() + x.sqrt() + x.rsqrt() + x.sin() + x.cos() + x.floor() + x.ceil() + x.erf()
    tl.store(y_ptr + tl.arange(0, N), y)


def maths_by_methods():
    x, y = torch.linspace(0.5, 4.0, 16), torch.zeros(16)
    by_methods[(1,)](x, y, 16)
    return y, 2 * x + x.sqrt() + x.rsqrt() + x.sin() + x.cos() + x.floor() + x.ceil() + x.erf()


def no_warnings():
    """Overflow and -inf - (-inf) are arithmetic, not news: a GPU does not warn."""
    x = torch.full((N,), -float("inf"), dtype=torch.float32)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run("subtract", x, x, out=torch.float16)
    return torch.tensor([len(caught)]), torch.tensor([0])


def patched_once():
    """Not a matter of right and wrong, but of time: a call of tl.max must not patch the language once more."""
    import triton.runtime.interpreter as ti

    counted, original = [], ti._patch_lang_tensor

    def counting(*arguments):
        counted.append(1)
        return original(*arguments)

    ti._patch_lang_tensor = counting
    try:
        run("absolute", X, out=BF16)
        once = len(counted)
        run(reductions, X, out=BF16)
    finally:
        ti._patch_lang_tensor = original
    return torch.tensor([len(counted) - once]), torch.tensor([once])


def described_once():
    """Time again: tiles of one shape share its description."""
    shapes = [tl.core.tensor(None, tl.block_type(dtype, [16, 32])).shape for dtype in (tl.float32, tl.int1)]
    assert [n.value for n in shapes[0]] == [16, 32], "a shape has its numbers"
    return torch.tensor([shapes[0] is shapes[1]]), torch.tensor([True])


# ---- the cases: what a kernel gives, and what is right ---------------------------------------------------------------
TIES = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1.00390625 + 1e-4, -1.7, 3.4e38, 1e-40, float("inf"), -float("inf")] * 8)
NANS = torch.full((N,), float("nan"))
NANS[1::2] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # a NaN that rounding up would overflow
HOLES = X.float()
HOLES[::3] = float("nan")
# Of a float32 dot, which is TF32 by default, each operand keeps 10 bits of mantissa.
A_TF32, B_TF32 = ((m.view(torch.int32) & torch.tensor(-(2**13), dtype=torch.int32)).view(torch.float32) for m in (A, B))


def converted(x, out):
    return lambda: (run("convert", x, out=out), x.to(out))


def of_one(kernel, want, *, first=N):
    return lambda: (run(kernel, X, out=BF16)[:first], want)


def of_two(kernel, want, *, out=BF16, x=X, y=Y):
    return lambda: (run(kernel, x, y, out=out), want)


def product(kernel, a, b, *operands):
    a_, b_ = (m.double() for m in operands or (a, b))
    return lambda: (run(kernel, a, b, out=torch.float32, size=N * N), (a_ @ b_.T).float().flatten())


CASES = {
    "f32_to_bf16": converted(TIES, BF16),
    "nan_to_bf16": converted(NANS, BF16),
    "bf16_to_f32": converted(X, torch.float32),
    "int_to_bf16": converted(torch.arange(-32, 32, dtype=torch.int32) * 77, BF16),
    # Triton divides bfloat16 in float32, and so subtracts in float32.
    "arithmetic": of_two("arithmetic", ((X * 2 + Y).float() - X.float() / Y.float()).to(BF16)),
    "fma": of_two("fused", (X.float() * Y.float() + 0.5).to(BF16)),
    "comparison": of_two("less", (X < Y).int(), out=torch.int32),
    "maximum": of_two("greater", torch.maximum(X, Y)),
    "minimum_of_nan": of_two("lesser", torch.fmin(HOLES, Y.float()), out=torch.float32, x=HOLES, y=Y.float()),
    "maximum_of_nan": of_two("greater", torch.fmax(HOLES, Y.float()), out=torch.float32, x=HOLES, y=Y.float()),
    "clamp": of_one("clamp", X.clamp(-0.5, 0.75)),
    "where": of_two("choose", torch.where(torch.arange(N) < 20, X, -Y)),
    "abs": of_one("absolute", X.abs()),
    "exp2_log2": of_one("exponentials", (torch.exp2(X.float()) + torch.log2(X.float().abs())).to(BF16)),
    "reductions": of_one(reductions, torch.stack([X.max(), X.min(), X.float().sum().to(BF16)]), first=3),
    "own_reduction": of_one(own_reduction, X.max()[None], first=1),
    "dot": product(dot, A.to(BF16), B.to(BF16)),
    "dot_f16": product(dot, A.half(), B.half()),
    "dot_tf32": product(dot, A, B, A_TF32, B_TF32),
    "atomic_add": atomic_add,
    "range_over_an_argument": range_over_an_argument,
    "maths_by_methods": maths_by_methods,
    "no_warnings": no_warnings,
    "patched_once": patched_once,
    "described_once": described_once,
}


def answer(case) -> list:
    """Exact in 16 bit and integers, to a few float32 roundings otherwise; NaN equals NaN."""
    try:
        got, want = case()
        near = 1e-5 if got.dtype == torch.float32 else 0.0
        torch.testing.assert_close(got, want, rtol=near, atol=near, equal_nan=True)
    except Exception as error:
        return [False, f"{type(error).__name__}: {error}"]
    return [True, None]


if __name__ == "__main__":
    print(json.dumps({name: answer(case) for name, case in CASES.items()}))
