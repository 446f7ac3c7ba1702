"""What is common to the errors of a wrong tensor: a true observation, for a learner to reason from.

Nothing here knows a mistake. Each observation is checked on every element before it is said.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensor = torch.Tensor
NAMES = {1: ("element",), 2: ("row", "column"), 3: ("plane", "row", "column")}

_RUNS = 4  # that are listed


def observe(actual: Tensor, expected: Tensor, bound: float, known: Mapping[str, Tensor] | None = None) -> str | None:
    """A half-sentence on how `actual` is wrong, or None.

    Args:
        actual, expected: of one shape, float64.
        bound: the largest absolute error that is no error.
        known: vectors by name, which a factor of each row, or each column, may be made of.
    """
    if actual.numel() < 4 or not actual.isfinite().all() or not expected.isfinite().all():
        return None
    wrong = (actual - expected).abs() > bound
    found = _factor(actual, expected, bound) or _shift(actual, expected, bound)
    if found is None and actual.ndim in NAMES:
        found = (
            _line_factors(actual, expected, bound, known or {})
            or _repeated(actual, expected, wrong, bound)
            or _misplaced(actual, expected, wrong, bound)
        )
        # A 0 is right whatever is computed, but in a mask.
        mask = bool(((expected == 0) | (expected == 1)).all())
        telling = mask or bool((expected[~wrong].abs() > 100 * bound).any())
        if found is None and telling and (places := where(wrong)) and not places.endswith("..."):  # no run of them
            zero = ", and are 0 everywhere" if not actual[wrong].any() else ""
            found = f"wrong: {places}{zero}; all of the others are right"
    return found or _fewer_digits(actual, expected, bound)


def _fewer_digits(actual: Tensor, expected: Tensor, bound: float) -> str | None:
    """Nearly right everywhere, and with many different small errors: as where something has fewer digits."""
    error, largest = (actual - expected).abs(), expected.abs().max()
    if error.numel() < 16 or not 0 < error.max() < 4e-3 * largest or (error > bound).sum() < error.numel() // 8:
        return None
    return (
        f"all of the values are nearly right, off by at most {error.max() / largest:.2g} of the largest of them: has "
        "something on the way fewer digits than it should have?"
    )


def _factor(actual: Tensor, expected: Tensor, bound: float) -> str | None:
    square = expected.square().sum()
    if square == 0 or expected.numel() < 4:
        return None
    factor = ((actual * expected).sum() / square).item()
    if abs(factor - 1) < 1e-3 or abs(factor) < 1e-6 or expected.abs().max() < 100 * bound:
        return None
    if len(expected[expected.abs() > 100 * bound].unique()) < 2:
        return None  # one number is some multiple of any other
    if (actual - factor * expected).abs().max() > max(bound, bound * abs(factor)):
        return None
    if ((actual - expected).abs() <= bound)[expected.abs() > 100 * bound].any():
        return None  # so near to 1 that many other things would fit
    return f"every value is {factor:.6g} times what it should be"


def _line_factors(actual: Tensor, expected: Tensor, bound: float, known: Mapping[str, Tensor]) -> str | None:
    """Each row, or each column, right but for a factor of its own: as where it is divided by something else."""
    if actual.ndim != 2 or min(actual.shape) < 2:
        return None
    for axis, name in enumerate(NAMES[2]):
        got, want = (x.movedim(axis, 0) for x in (actual, expected))
        square = want.square().sum(1)
        if bool((square <= 1e4 * bound**2).any()):
            continue
        factors = (got * want).sum(1) / square
        off = (factors - 1).abs() > max(1e-6, 100 * bound)
        if (
            (got - factors[:, None] * want).abs().max() > bound
            or 2 * int(off.sum()) < len(off)
            or bool((factors.abs() < 1e-6).any())
        ):
            continue
        if bool(((want.abs() > 100 * bound).sum(1) < 3).any()):
            continue  # two numbers are near a multiple of two others too easily
        made = next((text for known_as, x in known.items() if (text := _made_of(factors, x.double(), known_as))), "")
        if made:
            return f"each {name} is right but for a factor of its own, which is {made}"
        listed = ", ".join(f"{x:.4g}" for x in factors[:4].tolist()) + (", ..." if len(factors) > 4 else "")
        return f"each {name} is right but for a factor of its own: {listed}. What is it multiplied or divided by?"
    return None


def _made_of(factors: Tensor, x: Tensor, name: str) -> str:
    """'exp(0.5 * lse)', or '2 * delta': how factors are made of a vector, if they are."""
    if x.shape != factors.shape or len(x.unique()) < 4 or not bool(x.isfinite().all() & (factors > 0).all()):
        return ""
    line = torch.stack([x, torch.ones_like(x)], 1)
    a, b = torch.linalg.lstsq(line, factors.log()[:, None]).solution[:, 0].tolist()
    if abs(a) > 0.01 and bool(((a * x + b - factors.log()).abs() < 1e-3).all()):
        return f"exp({a:.3g} * {name}{f' {b:+.3g}' if abs(b) > 1e-3 else ''})"
    for text, ratio in ((f"{{}}{name}", factors / x), (f"{{}}1 / {name}", factors * x)):
        if bool(((ratio - ratio[0]).abs() < 1e-3 * ratio[0].abs()).all()):
            times = ratio[0].item()
            return text.format("" if abs(times - 1) < 1e-3 else f"{times:.3g} * ")
    return ""


def _shift(actual: Tensor, expected: Tensor, bound: float) -> str | None:
    difference = actual - expected
    shift = difference.mean().item()
    if abs(shift) < 10 * bound or (difference - shift).abs().max() > bound:
        return None
    return f"every value is {abs(shift):.6g} too {'large' if shift > 0 else 'small'}"


def _misplaced(actual: Tensor, expected: Tensor, wrong: Tensor, bound: float) -> str | None:
    """Values that belong elsewhere: the whole transposed, or each wrong one that of another place."""
    if actual.ndim >= 2 and actual.shape[-1] == actual.shape[-2]:
        if (actual - expected.transpose(-1, -2)).abs().max() <= bound:
            return "rows and columns are exchanged"
    if len(actual[wrong].unique()) < 2:
        return None  # one number, as of a constant, is no sign that anything was moved
    values, order = expected.flatten().sort()
    mine, spread = actual[wrong], (values[-1] - values[0]).item()
    if mine.numel() and (mine.max() - mine.min()).item() <= bound:  # one number everywhere has no place of its own
        return None
    # So often a random number would be near one of the values: all of the wrong ones by chance?
    chance = min(1.0, 2 * bound * len(values) / spread) if spread else 1.0
    if chance ** len(mine) > 1e-6:
        return None
    after = torch.searchsorted(values, mine).clamp(1, len(values) - 1)
    nearest = torch.where((mine - values[after - 1]).abs() < (values[after] - mine).abs(), after - 1, after)
    if ((values[nearest] - mine).abs() > bound).any():
        return None
    around = torch.searchsorted(values, mine + 2 * bound) - torch.searchsorted(values, mine - 2 * bound)
    example = int(around.argmin())  # whose place is least in doubt
    here, there = wrong.nonzero()[example].tolist(), order[nearest[example]]
    source = [int(i) for i in torch.unravel_index(there, expected.shape)]
    return f"each wrong value is a right one in another place: at {here} stands what belongs at {source}"


def _repeated(actual: Tensor, expected: Tensor, wrong: Tensor, bound: float) -> str | None:
    """Whole rows or columns that hold what belongs in others, which are right."""
    if actual.ndim != 2 or len(expected.unique()) < 4:  # masks have few numbers: they agree by chance
        return None
    for axis, name in enumerate(NAMES[2]):
        got, want, off = (x.movedim(axis, 0) for x in (actual, expected, wrong))
        lines = off.any(1)
        if lines.all() or not lines.any() or want.shape[1] < 4:
            continue
        distance = (got[:, None] - want[None]).abs().amax(-1)  # [line, right line]
        near, close = distance <= bound, distance <= 4 * bound
        varied = bool((got[lines].amax(1) - got[lines].amin(1) > 4 * bound).all())  # zeros belong in any place
        if varied and bool(near[lines].any(1).all()) and bool((close[lines].sum(1) == 1).all()):
            source = distance.argmin(1)
            at = int(lines.nonzero()[0])
            holds = f"{name} {at} holds what belongs in {name} {int(source[at])}, as well as that one"
            return f"{holds}; so for {_listed(lines, name)}"
    return None


def _listed(lines: Tensor, name: str) -> str:
    count = int(lines.sum())
    return f"{runs(lines, name)}, {count} of {len(lines)}" if count > 1 else "this one alone"


def where(wrong: Tensor) -> str | None:
    """Rows or columns that are wrong as a whole, where the others are right: "rows 4 to 7"."""
    if wrong.all() or not wrong.any():
        return None
    for axis, name in enumerate(NAMES[wrong.ndim]):
        lines = wrong.movedim(axis, 0).flatten(1) if wrong.ndim > 1 else wrong[:, None]
        if torch.equal(lines.any(1), lines.all(1)) and lines.any() and not lines.all():
            return runs(lines.any(1), name)
    return None


def runs(chosen: Tensor, name: str) -> str:
    """ "rows 4 to 7", "row 3", "the odd rows", from a boolean vector."""
    places = chosen.nonzero().flatten().tolist()
    if len(places) == 1:
        return f"{name} {places[0]}"
    steps = {b - a for a, b in zip(places, places[1:], strict=False)}
    if steps == {1}:
        return f"{name}s {places[0]} to {places[-1]}"
    if steps == {2} and len(places) >= len(chosen) // 2:
        return f"the {'odd' if places[0] % 2 else 'even'} {name}s"
    first = [x for x in places if x - 1 not in places]
    last = [x for x in places if x + 1 not in places]
    if len(places) >= 4 * len(first) and len(first) <= _RUNS:  # not here and there
        parts = (f"{a} to {b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True))
        return f"{name}s {', '.join(parts)}"
    return f"{name}s {', '.join(map(str, places[:6]))}{', ...' if len(places) > 6 else ''}"
