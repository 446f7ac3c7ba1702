"""Checks of phase 3: the pieces of a Triton kernel, then the minimal FlashAttention kernel itself.

A kernel that is handed in is run on small inputs with every address checked, then on the checker's cases, and then it
is given to the real compiler, which accepts less than the interpreter.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.triton_minimal import (
    LOG2_E,
    compile_arguments,
    flash_attention_forward,
    flash_attention_forward_kernel,
    hbm_bytes,
)
from flashlab.check import expect, expect_close, running, verify_one_head
from flashlab.check.verification import Report
from flashlab.exercises.registry import exercise
from flashlab.exercises.triton_answers import compiles, explain_undefined, in_bounds, kernel_of
from flashlab.triton_tools.watch import hbm_traffic

FORWARD_PARAMETERS = tuple(inspect.signature(flash_attention_forward_kernel.fn).parameters)


def _random(*shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator).to(runtime.device(), dtype) for shape in shapes]


def _forward(kernel: Any) -> Callable[..., Any]:
    """fn(q, k, v, *, scale) that launches `kernel` as the package's launcher does, with small tiles."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None) -> Any:
        __tracebackhide__ = True
        case = f"M={len(q)}, N={len(k)}, BLOCK_M = BLOCK_N = 32"
        with in_bounds(case, q=q, k=k, v=v) as traffic:
            o, lse = flash_attention_forward(q, k, v, scale, 32, 32, kernel=kernel)
        explain_undefined(traffic, o, case)
        return o, lse

    return forward


def _launcher(kernel: Any) -> Callable[..., Any]:
    """A plain function around `kernel`, whose source hbm_traffic can take to a process that interprets."""

    def launch(q, k, v):
        return flash_attention_forward(q, k, v, BLOCK_M=32, BLOCK_N=32, kernel=kernel)

    return launch


# ---- 3.1 ------------------------------------------------------------------------------------------------------------


@exercise(
    "3.1",
    title="A tile's addresses",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "`tl.arange(0, ROWS)` is the row numbers, `tl.arange(0, COLS)` the column numbers. Which of them becomes a "
        "column (`[:, None]`), which a row (`[None, :]`)?",
        "address = pointer + row number * stride of a row + column number * stride of a column.",
        "x_ptrs = x_ptr + rows[:, None] * stride_xr + cols[None, :] * stride_xc, and the same for y. Then "
        "tl.store(y_ptrs, tl.load(x_ptrs)).",
    ],
)
def _(copy_tile_kernel: Any) -> str:
    names = ("x_ptr", "y_ptr", "stride_xr", "stride_xc", "stride_yr", "stride_yc", "ROWS", "COLS")
    kernel = kernel_of(copy_tile_kernel, names)
    (x,) = _random((8, 16))
    cases = {
        "a contiguous matrix": (x, torch.zeros_like(x)),
        "a transposed source": (x.T.contiguous().T, torch.zeros_like(x)),
        "a transposed destination": (x, torch.zeros_like(x.T.contiguous()).T),
        "every second column of a wider matrix": (
            torch.stack([x, torch.full_like(x, math.nan)], dim=2).reshape(8, 32)[:, ::2],
            torch.zeros_like(x),
        ),
    }
    for case, (source, target) in cases.items():
        with in_bounds(case, x=source, y=target):
            kernel[(1,)](source, target, *source.stride(), *target.stride(), ROWS=8, COLS=16)
        expect_close(
            target, x, what="the copy", case=case, because="are the strides with the right index, x's and y's?"
        )
    return f"{len(cases)} layouts"


# ---- 3.2 ------------------------------------------------------------------------------------------------------------


@exercise(
    "3.2",
    title="Into base 2 and back",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "exp(x) = 2^(x · log2 e). Which factor does `scale` need so that 2^(scale_log2 · qk) is exp(scale · qk)?",
        "The kernel's m is a maximum of base-2 scores, so it is log2(e) times the natural one. log2(l) is a base-2 "
        "logarithm too. Their sum is log2 of the row's total.",
        "scale_log2 = scale * log2(e); lse = (m + log2(l)) * ln(2), and ln(2) = 1 / log2(e).",
    ],
)
def _(scale_log2: Callable[..., Any], natural_lse: Callable[..., Any]) -> str:
    for scale in (1.0, 0.125, 0.3):
        expect_close(
            scale_log2(scale),
            scale * LOG2_E,
            what=f"scale_log2({scale})",
            tol=1e-6,
            mistakes={
                "ln2-for-log2e": (scale / LOG2_E, "that is scale · ln 2; the factor is log2(e) = 1.4427, its inverse"),
                "unchanged": (scale, "the scale is unchanged: 2^(scale · qk) is not exp(scale · qk)"),
            },
        )
    (s,) = _random((5, 40))
    s = s * 8
    m = (s * LOG2_E).amax(1)
    l = torch.exp2(s * LOG2_E - m[:, None]).sum(1)  # noqa: E741
    expect_close(
        natural_lse(m, l),
        torch.logsumexp(s, 1),
        what="natural_lse(m, l)",
        tol=1e-4,
        mistakes={
            "lse-in-base-2": (m + torch.log2(l), "that is in base 2 still; times ln 2 makes it natural"),
            "mixed-bases": (m + torch.log(l), "m is in base 2, log(l) in base e: bring both to the same base first"),
            "log-of-l-only": (m / LOG2_E + torch.log2(l), "m is natural now, log2(l) is not"),
        },
    )
    return "both directions"


# ---- 3.3 ------------------------------------------------------------------------------------------------------------


@exercise(
    "3.3",
    title="The log-sum-exp of a row of any length",
    minutes=20,
    difficulty="Core",
    hints=[
        "One block is `tl.load(x_ptr + row * stride + offs, mask=offs < N, other=...)`. What must a missing element "
        "be, so that it changes neither a maximum nor a sum of exponentials?",
        'other=float("-inf"). Then m_new = tl.maximum(m, tl.max(x, 0)) and l = l * tl.exp(m - m_new) + '
        "tl.sum(tl.exp(x - m_new), 0).",
        "Keep m and l as scalars: m starts at -inf (given), l at 0. Set m = m_new last. After the loop store "
        "m + tl.log(l).",
    ],
)
def _(row_lse_kernel: Any) -> str:
    kernel = kernel_of(row_lse_kernel, ("x_ptr", "lse_ptr", "stride", "N", "BLOCK"))
    shapes = [(3, 64), (2, 100), (4, 5), (2, 129), (1, 1)]
    for rows, n in shapes:
        (x,) = _random((rows, n), seed=n)
        for level in (0.0, -5.0, 300.0):
            case = f"N={n}, BLOCK=32, scores near {level:g}"
            lse = torch.full((rows,), math.nan, device=x.device)
            values = 3 * x + level
            with in_bounds(case, x=values):
                kernel[(rows,)](values, lse, values.stride(0), n, BLOCK=32)
            want = torch.logsumexp(values.double(), 1)
            padded = torch.cat([values, torch.zeros(rows, -n % 32, device=x.device)], 1)
            expect_close(
                lse,
                want,
                what="the log-sum-exp",
                case=case,
                tol=1e-4,
                mistakes={
                    "tail-not-masked": (
                        torch.logsumexp(padded.double(), 1),
                        "the elements past the end count as zeros, and exp(0) is 1: they have to be -inf",
                    ),
                    "no-rescale": (
                        _lse_without_rescale(values, 32),
                        "the sum is wrong where the maximum moves: l was not rescaled to the new maximum",
                    ),
                },
            )
    compiles(kernel, {"x_ptr": torch.float32, "lse_ptr": torch.float32, "stride": 100, "N": 100, "BLOCK": 32})
    return f"{3 * len(shapes)} cases, and it compiles"


def _lse_without_rescale(x: torch.Tensor, block: int) -> torch.Tensor:
    m, total = torch.full_like(x[:, 0], -math.inf), torch.zeros_like(x[:, 0])
    for part in x.split(block, 1):
        m = torch.maximum(m, part.amax(1))
        total = total + torch.exp(part - m[:, None]).sum(1)
    return m + torch.log(total)


# ---- 3.4, and the two bug hunts that repair the same kernel ---------------------------------------------------------


def _verify_forward(kernel: Any, *, dtypes: tuple[torch.dtype, ...] = (torch.float16,)) -> Report:
    __tracebackhide__ = True
    kernel_of(kernel, FORWARD_PARAMETERS)
    report = verify_one_head(_forward(kernel), dtypes=dtypes, max_seq=300)
    _expect_own_strides(kernel)
    compiles(kernel, compile_arguments(torch.float16, 64))
    return report


def _expect_own_strides(kernel: Any) -> None:
    """q, k and v each lie differently in memory: a stride of one, used for another, shows."""
    __tracebackhide__ = True
    q, k, v = _random((40, 32), (50, 32), (50, 32))
    columns, wide = q.T.contiguous().T, torch.full((50, 96), math.nan, device=v.device)
    wide[:, 0:64:2] = v
    case = "q stored by columns, v as every second column of a wider matrix"
    with running(case):
        o, lse = _forward(kernel)(columns, k, wide[:, 0:64:2])
    want, want_lse = reference.attention(*(x[None, None] for x in (q, k, v)))
    because = "does every pointer use its own two strides?"
    expect_close(o, want[0, 0], what="o", case=case, tol=1e-2, diagnosis="wrong-strides", because=because)
    expect_close(lse, want_lse[0, 0], what="lse", case=case, tol=1e-2, diagnosis="wrong-strides", because=because)


@exercise(
    "3.4",
    title="flash_attention_forward_kernel",
    minutes=40,
    difficulty="Core",
    hints=[
        "Keep the simulation of phase 2 beside you: each of its lines has one line here. A slice becomes addresses, "
        "a load and a mask.",
        "Order within an iteration: scores, mask with -inf, m_new, p, correction, l_i, acc, then m_i = m_new. Scores: "
        "`tl.dot(q, k.T) * scale_log2`; exponentials: `tl.exp2`.",
        "Mask the scores with `tl.where(in_range[None, :], s, float('-inf'))`: keys are the columns of s. The masked "
        "K rows are zeros, and a score of 0 is not nothing.",
        "acc = tl.dot(p.to(v.dtype), v, acc) after acc was multiplied by correction[:, None]. At the end acc / l_i, "
        "and lse = (m_i + log2(l_i)) * ln 2, both stored with the mask offs_m < M.",
        "float32 inputs wrong in the fourth digit? That is TF32: tl.dot(..., input_precision='ieee').",
    ],
)
def _(flash_attention_forward_kernel: Any) -> Report:
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    return _verify_forward(flash_attention_forward_kernel, dtypes=dtypes)


@exercise(
    "3.5",
    title="The half that is never looked at",
    minutes=15,
    difficulty="Bug hunt",
    untouched="0301d4112ed1",
    history="flashinfer-ai/flashinfer, issue 2113 (2025), and sgl-project/sglang, pull request 35045 (2026)",
    hints=[
        "The outputs are right, so m_i, l_i and acc belong together. Only the last line can be wrong. What does the "
        "check say that it stores, and what should be there?",
        "The quotient is 1.4427 in every row. Which number of this kernel is 1.4427?",
        "The scores were multiplied by log2(e), so m_i and log2(l_i) are logarithms in base 2. lse is a natural one: "
        "times ln 2 = 0.6931.",
    ],
)
def _(flash_attention_forward_kernel: Any) -> Report:
    return _verify_forward(flash_attention_forward_kernel)


@exercise(
    "3.6",
    title="A very small number",
    minutes=15,
    difficulty="Bug hunt",
    untouched="91615cf68108",
    history="TransformerLensOrg/TransformerLens, issue 318 (2023); flashinfer-ai/flashinfer, pull request 4401 (2026)",
    hints=[
        "Which rows are zero? Look at their scores: nothing is special about them but their size.",
        "The author wanted to avoid -inf - (-inf). What does m_i start from instead, and what happens to a row whose "
        "scores are all below that number?",
        "exp2(s - m_i) underflows to 0 if m_i is far above every s. Start from float('-inf'), mask with it, and guard "
        "the one subtraction that can be -inf - (-inf), as the lecture's m_safe does.",
    ],
)
def _(flash_attention_forward_kernel: Any) -> Report:
    return _verify_forward(flash_attention_forward_kernel)


# ---- 3.7 ------------------------------------------------------------------------------------------------------------


@exercise(
    "3.7",
    title="How many bytes?",
    minutes=10,
    difficulty="Core",
    hints=[
        "How many programs are there? Each reads its own rows of Q once, and the whole of K and of V.",
        "Rows of Q that do not exist are masked, so all programs together read M rows of Q, not P · BLOCK_M.",
        "P = ceil(M / BLOCK_M); (M + 2 · N · P) · HEAD_DIM · itemsize.",
    ],
)
def _(bytes_read: Callable[..., Any]) -> str:
    expect(callable(bytes_read), "a function is expected: give its name, without calling it", diagnosis="wrong-type")
    for M, N, D, BLOCK_M in ((64, 64, 32, 32), (150, 200, 32, 64), (1, 40, 16, 64), (90, 30, 64, 16)):
        case = f"M={M}, N={N}, HEAD_DIM={D}, BLOCK_M={BLOCK_M}, 2 bytes an element"
        with running(case):
            got = bytes_read(M, N, D, BLOCK_M, 2)
        programs = -(-M // BLOCK_M)
        expect_close(
            got,
            hbm_bytes(M, N, D, 2, BLOCK_M)[0],
            what="bytes_read",
            case=case,
            tol=0.5,
            mistakes={
                "read-once": ((M + 2 * N) * D * 2, "K and V are read by every program, not once"),
                "rounded-down": (
                    (M + 2 * N * (M // BLOCK_M)) * D * 2,
                    "the last program counts too, if BLOCK_M does not divide M",
                ),
                "masked-rows": (
                    (programs * BLOCK_M + 2 * N * programs) * D * 2,
                    "rows of Q past the end are masked: they are not read",
                ),
                "elements": ((M + 2 * N * programs) * D, "that is elements; an element has `itemsize` bytes"),
            },
        )
    q, k, v = _random((100, 32), (150, 32), (150, 32), dtype=torch.float16)
    counted = hbm_traffic(flash_attention_forward, q, k, v, BLOCK_M=32).bytes_read
    expect(
        bytes_read(100, 150, 32, 32, 2) == counted,
        f"the interpreter counted {counted} bytes for M=100, N=150, HEAD_DIM=32, BLOCK_M=32",
        diagnosis="wrong-value",
    )
    return "equal to what the interpreter counts"


# ---- 3.8 ------------------------------------------------------------------------------------------------------------


@exercise(
    "3.8",
    title="A causal mask that saves work",
    minutes=45,
    difficulty="Stretch",
    hints=[
        "Query i may see key j if j <= i + N - M: the last query sees the last key. Which tiles of s can have such a "
        "pair, for the rows of this program?",
        "The program's last row is start_m + BLOCK_M - 1, so no key from start_m + BLOCK_M + N - M on is ever seen: "
        "let the loop end at min(N, that). Mask the rest inside a tile: offs_n[None, :] <= offs_m[:, None] + N - M.",
        "With M > N the first rows see nothing: m_new stays -inf. Keep m_safe, and l_i == 0 gives o = 0. Triton's "
        "range takes a computed end: range(0, tl.minimum(N, last), BLOCK_N), with an end below 0 for no iteration.",
    ],
)
def _(flash_attention_causal_kernel: Any) -> Report:
    kernel = kernel_of(flash_attention_causal_kernel, FORWARD_PARAMETERS)
    forward = _forward(kernel)

    def causal_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Any:
        __tracebackhide__ = True
        if causal:
            return forward(q, k, v, scale=scale)
        # The cases without a mask are not this kernel's business: give them to the reference's low-precision twin.
        o, lse = reference.attention(*(x[None, None] for x in (q, k, v)), scale=scale)
        return o[0, 0].to(q.dtype), lse[0, 0].float()

    report = verify_one_head(causal_forward, causal=True, max_seq=200)
    q, k, v = _random((128, 32), (128, 32), (128, 32), dtype=torch.float16)
    row = 32 * 2  # bytes
    needed = (32 + 64 + 96 + 128) * row  # of K, by the four programs of 32 rows
    read = hbm_traffic(_launcher(kernel), q, k, v).read_from["k"]
    expect(
        read <= needed,
        f"right, but it reads {read} bytes of K for M = N = 128 and BLOCK_M = BLOCK_N = 32, where {needed} suffice: "
        "end the loop where the program's last row stops seeing keys",
        diagnosis="causal-tiles-not-skipped",
    )
    compiles(kernel, compile_arguments(torch.float16, 64))
    return report
