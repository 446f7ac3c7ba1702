"""Checks of phase 1: naive attention and the two walls.

The counting exercises know what the usual slips would have given. The kernels are run on the checker's cases, and
then handed to the real compiler: the interpreter accepts more than a GPU does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import fused_cost, naive_cost, naive_peak_bytes, trace_ops
from flashlab.check import CheckFailed, expect, expect_close, running, verify_one_head
from flashlab.exercises.registry import exercise
from flashlab.exercises.triton_answers import compiles, explain_undefined, in_bounds, kernel_of

# ---- 1.1 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.1",
    title="Five lines, counted",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Line by line: what does it read, what does it write? A matrix of N × N numbers is N·N·itemsize bytes.",
        "Reads: Q and K; S; S and the mask (N × N too); S; P and V. Writes: S, S, S, P, O.",
        "FLOPs: 2·N·N·D for each product, N·N for scaling, N·N for adding the mask, 5·N·N for the softmax.",
    ],
)
def _(count: Callable[[int, int, int], tuple[int, int, int]]) -> str:
    for n, d, e in ((8, 4, 2), (1024, 64, 2), (4096, 128, 4)):
        case = f"N={n}, D={d}, itemsize={e}"
        with running(case):
            got = count(n, d, e)
        expect(
            isinstance(got, tuple | list) and len(got) == 3,
            "return three numbers: bytes_read, bytes_written, flops",
            diagnosis="wrong-type",
            case=case,
        )
        s, x = n * n, n * d
        read, written, flops = (5 * s + 3 * x) * e, (4 * s + x) * e, 4 * s * d + 7 * s
        expect_close(
            got[0],
            read,
            what="bytes_read",
            case=case,
            tol=0.5,
            mistakes={
                "elements-not-bytes": (read / e, "bytes_read counts elements: each has itemsize bytes"),
                "mask-not-read": (
                    (4 * s + 3 * x) * e,
                    "bytes_read lacks one N × N matrix: adding the mask reads the scores and the mask",
                ),
                "mask-read-only": (
                    (4 * s + 3 * x) * e - x * e,
                    "bytes_read lacks an N × N matrix and one of Q, K and V",
                ),
                "v-not-read": (
                    (5 * s + 2 * x) * e,
                    "bytes_read lacks N·D numbers: the first product reads Q and K, the last V",
                ),
            },
        )
        expect_close(
            got[1],
            written,
            what="bytes_written",
            case=case,
            tol=0.5,
            mistakes={
                "elements-not-bytes": (written / e, "bytes_written counts elements: each has itemsize bytes"),
                "o-not-written": (4 * s * e, "bytes_written lacks the output, N·D numbers"),
                "line-not-written": (
                    (3 * s + x) * e,
                    "bytes_written lacks a matrix: four of the five lines write N × N numbers",
                ),
            },
        )
        expect_close(
            got[2],
            flops,
            what="flops",
            case=case,
            tol=0.5,
            mistakes={
                "multiply-add-is-two": (
                    2 * s * d + 7 * s,
                    "flops: a multiply-add is two operations, 2·N·N·D a product",
                ),
                "only-matmuls": (4 * s * d, "flops has the two products only: scaling, mask and softmax add 7·N·N"),
                "mask-not-added": (4 * s * d + 6 * s, "flops lacks N·N additions: those of the mask"),
            },
        )
    return "reads, writes and FLOPs right at three sizes"


_UNITS = "a factor of 1000: TFLOP/s are 10¹² operations, GB/s 10⁹ bytes a second"


# ---- 1.2 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.2",
    title="The roofline as a time",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Two clocks run side by side: one for the arithmetic, one for the memory. The work ends when the "
        "slower one does.",
        "Arithmetic takes flops / (tflops · 10¹²) seconds, memory takes bytes_moved / (gb_s · 10⁹).",
        'The larger of the two is the time; its name, "compute" or "memory", is the bound.',
    ],
)
def _(least_time: Callable[[float, float, runtime.GpuLimits], tuple[float, str]]) -> str:
    costs = {
        "naive, N=4096": naive_cost(4096, 128),
        "fused, N=4096": fused_cost(4096, 128),
        "fused, N=64": fused_cost(64, 64),
    }
    for gpu in (runtime.GPUS[name] for name in ("H200", "A100", "RTX 4090", "RTX 5060 Ti")):
        for name, cost in costs.items():
            case = f"{name} on {gpu.name}"
            with running(case):
                got = least_time(cost.flops, cost.bytes, gpu)
            expect(
                isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[1], str),
                'return two things: the seconds, and "memory" or "compute"',
                diagnosis="wrong-type",
                case=case,
            )
            assert gpu.fp16_tflops is not None and gpu.memory_gb_s is not None
            compute, memory = cost.flops / (gpu.fp16_tflops * 1e12), cost.bytes / (gpu.memory_gb_s * 1e9)
            want = max(compute, memory)
            expect_close(
                got[0],
                want,
                what="the time in seconds",
                case=case,
                tol=1e-6 * want,
                mistakes={
                    "min-not-max": (
                        min(compute, memory),
                        "the time is that of the faster clock: the slower one is the bound",
                    ),
                    "sum-not-max": (
                        compute + memory,
                        "the two times are added: arithmetic and memory work at the same time",
                    ),
                    **{
                        f"units-{i}": (max(a * compute, b * memory), _UNITS)
                        for i, (a, b) in enumerate(((1e3, 1), (1, 1e3), (1e3, 1e3), (1e-3, 1), (1, 1e-3), (1e-3, 1e-3)))
                    },
                },
            )
            bound = "memory" if memory > compute else "compute"
            expect(
                got[1] == bound,
                f'the bound is "{bound}": {cost.intensity:.0f} FLOP a byte is '
                f"{'below' if bound == 'memory' else 'above'} "
                f"the ridge of {gpu.name}, {gpu.ridge:.0f}; you said {got[1]!r}",
                diagnosis="wrong-bound",
                case=case,
            )
    return "four GPUs, three costs"


# ---- 1.3 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.3",
    title="One matrix instead of two",
    minutes=15,
    difficulty="Core",
    hints=[
        "The scores have to exist once: N × N. Which lines of naive_attention make a second matrix of that size?",
        "Scaling: scale q instead, it is small, or scale in place with `scores.mul_(scale)`. The softmax: "
        "its three steps, "
        "shift, exp and divide, can each be done in place.",
        "`scores -= scores.amax(dim=-1, keepdim=True)`, `scores.exp_()`, `scores /= scores.sum(dim=-1, "
        "keepdim=True)`. "
        "The statistics have one number a row.",
    ],
)
def _(frugal_attention: Callable[..., torch.Tensor]) -> str:
    device = runtime.device()
    generator = torch.Generator().manual_seed(13)
    for n, d, size in ((7, 16, 1), (96, 32, 1), (64, 64, 40), (512, 64, 1)):
        case = f"N={n}, D={d}" + (", large scores" if size > 1 else "")
        q, k, v = (torch.randn(n, d, generator=generator).to(device) for _ in range(3))
        q = q * size
        before = [x.clone() for x in (q, k, v)]
        with running(case):
            got = frugal_attention(q, k, v)
        expect(
            all(torch.equal(x, y) for x, y in zip((q, k, v), before, strict=True)),
            "the function changed its inputs: q, k and v belong to the caller, work in place on your own tensors only",
            diagnosis="inputs-changed",
            case=case,
        )
        want, _ = reference.attention(*(x[None, None] for x in (q, k, v)))
        unscaled, _ = reference.attention(*(x[None, None] for x in (q, k, v)), scale=1.0)
        expect_close(
            got,
            want[0, 0].float(),
            what="o",
            case=case,
            tol=1e-4 if size == 1 else 1e-3,
            mistakes={"scale-missing": (unscaled[0, 0], "the scores are not scaled by 1 / sqrt(D)")},
            because="subtract the row's maximum before the exp, or large scores overflow" if size > 1 else None,
        )
    ops = trace_ops(frugal_attention, q, k, v)
    worst = max(ops, key=lambda op: op.live_bytes)
    matrices = worst.live_bytes / (512 * 512 * 4)
    expect(
        matrices < 1.3,
        f"right, but it holds {matrices:.2f} matrices of N × N when `{worst.name}` ends; one is enough",
        diagnosis="second-matrix-alive",
        case="N=512, D=64",
    )
    expect(
        max(op.bytes_written for op in ops) >= 512 * 512 * 4,
        "right and small, but the scores were never there as one matrix: this exercise is about doing the "
        "four lines in "
        "place. What you did is phase 2, well ahead of time",
        diagnosis="not-the-four-lines",
        case="N=512, D=64",
    )
    naive = naive_peak_bytes(512, 64, itemsize=4) / (512 * 512 * 4)
    return f"peak {matrices:.2f} matrices of N × N, naive_attention has {naive:.2f}"


# ---- 1.4 ------------------------------------------------------------------------------------------------------------


BLOCK_M = 64


def _one_head(kernel: Any, **tiles: Callable[[int], int]) -> Callable[..., Any]:
    """fn(q, k, v, *, scale) around a kernel of the learner's; `tiles` give its constexpr arguments from N.

    As `schemes.launch`, but with every address watched, and an output that shows what was never written.
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> Any:
        __tracebackhide__ = True
        constants = {name: tile(len(k)) for name, tile in tiles.items()}
        o, lse = torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(len(q), dtype=torch.float32)
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
    __tracebackhide__ = True
    generator = torch.Generator().manual_seed(14)
    q, k, v = (torch.randn(n, 64, generator=generator).half().to(runtime.device()) for n in (20, 100, 100))
    got, _ = run(q, k, v)
    padded = [torch.cat([x, x.new_zeros(28, 64)]) for x in (k, v)]
    right, wrong = (reference.attention(*(x[None, None] for x in (q, *kv)))[0][0, 0] for kv in ((k, v), padded))
    if (got - wrong).abs().max() < (got - right).abs().max() / 8:
        raise CheckFailed(
            "right for N = 128, wrong for N = 100: the padded keys, zeros that were never in K, still get a weight in "
            "the softmax",
            diagnosis="tail-not-masked",
            case="N = 100 in a tile of 128",
        )


def _verify_padded(kernel: Any, **options: Any) -> Any:
    """verify_one_head of a scheme A kernel; where it fails, first ask whether the padding is why."""
    __tracebackhide__ = True
    run = _one_head(kernel, BLOCK_N=schemes.padded)
    try:
        return verify_one_head(run, max_seq=150, **options)
    except CheckFailed as failed:
        if failed.diagnosis != "not-solved-yet":
            _explain_padding(run)
        raise


@exercise(
    "1.4",
    title="Scheme A",
    minutes=30,
    difficulty="Core",
    hints=[
        "Three tiles: q [BLOCK_M, HEAD_DIM], k [HEAD_DIM, BLOCK_N] (axes swapped while loading), v "
        "[BLOCK_N, HEAD_DIM]. "
        "Every load and store has a mask: rows past M, keys past N.",
        "A masked-off key is loaded as zeros and its score is 0, which is a score like any other: "
        "`tl.where(offs_n[None, "
        ':] < N, s, float("-inf"))` before the maximum.',
        "`s = tl.dot(q, k) * scale`, then m_i, p, l_i along axis 1, and `o = tl.dot(p.to(v.dtype), v) / l_i[:, None]`.",
        "lse is `m_i + tl.log(l_i)`, stored at `lse_ptr + offs_m` with `mask=offs_m < M`; o is cast with "
        "`o.to(o_ptr.dtype.element_ty)`.",
    ],
)
def _(scheme_a_kernel: Any) -> str:
    kernel = kernel_of(scheme_a_kernel)
    report = _verify_padded(kernel, dtypes=(torch.float16, torch.bfloat16))
    compiles(kernel, schemes.kernel_arguments(64, 64, BLOCK_N=64), num_stages=1)
    return f"{report.verdict}; compiled for sm_90"


# ---- 1.5 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.5",
    title="The first length that fails",
    minutes=10,
    difficulty="Core",
    hints=[
        "Three tiles at once: q, k and v. How many bytes is each, for a tile of BLOCK_N keys?",
        "BLOCK_N is a power of two, at least 16. Find the largest one that fits: (BLOCK_M + "
        "2·BLOCK_N)·D·itemsize <= limit.",
        "Every N up to that BLOCK_N is padded to it or to less, and runs. The next N is padded to twice as much.",
    ],
)
def _(first_failing: Callable[[int, int, int, int], int]) -> str:
    cases = [
        (runtime.limits(target).shared_per_block, head_dim, block_m, itemsize)
        for target in ("sm_80", "sm_89", "sm_90")
        for head_dim, block_m, itemsize in ((128, 16, 4), (128, 64, 2), (64, 64, 2), (32, 128, 2))
    ]
    cases.append((48 * 1024, 256, 64, 4))  # nothing fits here
    for limit, d, block_m, e in cases:
        case = f"limit={limit}, D={d}, BLOCK_M={block_m}, itemsize={e}"
        with running(case):
            got = first_failing(limit, d, block_m, e)

        def answer(tiles: float, block_m: int = block_m, limit: int = limit, row: int = d * e) -> int:
            """The first failing N if `tiles` tiles of BLOCK_N keys had to fit beside q's."""
            block_n = 16
            while (block_m + tiles * block_n) * row <= limit:
                block_n *= 2
            return 1 if block_n == 16 else block_n // 2 + 1

        def mistakes(
            answer: Callable[..., int] = answer, limit: int = limit, d: int = d, block_m: int = block_m, e: int = e
        ):
            power = 2 * (answer(2) - 1)
            exact = max(0, (limit // (d * e) - block_m) // 2) + 1
            return {
                "one-tile-forgotten": (answer(1), "only one of K and V is counted: both tiles are there at once"),
                "q-forgotten": (answer(2, 0), "the tile of Q is not counted: BLOCK_M rows of it are there too"),
                "elements-not-bytes": (answer(2, row=d), "elements are counted, not bytes: each has itemsize of them"),
                "padding-forgotten": (
                    exact,
                    "N is padded to a power of two before it meets shared memory: a length just above one "
                    "costs as much as the next",
                ),
                "first-power-not-first-length": (
                    power,
                    "that is the first power of two that fails; lengths below it are padded to it and fail as well",
                ),
                "last-that-runs": (answer(2) - 1, "that is the last length that runs; the next one fails"),
            }

        expect_close(got, answer(2), what="the first failing N", case=case, tol=0.5, mistakes=mistakes())
    return f"{len(cases)} combinations of limit, D, BLOCK_M and itemsize"


# ---- 1.6 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.6",
    title="A slice without a slice",
    minutes=20,
    difficulty="Core",
    hints=[
        "`tl.split` cuts a tensor whose last axis has length 2 into two without that axis. So make such an "
        "axis: which "
        "reshape puts the left half at index 0 and the right half at index 1 of a new axis?",
        "`tl.reshape(x, [ROWS, 2, COLUMNS // 2])` has the halves on axis 1; `tl.permute(..., (0, 2, 1))` "
        "brings that axis to "
        "the end. Reshaping to [ROWS, COLUMNS // 2, 2] directly would separate even from odd columns.",
        "Split once: left and right half. J >= 2 lies in the right half. Split that half again: J % 2 says "
        "which part. J is "
        "a constant, so `if` on it is decided by the compiler.",
    ],
)
def _(quarter_kernel: Any) -> str:
    kernel = kernel_of(quarter_kernel)
    device = runtime.device()
    for rows, columns in ((16, 64), (32, 16)):
        x = torch.arange(rows * columns, device=device, dtype=torch.float32).reshape(rows, columns)
        quarters = list(x.split(columns // 4, dim=1))
        for j in range(4):
            case = f"x [{rows}, {columns}], J={j}"
            y = torch.full((rows, columns // 4), math.nan, device=device)
            with in_bounds(case, x=x, y=y):
                kernel[(1,)](x, y, ROWS=rows, COLUMNS=columns, J=j)
            swapped = quarters[2 * (j % 2) + j // 2]
            even_odd = x[:, j // 2 :: 2][:, j % 2 :: 2]
            expect_close(
                y,
                quarters[j],
                what="y",
                case=case,
                mistakes={
                    "interleaved-columns": (
                        even_odd,
                        "y holds every fourth column of x: reshaping to [.., COLUMNS // 2, 2] separates "
                        "even from odd "
                        "columns; the axis of length 2 has to come first, then be permuted to the end",
                    ),
                    "halves-mixed": (
                        swapped,
                        "y holds another quarter: J // 2 says which half, J % 2 which half of that",
                    ),
                    "left-and-right-swapped": (quarters[3 - j], "y holds quarter 3 - J: left and right are swapped"),
                    "always-the-first": (quarters[0], "y holds the first quarter, whatever J is"),
                },
            )
    arguments = {"x_ptr": torch.float32, "y_ptr": torch.float32, "ROWS": 64, "COLUMNS": 256, "J": 2}
    compiles(kernel, arguments, target="sm_120", num_stages=1)
    return "all four quarters at two sizes; compiled for sm_120"


# ---- 1.7 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.7",
    title="Right at 128, wrong at 100",
    minutes=15,
    difficulty="Bug hunt",
    untouched="0798636dde1d",
    history="a common mistake; a masked load looks like a mask",
    hints=[
        "It is right whenever N is a power of two. What is different about the tile when N is not?",
        "Print `o` of a row for N = 100 with V all ones: every weight is positive and they should sum to "
        "1. What do they sum "
        "to? Who has the rest?",
        "s is [BLOCK_M, BLOCK_N]: its columns are keys. Which of the two offsets counts keys, and which "
        "limit goes with it?",
    ],
)
def _(masked_kernel: Any) -> str:
    kernel = kernel_of(masked_kernel)
    report = _verify_padded(kernel)
    return f"found: {report.verdict}"


# ---- 1.8 ------------------------------------------------------------------------------------------------------------


@exercise(
    "1.8",
    title="Both walls, in two passes",
    minutes=40,
    difficulty="Stretch",
    hints=[
        "Pass 1 is phase 0's online normaliser: for each block of K, a tile of scores, then m_i and l_i. "
        "Nothing else is kept.",
        "In pass 1: m_new = max(m_i, row maximum of s); l_i = l_i · exp(m_i - m_new) + row sum of exp(s - m_new).",
        "In pass 2 compute s again, from the same q and the same block of K. Now m_i and l_i are those of "
        "the whole row, so "
        "p = exp(s - m_i) / l_i is final: acc = tl.dot(p.to(v.dtype), v, acc). No rescaling.",
        "Both loops: `for start in range(0, N, BLOCK_N)`, rows = start + offs_n, every load masked with "
        "rows < N and the "
        "scores of rows >= N set to -inf.",
    ],
)
def _(two_pass_kernel: Any) -> str:
    kernel = kernel_of(two_pass_kernel)
    report = verify_one_head(_one_head(kernel, BLOCK_N=lambda n: 32), max_seq=300)
    compiled = compiles(kernel, schemes.kernel_arguments(4096, 64, BLOCK_N=64), target="sm_120", num_stages=1)
    expect(
        (compiled.shared_bytes or 0) <= 4 * 64 * 64 * 2,
        f"right, but it needs {compiled.shared_bytes} bytes of shared memory for tiles of 64 keys: hold "
        "one block of K and "
        "one of V at a time",
        diagnosis="shared-memory-grows",
    )
    return f"{report.verdict}; {compiled.shared_bytes} bytes of shared memory for every N"
