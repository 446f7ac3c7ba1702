"""What can be seen of a wrong result, without a cause: for a bug hunt that nobody has begun yet.

While `watching`, a comparison that fails is noted and passed over, so that every case is run. What was seen is then
told case by case: which elements are wrong, two of them with the right value beside.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch

_WRONG, _RIGHT = 3, 3  # cases that are told of each kind


@dataclass
class Symptoms:
    """What was compared: `wrong` is {case: sentences}, `right` the cases in which everything was."""

    wrong: dict[str, list[str]] = field(default_factory=dict)
    right: dict[str, None] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    compared_with: list[tuple[str, torch.Tensor, torch.Tensor, float]] = field(default_factory=list)

    def compared(
        self, case: str | None, what: str, got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | float,
        axes: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Note one comparison. got, want: float64, of one shape; bound: the error allowed; axes: what to call them."""
        name = case or "the one case"
        if (said := seen_where(got, want, bound, axes)) != "right":
            sentence = f"{what}: {said}"
            if sentence not in self.wrong.setdefault(name, []):
                self.wrong[name].append(sentence)
            self.right.pop(name, None)
        elif name not in self.wrong:
            self.right[name] = None

    def everywhere(self, what: str) -> str | None:
        """What all comparisons of `what` have in common: one factor, or one difference, or one value."""
        mine = [(got.flatten(), want.flatten(), bound) for name, got, want, bound in self.compared_with if name == what]
        if len(mine) < 2:
            return None
        got, want = (torch.cat([part[i] for part in mine]) for i in (0, 1))  # type: ignore[misc]
        bounds = torch.cat([torch.full_like(part[0], part[2]) for part in mine])
        plain = got.isfinite() & want.isfinite() & (want.abs() < 1e6) & (bounds < 1)
        got, want, bound = got[plain], want[plain], float(bounds[plain].max()) if plain.any() else 0.0
        if len(got) < 3 or (got - want).abs().max() <= bound or (want.max() - want.min()) < 10 * bound:
            return None
        if (got.max() - got.min()).item() <= 1e-9:
            return f"{what} is {got[0].item():.6g} in every case, whatever it should be"
        large = want.abs() > 100 * bound
        if large.sum() >= 3 and float(large.double().mean()) > 0.5:
            factors = got[large] / want[large]
            factor = factors.mean()
            alike = (factors - factor).abs().max() < 5e-5 * factor.abs() and factor.abs() > 1e-9
            alike = alike and (factor - 1).abs() > 1e-5
            if alike and ((got - factor * want).abs() <= 4 * bound + 1e-4 * (factor * want).abs()).all():
                return f"{what} is {_named(factor.item())} times what it should be, in every case"
        shift = got - want
        if (shift.max() - shift.min()).item() <= max(4 * bound, 1e-9) and shift.abs().min() > 20 * bound:
            size = shift.mean().item()
            return f"{what} is {_named(abs(size))} too {'large' if size > 0 else 'small'}, in every case"
        return None

    def remark(self, sentence: str) -> None:
        if sentence not in self.remarks:
            self.remarks.append(sentence)

    def lines(self) -> list[str]:
        """At most 14 lines; none if nothing was seen."""
        if not self.wrong and not self.remarks:
            return []
        count = len(self.wrong) + len(self.right)
        out = [f"{len(self.wrong)} of {count} cases wrong"] if count else []
        for name, sentences in _spread(list(self.wrong.items()), _WRONG):
            out += [f"  wrong  {name}", *(f"         {sentence}" for sentence in sentences[:2])]
        out += [f"  right  {name}" for name in _spread(list(self.right), _RIGHT)]
        return out + self.remarks[:1]


_CONSTANTS = {
    "ln 2": math.log(2), "log2(e) = 1 / ln 2": 1 / math.log(2), "ln 10": math.log(10), "1 / ln 10": 1 / math.log(10),
    "the square root of 2": math.sqrt(2), "e": math.e, "1 / e": 1 / math.e,
    **{f"ln {n}": math.log(n) for n in (3, 4, 5, 8, 16, 32, 64, 128)},
}  # fmt: skip


def _named(x: float) -> str:
    """A number, and what it is if it is a constant that learners mix up."""
    name = next((name for name, value in _CONSTANTS.items() if abs(x - value) < 2e-5 * value), "")
    return f"{x:.6g}" + (f" ({name})" if name else "")


_watched: ContextVar[Symptoms | None] = ContextVar("flashlab_symptoms", default=None)


@contextlib.contextmanager
def watching() -> Iterator[Symptoms]:
    """Collect what comparisons see; they raise nothing meanwhile."""
    seen = Symptoms()
    token = _watched.set(seen)
    try:
        yield seen
    finally:
        _watched.reset(token)


def watched() -> Symptoms | None:
    """Who collects at the moment, or None."""
    return _watched.get()


def seen_where(got: torch.Tensor, want: torch.Tensor, bound: torch.Tensor | float, axes: Sequence[str] = ()) -> str:
    """'wrong in rows 4 to 7 of 8; [4, 0] is 1.3, should be 1.2', or 'right'. See `Symptoms.compared`."""
    off = ~(((got - want).abs() <= bound) | (got == want) | (got.isnan() & want.isnan()))
    if not off.any():
        return "right"
    off, got, want = (x.reshape(_shape(x)) for x in (off, got, want))
    return f"{_where(off, axes)}; {_examples(off, got, want)}"


def _spread(items: list, most: int) -> list:
    """At most so many of them: the first, the last, and others in between."""
    if len(items) <= most:
        return items
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _shape(x: torch.Tensor) -> list[int]:
    """Without the batch and the heads where there is one of them."""
    shape = list(x.shape)
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return shape


def _where(off: torch.Tensor, axes: Sequence[str]) -> str:
    """'rows 4 to 7 of 8, all 64 columns'."""
    if off.ndim == 0:
        return "wrong"
    names = list(axes) or (["elements"] if off.ndim == 1 else ["batches", "heads", "rows", "columns"][-off.ndim :])
    names = [*(["axis"] * off.ndim), *names][-off.ndim :]
    parts = []
    for axis, (name, size) in enumerate(zip(names, off.shape, strict=True)):
        others = [i for i in range(off.ndim) if i != axis]
        hit = off.any(dim=others) if others else off
        if size > 1:
            parts.append(spans(hit.nonzero().flatten().tolist(), name, size))
    whole = "" if bool(off.all()) else f" ({int(off.sum())} of {off.numel()} numbers)"
    return "wrong in " + ", ".join(parts or ["its one number"]) + whole


def spans(indices: Sequence[int], name: str, size: int) -> str:
    if len(indices) == size:
        return f"all {size} {name}"
    found: list[list[int]] = []
    for i in indices:
        if found and found[-1][1] == i - 1:
            found[-1][1] = i
        else:
            found.append([i, i])
    said = [str(a) if a == b else f"{a} to {b}" for a, b in found[:4]]
    return f"{name} {', '.join(said)}{', ...' if len(found) > 4 else ''} of {size}"


def _examples(off: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> str:
    at = off.nonzero().tolist()
    said = []
    for i in at if len(at) < 2 else [at[0], at[-1]]:
        x, y = got[tuple(i)].item(), want[tuple(i)].item()
        digits = 4 if f"{x:.4g}" != f"{y:.4g}" else 10
        said.append(f"{f'{i} ' if i else ''}is {x:.{digits}g}, should be {y:.{digits}g}")
    return " and ".join(said)
