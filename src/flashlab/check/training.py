"""What an attention should give, forward and backward, with every option of the door; and how far off it may be.

The bounds of o and lse are those of `flashlab.check.tolerance`, and those of gradients follow it: each element's error
may be at most what its own terms allow after one rounding of P, of dS and of the result to the inputs' dtype, and the
largest at most 3 times what an eager attention in that dtype errs by (the rule of flash-attention's test suite).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.inputs import scale_of
from flashlab.attention.options import visible
from flashlab.attention.reference import Gradients
from flashlab.check.cases import Case, make_inputs
from flashlab.check.failed import CheckFailed
from flashlab.check.running import one_thread, running
from flashlab.check.tolerance import FLOAT32, bounded, excess


class Wanted(NamedTuple):
    """A right result in float64, and the allowed error of each element."""

    value: torch.Tensor
    bound: torch.Tensor

    def excess(self, got: torch.Tensor) -> float:
        """The largest error as a multiple of its bound: at most 1 where it is right; NaN where `got` has a NaN."""
        if got.shape != self.value.shape:
            raise ValueError(f"the result is {list(got.shape)}; {list(self.value.shape)} is wanted")
        got = got.detach().to(self.value.device).double()
        return excess(got, self.value, self.bound).max().item() if got.numel() else 0.0


def wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_o: torch.Tensor | None = None, **options: Any
) -> dict[str, Wanted]:
    """o and lse of an attention, and dq, dk and dv where `grad_o` is given, with their bounds; computed where q is.

    options: causal, scale, window, softcap, as `flashlab.attention.reference.attention` takes them.
    """
    q, k, v = (x.detach() for x in (q, k, v))
    truth = bounded(q, k, v, **options)
    found = {"o": Wanted(truth.o, truth.o_bound), "lse": Wanted(truth.lse, truth.lse_bound)}
    if grad_o is None:
        return found

    epsilon, tiny = torch.finfo(q.dtype).eps, torch.finfo(q.dtype).smallest_normal
    factor = abs(scale_of(options.get("scale"), q.shape[3]))
    group = q.shape[1] // k.shape[1]

    def shared(x: torch.Tensor) -> torch.Tensor:  # a key head's rows for each query head that reads them
        return x.double().abs().repeat_interleave(group, 1)

    grad_o = grad_o.detach()
    right = reference.attention_backward(grad_o, q, k, v, **options)
    eager = reference.low_precision_backward(grad_o, q, k, v, **options)
    do = grad_o.double().abs()
    p = _probabilities(q, k, **options)
    slopes = do @ shared(v).transpose(-1, -2) + (do * truth.o.abs()).sum(-1, keepdim=True)  # of dS / P, without signs
    allowed = 2 * epsilon + truth.score_error[..., None]
    # What is so small is lost: float32 below its normal numbers, as a GPU computes; a 16-bit number's last bits.
    lost = max(tiny * epsilon, 2.0**-126)
    off = (allowed * p + lost) * slopes + lost  # dS
    bounds = {
        "dq": factor * off @ shared(k),
        "dk": _shared_sum(factor * off.transpose(-1, -2) @ q.double().abs(), group),
        "dv": _shared_sum((allowed * p + lost).transpose(-1, -2) @ do, group),
    }
    for name, value, twin in zip(bounds, right, eager, strict=True):
        found[name] = _calibrated(value, bounds[name] + 64 * tiny * epsilon * max(q.shape[2], k.shape[2]), twin)
    return found


def _calibrated(value: torch.Tensor, analytic: torch.Tensor, twin: torch.Tensor) -> Wanted:
    """The analytic bound, cut at 3 times the largest error of the eager twin and one rounding of the largest result."""
    if not value.numel():
        return Wanted(value, analytic)
    error = (twin.double() - value).abs().max().nan_to_num(nan=float("inf")).item()
    rounding = torch.finfo(twin.dtype).eps * value.abs().max().item()
    floor = 8 * FLOAT32 * analytic.max().item() / torch.finfo(twin.dtype).eps
    return Wanted(value, analytic.clamp(max=3 * error + rounding + floor))


def _probabilities(q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
    """P [batch, heads, seq_q, seq_k] in float64: attention to the rows of the unit matrix."""
    unit = torch.eye(k.shape[2], dtype=torch.float64, device=k.device).expand(*k.shape[:2], -1, -1)
    return reference.attention(q, k, unit, **options)[0]


def _shared_sum(x: torch.Tensor, group: int) -> torch.Tensor:
    return x.unflatten(1, (-1, group)).sum(2) if x.numel() else x[:, ::group]


def worst(found: dict[str, Wanted], **got: torch.Tensor) -> tuple[str, float]:
    """The result that is furthest off, and its error as a multiple of its bound; NaN counts as infinite."""
    errors = {name: found[name].excess(x) for name, x in got.items()}
    return max(errors.items(), key=lambda item: float("inf") if item[1] != item[1] else item[1])


# ---- verify, for functions with a gradient --------------------------------------------------------------------------

Call = Callable[[Case, torch.Tensor, torch.Tensor, torch.Tensor], Any]


class GradientReport(NamedTuple):
    """Success: how many cases, and the largest error in units of its bound."""

    cases: int
    worst: float

    def __repr__(self) -> str:
        return f"{self.cases} cases of the gradient, worst error {self.worst:.2f} of its bound"


def gradient_cases(
    *, causal: bool, dtypes: Sequence[torch.dtype], head_dims: Sequence[int], gqa: bool, cross: bool, scaled: bool,
    strided: bool, empty: bool, max_seq: int | None, full: bool,
) -> list[Case]:  # fmt: skip
    """Short ones, each made to break one way of being wrong: tails, masks, heads, the size of the scores.

    The arguments are those of `flashlab.check.cases.case_list`.
    """
    first = Case("", 1, 1, dtype=dtypes[0], head_dim=head_dims[0])
    specs = _CASES + (_GROUPED if gqa else []) + (_CAUSAL if causal else [])
    cases = [replace(first, dtype=dtype, **spec) for dtype in dtypes for spec in specs]
    for head_dim in head_dims[1:]:
        cases += [replace(first, head_dim=head_dim, **_TAILS)]
        cases += [replace(first, head_dim=head_dim, causal=True, **_TAILS)] if causal else []
    cases += [replace(first, **spec) for spec in (_EMPTY if empty else []) + (_LONG if full else [])]
    cases += [replace(first, causal=True, **spec) for spec in (_LONG if full and causal else [])]
    if not cross:
        cases = [replace(c, seq_k=c.seq_q) for c in cases]
    if not strided:
        cases = [replace(c, layout="contiguous") for c in cases]
    if not scaled:
        cases = [replace(c, scale=None) for c in cases]
    if max_seq is not None:
        cases = [c for c in cases if max(c.seq_q, c.seq_k) <= max_seq]
    return list(dict.fromkeys(cases))


def _spec(name: str, seq_q: int, seq_k: int, **rest: Any) -> dict[str, Any]:
    return dict(name=name, seq_q=seq_q, seq_k=seq_k, **rest)


_TAILS = _spec("several tiles, the last not full", 50, 70, heads=2, kv_heads=2)
_CASES = [
    *(_spec("a short sequence", length, length) for length in (1, 2, 5, 17)),
    _TAILS,
    _spec("more queries than keys", 70, 33, batch=2),
    _spec("another scale", 33, 40, scale=0.7),
    _spec("every score near -200", 20, 37, content="near -200"),
    _spec("heads interleaved in memory", 20, 30, heads=3, kv_heads=3, layout="by token"),
]
_GROUPED = [_spec("grouped queries", 20, 33, heads=6, kv_heads=2, batch=2)]
_CAUSAL = [
    _spec("a square", 60, 60, causal=True),
    _spec("more keys than queries", 20, 53, causal=True),
    _spec("queries that see no key", 53, 20, causal=True),
]
_EMPTY = [_spec("no keys", 5, 0), _spec("no queries", 0, 5), _spec("no batch", 5, 5, batch=0)]
_LONG = [_spec("a long sequence", 513, 513, heads=2, kv_heads=2), _spec("a long sequence, few keys", 512, 130)]


@one_thread()
def run_gradients(call: Call, cases: Sequence[Case], *, deterministic: bool = False) -> GradientReport:
    """Run `call(case, q, k, v)` on every case and differentiate it; raise `CheckFailed` with a diagnosis.

    Its result is o or (o, lse, ...), from which autograd has to reach q, k and v. Half of the cases hand on a gradient
    of stride 0, as ``o.sum().backward()`` does. deterministic: each case twice, compared bit by bit.
    """
    __tracebackhide__ = True
    seen: list[tuple[Case, dict[str, Wanted], dict[str, torch.Tensor], tuple[torch.Tensor, ...]]] = []
    largest, failed = 0.0, False
    for number, case in enumerate(cases):
        q, k, v = (x.requires_grad_() for x in make_inputs(case, runtime.device()))
        generator = torch.Generator().manual_seed(number)
        grad_o = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(q.device, q.dtype)
        if number % 2:
            grad_o = torch.full((), 0.5, dtype=q.dtype, device=q.device).expand(q.shape)
        got = _differentiated(call, case, q, k, v, grad_o)
        if deterministic:
            again = _differentiated(call, case, q, k, v, grad_o)
            if name := next((name for name, x in got.items() if not _same(x, again[name])), None):
                said = f"{name} of two runs on the same input differ in their last bits: the order of a sum is not "
                said += "fixed"
                raise CheckFailed(said, diagnosis="not-deterministic", case=str(case))
        inputs = tuple(x.detach().cpu() for x in (q, k, v, grad_o))
        right = wanted(*inputs, causal=case.causal, scale=case.softmax_scale)
        _, error = worst(right, **got)
        seen.append((case, right, got, inputs))
        failed |= not error <= 1
        largest = max(largest, error)
    if failed:
        raise _diagnosed(seen)
    return GradientReport(len(seen), largest)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit, but for the bits of a NaN and of a zero's sign."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def _differentiated(call: Call, case: Case, q, k, v, grad_o) -> dict[str, torch.Tensor]:
    """o, dq, dk and dv, of the right shapes and dtypes."""
    __tracebackhide__ = True
    with running(str(case)), torch.enable_grad():
        result = call(case, q, k, v)
        o = result[0] if isinstance(result, tuple | list) else result
        if not isinstance(o, torch.Tensor) or not o.requires_grad:
            raise CheckFailed("the output has no gradient: nothing leads back to q, k and v", diagnosis="no-gradient")
        found = torch.autograd.grad(o, (q, k, v), grad_o, allow_unused=True)
    got: dict[str, torch.Tensor] = {"o": o.detach()}
    for name, x, like in zip(("dq", "dk", "dv"), found, (q, k, v), strict=True):
        if x is None or x.shape != like.shape or x.dtype != like.dtype:
            is_ = "missing" if x is None else f"{list(x.shape)}, {x.dtype}"
            said = f"{name} is {is_}; it should be like its input, {list(like.shape)}, {like.dtype}"
            raise CheckFailed(said, diagnosis="wrong-shape", case=str(case))
        got[name] = x
    return got


def _terms(
    case: Case, q, k, v, do, *, hidden: torch.Tensor | None = None, delta: bool = True, lse: bool = True,
    in_turn: bool = False, scale: float | None = None,
) -> Gradients:  # fmt: skip
    """In float64 as a kernel would compute them from o and lse, with another mask or scale, or without delta or lse.

    dk and dv are those of each query head by itself. in_turn: query head h reads key head h % kv_heads.
    """
    group = q.shape[1] // k.shape[1]
    o, row_lse = reference.attention(q, k, v, causal=case.causal, scale=case.softmax_scale)
    wide_k, wide_v = (x.double().repeat(1, group, 1, 1) if in_turn else x.double().repeat_interleave(group, 1)
                      for x in (k, v))  # fmt: skip
    if hidden is None:
        hidden = ~visible(q.shape[2], k.shape[2], case.causal)
    scale = case.softmax_scale if scale is None else scale
    s = scale * (q.double() @ wide_k.transpose(-1, -2))
    shift = row_lse if lse else s.masked_fill(hidden, -torch.inf).amax(-1)
    empty = torch.isneginf(row_lse)
    p = torch.exp(s - shift.masked_fill(empty, 0.0)[..., None]).masked_fill(hidden | empty[..., None], 0.0)
    ds = do.double() @ wide_v.transpose(-1, -2)
    if delta:
        ds = ds - (do.double() * o).sum(-1, keepdim=True)
    ds = scale * p * ds
    return Gradients(ds @ wide_k, ds.transpose(-1, -2) @ q.double(), p.transpose(-1, -2) @ do.double())


def _models(case: Case, q, k, v, do) -> dict[str, Gradients]:
    """What known mistakes give on a case, by diagnosis."""
    group, scale, (M, N) = q.shape[1] // k.shape[1], case.softmax_scale, (q.shape[2], k.shape[2])

    def summed(**wrong: Any) -> Gradients:
        terms = _terms(case, q, k, v, do, **wrong)
        return Gradients(terms.dq, _shared_sum(terms.dk, group), _shared_sum(terms.dv, group))

    right, whole, turned = _terms(case, q, k, v, do), summed(), _terms(case, q, k, v, do, in_turn=True)
    everything = torch.zeros(M, N, dtype=torch.bool)
    unmasked, plain = summed(hidden=everything), summed(scale=q.shape[3] ** -0.5)
    after = torch.arange(N)[None, :] > torch.arange(M)[:, None]  # as a mask aligned at the first key hides them
    return {
        "delta-missing": summed(delta=False),
        "dq-not-scaled": whole._replace(dq=whole.dq / scale),
        "dk-not-scaled": whole._replace(dk=whole.dk / scale),
        "dq-scaled-twice": whole._replace(dq=whole.dq * scale),
        "group-not-summed": Gradients(whole.dq, right.dk[:, group - 1 :: group], right.dv[:, group - 1 :: group]),
        "first-of-the-group": Gradients(whole.dq, right.dk[:, ::group], right.dv[:, ::group]),
        "dk-dv-exchanged": whole._replace(dk=whole.dv, dv=whole.dk),
        "wrong-kv-head": whole._replace(dq=turned.dq),
        "wrong-kv-head-throughout": Gradients(
            turned.dq, *(x.unflatten(1, (group, -1)).sum(1) if x.numel() else x[:, ::group] for x in turned[1:])
        ),
        "causal-mask-missing": unmasked,
        "causal-mask-missing-in-dq": whole._replace(dq=unmasked.dq),
        "causal-mask-missing-in-dk": unmasked._replace(dq=whole.dq),
        "default-scale": plain,
        "default-scale-in-dq": whole._replace(dq=plain.dq),
        "default-scale-in-dk": plain._replace(dq=whole.dq),
        "causal-aligned-top-left": summed(hidden=after if case.causal else everything),
        "causal-always": summed(hidden=~visible(M, N, causal=True)),
        "probabilities-not-normalised": summed(lse=False),
    }


_OF_ONE_HEAD = "dk and dv of a key head are those of one query head"
_UNMASKED, _PLAIN = "of P without the causal mask", "of the scale 1 / sqrt(head_dim), also where another one is given"
_IN_TURN = "take the key heads in turn: query head h reads key head h // group"
SENTENCES = {
    "delta-missing": "dq and dk are those of dS = P * dP: delta, the row's sum of dO * O, is not subtracted",
    "dq-not-scaled": "dq is right but for the factor scale",
    "dk-not-scaled": "dk is right but for the factor scale",
    "dq-scaled-twice": "dq has the factor scale twice",
    "group-not-summed": f"{_OF_ONE_HEAD}; all the heads that read it add to them",
    "causal-mask-missing": f"the gradients are those {_UNMASKED}",
    "causal-mask-missing-in-dq": f"dq is that {_UNMASKED}; dk and dv are right",
    "causal-mask-missing-in-dk": f"dk and dv are those {_UNMASKED}; dq is right",
    "default-scale": f"the gradients are those {_PLAIN}",
    "default-scale-in-dq": f"dq is that {_PLAIN}; dk and dv are right",
    "default-scale-in-dk": f"dk and dv are those {_PLAIN}; dq is right",
    "causal-aligned-top-left": "the gradients are those of a causal mask aligned at the first key, not at the last",
    "causal-always": "the gradients have a causal mask where none was asked for; with causal=True they are right",
    "first-of-the-group": f"{_OF_ONE_HEAD}; all the heads that read it add to them",
    "dk-dv-exchanged": "dk and dv are exchanged",
    "wrong-kv-head": f"dq is that of query heads which {_IN_TURN}",
    "wrong-kv-head-throughout": f"the gradients are those of query heads which {_IN_TURN}",
    "probabilities-not-normalised": "the gradients are those of exp(score - maximum), not divided by the row's sum",
}


def _diagnosed(seen: Sequence[tuple[Case, dict[str, Wanted], dict[str, torch.Tensor], tuple]]) -> CheckFailed:
    """The mistake whose model gives what was found on every case, else what was seen on the first wrong case."""
    wrong = [entry for entry in seen if not worst(entry[1], **entry[2])[1] <= 1]
    case, right, got, _ = wrong[0]
    name, error = worst(right, **got)
    if all(right["o"].excess(got["o"]) <= 1 for _, right, got, _ in seen):
        unseen = [case.causal and case.seq_q > case.seq_k for case, *_ in wrong]  # rows without a key, in them
        calm = [entry for entry, x in zip(wrong, unseen, strict=True) if not x] or wrong
        models = [_models(case, *inputs) for case, _, _, inputs in calm]
        for slug, sentence in SENTENCES.items():
            if all(_fits(model[slug], entry[1], entry[2]) for model, entry in zip(models, calm, strict=True)):
                return CheckFailed(sentence, diagnosis=slug, case=str(calm[0][0]))
        low = [case.content == "near -200" for case, *_ in wrong]
        if any(low) and all(x or y for x, y in zip(low, unseen, strict=True)) and not got["dq"].isfinite().all():
            said = (
                "what fills up the last tile of keys has a score of 0, and exp(0 - lse) is infinite where every score "
            )
            said += "is low: inf * 0 is NaN, so these keys are hidden by `where`"
            return CheckFailed(said, diagnosis="tail-overflows", case=str(case))
        if all(unseen) and all(_lost_alone(entry[0], entry[2]) for entry in wrong):
            said = "a row that sees no key has an lse of -inf, so exp(score - lse) is infinite, and gradients are NaN: "
            return CheckFailed(f"{said}its P should be 0", diagnosis="masked-rows-nan", case=str(case))
    off = right[name].value - got[name].cpu().double()
    index = tuple(int(i) for i in torch.unravel_index(off.nan_to_num(nan=torch.inf).abs().argmax(), off.shape))
    values = f"{got[name].cpu().double()[index]:.4g}, where {right[name].value[index]:.4g} is right"
    sizes = "NaN" if error != error else f"off by {error:.3g} times what rounding explains"
    others = ", ".join(n for n in right if n != "lse" and n in got and right[n].excess(got[n]) <= 1) or "nothing else"
    said = f"{name} is {sizes}: {name}{list(index)} is {values}; within their bounds there: {others}"
    return CheckFailed(said, diagnosis=f"wrong-{name}", case=str(case))


def _lost_alone(case: Case, got: dict[str, torch.Tensor]) -> bool:
    """Whether what is NaN, or infinite, in dq are just rows that see no key."""
    lost = ~got["dq"].isfinite().all(-1)
    return bool(lost.any()) and not lost[..., case.seq_q - case.seq_k :].any()


def _fits(model: Gradients, right: dict[str, Wanted], got: dict[str, torch.Tensor]) -> bool:
    """Whether what was found is the model's result, up to some roundings of its largest elements."""
    for name, value in zip(("dq", "dk", "dv"), model, strict=True):
        room = right[name].bound + 16 * torch.finfo(got[name].dtype).eps * value.abs().max()
        if not Wanted(value, room).excess(got[name]) <= 1:
            return False
    return True
