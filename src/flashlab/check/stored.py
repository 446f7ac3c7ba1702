"""What a kernel has stored, told by what it has not: an output carries a mark before the launch.

An answer that is half written is usually right in what it does and only not finished. Then the sentence says what is
not stored yet, before anything is said about numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from flashlab.attention import reference
from flashlab.check import CheckFailed, expect_close, pattern
from flashlab.check.cuda_answer import Answer, Source, built, expect_launched, ran
from flashlab.check.poison import MarkedEmpty, mark_unwritten, unwritten
from flashlab.simt import Counters

# (batch, heads, kv_heads, seq_q, seq_k): several heads; then more rows than any tile has
_SHAPES = ((2, 2, 1, 40, 72), (1, 1, 1, 200, 48))
_BEFORE = "what was there before the launch"


def marked(*shape: int) -> torch.Tensor:
    """A float32 output that nobody has written: each element holds the mark (a NaN)."""
    return mark_unwritten(torch.empty(shape))


def expect_written(x: torch.Tensor, what: str, *, case: str | None = None, because: str = "") -> None:
    """Raises CheckFailed where elements of an output still carry the mark of ``marked``.

    Args:
        x: after the launch.
        what: its name.
        case: what the kernel was run on.
        because: words for the end of the sentence, where a part is missing.
    """
    missing = unwritten(x)
    if missing.all():
        said = f"nothing is stored to {what}: all its {x.numel()} elements still hold {_BEFORE}"
        raise CheckFailed(said, diagnosis="nothing-stored", case=case)
    if missing.any():
        raise CheckFailed(
            f"{int(missing.sum())} of {x.numel()} elements of {what} were never written, {_places(missing)}"
            + (f": {because}" if because else ""),
            diagnosis="elements-missing",
            case=case,
        )


def expect_results(
    answer: Answer, given: Sequence[Any], want: Mapping[str, torch.Tensor], case: str, *,
    checks: Sequence[bool] = (True, False), tol: float | None = None, because: str = "",
    said: Callable[[torch.Tensor], str | None] = lambda got: None, **options: Any,
) -> Counters:  # fmt: skip
    """Calls an answer's function in each of the builds, the watched one and the fast one, and compares its results.

    Args:
        given: its arguments, None for a float32 output. want: {an output's name: what it should be}, in their order.
        because: see `expect_written`. said: words for wrong numbers. options: of `Answer.run`.

    Returns what the first build's run counted. Raises CheckFailed.
    """
    first = None
    for check in checks:
        outputs = [marked(*x.shape) for x in want.values()]
        fresh = iter(outputs)
        arguments = [next(fresh) if x is None else x for x in given]
        counters = answer.run(*arguments, case=case, check=check, **options)
        first = first or counters
        for (name, right), got in zip(want.items(), outputs, strict=True):
            expect_written(got, name, case=case, because=because)
            expect_close(got, right, what=name, case=case, tol=tol, because=said(got))
    assert first is not None, "there is a build"
    return first


def _places(missing: torch.Tensor) -> str:
    return pattern.where(missing) or f"the first at {missing.nonzero()[0].tolist()}"


def expect_stored(whole: Source, *, head_dim: int = 64, dtype: torch.dtype = torch.float16) -> None:
    """Raises CheckFailed where a whole kernel (``forward``) leaves a part of o or lse unwritten, or stores only zeros.

    The check build is run, so that a race or a bad address is told first.
    """
    module = built(whole, check=True, head_dim=head_dim, dtype=dtype)
    zeros, lse_zeros, right = [], [], []
    for batch, heads, kv_heads, seq_q, seq_k in _SHAPES:
        generator = torch.Generator().manual_seed(3)
        q, k, v = (
            torch.randn(batch, h, n, head_dim, generator=generator).to(dtype)
            for h, n in ((heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k))
        )
        case = f"batch={batch}, heads={heads}, kv_heads={kv_heads}, seq_q={seq_q}, seq_k={seq_k}"

        def call(q: Any = q, k: Any = k, v: Any = v) -> tuple[torch.Tensor, torch.Tensor]:
            with MarkedEmpty():
                return module.forward(q, k, v, echo=False)

        o, lse = ran(module, whole, case, call)
        assert module.report is not None, "every run in the emulator leaves a report"
        expect_launched(module.report)
        _expect_both(unwritten(o), unwritten(lse), case)
        zeros.append(bool((o == 0).all()))
        lse_zeros.append(bool((lse == 0).all()))
        right.append(bool(((o.double() - reference.attention(q, k, v)[0]).abs() < 0.03).all()))
    if all(zeros):
        said = "so far so good: all of o is stored, but every number in it is 0. What comes between is missing, or is "
        said += "multiplied by 0: the copy of K and V, the scores, P and its product with V"
        raise CheckFailed(said, diagnosis="only-zeros")
    if all(lse_zeros) and all(right):
        said = "o is right. lse is 0 in every row: store the maximum plus the logarithm of the sum"
        raise CheckFailed(said, diagnosis="lse-zero")


def _expect_both(o: torch.Tensor, lse: torch.Tensor, case: str) -> None:
    """The masks of what is not written of o [batch, heads, rows, head_dim] and lse [batch, heads, rows]."""
    if o.all() and lse.all():
        said = f"the kernel runs, but it stores nothing: all of o and lse still hold {_BEFORE}"
        raise CheckFailed(said, diagnosis="nothing-stored", case=case)
    for name, missing in (("o", o), ("lse", lse)):
        if not missing.any():
            continue
        if missing.all():
            other = "o is" if name == "lse" else "only lse is"
            sentence = f"{name} is never stored, {other}: all its {missing.numel()} elements still hold {_BEFORE}"
            raise CheckFailed(sentence, diagnosis=f"{name}-not-stored", case=case)
        raise _partly(name, missing, case)


def _partly(name: str, missing: torch.Tensor, case: str) -> CheckFailed:
    """What to say where a part of o or lse is not written."""
    whole_heads = missing.flatten(2).all(2)  # [batch, heads]
    if torch.equal(missing, whole_heads.view(*whole_heads.shape, *[1] * (missing.ndim - 2)).expand_as(missing)):
        b, h = whole_heads.nonzero()[0].tolist()
        advice = (
            "its row is number (batch * heads + head) * seq_q + row"
            if name == "lse"
            else "has it a block, and does rows_of find its rows?"
        )
        said = f"{name} is stored for {int((~whole_heads).sum())} of {whole_heads.numel()} heads: nothing is ever "
        said += f"written to batch {b}, head {h}; {advice}"
        return CheckFailed(said, diagnosis=f"{name}-of-heads-not-stored", case=case)
    one = missing.flatten(0, 1).all(0)  # what no head has
    if one.any():
        there = "in every head"
    else:
        one, there = missing[tuple(missing.flatten(2).any(2).nonzero()[0].tolist())], "in a head"
    slug = "rows-not-written"
    if one.ndim == 2 and torch.equal(one, one.all(0).expand_as(one)):
        slug = "columns-not-written"
    sentence = f"{name} is stored in part: {_places(one)} were never written {there}"
    return CheckFailed(sentence, diagnosis=slug, case=case)
