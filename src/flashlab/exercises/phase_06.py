"""The checks of phase 6: CUDA sources as text, built and run by the emulator.

Each source is built twice. The check build comes first: what it finds (a race, a bad address) is told in the finding's
own words, with the lines quoted. Then the results are compared, of the fast build too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashlab.attention.cost import FA1_BLOCK_N, FA2_BLOCK_M, fa1_cost, fa2_cost
from flashlab.check import CheckFailed, Report, expect, expect_close, running, verify
from flashlab.check.cuda_answer import Source, replaced
from flashlab.cuda import CudaModule, load_inline
from flashlab.exercises.registry import exercise
from flashlab.kernels import steps
from flashlab.kernels.series import Step
from flashlab.simt import CompileError, Counters, Finding, Module, SimtError, compile_cuda

HOLE = "YOUR CODE HERE"


def _text(answer: Any) -> str:
    """The learner's source, once it is text and the hole is filled."""
    __tracebackhide__ = True
    expect(isinstance(answer, str), "the CUDA source is expected, as text", diagnosis="wrong-type")
    if HOLE in answer:
        raise NotImplementedError
    return answer


def _compiled(source: Source, build: Callable[[], Module]) -> Module:
    __tracebackhide__ = True
    try:
        return build()
    except CompileError as error:
        lines = getattr(error, "log", str(error)).splitlines()
        message = next((x for x in lines if "error:" in x), lines[0])
        message = re.sub(r"^.*?\.cu:(\d+)(:\d+)?: (fatal )?error: ", lambda m: f"{source.place(int(m[1]))} ", message)
        raise CheckFailed(f"it does not compile: {message}", diagnosis="does-not-compile") from None


def _failure(findings: Sequence[Finding], source: Source, case: str | None) -> CheckFailed:
    """What ended the launch says most; then a race, of which an uninitialised read may be the consequence."""
    first = min(findings, key=lambda f: (not f.fatal, f.kind != "race"))
    short = replace(first, message=re.sub(r" \(called from line \d+\)", "", first.message))
    return CheckFailed(source.told(short), diagnosis=first.kind, case=case)


def _launch(module: Module, source: Source, case: str | None, call: Callable[[], Any]) -> Any:
    """call() returns what it likes, the emulator's report last. CheckFailed with what was found."""
    __tracebackhide__ = True
    try:
        result = call()
    except SimtError as error:
        findings = getattr(error.report, "findings", None)
        if not findings:
            raise CheckFailed(str(error), diagnosis="launch-failed", case=case) from None
        raise _failure(findings, source, case) from None
    report = result[-1] if isinstance(result, tuple) else result
    if report.findings:
        raise _failure(report.findings, source, case)
    return result


class _Toy:
    """A small source with an extern "C" function `run(..., void* stream)`, in both builds."""

    def __init__(self, answer: Any):
        __tracebackhide__ = True
        self.source = Source(_text(answer), "kernel")
        self.builds = [
            _compiled(self.source, lambda check=check: compile_cuda(self.source.text, check=check))
            for check in (True, False)
        ]
        entries = self.builds[0].entries
        expect("run" in entries, 'the source should keep its extern "C" function `run`', diagnosis="wrong-type")

    def __call__(self, *args: Any, case: str, fast: bool = False) -> Counters:
        __tracebackhide__ = True
        module = self.builds[fast]
        return _launch(module, self.source, case, lambda: module.launch("run", *args, None, echo=False)).counters


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- 6.1 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.1",
    title="Which element is mine?",
    minutes=10,
    difficulty="Warm-up",
    hints=[
        "Blocks lie side by side: how many threads in x-direction come before this block's first one?",
        "col = blockIdx.x * blockDim.x + threadIdx.x, and the same in y for the row. Element (row, col) is number "
        "row * cols + col.",
        "Before anything is read: if (row >= rows || col >= cols) return; both can happen, at the right edge and at "
        "the bottom.",
    ],
)
def _(add_bias: str) -> str:
    toy = _Toy(add_bias)
    shapes = [(4, 32), (8, 64), (10, 50), (7, 33), (1, 1), (3, 100)]
    for rows, cols in shapes:
        case = f"rows={rows}, cols={cols}"
        x, bias = _random(rows, cols), _random(cols, seed=1)
        for fast in (False, True):
            y = torch.full((rows, cols), math.nan)
            counters = toy(x, bias, y, rows, cols, case=case, fast=fast)
            missing = int(y.isnan().sum())
            expect(
                missing == 0,
                f"{missing} of {rows * cols} elements of y were never written: does every (row, col) have a thread?",
                diagnosis="elements-missing",
                case=case,
            )
            wrong = x + bias[:1]
            expect_close(
                y,
                x + bias,
                what="y",
                case=case,
                mistakes={
                    "no-bias": (x, "y is x: the bias is missing"),
                    "one-bias": (wrong, "every column got bias[0]"),
                },
            )
            if not fast and cols % 32 == 0:
                expect(
                    counters["global_load_sectors"] <= counters["global_load_ideal"],
                    f"right, but the loads touch {counters['global_load_sectors']} sectors where "
                    f"{counters['global_load_ideal']} suffice: threadIdx.x should run along the row",
                    diagnosis="not-coalesced",
                    case=case,
                )
    return f"{len(shapes)} shapes, both builds"


# ---- 6.2 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.2",
    title="The sum that is sometimes right",
    minutes=10,
    difficulty="Bug hunt",
    hints=[
        "Both lines of the race are the same line, in different rounds of the loop. Who writes part_smem[40] in the "
        "first round, and who reads it in the second?",
        "Every round reads what other threads wrote in the round before. What has to come between two rounds?",
        "One __syncthreads() in the loop. Careful where: inside the `if`, not every thread would reach it.",
    ],
)
def _(block_sum: str) -> str:
    toy = _Toy(block_sum)
    for blocks in (1, 3):
        x = 1 + _random(blocks, 128, seed=blocks).abs()
        for fast in (False, True):
            y = torch.full((blocks, 128), math.nan)
            counters = toy(x, y, blocks, case=f"blocks={blocks}", fast=fast)
            expect_close(y, x / x.sum(1, keepdim=True), what="y = x / sum", case=f"blocks={blocks}", tol=1e-5)
            expect(
                fast or counters["shared_loads"] < 60 * blocks,
                "right, but the tree is gone: half of the threads that are left should add, in each round",
                diagnosis="no-tree",
            )
    return "no race, right fractions"


# ---- 6.3 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.3",
    title="A transpose that wastes nothing",
    minutes=25,
    difficulty="Core",
    hints=[
        "threadIdx.x must run along a row of x when you load, and along a row of y when you store. So a thread stores "
        "another number than the one it loaded: that is what the tile is for.",
        "for (int i = threadIdx.y; i < 32; i += 8): load tile_smem[i][threadIdx.x]; barrier; in a second loop of the "
        "same kind store tile_smem[threadIdx.x][i] to row 32 * blockIdx.x + i of y. Each loop has its own guard.",
        "tile_smem[threadIdx.x][i] is a column of the tile: 32 words of one bank, if rows are 32 words long. Make "
        "them 33.",
        "Do not `return` early at the edges: all threads have to reach the barrier. Put guards around the accesses.",
    ],
)
def _(transpose: str) -> str:
    toy = _Toy(transpose)
    shapes = [(64, 96), (32, 32), (50, 70), (33, 5), (1, 40)]
    for rows, cols in shapes:
        case = f"rows={rows}, cols={cols}"
        x = _random(rows, cols)
        for fast in (False, True):
            y = torch.full((cols, rows), math.nan)
            counters = toy(x, y, rows, cols, case=case, fast=fast)
            expect_close(
                y,
                x.T,
                what="y",
                case=case,
                mistakes={
                    "not-transposed": (x.reshape(cols, rows), "y is x itself: nothing was transposed"),
                    "tiles-only": (
                        _tiles_swapped(x),
                        "the tiles went to their places, but inside a tile nothing moved",
                    ),
                },
            )
            if fast or rows % 32 or cols % 32:
                continue
            for kind, matrix in (("load", "x"), ("store", "y")):
                sectors, ideal = counters[f"global_{kind}_sectors"], rows * cols // 8
                expect(
                    sectors <= ideal,
                    f"right, but the {kind}s touch {sectors} sectors where {ideal} suffice: let threadIdx.x run "
                    f"along a row of {matrix}",
                    diagnosis="not-coalesced",
                    case=case,
                )
            expect(
                counters.bank_conflicts == 0,
                f"right, and coalesced, but shared memory takes {counters.bank_conflicts} wavefronts more than needed: "
                "a column of the tile lies in one bank",
                diagnosis="bank-conflicts",
                case=case,
            )
    return f"{len(shapes)} shapes, no sector and no wavefront too many"


def _tiles_swapped(x: torch.Tensor) -> torch.Tensor:
    """x [rows, cols] with its 32 x 32 tiles transposed as a matrix of tiles, each left as it is."""
    rows, cols = x.shape
    if rows % 32 or cols % 32:
        return torch.full((cols, rows), math.nan)
    return x.reshape(rows // 32, 32, cols // 32, 32).permute(2, 1, 0, 3).reshape(cols, rows)


# ---- 6.4 ------------------------------------------------------------------------------------------------------------


@exercise(
    "6.4",
    title="Online softmax of a row, in one warp",
    minutes=30,
    difficulty="Core",
    hints=[
        "The loop is for (int i = threadIdx.x; i < n; i += 32). With a new value: m_new = max(m, value), and what "
        "happens to l when the maximum moves?",
        "l = l * expf(m - m_new) + expf(value - m_new); m = m_new. The first time m is -INFINITY and expf gives 0.",
        "Merging two states is the same with two sums: fetch m and l of lane ^ step, then l * expf(m - m_new) + "
        "l_other * expf(m_other - m_new). Fetch both before you change either.",
        "If both lanes are empty, m_new is -INFINITY and m - m_new is NaN. Subtract base = m_new == -INFINITY ? 0 : "
        "m_new instead.",
    ],
)
def _(row_lse: str) -> str:
    toy = _Toy(row_lse)
    cases = 0
    for n in (64, 100, 257, 32, 5, 1):
        for kind in ("random", "rising", "near -200", "near 300"):
            case = f"n={n}, scores {kind}"
            x = 3 * _random(4, n, seed=n) + {"near -200": -200, "near 300": 300}.get(kind, 0)
            x = x.sort(1).values if kind == "rising" else x
            want = torch.logsumexp(x.double(), 1)
            whole = torch.cat([x.flatten(), torch.zeros(64)])
            padded = torch.stack([whole[r * n : r * n - (-n // 32) * 32] for r in range(4)])
            first = [x[:, lane::32] for lane in range(min(32, n))]
            unscaled = torch.stack([_no_rescale(part) for part in first], 1)  # [rows, lanes]
            alone = torch.logsumexp(x[:, ::32].double(), 1)
            for fast in (False, True):
                lse = torch.full((4,), math.nan)
                counters = toy(x, lse, 4, n, case=case, fast=fast)
                if lse.isnan().any() and want.isfinite().all():
                    raise CheckFailed(
                        "the log-sum-exp is NaN: some lanes have no element, and their -INFINITY - (-INFINITY) is NaN",
                        diagnosis="nan-from-empty-lanes",
                        case=case,
                    )
                expect_close(
                    lse,
                    want,
                    what="the log-sum-exp",
                    case=case,
                    tol=1e-3,
                    mistakes={
                        "tail-not-masked": (
                            torch.logsumexp(padded.double(), 1),
                            "elements past the end of the row were counted: they belong to the next row",
                        ),
                        "lanes-not-merged": (alone, "that is lane 0's own part: the 32 states were not merged"),
                        "no-rescale": (
                            torch.logsumexp(unscaled, 1),
                            "wrong where a lane's maximum moves: l was not rescaled to the new maximum",
                        ),
                    },
                )
                if not fast:
                    _expect_one_pass(counters, n, case)
                cases += 1
    return f"{cases // 2} cases in both builds, each row read once"


def _no_rescale(x: torch.Tensor) -> torch.Tensor:
    """The log-sum-exp of each row of x when l is never rescaled."""
    running_maximum = x.double().cummax(1).values
    return running_maximum[:, -1] + torch.exp(x.double() - running_maximum).sum(1).log()


def _expect_one_pass(counters: Counters, n: int, case: str) -> None:
    __tracebackhide__ = True
    loads, needed = counters["global_loads"], 4 * -(-n // 32)
    expect(
        loads <= needed,
        f"right, but a warp loads {loads / 4:g} times for a row where {needed // 4} suffice: read the row once, and "
        "give lane t the elements t, t + 32, ...",
        diagnosis="read-twice",
        case=case,
    )
    expect(
        counters["global_load_sectors"] <= 4 * (n // 8 + 2 + n // 32),
        f"right, but the loads touch {counters['global_load_sectors']} sectors: neighbouring lanes should take "
        "neighbouring elements",
        diagnosis="not-coalesced",
        case=case,
    )
    expect(
        counters["shared_stores"] == 0,
        "right, but it uses shared memory: merge the states with __shfl_xor_sync",
        diagnosis="uses-shared-memory",
        case=case,
    )


# ---- 6.5 and 6.6: parts of p6_2_loop_order.cu -----------------------------------------------------------------------

FRAME: Step = steps(6)[1]
_PROBES = ((1, 1, 1, 70, 100, False), (1, 2, 1, 130, 130, True), (1, 1, 1, 50, 20, True))


def _forward(module: CudaModule, *tensors: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    return *module.forward(*tensors, **options), module.report


def _verified(source: Source) -> Report:
    """A whole kernel in float32: the check build on a few shapes, then the checker's cases on the fast one."""
    __tracebackhide__ = True
    checked, fast = (
        _compiled(
            source, lambda check=check: load_inline(source.text, backend="emulator", dtype=torch.float32, check=check)
        )
        for check in (True, False)
    )
    for batch, heads, kv_heads, seq_q, seq_k, causal in _PROBES:
        case = f"heads={heads}, kv_heads={kv_heads}, seq_q={seq_q}, seq_k={seq_k}{', causal' if causal else ''}"
        q, k, v = (_random(batch, h, n, 64, seed=n) for h, n in ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k)))
        _launch(checked, source, case, lambda q=q, k=k, v=v, causal=causal: _forward(checked, q, k, v, causal=causal))

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float) -> Any:
        __tracebackhide__ = True
        q_, k_, v_ = (x.cpu().contiguous() for x in (q, k, v))
        o, lse, _ = _launch(fast, source, None, lambda: _forward(fast, q_, k_, v_, causal=causal, scale=scale))
        return o.to(q.device), lse.to(q.device)

    return verify(forward, causal=True, dtypes=(torch.float32,), gqa=True, max_seq=200)


@exercise(
    "6.5",
    title="Right for every multiple of 32",
    minutes=15,
    difficulty="Bug hunt",
    hints=[
        "The first bug is an address: with 100 keys, the fourth tile has 4 rows, and the copy takes 32.",
        "Copy a row only if row < rows, and put zeros otherwise. Then run the check again: the addresses are right, "
        "the numbers are not. What score does a key of zeros get, and what is exp of it?",
        "A missing key's score has to be -INFINITY, before the maximum is taken: s[n] = n < keys ? s[n] * scale_log2 : "
        "-INFINITY.",
    ],
)
def _(copy_chunk: str, scale_scores: str) -> Report:
    copy, scores = _text(copy_chunk), _text(scale_scores)
    return _verified(replaced(replaced(FRAME, "copy a chunk", copy), "mask", scores))


@exercise(
    "6.6",
    title="FlashAttention-2's inner loop",
    minutes=45,
    difficulty="Core",
    hints=[
        "Keep the simulation of phase 2 beside you. One thread has one row, so m_i and l_i are plain numbers, and a "
        "tile of scores is float s[BLOCK_N].",
        "keys = (p.causal ? min(p.seq_k, m_start + row + diagonal + 1) : p.seq_k) - n_start. It may be 0 or negative: "
        "then n < keys is never true, and all scores are -INFINITY.",
        "s[n] = dot(q_rmem[c], k_smem[n][c], s[n]) over all c; then s[n] = n < keys ? s[n] * scale_log2 : -INFINITY, "
        "and the maximum of those.",
        "m_new = fmaxf(m_i, m_tile); base = m_new == -INFINITY ? 0 : m_new; correction = exp2_approx(m_i - base); "
        "s[n] = exp2_approx(s[n] - base). With base no difference is ever -INFINITY - (-INFINITY).",
        "m_i = m_new, l_i = l_i * correction + the sum of s; for each chunk acc[c] = scaled(correction, acc[c]), then "
        "acc[c] = axpy(s[n], v_smem[n][c], acc[c]) for all n. Do not divide: that is done after the loop.",
    ],
)
def _(inner_loop: str) -> Report:
    return _verified(replaced(FRAME, "one tile", _text(inner_loop)))


# ---- 6.7 ------------------------------------------------------------------------------------------------------------


def _causal_bytes(N: int, D: int, block_m: int, block_n: int) -> tuple[int, int]:
    visits = sum(N - start for start in range(0, N, block_n))
    keys = sum(min(N, start + block_m) for start in range(0, N, block_m))
    return 4 * (2 * N * D + visits * (2 * D + 2) + 2 * N), 4 * (N * D + 2 * D * keys)


@exercise(
    "6.7",
    title="Count the bytes of a causal mask",
    minutes=30,
    difficulty="Stretch",
    hints=[
        "FA1's order: which rows see a key of the tile that starts at n_start? Row i sees the keys 0 to i, so those "
        "with i >= n_start: N - n_start rows. Each of them reads a row of Q, a row of O, m and l.",
        "FA2's order: the block that starts at m_start has m_start + BLOCK_M - 1 as its last row. It reads the keys 0 "
        "to that one, but no more than N, of K and of V.",
        "FA1: 4 * (2ND + sum over n_start of (N - n_start) * (2D + 2) + 2N). "
        "FA2: 4 * (ND + sum over m_start of min(N, m_start + BLOCK_M) * 2D).",
    ],
)
def _(causal_bytes_read: Callable[..., Any]) -> str:
    expect(callable(causal_bytes_read), "a function is expected, not its result", diagnosis="wrong-type")
    for N, D, block_m, block_n in ((256, 64, 128, 32), (128, 64, 64, 64), (200, 64, 128, 32), (300, 128, 64, 16)):
        case = f"N={N}, D={D}, BLOCK_M={block_m}, BLOCK_N={block_n}"
        with running(case):
            got = causal_bytes_read(N, D, block_m, block_n)
        expect(isinstance(got, tuple) and len(got) == 2, "return two numbers, (FA1, FA2)", diagnosis="wrong-type")
        full = fa1_cost(N, N, D, block_n=block_n).bytes_read, fa2_cost(N, N, D, block_m=block_m).bytes_read
        for order, mine, want, unmasked in zip(
            ("FA1", "FA2"), got, _causal_bytes(N, D, block_m, block_n), full, strict=True
        ):
            expect_close(
                mine,
                want,
                what=f"the bytes that {order}'s order reads",
                case=case,
                tol=0.5,
                mistakes={
                    "nothing-skipped": (unmasked, f"{order}: that is the count without a mask"),
                    "halved": (unmasked / 2, f"{order}: half of the count without a mask is only nearly right"),
                    "numbers": (want / 4, f"{order}: that counts numbers; a float32 has 4 bytes"),
                },
            )
    q, k, v = (_random(1, 1, 200, 64, seed=i) for i in range(3))
    for order, step, mine in zip(
        ("FA1", "FA2"), steps(6)[:2], causal_bytes_read(200, 64, FA2_BLOCK_M, FA1_BLOCK_N), strict=True
    ):
        module = load_inline(step, check=True)
        module.forward(q, k, v, causal=True)
        counted = module.report.counters["global_load_bytes"]
        expect(
            mine == counted, f"{order}: the emulator counted {counted} bytes for N=200, D=64", diagnosis="wrong-value"
        )
    return "equal to what the emulator counts"
