"""Checks of phase 1: naive attention and the two walls.

The counting exercises know what the usual slips would have given. The kernels are run on the checker's cases, and
then handed to the real compiler: the interpreter accepts more than a GPU does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference, schemes
from flashlab.attention.cost import fused_cost, naive_cost, naive_peak_bytes, trace_ops
from flashlab.check import CheckFailed, expect, expect_all_close, expect_close, running, verify_one_head
from flashlab.check.slips import Chosen, Slip, explain, explained, right_where
from flashlab.exercises.registry import exercise
from flashlab.exercises.triton_answers import calls, compiles, explain_undefined, in_bounds, kernel_of
from flashlab.triton_tools.watch import watched

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
    sizes = ((8, 4, 2), (1024, 64, 2), (4096, 128, 4), (96, 40, 8))
    answers, wants = [], []
    for n, d, e in sizes:
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
        answers.append((case, got))
        wants.append(((5 * s + 3 * x) * e, (4 * s + x) * e, 4 * s * d + 7 * s))
    both = list(zip(answers, wants, strict=True))
    read, written, flops = ([(case, got[i], want[i]) for (case, got), want in both] for i in range(3))
    if all(a[1] == b[2] and a[2] == b[1] for a, b in zip(read, written, strict=True)):
        raise CheckFailed("bytes_read and bytes_written are swapped", diagnosis="swapped", case=read[0][0])
    matrices, known = [(n * n, n * d) for n, d, _ in sizes], {}
    for bytes_of, slug, why in (
        (lambda itemsize: 1, "elements-not-bytes", "counts elements: each has itemsize bytes"),
        (lambda itemsize: 2, "itemsize-ignored", "takes every element for 2 bytes: each has itemsize bytes"),
    ):
        known[slug] = [bytes_of(size[2]) / size[2] for size in sizes], why
    for what, counted in (("bytes_read", read), ("bytes_written", written)):
        mistakes = {
            slug: ([want * f for (_, _, want), f in zip(counted, factors, strict=True)], f"{what} {why}")
            for slug, (factors, why) in known.items()
        }
        units = [(s * e, x * e) for (s, x), (_, _, e) in zip(matrices, sizes, strict=True)]
        verb = what.removeprefix("bytes_").replace("written", "writes").replace("read", "reads")
        told = (
            f"{what} counts {{0}} matrices of N × N and {{1}} of N × D: go through the five lines, and note for each "
            f"which matrices it {verb}"
        )
        others = {
            "N numbers": [n * e for n, _, e in sizes], "D × D numbers": [d * d * e for _, d, e in sizes],
            "D numbers": [d * e for _, d, e in sizes], "one number": [e for *_, e in sizes],
        }  # fmt: skip
        _explain_count(counted, units, told, "matrices-miscounted", mistakes, others)
    told = (
        "flops counts {0} times N·N·D and {1} times N·N: a multiply-add is two operations; a score is scaled, has the "
        "mask added, and takes 5 in the softmax"
    )
    mistakes = {
        "multiply-add-is-two": (
            [2 * n * n * d + 7 * n * n for n, d, _ in sizes],
            "flops has half of the products: there are two, and a multiply-add is two operations, 2·N·N·D a product",
        ),
        "only-matmuls": (
            [4 * n * n * d for n, d, _ in sizes],
            "flops has the two products only: scaling, mask and softmax add 7·N·N",
        ),
    }
    units = [(n * n * d, n * n) for n, d, _ in sizes]
    for words, f in {
        "N·D·D where N·N·D belongs, in one product": lambda n, d: 2 * n * d * d + 2 * n * n * d + 7 * n * n,
        "N·D·D where N·N·D belongs, in both products": lambda n, d: 4 * n * d * d + 7 * n * n,
        "N·D, without the other N, in one product": lambda n, d: 2 * n * d + 2 * n * n * d + 7 * n * n,
        "N·D, without the other N, in both products": lambda n, d: 4 * n * d + 7 * n * n,
        "N·N, without D, in both products": lambda n, d: 4 * n * n + 7 * n * n,
        "N·N·N in both products": lambda n, d: 4 * n**3 + 7 * n * n,
        "N·N·N in one product": lambda n, d: 2 * n**3 + 2 * n * n * d + 7 * n * n,
        "5 per row for the softmax: it takes 5 for each score": lambda n, d: 4 * n * n * d + 2 * n * n + 5 * n,
        "5·N·D for the softmax: it takes 5 for each score, N·N": lambda n, d: 4 * n * n * d + 2 * n * n + 5 * n * d,
        "the scaling of N·D numbers: S has N·N": lambda n, d: 4 * n * n * d + 6 * n * n + n * d,
    }.items():
        mistakes[f"product-miscounted {words}"] = ([f(n, d) for n, d, _ in sizes], f"flops has {words}")
    others = {
        "N": [n for n, _, _ in sizes], "N·D": [n * d for n, d, _ in sizes], "N·D·D": [n * d * d for n, d, _ in sizes],
        "N·N·N": [n**3 for n, _, _ in sizes],
    }  # fmt: skip
    _explain_count(flops, units, told, "flops-miscounted", mistakes, others)
    return f"reads, writes and FLOPs right at {len(sizes)} sizes"


def _explain_count(
    counted: Sequence[tuple[str, Any, float]],
    units: Sequence[tuple[float, float]],
    told: str,
    slug: str,
    mistakes: Mapping[str, tuple[Sequence[float], str]],
    others: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Compare counts; where a wrong one is a sum of the same units at every size, say how many of each it has."""
    __tracebackhide__ = True
    try:
        got = torch.tensor([float(value) for _, value, _ in counted], dtype=torch.float64)
        rows = torch.tensor(units, dtype=torch.float64)
        parts = torch.linalg.lstsq(rows, got[:, None]).solution[:, 0]
        parts = (2 * parts).round() / 2
        if bool(((rows @ parts - got).abs() <= 1e-9 * got.abs() + 0.5).all()):
            sentence = told.format(*(f"{x:g}" for x in parts.tolist()))
            mistakes = {**mistakes, slug: ([value for _, value, _ in counted], sentence)}
        else:  # a matrix or a vector of other sides: at most one, or the sizes would give anything
            for name, more in (others or {}).items():
                wide = torch.cat([rows, torch.tensor(more, dtype=torch.float64)[:, None]], 1)
                parts = torch.linalg.lstsq(wide, got[:, None]).solution[:, 0].round()
                if bool(((wide @ parts - got).abs() <= 1e-9 * got.abs() + 0.5).all()):
                    counts = [f"{x:g}" for x in parts.tolist()]
                    sentence = (
                        f"{told.format(*counts)}. It counts {counts[-1]} times {name} as well, which is nothing here"
                    )
                    mistakes = {**mistakes, slug: ([value for _, value, _ in counted], sentence)}
                    break
    except (TypeError, ValueError, RuntimeError):
        pass  # not numbers: the comparison says so
    what = told.split()[0]
    expect_all_close(counted, what=what, tol=0.5, mistakes=mistakes)


_UNITS = "wrong units: TFLOP/s are 10¹² operations, GB/s 10⁹ bytes a second, and the time is in seconds"


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
    gpus = [runtime.GPUS[name] for name in ("H200", "A100", "RTX 4090", "RTX 5060 Ti")]
    pairs = [(gpu, cost, f"{name} on {gpu.name}") for gpu in gpus for name, cost in costs.items()]
    seconds = []
    for gpu, cost, case in pairs:
        with running(case):
            got = least_time(cost.flops, cost.bytes, gpu)
        expect(
            isinstance(got, tuple | list) and len(got) == 2 and isinstance(got[1], str),
            'return two things: the seconds, and "memory" or "compute"',
            diagnosis="wrong-type",
            case=case,
        )
        expect(
            got[1] in ("memory", "compute"),
            f'the bound is called "memory" or "compute", not {got[1]!r}',
            diagnosis="wrong-word",
            case=case,
        )
        seconds.append(got)

    def clocks(a: float = 1.0, b: float = 1.0, on: runtime.GpuLimits | None = None) -> list[tuple[float, float]]:
        """The two times of every pair, a and b times as long, perhaps on another GPU."""
        return [
            (a * c.flops / ((on or g).fp16_tflops * 1e12), b * c.bytes / ((on or g).memory_gb_s * 1e9))  # type: ignore[operator]
            for g, c, _ in pairs
        ]

    def slower(**changes: Any) -> list[float]:
        return [max(both) for both in clocks(**changes)]

    right = slower()
    binary, bits = {"a": 1e12 / 2**40, "b": 1e9 / 2**30}, "bytes are counted as bits: memory_gb_s is in bytes a second"
    mistakes: dict[str, tuple[list[float], str]] = {
        "min-not-max": (
            [min(both) for both in clocks()],
            "the time is that of the faster clock: the slower one is the bound",
        ),
        "sum-not-max": (
            [sum(both) for both in clocks()],
            "the two times are added: arithmetic and memory work at the same time",
        ),
        "memory-only": ([m for _, m in clocks()], "only the memory's time counts: arithmetic can be the slower one"),
        "compute-only": ([c for c, _ in clocks()], "only the arithmetic's time counts: memory can be the slower one"),
        "bits": (slower(b=8.0), bits),
        "bits 2": (slower(b=1 / 8), bits),
        "binary-units": (slower(**binary), "tera and giga are powers of ten here: 10¹² and 10⁹"),
        "binary-units 2": (slower(b=binary["b"]), "giga is a power of ten here: 10⁹"),
        "rate-not-time": (
            [max(c.flops * g.fp16_tflops * 1e12, c.bytes * g.memory_gb_s * 1e9) for g, c, _ in pairs],  # type: ignore[operator]
            "the work is multiplied by the rate: a time is work divided by its rate",
        ),
        "inverted": (
            [1 / time for time in right],
            "that is the inverse, in runs a second: a time is work divided by its rate",
        ),
    }
    for gpu in gpus:
        mistakes[f"one-gpu {gpu.name}"] = (
            slower(on=gpu),
            f"the numbers of the {gpu.name} are used for every GPU: read them from the argument gpu",
        )
    factors = (1e-12, 1e-9, 1e-6, 1e-3, 1.0, 1e3, 1e6, 1e9, 1e12)
    for a in sorted(factors, key=lambda x: abs(math.log10(x))):  # one that makes no difference is told as 10^0
        for b in sorted(factors, key=lambda x: abs(math.log10(x))):
            power = f"10^{round(math.log10(a))} and 10^{round(math.log10(b))}"
            why = f"{_UNITS}; yours are {power} times those of arithmetic and memory"
            mistakes[f"wrong-units {a:g} {b:g}"] = (slower(a=a, b=b), why)
    # Relative errors: the times span six powers of ten.
    answers = [(case, _ratio(got[0], want), 1.0) for (_, _, case), got, want in zip(pairs, seconds, right, strict=True)]
    wrong = {slug: ([x / want for x, want in zip(xs, right, strict=True)], why) for slug, (xs, why) in mistakes.items()}

    def slipped() -> tuple[str, str] | None:
        """One factor for every time that is arithmetic's, and another one for the memory's."""
        factors = {
            name: [r for (_, r, _), (c, m) in zip(answers, clocks(), strict=True) if (c > m) is (name == "arithmetic")]
            for name in ("arithmetic", "memory")
        }
        if any(max(rs) - min(rs) > 1e-6 * max(rs) for rs in factors.values()):
            return None
        off = {name: rs[0] for name, rs in factors.items() if abs(rs[0] - 1) > 1e-6}
        said = " and ".join(f"the time of {name} is {_power(f)} times what it should be" for name, f in off.items())
        right_one = [name for name in factors if name not in off]
        return "wrong-factor", said + (f"; that of {right_one[0]} is right" if right_one else "")

    with explained(slipped):
        if not all(abs(ratio - 1) <= 1e-6 for _, ratio, _ in answers if isinstance(ratio, float)):
            expect_all_close(answers, what="your time, over the right one,", mistakes=wrong)
    for (gpu, cost, case), got, want, (compute, memory) in zip(pairs, seconds, right, clocks(), strict=True):
        expect_close(got[0], want, what="the time in seconds", case=case, tol=1e-6 * want)
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


def _power(factor: float) -> str:
    """A factor as a power of ten by one of two, where it is."""
    for power in range(-15, 16, 3):
        for binary in range(-60, 61):
            if abs(factor / (10.0**power * 2.0**binary) - 1) < 1e-6:
                named = [f"10^{power}" if power else "", f"2^{binary}" if binary else ""]
                return f"{factor:.6g} = {' · '.join(x for x in named if x)}"
    return f"{factor:.6g}"


def _ratio(got: Any, want: float) -> Any:
    try:
        return float(got) / want
    except (TypeError, ValueError):
        return got


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
        expect(
            size == 1 or not isinstance(got, torch.Tensor) or bool(got.isfinite().all()),
            "not finite where the scores are large: subtract the row's maximum before the exp",
            diagnosis="no-max-subtraction",
            case=case,
        )
        tol = 1e-4 if size == 1 else 1e-3
        mistakes = _naive_mistakes(q.double(), k.double(), v.double()) if size == 1 else {}
        if isinstance(got, torch.Tensor) and got.shape == q.shape:
            off = (got.double() - want[0, 0]).abs().max().item()
            rounded = "nearly right: is something in 16 bits? The matrix has to stay in float32"
            if tol < off < 0.02:
                mistakes["low-precision"] = (got, rounded)
        expect_close(got, want[0, 0].float(), what="o", case=case, tol=tol, mistakes=mistakes)
    _expect_a_maximum_per_row(frugal_attention)
    # Few columns, so that what has N rows weighs little: only a second N x N tensor may count.
    ops = trace_ops(frugal_attention, *(torch.randn(512, 16, generator=generator).to(device) for _ in range(3)))
    worst = max(ops, key=lambda op: op.live_bytes)
    matrices = worst.live_bytes / (512 * 512 * 4)
    expect(
        matrices < 1.3,
        f"right, but it holds {matrices:.2f} matrices of N × N when `{worst.name}` ends; one is enough",
        diagnosis="second-matrix-alive",
        case="N=512, D=16",
    )
    naive = naive_peak_bytes(512, 16, itemsize=4) / (512 * 512 * 4)
    return f"peak {matrices:.2f} matrices of N × N, naive_attention has {naive:.2f}"


def _naive_mistakes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, tuple[torch.Tensor, str]]:
    """What slips in the four lines would give, for small scores."""
    n, d = q.shape
    s = q @ k.T
    scales = {
        "scale-missing": (1.0, "the scores are not scaled by 1 / sqrt(D)"),
        "scale-one-over-d": (
            1 / d,
            "the scores are scaled by 1 / D, or twice; it is 1 / sqrt(D), once",
        ),
        "scale-inverted": (math.sqrt(d), "the scores are multiplied by sqrt(D); divide them by it"),
        "scale-of-n": (n**-0.5, "the scores are scaled by 1 / sqrt(N); it is 1 / sqrt(D)"),
        "scale-hard-coded": (1 / 8, "the scores are always scaled by 1/8, which is right for D = 64 only"),
    }
    told = {slug: (torch.softmax(s * scale, 1) @ v, why) for slug, (scale, why) in scales.items()}
    late = torch.softmax(s, 1) @ v
    s = s * d**-0.5
    p = torch.exp(s - s.amax(1, keepdim=True))
    lost = "sum(dim=1) without keepdim divides column j by the sum of row j: keep the axis, keepdim=True"
    shifts = {
        "of each column": s.amax(0, keepdim=True),
        "of column j for row j (max without keepdim)": s.amax(1)[None],
        "of the whole matrix": s.amax(),
        "of nothing, or none": torch.zeros((), dtype=s.dtype, device=s.device),
    }
    sums = {
        "": lambda x: x.sum(1, keepdim=True),
        lost: lambda x: x.sum(1),
        "the sum runs along the columns: each row has its own": lambda x: x.sum(0, keepdim=True),
        "one sum was taken for the whole matrix: each row has its own": lambda x: x.sum(),
    }
    for of, shift in shifts.items():
        x = torch.exp(s - shift)
        for why, total in sums.items():
            if why or "column" in of:
                also = f"the maximum that is subtracted is that {of}: each row has its own" if "column" in of else ""
                words = "; and ".join(x for x in (also, why) if x)
                told[f"wrong-axis {of} {why[:12]}"] = (x / total(x) @ v, words)
    return told | {
        "scale-after-softmax": (
            late * d**-0.5,
            "1 / sqrt(D) is a factor of o; it scales the scores, before the softmax",
        ),
        "not-normalised": (p @ v, "the exponentials are not divided by their row's sum"),
        "wrong-axis": (torch.softmax(s, 0) @ v, "the softmax runs along the columns: a row's keys lie along dim=-1"),
        "sum-of-columns": (p / p.sum(0, keepdim=True) @ v, "the sum runs along the columns: each row has its own"),
        "keepdim-missing": (p / p.sum(1) @ v, lost),
        "one-sum": (p / p.sum() @ v, "one sum was taken for the whole matrix: each row has its own"),
        "base-2": (torch.softmax(s * math.log(2), 1) @ v, "2 is raised to the scores: the exponential is e^x"),
    }


def _expect_a_maximum_per_row(fn: Callable[..., torch.Tensor]) -> None:
    """Rows whose scores are 400 apart: against one maximum for all, every exponential of the lower row is 0."""
    __tracebackhide__ = True
    case = "two rows of scores, near +200 and near -200"
    q, k = torch.ones(2, 16, device=runtime.device()), torch.full((2, 16), 50.0, device=runtime.device())
    q[1], k[1] = -1.0, 49.5
    v = torch.arange(32.0, device=q.device).view(2, 16)
    with running(case):
        got = fn(q, k, v)
    want, _ = reference.attention(*(x[None, None] for x in (q, k, v)))
    lower = torch.as_tensor(got)[1]
    expect(
        bool(lower.isfinite().all()) and bool(lower.abs().sum() > 0),
        "one maximum was taken for the whole matrix: a row far below it has only zeros; take each row's own",
        diagnosis="global-max",
        case=case,
    )
    expect_close(got, want[0, 0].float(), what="o", case=case, tol=1e-3)


# ---- 1.4 ------------------------------------------------------------------------------------------------------------


BLOCK_M = 64


def _one_head(kernel: Any, **tiles: Callable[[int], int]) -> Callable[..., Any]:
    """fn(q, k, v, *, scale) around a kernel of the learner's; `tiles` give its constexpr arguments from N.

    As `schemes.launch`, but with every address watched, and an output that shows what was never written.
    """

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> Any:
        __tracebackhide__ = True
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
        return verify_one_head(run, max_seq=150, max_tile=128, **options)
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
    report = _verify_padded(kernel, dtypes=(torch.float16, torch.bfloat16), head_dims=(64, 32))
    compiles(kernel, schemes.kernel_arguments(64, 64, BLOCK_N=64), num_stages=1)
    return f"{report.verdict}; compiled for sm_90"


# ---- 1.5 ------------------------------------------------------------------------------------------------------------


def _first_failing(
    limit: int, d: int, block_m: int, e: int, *, tiles: int = 2, q_tiles: int = 1, itemsize: int = 0, unit: int = 1,
    room: int = 0, least: int = 16,
) -> int:  # fmt: skip
    """The smallest N that does not fit, if so many tiles of so many bytes had to."""
    row, block_n = d * (itemsize or e), least
    while (q_tiles * block_m + tiles * block_n) * row <= limit * unit + room:
        block_n *= 2
    return 1 if block_n == least else block_n // 2 + 1


_PADDED = "N is padded to a power of two before it meets shared memory: the answer is one above such a power, or 1"
_LENGTH_SLIPS = [
    Slip("kv", 1, "only one of K and V is counted: both tiles are there at once", "one-tile-forgotten"),
    Slip("kv", 3, "three tiles of BLOCK_N rows are counted: those of K and V are two", "three-tiles"),
    Slip("q", 0, "the tile of Q is not counted: BLOCK_M rows of it are there too", "q-forgotten"),
    Slip("q", 2, "two tiles of BLOCK_M rows are counted: only Q has one", "o-counted"),
    Slip("q", "N", "the tile of Q is taken for BLOCK_N rows: it has BLOCK_M", "q-of-block-n"),
    Slip("q", "row", "one row of Q is counted: there are BLOCK_M", "q-of-one-row"),
    Slip("itemsize", 1, "elements are counted, not bytes: each has itemsize of them", "elements-not-bytes"),
    Slip("itemsize", 2, "every element is taken for 2 bytes: it has itemsize", "itemsize-ignored"),
    Slip("itemsize", 4, "every element is taken for 4 bytes: it has itemsize", "itemsize-ignored"),
    Slip("itemsize", "bits", "bits are counted: the limit is in bytes", "bits"),
    Slip("D", 1, "HEAD_DIM is not in the size of a row", "head-dim-ignored"),
    Slip("D", 64, "every row is taken for 64 numbers: it has HEAD_DIM", "head-dim-ignored"),
    Slip("D", 128, "every row is taken for 128 numbers: it has HEAD_DIM", "head-dim-ignored"),
    Slip("scores", 1, "a tile of scores is counted: only Q, K and V are kept there", "scores-counted"),
    Slip("limit", 1024, "the limit is in bytes already, not in KiB", "limit-in-kib"),
    Slip("limit", 1 / 1024, "the limit is divided by 1024: it is in bytes", "limit-in-kib"),
    Slip("room", -1, "tiles that need just the limit fit: the first length fails above it", "exact-fit-refused"),
    Slip("least", 1, "a tile has at least 16 keys: N is padded to 16, however short it is", "minimum-forgotten"),
    Slip("least", 2, "BLOCK_N starts at 2: a tile has at least 16 keys", "minimum-forgotten"),
    Slip("least", 32, "BLOCK_N starts at 32: a tile may have 16 keys", "minimum-too-large"),
    Slip("padding", "none", _PADDED, "padding-forgotten"),
    Slip("padding", "none, rounded", f"{_PADDED}. (And where nothing fits it is 1)", "padding-forgotten"),
    Slip("padding", "none, last", _PADDED, "padding-forgotten"),
    Slip("padding", "up", "the length that would fit unpadded is rounded up to a power of two: round it down",
         "rounded-up"),
    Slip("padding", "16", "N is padded to a multiple of 16 there: it is padded to a power of two", "padded-to-16"),
    Slip("result", "power", "that is the first power of two that fails: lengths below it are padded to it and fail too",
         "first-power-not-first-length"),
    Slip("result", "half", "that is the largest length that runs: the next one is the first that fails",
         "last-that-runs"),
    Slip("result", "power + 1", "that is one above the first power of two that fails: lengths below that power are "
         "padded to it, and fail too", "first-power-not-first-length"),
    Slip("nothing", "smallest", "where not even the smallest tile fits, every length fails, and the first is 1",
         "nothing-fits"),
]  # fmt: skip


def _first_failing_with(limit: int, d: int, block_m: int, e: int, chosen: Chosen) -> float:
    """The first failing length with slips."""
    e = 8 * e if chosen.get("itemsize") == "bits" else chosen.get("itemsize", e)
    row = chosen.get("D", d) * e
    room = limit * chosen.get("limit", 1) + chosen.get("room", 0)
    q, kv, least = chosen.get("q", 1), chosen.get("kv", 2), chosen.get("least", 16)

    def fits(n: int) -> bool:
        rows_of_q = {"N": n, "row": 1}.get(q, q * block_m if isinstance(q, int) else 0)
        return (rows_of_q + kv * n) * row + chosen.get("scores", 0) * block_m * n * e <= room

    padding = str(chosen.get("padding", ""))
    if padding.startswith("none"):
        n = math.floor((room / row - (0 if q in ("N", 0) else 1 if q == "row" else q * block_m)) / (kv + (q == "N")))
        n = max(0, n) if "rounded" not in padding else n
        return n + ("last" not in padding)
    if padding == "up":
        n = math.floor(room / row - block_m) // 2
        return 2 ** math.ceil(math.log2(n)) + 1 if n >= 16 else 1
    block_n = int(least)
    if not fits(block_n):
        small = {"smallest": least, "power": block_n, "half": 0, "power + 1": block_n + 1}
        return 1 if "nothing" not in chosen and "result" not in chosen else small[chosen.get("result", "smallest")]
    while fits(block_n):
        block_n += 16 if padding == "16" else block_n
    last = block_n - 16 if padding == "16" else block_n // 2
    return {"power": block_n, "half": last, "power + 1": block_n + 1}.get(str(chosen.get("result")), last + 1)


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
    cases.append(((64 + 2 * 20) * 128 * 2, 128, 64, 2))  # 16 keys fit, 32 do not
    cases.append(((64 + 2 * 128) * 128 * 2, 128, 64, 2))  # the tiles of 128 keys fit to the byte
    cases.append(((64 + 2 * 128) * 128 * 2 + 100, 128, 64, 2))  # they fit, with a little to spare
    cases.append(((64 + 2 * 10) * 128 * 2, 128, 64, 2))  # 8 keys would fit, but a tile has 16 at least
    answers = []
    for limit, d, block_m, e in cases:
        case = f"limit={limit}, D={d}, BLOCK_M={block_m}, itemsize={e}"
        with running(case):
            got = first_failing(limit, d, block_m, e)
        answers.append((case, got, _first_failing(limit, d, block_m, e)))

    def given(**changes: Any) -> list[int]:
        return [_first_failing(*case, **changes) for case in cases]

    exact = [max(0, (limit // (d * e) - block_m) // 2) + 1 for limit, d, block_m, e in cases]
    mistakes = {
        "one-tile-forgotten": (given(tiles=1), "only one of K and V is counted: both tiles are there at once"),
        "q-forgotten": (given(q_tiles=0), "the tile of Q is not counted: BLOCK_M rows of it are there too"),
        "o-counted": (given(q_tiles=2), "a tile of O is counted too: only Q, K and V are kept in shared memory"),
        "elements-not-bytes": (given(itemsize=1), "elements are counted, not bytes: each has itemsize of them"),
        "itemsize-ignored": (given(itemsize=2), "every element is taken for 2 bytes; it has itemsize"),
        "limit-in-kib": (given(unit=1024), "the limit is in bytes already, not in KiB"),
        "padding-forgotten": (
            exact,
            "N is padded to a power of two before it meets shared memory: a length just above one costs as much as the "
            "next",
        ),
        "first-power-not-first-length": (
            [2 * (n - 1) or 16 for n in given()],
            "that is the first power of two that fails; lengths below it are padded to it and fail as well",
        ),
        "exact-fit-refused": (given(room=-1), "tiles that need just the limit fit: the first length fails above it"),
        "minimum-forgotten": (
            given(least=1),
            "a tile has at least 16 keys: N is padded to 16, however short it is",
        ),
        "nothing-fits": (
            [max(17, n) for n in given()],
            "where not even the smallest tile of 16 keys fits, every length fails, and the first is 1",
        ),
        "last-that-runs": ([n - 1 for n in given()], "that is the last length that runs; the next one fails"),
    }
    mistakes["first-power-not-first-length 2"] = (
        [2 * (n - 1) if n > 1 else 1 for n in given()],
        mistakes["first-power-not-first-length"][1],
    )

    def slipped() -> tuple[str, str] | None:
        got = [float(x) for _, x, _ in answers]
        found = explain(lambda chosen: got == [_first_failing_with(*case, chosen) for case in cases], _LENGTH_SLIPS)
        tried = [(kib * 1024, d, m, e) for kib in (16, 33, 99, 163) for d in (32, 64, 128) for m in (16, 64, 128)
                 for e in (1, 2, 4)]  # fmt: skip
        conditions: dict[str, Callable[..., bool]] = {
            "not even 16 keys fit": lambda limit, d, m, e: _first_failing(limit, d, m, e) == 1,
            "16 keys fit": lambda limit, d, m, e: _first_failing(limit, d, m, e) > 1,
            "BLOCK_M is 16": lambda limit, d, m, e: m == 16, "BLOCK_M is 64": lambda limit, d, m, e: m == 64,
            "BLOCK_M is 128": lambda limit, d, m, e: m == 128, "itemsize is 1": lambda limit, d, m, e: e == 1,
            "itemsize is 2": lambda limit, d, m, e: e == 2, "itemsize is 4": lambda limit, d, m, e: e == 4,
            "HEAD_DIM is 64": lambda limit, d, m, e: d == 64, "HEAD_DIM is 128": lambda limit, d, m, e: d == 128,
        }  # fmt: skip
        return found or right_where(conditions, tried, lambda *x: first_failing(*x) == _first_failing(*x), "the length")

    with explained(slipped):
        expect_all_close(answers, what="the first failing N", tol=0.5, mistakes=mistakes)
    return f"{len(cases)} combinations of limit, D, BLOCK_M and itemsize"


# ---- 1.6 ------------------------------------------------------------------------------------------------------------


FORBIDDEN = {"gather", "sum", "max", "min", "reduce", "dot", "associative_scan", "cumsum", "sort", "histogram"}


def _explain_quarters(answers: list[tuple[str, torch.Tensor, torch.Tensor]], x: torch.Tensor) -> None:
    """Compare the quarters J = 0 to 3; say which quarter stands where another should."""
    __tracebackhide__ = True
    quarters = [want for _, _, want in answers]
    rows, columns = x.shape

    def halves(t: torch.Tensor, way: str) -> tuple[torch.Tensor, torch.Tensor]:
        if way == "interleaved":
            return t[:, ::2], t[:, 1::2]
        if way == "rows":  # the flat tile's first and second half
            first, second = t.reshape(2, rows, -1)
            return first, second
        first, second = t.chunk(2, dim=1)
        return first, second

    mistakes: dict[str, tuple[list[torch.Tensor], str]] = {}
    for slug, ways, why in (
        ("interleaved-columns", ("interleaved", "interleaved"), "both times"),
        ("interleaved-columns-first", ("interleaved", "right"), "in the first cut"),
        ("interleaved-columns-second", ("right", "interleaved"), "in the second cut"),
    ):
        cut = [part for half in halves(x, ways[0]) for part in halves(half, ways[1])]
        told = (
            "reshaping to [.., COLUMNS // 2, 2] separates even from odd columns; the axis of length 2 has to come first"
        )
        mistakes[slug] = (cut, f"y holds columns that are not neighbours in x, {why}: {told}")
    for slug, ways in (("rows-cut", ("rows", "right")), ("rows-cut-second", ("right", "rows"))):
        cut = [part for half in halves(x, ways[0]) for part in halves(half, ways[1])]
        why = "y holds rows of x, cut in two: in the reshape ROWS comes first, so that the new axis cuts the columns"
        mistakes[slug] = (cut, why)
    held = [next((i for i, quarter in enumerate(quarters) if torch.equal(y, quarter)), None) for _, y, _ in answers]
    if None not in held and held != [0, 1, 2, 3]:
        slug, why = "another-quarter", "J // 2 says which half, J % 2 which half of that"
        for known, order, words in (
            ("left-and-right-swapped", [3, 2, 1, 0], "left and right are swapped, both times"),
            ("halves-swapped", [2, 3, 0, 1], "tl.split gives the left half first, and J >= 2 is right"),
            ("quarters-swapped", [1, 0, 3, 2], "the two quarters of each half are swapped"),
            ("halves-mixed", [0, 2, 1, 3], why),
            ("always-the-first", [0, 0, 0, 0], "J has no effect"),
        ):
            if held == order:
                slug, why = known, words
        at = next(j for j in range(4) if held[j] != j)
        sentence = f"for J = 0, 1, 2, 3 y holds the quarters {', '.join(map(str, held))}: {why}"
        raise CheckFailed(sentence, diagnosis=slug, case=answers[at][0])
    expect_all_close(answers, what="y", mistakes=mistakes)


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
    called = calls(kernel)
    used = sorted(FORBIDDEN & set(called))
    expect(
        not used,
        f"tl.{used[0] if used else ''} is not allowed here: use reshape, permute and split",
        diagnosis=f"{used[0] if used else ''}-used",
    )
    expect(
        called.count("load") == 1,
        f"the kernel calls tl.load {called.count('load')} times; it should load x once, and cut what it loaded",
        diagnosis="loaded-again",
    )
    device = runtime.device()
    for rows, columns in ((16, 64), (32, 16)):
        x = torch.arange(rows * columns, device=device, dtype=torch.float32).reshape(rows, columns)
        answers = []
        for j in range(4):
            case = f"x [{rows}, {columns}], J={j}"
            y = torch.full((rows, columns // 4), math.nan, device=device)
            with in_bounds(case, x=x, y=y) as traffic:
                kernel[(1,)](x, y, ROWS=rows, COLUMNS=columns, J=j)
            expect(
                traffic is None or traffic.read_from["x"] <= x.nbytes,
                "x is read more than once; load it once, and cut what was loaded",
                diagnosis="loaded-again",
                case=case,
            )
            answers.append((case, y, x[:, j * columns // 4 : (j + 1) * columns // 4]))
        _explain_quarters(answers, x)
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
    report = _verify_padded(kernel, head_dims=(64, 32))
    return f"found: {report.verdict}"


# ---- 1.8 ------------------------------------------------------------------------------------------------------------


def _expect_two_passes(run: Callable[..., Any]) -> None:
    """K is read twice, V once; and no more than that."""
    __tracebackhide__ = True
    if not runtime.INTERPRETED:
        return
    q, k, v = (torch.randn(64, 64, generator=torch.Generator().manual_seed(18)).half() for _ in range(3))
    with watched(q=q, k=k, v=v) as traffic:
        run(q, k, v)
    passes = traffic.read_from["k"] / (64 * 64 * 2)
    expect(
        passes >= 2,
        f"right, but K is read {passes:g} times: this is one pass that corrects o, phase 3's kernel; here the first "
        "pass finds m and l of the whole row, so that the second never has to rescale o",
        diagnosis="one-pass",
        case="M=N=64, BLOCK_N=32",
    )


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
    run = _one_head(kernel, BLOCK_N=lambda n: 32)
    report = verify_one_head(run, head_dims=(64, 32), max_tile=128)
    _expect_two_passes(run)
    compiled = compiles(kernel, schemes.kernel_arguments(4096, 64, BLOCK_N=64), target="sm_120", num_stages=1)
    expect(
        (compiled.shared_bytes or 0) <= 4 * 64 * 64 * 2,
        f"right, but it needs {compiled.shared_bytes} bytes of shared memory for tiles of 64 keys: hold "
        "one block of K and "
        "one of V at a time",
        diagnosis="shared-memory-grows",
    )
    return f"{report.verdict}; {compiled.shared_bytes} bytes of shared memory for every N"
