"""Checks of phase 1: naive attention and the two walls.

The counting exercises know what the usual slips would have given. The kernels are run on the checker's cases, and
then handed to the real compiler: the interpreter accepts more than a GPU does.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import fused_cost, naive_cost, trace_ops
from flashlab.check import CheckFailed, expect, verify_one_head
from flashlab.check.lookup import Row
from flashlab.exercises.kernel_rule import KernelRule, apart, empty, kernel_rule, made
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import RULES, rule
from flashlab.exercises.tensor_rule import copied, normal, tensor_rule
from flashlab.exercises.triton_answers import calls, compiles, explain_undefined, in_bounds, kernel_of
from flashlab.triton_tools.watch import watched

# ---- 1.1 ------------------------------------------------------------------------------------------------------------


@rule(
    "1.1",
    title="Five lines, counted", minutes=10, difficulty="Warm-up",
    hints=[
        "Line by line: what does it read, what does it write? A matrix of N × N numbers is N·N·itemsize bytes.",
        "Reads: Q and K; S; S and the mask (N × N too); S; P and V. Writes: S, S, S, P, O.",
        "FLOPs: 2·N·N·D for each product, N·N for scaling, N·N for adding the mask, 5·N·N for the softmax.",
    ],
    returns="bytes_read, bytes_written, flops",
    inputs=[(8, 4, 2), (1024, 64, 2), (4096, 128, 4), (96, 40, 8)],
    draw=lambda r: (r.randint(1, 3000), r.randint(1, 300), r.choice((1, 2, 4, 8))),
    units={
        "bytes_read": {"matrices of N × N": "N * N * itemsize", "of N × D": "N * D * itemsize"},
        "bytes_written": {"matrices of N × N": "N * N * itemsize", "of N × D": "N * D * itemsize"},
        "flops": {"times N·N·D": "N * N * D", "times N·N": "N * N"},
    },
    hint={
        "bytes_read": "go through the five lines, and note for each which matrices it reads",
        "bytes_written": "go through the five lines, and note for each which matrix it writes",
        "flops": "there are two products, and a multiply-add is two operations; a score is scaled, has the mask added, "
        "and takes 5 in the softmax",
    },
    also=["((5 * N * N + 3 * N * D) * itemsize, (4 * N * N + N * D) * itemsize, 4 * N * N * D + 7 * N * N)"],
)  # fmt: skip
def count(N, D, itemsize):
    """Return (bytes_read, bytes_written, flops)."""
    # BEGIN SOLUTION
    matrix, tall = N * N * itemsize, N * D * itemsize
    bytes_read = 2 * tall + matrix + 2 * matrix + matrix + (matrix + tall)
    bytes_written = 4 * matrix + tall
    flops = 2 * N * N * D + N * N + N * N + 5 * N * N + 2 * N * N * D
    return bytes_read, bytes_written, flops
    # END SOLUTION


# ---- 1.2 ------------------------------------------------------------------------------------------------------------

_GPUS = tuple(runtime.GPUS[name] for name in ("H200", "A100", "RTX 4090", "RTX 5060 Ti"))


@rule(
    "1.2",
    title="The roofline as a time", minutes=10, difficulty="Warm-up",
    hints=[
        "Two clocks run side by side: one for the arithmetic, one for the memory. The work ends when the "
        "slower one does.",
        "Arithmetic takes flops / (tflops · 10¹²) seconds, memory takes bytes_moved / (gb_s · 10⁹).",
        'The larger of the two is the time; its name, "compute" or "memory", is the bound.',
    ],
    returns="seconds, bound",
    inputs=[
        (cost.flops, cost.bytes, gpu)
        for gpu in _GPUS for cost in (naive_cost(4096, 128), fused_cost(4096, 128), fused_cost(64, 64))
    ],
    draw=lambda r: (lambda moved: (moved * 10 ** r.uniform(1.3, 2.8), moved, r.choice(_GPUS)))(10 ** r.uniform(6, 11)),
    words={"compute": "the time of arithmetic", "memory": "the time of memory"},
    notes={
        "1e12": "TFLOP/s are 10¹² operations per second", "1e9": "GB/s are 10⁹ bytes per second, powers of ten",
        "bytes_moved": "memory_gb_s counts bytes, of 8 bits",
        "memory > compute": "the bound is the one that takes longer",
        "max(compute, memory)": "both work at the same time, and the slower one is the bound",
    },
    rows=[
        Row("compute-only", "only the time of arithmetic counts: memory can be the slower one",
            [("max(compute, memory)", "compute"), ("memory > compute", "False")]),
        Row("memory-only", "only the time of memory counts: arithmetic can be the slower one",
            [("max(compute, memory)", "memory"), ("memory > compute", "True")]),
    ],
)  # fmt: skip
def least_time(flops, bytes_moved, gpu):
    """Return (seconds, bound)."""
    # BEGIN SOLUTION
    compute = flops / (gpu.fp16_tflops * 1e12)
    memory = bytes_moved / (gpu.memory_gb_s * 1e9)
    return max(compute, memory), "memory" if memory > compute else "compute"
    # END SOLUTION


# ---- 1.3 ------------------------------------------------------------------------------------------------------------


def _expect_one_matrix(frugal_attention: Callable[..., torch.Tensor]) -> None:
    """No second N x N tensor; few columns, so that what has N rows weighs little."""
    ops = trace_ops(frugal_attention, *(copied(x, True) for x in _three(random.Random(13), 512, 16)))
    matrices = [(op.live_bytes / (512 * 512 * 4), op.name) for op in ops]
    held, name = next((x for x in matrices if x[0] >= 1.3), (0.0, ""))
    said = f"right, but `{name}` makes another matrix of N × N, and then {held:.2f} are held; one is enough"
    expect(not held, said, diagnosis="second-matrix-alive", case="N=512, D=16")


def _three(r: random.Random, n: int, d: int, size: float = 1.0) -> tuple[torch.Tensor, ...]:
    q, k, v = (normal(r, n, d, dtype=torch.float32) for _ in range(3))
    return q * size, k, v


def _two_heights() -> tuple[torch.Tensor, ...]:
    """Rows whose scores are 400 apart: against one maximum for all, every exponential of the lower row is 0."""
    q, k = torch.ones(2, 16), torch.full((2, 16), 50.0)
    q[1], k[1] = -1.0, 49.5
    return q, k, torch.arange(32.0).view(2, 16)


_ROW_MAXIMUM = "each row has its own maximum: take it along the keys, and keep the axis"

_ROWS_SUM = "each row's weights sum to 1: take the sum along the keys, and keep the axis"


@tensor_rule(
    "1.3",
    title="One matrix instead of two", minutes=15,
    hints=[
        "The scores have to exist once: N × N. Which lines of naive_attention make a second matrix of that size?",
        "Scaling: scale q instead, it is small, or scale in place with `scores.mul_(scale)`. The softmax: its three "
        "steps, shift, exp and divide, can each be done in place.",
        "`scores -= scores.amax(dim=-1, keepdim=True)`, `scores.exp_()`, `scores /= scores.sum(dim=-1, "
        "keepdim=True)`. The statistics have one number a row.",
    ],
    returns="o",
    inputs={
        "N=7, D=16": _three(random.Random(1), 7, 16), "N=16, D=16": _three(random.Random(2), 16, 16),
        "N=64, D=64, large scores": _three(random.Random(3), 64, 64, 40.0),
        "two rows, near +200 and -200": _two_heights(),
    },
    draw=lambda r: _three(r, r.randint(1, 40), r.choice((8, 16, 32, 64))),
    also=[
        "torch.softmax(q @ k.T / math.sqrt(q.shape[-1]), dim=-1) @ v",
        "(lambda p: p @ v / p.sum(-1, keepdim=True))((lambda s: torch.exp(s - s.amax(-1, keepdim=True)))(q @ k.T / "
        "math.sqrt(q.shape[-1])))",
    ],
    nan={"": "not finite where the scores are large: subtract the row's maximum before the exp, of scaled scores"},
    notes={
        "math.sqrt(q.shape[-1])": "the scores are scaled by 1 / sqrt(D), once", "math.sqrt": "it is 1 / sqrt(D)",
        "scores -= scores.amax(dim=-1, keepdim=True)": _ROW_MAXIMUM, "scores.amax": _ROW_MAXIMUM,
        "scores /= scores.sum(dim=-1, keepdim=True)": _ROWS_SUM, "scores.sum": _ROWS_SUM,
        "dtype": "is something in 16 bits? The matrix has to stay in float32",
    },
    rows=[
        Row("scale-hard-coded", "the scores are always scaled by 1/8, which is right for D = 64 only",
            [("math.sqrt(q.shape[-1])", "8")]),
        Row("scale-of-n", "the scores are scaled by 1 / sqrt(N); it is 1 / sqrt(D)",
            [("math.sqrt(q.shape[-1])", "math.sqrt(len(q))")]),
        Row("base-2", "2 is raised to the scores: the exponential is e^x", [("scores.exp_()", "scores.exp2_()")]),
        Row("scale-after-softmax", "1 / sqrt(D) is a factor of o; it scales the scores, before the softmax",
            instead="torch.softmax(q @ k.T, dim=-1) @ v / math.sqrt(q.shape[-1])"),
    ],
    on_device=True,
    tol=3e-4,
    then=_expect_one_matrix,
)  # fmt: skip
def frugal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v: [N, D] float32. Returns o [N, D]; no two tensors of N × N numbers are alive at a time."""
    # BEGIN SOLUTION
    scores = (q / math.sqrt(q.shape[-1])) @ k.T
    scores -= scores.amax(dim=-1, keepdim=True)
    scores.exp_()
    scores /= scores.sum(dim=-1, keepdim=True)
    return scores @ v
    # END SOLUTION


# ---- 1.4 ------------------------------------------------------------------------------------------------------------


BLOCK_M = 64


def _one_head(kernel: Any, **tiles: Callable[[int], int]) -> Callable[..., Any]:
    """fn(q, k, v, *, scale) around a kernel of the learner's; `tiles` give its constexpr arguments from N.

    As `schemes.launch`, but with every address watched, and an output that shows what was never written.
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> Any:
        constants = {name: tile(len(k)) for name, tile in tiles.items()}
        o = q.new_empty(q.shape) if q.is_contiguous() else q.new_empty(q.shape[::-1]).T
        lse = q.new_empty(len(q), dtype=torch.float32)
        strides = (*q.stride(), *k.stride(), *v.stride(), *o.stride())
        scale = q.shape[1] ** -0.5 if scale is None else scale
        case = f"M={len(q)}, N={len(k)}, BLOCK_M={BLOCK_M}, " + ", ".join(f"{n}={x}" for n, x in constants.items())
        with in_bounds(case, q=q, k=k, v=v, o=o, lse=lse) as traffic:
            kernel[(-(-len(q) // BLOCK_M),)](
                q, k, v, o, lse, *strides, len(q), len(k), scale,
                HEAD_DIM=q.shape[1], BLOCK_M=BLOCK_M, **constants, num_warps=4, num_stages=1,
            )  # fmt: skip
        explain_undefined(traffic, o, case)
        return o, lse

    return run


def _explain_padding(run: Callable[..., Any]) -> None:
    """Raise CheckFailed if `run` gives what it would with the zeros that pad K and V taken for keys."""
    generator = torch.Generator().manual_seed(14)
    q, k, v = (torch.randn(n, 64, generator=generator).half().to(runtime.device()) for n in (20, 100, 100))
    got, _ = run(q, k, v)
    padded = [torch.cat([x, x.new_zeros(28, 64)]) for x in (k, v)]
    right, wrong = (reference.attention(*(x[None, None] for x in (q, *kv)))[0][0, 0] for kv in ((k, v), padded))
    if (got - wrong).abs().max() < (got - right).abs().max() / 8:
        said = "right for N = 128, wrong for N = 100: the padded keys, zeros that were never in K, still get a weight "
        said += "in the softmax"
        raise CheckFailed(said, diagnosis="tail-not-masked", case="N = 100 in a tile of 128")


def _verify_padded(kernel: Any, **options: Any) -> Any:
    """verify_one_head of a scheme A kernel; where it fails, first ask whether the padding is why."""
    run = _one_head(kernel, BLOCK_N=schemes.padded)
    try:
        return verify_one_head(run, max_seq=150, max_tile=128, **options)
    except CheckFailed as failed:
        if failed.diagnosis != "not-solved-yet":
            _explain_padding(run)
        raise


def of_one_head(
    r: random.Random, M: int, N: int, HEAD_DIM: int, BLOCK_M: int, BLOCK_N: int, large: float
) -> tuple[Any, ...]:
    """A kernel's arguments; behind each row, or column, is room: a stride taken for another shows.

    large: makes scores that overflow without their maximum; below 0, all of one sign.
    """
    by_columns = r.random() < 0.5
    q, k, v = (
        apart(normal(r, HEAD_DIM, n, dtype=torch.float16), gap).T if by_columns else
        apart(normal(r, n, HEAD_DIM, dtype=torch.float16), gap) for n, gap in ((M, 8), (N, 16), (N, 24))
    )  # fmt: skip
    if large < 0:
        q.abs_(), k.abs_()
    q *= large
    o = empty(M, HEAD_DIM, gap=4)
    strides = (step for x in (q, k, v, o) for step in x.stride())
    return q, k, v, o, empty(M), *strides, M, N, 0.3, HEAD_DIM, BLOCK_M, BLOCK_N


def mended_to(
    kernel: Any, sizes: Sequence[tuple[float, ...]], draw: Callable[[random.Random], tuple[float, ...]],
    given: Callable[..., tuple[Any, ...]] = of_one_head, writes: str = "o_ptr, lse_ptr", **data: Any,
) -> KernelRule:  # fmt: skip
    """What a learner's kernel of one head is mended to. sizes, draw: M, N, HEAD_DIM, BLOCK_M, BLOCK_N, large."""
    return made(
        kernel.fn, ("o", "lse"), writes=writes, programs=lambda M, BLOCK_M, **_: -(-M // BLOCK_M),
        inputs={str(x): given(random.Random(i), *x) for i, x in enumerate(sizes)},
        draw=lambda r: given(r, *draw(r)), tol=5e-3, **data,
    )  # fmt: skip


SIZES = ((5, 7, 16, 16, 4, 1.0), (20, 16, 16, 16, 8, 1.0), (9, 9, 8, 4, 4, 60.0), (9, 9, 8, 4, 4, -60.0))


def some_sizes(r: random.Random) -> tuple[float, ...]:
    sides = (r.choice(x) for x in ((8, 16), (4, 8), (4, 8), (1.0, 60.0, -60.0)))
    return r.randint(1, 20), r.randint(1, 20), *sides


_SCHEME_A = mended_to(
    schemes.scheme_a_kernel, [(*x, schemes.padded(x[1]), large) for x, large in (
        ((5, 7, 16, 16), 1.0), ((20, 16, 16, 16), 1.0), ((9, 9, 8, 4), 60.0), ((9, 9, 8, 4), -60.0))],
    lambda r: (r.randint(1, 20), (n := r.randint(1, 16)), r.choice((8, 16)), r.choice((4, 8)), schemes.padded(n), 1.0),
)  # fmt: skip


@exercise(
    "1.4",
    title="Scheme A",
    minutes=30,
    hints=[
        "Three tiles: q [BLOCK_M, HEAD_DIM], k [HEAD_DIM, BLOCK_N] (axes swapped while loading), v [BLOCK_N, "
        "HEAD_DIM]. Every load and store has a mask: rows past M, keys past N.",
        "A masked-off key is loaded as zeros and its score is 0, which is a score like any other: "
        "`tl.where(offs_n[None, "
        ':] < N, s, float("-inf"))` before the maximum.',
        "`s = tl.dot(q, k) * scale`, then m_i, p, l_i along axis 1, and `o = tl.dot(p.to(v.dtype), v) / l_i[:, None]`.",
        "lse is `m_i + tl.log(l_i)`, stored at `lse_ptr + offs_m` with `mask=offs_m < M`; o is cast with "
        "`o.to(o_ptr.dtype.element_ty)`.",
    ],
)
def scheme_a(scheme_a_kernel: Any) -> str:
    kernel = kernel_of(scheme_a_kernel)
    with _SCHEME_A.mending(kernel):
        report = _verify_padded(kernel, dtypes=(torch.float16, torch.bfloat16), head_dims=(64, 32))
    compiles(kernel, schemes.kernel_arguments(64, 64, BLOCK_N=64), num_stages=1)
    return f"{report.verdict}; compiled for sm_90"


# ---- 1.5 ------------------------------------------------------------------------------------------------------------

_LIMITS = tuple(runtime.limits(target).shared_per_block for target in ("sm_80", "sm_89", "sm_90"))


def _tiles(r: random.Random) -> tuple[int, int, int, int]:
    """limit, HEAD_DIM, BLOCK_M, itemsize: any limit, or one near what tiles of a power of two need."""
    d, m, e = r.choice((16, 32, 64, 128, 256)), r.choice((16, 32, 64, 128)), r.choice((1, 2, 4))
    rows = m + 2 * 2 ** r.randint(3, 9)
    near = rows * d * e + r.choice((0, r.randint(-d * e, d * e), r.randint(-rows * e, rows * e)))
    return r.choice((near, near, r.randint(1, 230) * 1024)), d, m, e


_PADDED = "N is padded to a power of two before it meets shared memory: the answer is one above such a power, or 1"
_POWER = "that is the first power of two that fails: lengths below it are padded to it and fail too"


def _tiles_of(answer: Callable[..., Any]) -> tuple[str, str] | None:
    """What the tiles take at the first length that an answer, or the right one, says fails."""
    it = RULES["1.5"]
    for limit, head_dim, block_m, itemsize in it.tried:
        mine, want = (fn(limit, head_dim, block_m, itemsize) for fn in (answer, it.fn))
        if mine != want and mine >= 1:
            n = min(mine, want)
            block_n = max(16, 1 << (n - 1).bit_length())
            size = (block_m + 2 * block_n) * head_dim * itemsize
            said = f"a length of {n} is padded to {block_n}, and the three tiles take {size} bytes: that "
            said += f"fits into {limit}" if mine < want else f"does not fit into {limit}"
            return "wrong-length", f"with HEAD_DIM={head_dim}, BLOCK_M={block_m}, itemsize={itemsize} {said}"
    return None


@rule(
    "1.5",
    title="The first length that fails", minutes=10,
    hints=[
        "Three tiles at once: q, k and v. How many bytes is each, for a tile of BLOCK_N keys?",
        "BLOCK_N is a power of two, at least 16. Find the largest one that fits: (BLOCK_M + "
        "2·BLOCK_N)·D·itemsize <= limit.",
        "Every N up to that BLOCK_N is padded to it or to less, and runs. The next N is padded to twice as much.",
    ],
    returns="the first failing N",
    inputs=[
        *((limit, *sizes) for limit in _LIMITS
          for sizes in ((128, 16, 4), (128, 64, 2), (64, 64, 2), (32, 128, 2))),
        (48 * 1024, 256, 64, 4),  # nothing fits here
        ((64 + 2 * 20) * 128 * 2, 128, 64, 2),  # 16 keys fit, 32 do not
        ((64 + 2 * 128) * 128 * 2, 128, 64, 2),  # the tiles of 128 keys fit to the byte
        ((64 + 2 * 128) * 128 * 2 + 100, 128, 64, 2),  # they fit, with a little to spare
        ((64 + 2 * 128) * 128 * 2 - 1, 128, 64, 2),  # one byte is missing
        ((64 + 2 * 128) * 128 * 2 + 300, 128, 64, 2),  # a row more would fit, two numbers for each row of Q would not
        ((64 + 2 * 10) * 128 * 2, 128, 64, 2),  # 8 keys would fit, but a tile has 16 at least
    ],
    symptom=_tiles_of,
    draw=_tiles,
    words={"block_n": "BLOCK_N", "runs_up_to": "the longest N that runs"},
    notes={
        "2": "K and V are two tiles, there at once", "BLOCK_M": "the tile of Q has BLOCK_M rows",
        "itemsize": "an element has itemsize bytes", "limit": "tiles that need just the limit fit",
        "16": "a tile has at least 16 keys, however short N is", "HEAD_DIM": "a row has HEAD_DIM elements",
    },
    rows=[
        Row("padding-forgotten", _PADDED, instead="max(0, (limit // (HEAD_DIM * itemsize) - BLOCK_M) // 2) + 1"),
        Row("padding-forgotten", _PADDED, instead="(limit // (HEAD_DIM * itemsize) - BLOCK_M) // 2 + 1"),
        Row("first-power-not-first-length", _POWER, [("return runs_up_to + 1", "return block_n")]),
        Row("first-power-not-first-length", _POWER, [("return runs_up_to + 1", "return 2 * runs_up_to or 1")]),
        Row("nothing-fits", "where not even the smallest tile fits, every length fails, and the first is 1",
            [("return runs_up_to + 1", "return max(16, runs_up_to) + 1")]),
        Row("scores-counted", "a tile of scores is counted: only Q, K and V are kept there",
            [("itemsize <= limit", "itemsize + BLOCK_M * block_n * itemsize <= limit")]),
    ],
)  # fmt: skip
def first_failing(limit, HEAD_DIM, BLOCK_M, itemsize):
    """Return the smallest N >= 1 whose tiles need more than `limit` bytes of shared memory."""
    # BEGIN SOLUTION
    block_n, runs_up_to = 16, 0
    while (BLOCK_M + 2 * block_n) * HEAD_DIM * itemsize <= limit:
        runs_up_to = block_n
        block_n *= 2
    return runs_up_to + 1
    # END SOLUTION


# ---- 1.6 ------------------------------------------------------------------------------------------------------------


FORBIDDEN = {"gather", "sum", "max", "min", "reduce", "dot", "associative_scan", "cumsum", "sort", "histogram"}
_HALVES = "tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1))"
_QUARTERS = "tl.permute(tl.reshape(half, [ROWS, 2, COLUMNS // 4]), (0, 2, 1))"
_EVEN = "reshaping to [.., COLUMNS // 2, 2] separates even from odd columns; the axis of length 2 has to come first"


def _expect_one_load(kernel: Any) -> None:
    """CheckFailed where the quarter is not cut out of one load, by reshape, permute and split."""
    called = calls(kernel)
    for name in sorted(FORBIDDEN & set(called)):
        said = f"tl.{name} is not allowed here: use reshape, permute and split"
        raise CheckFailed(said, diagnosis=f"{name}-used")
    sentence = "no tl.split is called: load the whole of x, and cut the quarter out of it"
    expect("split" in called, sentence, diagnosis="not-cut")
    sentence = f"the kernel calls tl.load {called.count('load')} times; it should load x once, and cut what it loaded"
    expect(called.count("load") == 1, sentence, diagnosis="loaded-again")


def _quarter(rows: int, columns: int, j: int) -> tuple[Any, ...]:
    x = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
    return x, empty(rows, columns // 4), rows, columns, j


@kernel_rule(
    "1.6",
    title="A slice without a slice", minutes=20,
    hints=[
        "`tl.split` cuts a tensor whose last axis has length 2 into two without that axis. So make such an axis: which "
        "reshape puts the left half at index 0 and the right half at index 1 of a new axis?",
        "`tl.reshape(x, [ROWS, 2, COLUMNS // 2])` has the halves on axis 1; `tl.permute(..., (0, 2, 1))` brings that "
        "axis to the end. Reshaping to [ROWS, COLUMNS // 2, 2] directly would separate even from odd columns.",
        "Split once: left and right half. J >= 2 lies in the right half. Split that half again: J % 2 says which part. "
        "J is a constant, so `if` on it is decided by the compiler.",
    ],
    writes="y_ptr",
    returns="y",
    inputs={
        f"x [{rows}, {columns}], J={j}": _quarter(rows, columns, j)
        for rows, columns in ((16, 64), (32, 16)) for j in range(4)
    },
    draw=lambda r: _quarter(r.choice((4, 16)), r.choice((8, 16)), r.randrange(4)),
    notes={"J < 2": "J // 2 says which half", "J % 2 == 0": "J % 2 says which part of the half", "tl.permute": _EVEN},
    rows=[
        Row("interleaved-columns", f"y holds columns that are not neighbours in x: {_EVEN}", [
            (_HALVES, "tl.reshape(x, [ROWS, COLUMNS // 2, 2])"),
            (_QUARTERS, "tl.reshape(half, [ROWS, COLUMNS // 4, 2])")]),
        Row("interleaved-columns", f"y holds columns that are not neighbours in x, in the first cut: {_EVEN}", [
            (_HALVES, "tl.reshape(x, [ROWS, COLUMNS // 2, 2])")]),
        Row("interleaved-columns", f"y holds columns that are not neighbours in x, in the second cut: {_EVEN}", [
            (_QUARTERS, "tl.reshape(half, [ROWS, COLUMNS // 4, 2])")]),
        Row("halves-mixed", "J // 2 says which half, and J % 2 which half of that: the two are mixed up", [
            ("if J < 2", "if J % 2 == 0"), ("if J % 2 == 0:\n        quarter", "if J < 2:\n        quarter")]),
        Row("rows-cut", "y holds rows of x, cut in two: in the reshape ROWS comes first, so that the new axis cuts the "
            "columns", [("tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1))",
                         "tl.permute(tl.reshape(x, [2, ROWS, COLUMNS // 2]), (1, 2, 0))")]),
    ],
    then=_expect_one_load,
)  # fmt: skip
@triton.jit
def quarter_kernel(x_ptr, y_ptr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, J: tl.constexpr):
    """y [ROWS, COLUMNS // 4] = x[:, J * COLUMNS // 4 : (J + 1) * COLUMNS // 4], both contiguous."""
    rows = tl.arange(0, ROWS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])
    # BEGIN SOLUTION
    left, right = tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), (0, 2, 1)))
    if J < 2:
        half = left
    else:
        half = right
    first, second = tl.split(tl.permute(tl.reshape(half, [ROWS, 2, COLUMNS // 4]), (0, 2, 1)))
    if J % 2 == 0:
        quarter = first
    else:
        quarter = second
    # END SOLUTION
    tl.store(y_ptr + rows[:, None] * (COLUMNS // 4) + tl.arange(0, COLUMNS // 4)[None, :], quarter)


# ---- 1.7 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.7",
    title="Right at 128, wrong at 100",
    minutes=15,
    difficulty="Bug hunt",
    bug=[
        ("offs_n[None, :] < N, 0.0", "offs_m[:, None] < M, 0.0"),
        ("axis=1)\n    p = ", 'axis=1)\n    m_i = tl.where(m_i == float("-inf"), 0.0, m_i)\n    p = '),
        ("/ l_i[:, None]", "/ tl.where(l_i == 0.0, 1.0, l_i)[:, None]"),
    ],
    untouched="334f72b92670",
    history="a common mistake; a masked load looks like a mask",
    hints=[
        "It is right whenever N is a power of two. What is different about the tile when N is not?",
        "Print `o` of a row for N = 100 with V all ones: every weight is positive and they should sum to 1. What do "
        "they sum to? Who has the rest?",
        "s is [BLOCK_M, BLOCK_N]: its columns are keys. Which of the two offsets counts keys, and which "
        "limit goes with it?",
    ],
)
def masked(masked_kernel: Any) -> str:
    kernel = kernel_of(masked_kernel)
    with _SCHEME_A.mending(kernel, hunt=True):
        report = _verify_padded(kernel, head_dims=(64, 32))
    return f"found: {report.verdict}"


# ---- 1.8 ------------------------------------------------------------------------------------------------------------


def _expect_two_passes(run: Callable[..., Any]) -> None:
    """K is read twice, V once; and no more than that."""
    if not runtime.INTERPRETED:
        return
    q, k, v = (torch.randn(64, 64, generator=torch.Generator().manual_seed(18)).half() for _ in range(3))
    with watched(q=q, k=k, v=v) as traffic:
        run(q, k, v)
    passes = traffic.read_from["k"] / (64 * 64 * 2)
    said = f"right, but K is read {passes:g} times: this is one pass that corrects o, phase 3's kernel; here the "
    said += "first pass finds m and l of the whole row, so that the second never has to rescale o"
    expect(passes >= 2, said, diagnosis="one-pass", case="M=N=64, BLOCK_N=32")


_TWO_PASSES = mended_to(schemes.two_pass_kernel, SIZES, some_sizes)


@exercise(
    "1.8",
    title="Both walls, in two passes",
    minutes=40,
    difficulty="Stretch",
    hints=[
        "Pass 1 is phase 0's online normaliser: for each block of K, a tile of scores, then m_i and l_i. "
        'Nothing else is kept. Before the loop, m_i is `tl.full([BLOCK_M], float("-inf"), tl.float32)`, l_i is '
        "`tl.zeros([BLOCK_M], tl.float32)`.",
        "In pass 1: m_new = tl.maximum(m_i, row maximum of s); "
        "l_i = l_i · exp(m_i - m_new) + row sum of exp(s - m_new).",
        "In pass 2 compute s again, from the same q and the same block of K. Now m_i and l_i are those of the whole "
        "row, so p = exp(s - m_i) / l_i is final: acc = tl.dot(p.to(v.dtype), v, acc). No rescaling.",
        "Both loops: `for start in range(0, N, BLOCK_N)`, rows = start + offs_n, every load masked with rows < N and "
        "the scores of rows >= N set to -inf.",
    ],
)
def two_passes(two_pass_kernel: Any) -> str:
    kernel = kernel_of(two_pass_kernel)
    run = _one_head(kernel, BLOCK_N=lambda n: 32)
    with _TWO_PASSES.mending(kernel):
        report = verify_one_head(run, head_dims=(64, 32), max_tile=128)
    _expect_two_passes(run)
    compiled = compiles(kernel, schemes.kernel_arguments(4096, 64, BLOCK_N=64), target="sm_120", num_stages=1)
    said = f"right, but it needs {compiled.shared_bytes} bytes of shared memory for tiles of 64 keys: hold one block "
    said += "of K and one of V at a time"
    expect((compiled.shared_bytes or 0) <= 4 * 64 * 64 * 2, said, diagnosis="shared-memory-grows")
    return f"{report.verdict}; {compiled.shared_bytes} bytes of shared memory for every N"
