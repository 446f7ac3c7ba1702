"""`verify` and its fronts: run an attention function on every case; say how exact it is, or why it is wrong."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from flashlab import runtime
from flashlab.check.cases import Case, case_list, make_inputs
from flashlab.check.diagnose import diagnose
from flashlab.check.failed import CheckFailed
from flashlab.check.first_nan import where_made
from flashlab.check.mistakes import weights
from flashlab.check.observation import Observation
from flashlab.check.poison import MarkedEmpty, memory, unwritten
from flashlab.check.running import one_thread, running
from flashlab.check.symptoms import Symptoms, watched
from flashlab.check.tolerance import truth_of
from flashlab.check.training import GradientReport, gradient_cases, run_gradients
from flashlab.table import Table

Call = Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Any]


@dataclass(frozen=True)
class Report:
    """Success. `str(report)` is one line; `verdict` is one that is the same on every machine; `details` is a table.

    worst is the largest error over all cases, as a multiple of the eager low-precision attention's error in that case
    (of one rounding, where that attention happens to be exact); lse_error the largest |error| / max(1, |lse|).
    gradients is what was found of dq, dk and dv, where they were asked for.
    """

    cases: int
    worst: float
    lse_error: float | None
    details: Table = field(repr=False, compare=False)
    gradients: GradientReport | None = None

    @property
    def verdict(self) -> str:
        gradients = "" if self.gradients is None else f" and {self.gradients.cases} of the gradient"
        return f"{self.cases} cases{gradients}, all within their bounds"

    def __repr__(self) -> str:
        lse = "" if self.lse_error is None else f" · lse error {self.lse_error:.1e}"
        gradients = "" if self.gradients is None else f" · {self.gradients}"
        return f"✓ {self.cases} cases · worst error {self.worst:.2f} × the low-precision twin's{lse}{gradients}"


def verify(
    fn: Callable[..., Any],
    *,
    causal: bool = False,
    dtypes: Sequence[torch.dtype] = (torch.float16,),
    head_dims: Sequence[int] = (64,),
    gqa: bool = False,
    cross: bool = True,
    strided: bool = True,
    empty: bool = False,
    lse: bool = True,
    max_seq: int | None = None,
    max_tile: int = 256,
    deterministic: bool = False,
    full: bool = False,
    grads: bool = False,
) -> Report:
    """Check an attention function on every case; return a `Report`, or raise `CheckFailed` with a diagnosis.

    fn(q, k, v, *, causal, scale) -> (o, lse), with q [batch, heads, seq_q, head_dim], k and v [batch, kv_heads, seq_k,
    head_dim], o like q, lse [batch, heads, seq_q] in float32 (natural logarithm). A function without a `causal` or
    `scale` parameter is called without it.

    causal          test the causal mask too (aligned bottom-right; a row that sees no key gives o = 0, lse = -inf).
    dtypes          the first is tested on every case, the others on the telling ones; likewise head_dims.
    gqa             test fewer K/V heads than query heads.
    cross           test seq_q != seq_k.
    strided         test inputs that are not contiguous.
    empty           test no keys (o = 0, lse = -inf), no queries, no batch.
    lse             False for a function that returns o alone.
    max_seq         leave out longer cases.
    max_tile        128 for a function whose tiles are no larger, to save time.
    deterministic   run a case twice and compare bit by bit.
    full            add long cases, for a GPU or for CI.
    grads           test dq, dk and dv too, on cases of their own: autograd has to lead from o to q, k and v.

    An exception raised by `fn` passes through, with a note that names the case.
    """
    __tracebackhide__ = True
    takes = _parameters(fn)
    if causal and "causal" not in takes:
        said = "the function has no parameter `causal`, which it is asked to support"
        raise CheckFailed(said, diagnosis="wrong-call")

    def call(case: Case, q, k, v):
        __tracebackhide__ = True
        return fn(q, k, v, **_options(case, takes))

    common: dict[str, Any] = dict(
        causal=causal,
        dtypes=dtypes,
        head_dims=head_dims,
        gqa=gqa,
        cross=cross,
        strided=strided,
        empty=empty,
        scaled="scale" in takes,
        max_seq=max_seq,
        full=full,
    )
    report = run(call, case_list(max_tile=max_tile, **common), lse=lse, deterministic=deterministic)
    if not grads:
        return report
    return replace(report, gradients=run_gradients(call, gradient_cases(**common), deterministic=deterministic))


def verify_one_head(
    fn: Callable[..., Any],
    *,
    causal: bool = False,
    always_causal: bool = False,
    dtypes: Sequence[torch.dtype] = (torch.float16,),
    head_dims: Sequence[int] = (64,),
    max_seq: int | None = None,
    max_tile: int = 256,
) -> Report:
    """`verify` for fn(q, k, v, *, causal, scale) -> (o, lse) on one head: q and o [M, D], k and v [N, D], lse [M].

    always_causal: the function has the mask built in, and no parameter for it. max_tile: 128 for a function whose tiles
    are no larger, to save time.
    """
    __tracebackhide__ = True
    takes = _parameters(fn)

    def call(case: Case, q, k, v):
        __tracebackhide__ = True
        return as_batch(fn(q[0, 0], k[0, 0], v[0, 0], **_options(case, takes)))

    cases = case_list(
        causal=causal or always_causal,
        dtypes=dtypes,
        head_dims=head_dims,
        strided=False,
        batched=False,
        scaled="scale" in takes,
        max_seq=max_seq,
        max_tile=max_tile,
    )
    if always_causal:
        cases = list(dict.fromkeys(replace(case, causal=True) for case in cases))
    for layout in ("q by columns", "k by columns", "v by columns"):
        cases.append(replace(cases[0], name=f"{layout}, the others not", seq_q=40, seq_k=40, layout=layout))
    return run(call, cases, one_head=True)


def verify_block(
    fn: Callable[..., Any],
    *,
    block_sizes: Sequence[int] = (16, 32, 64),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    head_dims: Sequence[int] = (64,),
) -> Report:
    """`verify` for fn(Q_block, K, V, BLOCK_N) -> (O_block, lse): one block of queries against all keys, in tiles.

    Q_block and O_block are [BLOCK_M, D], K and V [N, D], lse [BLOCK_M]. Every case is run with one of `block_sizes`,
    the telling ones with all of them. A function with a parameter `scale` is given it by name.
    """
    __tracebackhide__ = True
    takes = {name: left for name, left in _parameters(fn).items() if name == "scale"}

    def call(case: Case, q, k, v):
        __tracebackhide__ = True
        return as_batch(fn(q[0, 0], k[0, 0], v[0, 0], case.block_n, **_options(case, takes)))

    cases = case_list(dtypes=dtypes, head_dims=head_dims, strided=False, batched=False, scaled="scale" in takes)
    cases = [replace(case, seq_q=min(case.seq_q, 64)) for case in cases]
    tiled = []
    for i, case in enumerate(cases):
        everything = case.content in ("rising", "late") or case.name == "a last block that is not full"
        chosen = block_sizes if everything else [block_sizes[i % len(block_sizes)]]
        tiled += [replace(case, block_n=block_n) for block_n in chosen]
    return run(call, tiled, one_head=True)


def _options(case: Case, takes: dict[str, bool]) -> dict[str, Any]:
    """What a function with these parameters is called with; those that have a default may be left out."""
    options = {"causal": case.causal, "scale": case.softmax_scale}
    return {x: value for x, value in options.items() if x in takes and not (case.omit_defaults and takes[x])}


# Sentences that are better with the line in which NaN arise.
_OF_NAN = (
    "wrong-value", "nan-everywhere", "correction-inverted", "masked-rows-nan", "masked-rows-lse", "nan-hidden",
    "rows-not-computed",
)  # fmt: skip


@one_thread()
def run(
    call: Call, cases: Sequence[Case], *, lse: bool = True, deterministic: bool = False, one_head: bool = False
) -> Report:
    """Run `call(case, q, k, v)` on every case: all of `verify` but the choice of the cases and of the call.

    one_head: the learner's own tensors have no batch and heads; sentences about shapes then leave them out.
    """
    __tracebackhide__ = True
    observations: list[Observation] = []
    wrong, kept = False, None
    for case in cases:
        try:
            observation, o = _observe(call, case, lse, one_head)
        except Exception:
            if wrong:
                break  # the earlier case tells the simpler story
            raise
        observations.append(observation)
        if (seen := watched()) is not None:
            _note(seen, observation)
        wrong = wrong or not observation.ok
        kept = kept or (case, o, o.clone())
    if wrong:
        failed = _maximum_of_padding(diagnose(observations), call, observations, lse, one_head)
        raise _with_weights(_with_first_nan(failed, call, observations), call, observations)
    if kept is not None:
        _expect_own_output(*kept)
    if deterministic:
        _expect_same_twice(call, cases, lse, one_head)
    return _report(observations)


def _maximum_of_padding(
    failed: CheckFailed, call: Call, observations: Sequence[Observation], lse: bool, one_head: bool
) -> CheckFailed:
    """Whether a maximum that seems to start at 0 is that of rows past the end: not so where tiles are full."""
    negative = [seen.case for seen in observations if str(seen.case) == failed.case and seen.case.block_n is None]
    if failed.diagnosis != "m-starts-at-zero" or watched() is not None or not negative:
        return failed
    try:
        full, _ = _observe(call, replace(negative[-1], seq_q=128), lse, one_head)
    except Exception:
        return failed
    if not full.ok:
        return failed
    said = "one maximum is taken for all rows of a tile: wrong where all scores are far below 0 and the tile has rows "
    said += "past the end, whose scores are 0, and right with 128 rows, where it has none. Each row has its own "
    said += "maximum"
    return CheckFailed(said, diagnosis="one-maximum", case=failed.case)


def _with_first_nan(failed: CheckFailed, call: Call, observations: Sequence[Observation]) -> CheckFailed:
    """With the line in which NaN arise, where the outputs show some, or rows of 0 that may hide them."""
    if failed.diagnosis not in _OF_NAN or watched() is not None:
        return failed
    lost = [x for x in observations if not x.ok and (x.o.isnan().any() or (x.lse is not None and x.lse.isnan().any()))]
    for seen in lost or [seen for seen in observations if str(seen.case) == failed.case]:
        inputs = make_inputs(seen.case, runtime.device())
        with contextlib.suppress(Exception):  # the first run raised nothing, and has its verdict
            if made := where_made(partial(call, seen.case, *inputs)):
                slug, sentence = failed.diagnosis, f"{failed.sentence}. NaN arises in {made}"
                if slug == "wrong-value":
                    slug = "not-finite"
                    has = "lse" if seen.lse is not None and not seen.o.isnan().any() else "o"
                    rest = failed.sentence
                    sentence = f"{has} has NaN, which arises in {made}. {rest[0].upper()}{rest[1:]}"
                return CheckFailed(sentence, diagnosis=slug, case=failed.case)
        break
    return failed


def _with_weights(failed: CheckFailed, call: Call, observations: Sequence[Observation]) -> CheckFailed:
    """What the weights of single keys tell, where the outputs of the cases told nothing but that they are wrong."""
    if failed.diagnosis not in ("wrong-value", "masked-rows-not-zero") or "?" in failed.sentence or watched():
        return failed
    cases = [replace(seen.case, seq_q=0, seq_k=0) for seen in observations if not seen.ok]
    told_apart = {(c.dtype, c.head_dim, c.causal, c.softmax_scale, c.block_n): c for c in reversed(cases)}
    for case in reversed(told_apart.values()):
        try:
            found = weights.explain(call, case)
        except Exception:  # the probe is another input: what fails there does not explain what failed here
            continue
        if found:
            return CheckFailed(found[1], diagnosis=found[0], case=found[2])
    return failed


def _note(seen: Symptoms, observation: Observation) -> None:
    """What can be seen of one case, for a bug hunt that is as it was given."""
    case, truth = str(observation.case), observation.truth
    seen.compared(case, "o", observation.o, truth.o, truth.o_bound, ("batches", "heads", "rows", "columns"))
    if observation.lse is not None:
        seen.compared(case, "lse", observation.lse, truth.lse, truth.lse_bound, ("batches", "heads", "rows"))


def _observe(call: Call, case: Case, lse: bool, one_head: bool) -> tuple[Observation, torch.Tensor]:
    __tracebackhide__ = True
    device = runtime.device()
    inputs = dict(zip("qkv", make_inputs(case, device), strict=True))
    before = {name: memory(x) for name, x in inputs.items()}
    with running(str(case)), MarkedEmpty():
        result = call(case, *inputs.values())
    o, row_lse = _outputs(result, case, device, lse, one_head)
    for name, x in inputs.items():
        if not torch.equal(memory(x), before[name]):
            said = f"the function changes its input {name}, or writes outside of its own output"
            raise CheckFailed(said, diagnosis="input-modified", case=str(case))
    never = row_lse is not None and row_lse.numel() > 0 and bool(unwritten(row_lse.detach().cpu()).all())
    row_lse = None if row_lse is None else row_lse.detach().cpu().double()
    observed = o.detach().cpu()
    return Observation(case, truth_of(case), observed.double(), row_lse, unwritten(observed), never), o


def _outputs(
    result: Any, case: Case, device: torch.device, lse: bool, one_head: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Take the function's result apart; CheckFailed when it is not tensors of the right shape, dtype and device."""
    __tracebackhide__ = True

    def fail(slug: str, sentence: str) -> None:
        __tracebackhide__ = True
        raise CheckFailed(sentence, diagnosis=slug, case=str(case))

    if result is None:
        fail("returned-none", "the function returned None: is the `return` missing?")
    if lse and isinstance(result, torch.Tensor):
        fail("wrong-type", "the function returned one tensor; it should return two, (o, lse)")
    if lse and (not isinstance(result, (tuple, list)) or len(result) != 2):
        count = f" of {len(result)} values" if isinstance(result, (tuple, list)) else ""
        fail("wrong-type", f"the function returned a {type(result).__name__}{count}; it should return (o, lse)")
    o, row_lse = result if lse else (result[0] if isinstance(result, (tuple, list)) and result else result, None)
    shape = (case.batch, case.heads, case.seq_q, case.head_dim)
    wanted = {"o": (o, shape, (case.dtype,)), "lse": (row_lse, shape[:3], (torch.float32, torch.float64))}
    for name, (x, size, dtypes) in wanted.items():
        if name == "lse" and not lse:
            continue
        if not isinstance(x, torch.Tensor):
            fail("wrong-type", f"{name} is a {type(x).__name__}; it should be a tensor")
        if tuple(x.shape) != size:
            skip = 2 if one_head else 0
            sizes = [tuple(each.shape) if isinstance(each, torch.Tensor) else () for each, _, _ in wanted.values()]
            if lse and sizes[::-1] == [size for _, size, _ in wanted.values()]:
                fail("wrong-order", "o and lse are exchanged: return (o, lse)")
            fail("wrong-shape", f"{name} has shape {list(x.shape[skip:])}; it should be {list(size[skip:])}")
        if x.dtype not in dtypes:
            fail("wrong-dtype", f"{name} is {x.dtype}; it should be {dtypes[0]}")
        if x.device.type != device.type:
            fail("wrong-device", f"{name} is on {x.device}; it should be on the inputs' device, {device}")
    return o, row_lse


def as_batch(result: Any) -> Any:
    """Add batch and heads of 1 to whatever tensors a one-head function returned."""
    if isinstance(result, torch.Tensor):
        return result[None, None]
    if isinstance(result, (tuple, list)):
        return tuple(x[None, None] if isinstance(x, torch.Tensor) else x for x in result)
    return result


def _expect_own_output(case: Case, o: torch.Tensor, before: torch.Tensor) -> None:
    __tracebackhide__ = True
    if not torch.equal(o, before):
        said = "a later call changed the output of an earlier one: each call needs an output of its own"
        raise CheckFailed(said, diagnosis="output-reused", case=str(case))


def _expect_same_twice(call: Call, cases: Sequence[Case], lse: bool, one_head: bool) -> None:
    __tracebackhide__ = True
    case = max(cases, key=lambda c: c.batch * c.heads * c.seq_q * c.seq_k)
    (first, _), (second, _) = _observe(call, case, lse, one_head), _observe(call, case, lse, one_head)
    if not torch.equal(first.o, second.o):
        said = "two runs on the same input differ in their last bits: the order of a sum is not fixed"
        raise CheckFailed(said, diagnosis="not-deterministic", case=str(case))


def _parameters(fn: Callable[..., Any]) -> dict[str, bool]:
    """The names that `fn` takes by keyword, and whether each has a default."""
    __tracebackhide__ = True
    if not callable(fn):
        raise CheckFailed(f"a function is expected, not a {type(fn).__name__}", diagnosis="wrong-type")
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return {"causal": False, "scale": False}
    whatever = {"causal": False, "scale": False} if any(p.kind is p.VAR_KEYWORD for p in parameters) else {}
    named = (p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return whatever | {p.name: p.default is not p.empty for p in named}


def _report(observations: Sequence[Observation]) -> Report:
    rows, worst, worst_lse = [], 0.0, None
    for seen in observations:
        error = (seen.o - seen.truth.o).abs().max().item() if seen.o.numel() else 0.0
        ratio = error / seen.truth.unit if seen.truth.unit else 0.0
        worst = max(worst, ratio)
        lse_error = ""
        if seen.lse is not None:
            off = torch.where(seen.lse == seen.truth.lse, 0.0, (seen.lse - seen.truth.lse).abs())
            relative = (off / seen.truth.lse.abs().clamp(min=1.0)).max().item() if off.numel() else 0.0
            worst_lse = max(worst_lse or 0.0, relative)
            lse_error = f"{relative:.1e}"
        bound = seen.truth.o_bound.max().item() if seen.o.numel() else 0.0
        cells = (f"{error:.1e}", f"{bound:.1e}", f"{seen.truth.twin_error:.1e}", f"{ratio:.2f}", lse_error)
        rows.append((str(seen.case), *cells))
    columns = ("Case", "Error", "Bound", "Twin's error", "Ratio", "lse error")
    return Report(len(observations), worst, worst_lse, Table(columns, tuple(rows), align="lrrrrr"))
