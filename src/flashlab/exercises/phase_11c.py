"""The checks of phase 11c: an exponential by multiplications, and parts of the backward pass."""

from __future__ import annotations

import functools
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from flashlab.attention import reference
from flashlab.check import CheckFailed, expect, expect_close, running
from flashlab.check.cuda_answer import Source, built, expect_defined, normal, ran, replaced, text_of
from flashlab.check.cuda_index import Outputs, Trials, all_found, events_of, explained, parted
from flashlab.check.lookup import Row
from flashlab.check.poison import MarkedEmpty
from flashlab.cuda import CudaModule
from flashlab.cuda.hopper_backward import SOURCE, hopper_backward
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import rule
from flashlab.simt import SimtError
from flashlab.simt.source import blank_comments

# What may be called or used as a function; whatever else the text does not define itself is by somebody else's hand.
_BY_HAND = re.compile(
    r"(?:if|for|while|switch|return|sizeof|decltype|__launch_bounds__|exp2_polynomial|f(?:abs|min|max|ma)f?|"
    r"(?:rint|nearbyint|round|floor|ceil|trunc|copysign)f?|l?l?rintf|l?l?roundf|min|max|abs|u?int(?:8|16|32|64)?(?:_t)?|"
    r"unsigned|float|double|bool|long|short|(?:static|reinterpret|const|bit)_cast|memcpy|is(?:nan|inf|finite)|signbit|"
    r"__(?:float|double|u?int|u?ll)(?:_as_|2)\w+|__f(?:ma|mul|add|sub|maf)\w*)"
)
_ALLOWED = 2.0**-16  # the lecture's polynomial errs by 2^-13
_X = torch.cat([torch.linspace(-126, 8, 9000), torch.arange(-126.0, 9), torch.linspace(-1, 1, 3001)])
_LOW = torch.tensor([-torch.inf, -1e30, -1000.0, -300.0, -200.0, -150.0, -129.0])
_HIGH = torch.cat([
    torch.linspace(8, 126, 2000), torch.tensor([127.4, 127.6, 128, 129, 200, 255, 256, 300]),
    torch.tensor([1000, 2.0**22 + 0.5, 1e10, 1e30, torch.inf]),
])  # fmt: skip


def _whole(text: str) -> Source:
    path = Path(__file__).parent / "phase_11_exp.cu"
    return replaced(Source(path.read_text(encoding="utf-8"), path.stem), "operands", text)


@exercise(
    "11c.1",
    title="2 to the x, by multiplications",
    minutes=30,
    hints=[
        "2^x = 2^n * 2^f, with n the nearest whole number and f = x - n in [-0.5, 0.5]. 2^n needs no arithmetic: a "
        "float keeps its exponent, with 127 added, in bits 23 to 30.",
        "2^f by a polynomial, Horner's way: fmaf(f, fmaf(f, fmaf(f, c3, c2), c1), 1.f). Taylor's coefficients are "
        "ln(2)^k / k!, and best at 0. At -0.5 the first term that is left out says how large the error is: after f^3 "
        "it is 8e-4 of the value, after f^4 6e-5, where 1.5e-5 is allowed.",
        "n = rintf(x) and (int) n work. So does a trick without a conversion: x + 12582912.f rounds x to a whole "
        "number, and leaves it in the lowest bits; __float_as_uint(that) << 23 has it where the exponent is.",
        "Below -127 there is no such float: take the maximum of x and -127 first, so that -infinity does no harm. "
        "Which maximum keeps NaN? fmaxf(x, y) does not; x < -127.f ? -127.f : x does. From n = 128 on the exponent "
        "would run over as well: n = 128 itself has the bits of infinity, so cut there, and keep NaN.",
    ],
)
def powers_of_two(exp2_polynomial: str) -> str:
    text = text_of(exp2_polynomial, "exp2_polynomial")
    expect_defined(text, "exp2_polynomial")
    _expect_by_hand(blank_comments(text))
    whole = _whole(text)
    _expect_powers(built(whole, check=True), whole)
    return f"{len(_X)} numbers, the largest error {_ALLOWED:.1e} or less; both infinities and NaN too"


def _expect_by_hand(code: str) -> None:
    own = set(re.findall(r"(?:\b(?:float|int|u?int\d+_t|unsigned|bool|double|void|auto)|#define)\s+(\w+)\s*[(=]", code))
    called = re.findall(
        r"(\w+)\s*(?:<[^<>();]*>)?\s*\(|\b(asm|__asm__|_*(?:exp|exp2|exp10|expm1|pow)f?|exp2_approx)\b|(##)", code
    )
    foreign = [n for names in called for n in names if n and n not in own and not _BY_HAND.fullmatch(n)]
    divisors = re.findall(r"/=?[\s(]*(?:float\s*\)[\s(]*)?([A-Za-z_]\w*)", code)
    fixed = re.findall(r"(?:const|constexpr|#define)\s+(?:\w+\s+)?(\w+)\s*=?\s*[-+(\d.]", code)
    divided = next((x for x in divisors if x not in fixed), "")
    said = "a division stands here, and this function should do without: multiplications, additions and integer "
    said += "operations only"
    expect(not divided, said, diagnosis="not-by-hand")
    said = f"`{foreign[0] if foreign else ''}` is what this function should do without: multiplications, additions "
    said += "and integer operations only"
    expect(not foreign, said, diagnosis="not-by-hand")


def _expect_powers(module: CudaModule, whole: Source) -> None:
    y, want = _powers(module, whole, _X).double(), torch.exp2(_X.double())
    error = ((y - want) / want).abs().nan_to_num(nan=torch.inf)
    at, worst = int(error.argmax()), float(error.max())
    fine = int((error <= _ALLOWED).sum())
    slug, why = _why(_X.double(), y) or ("not-exact-enough" if worst < 0.01 else "wrong-power", "")
    said = f"{why}exp2_polynomial({_X[at]:.6g}) is {y[at]:.6g}, and 2^x is {want[at]:.6g}: an error of {worst:.1e}, "
    said += f"where {_ALLOWED:.1e} is allowed ({fine} of {len(_X)} numbers are right)"
    expect(worst <= _ALLOWED, said, diagnosis=slug)
    y = _powers(module, whole, _LOW)
    good = (y >= 0) & (y <= 2.0**-120)
    at = int((~good).int().argmax())
    over = ", and an exponent below -127 runs over into the sign"
    limit = ". Limit x before n and f are taken of it" if bool(y[-1].abs() < 2.0**-100) else ""
    why = over if bool(y[-1] < -1) else limit
    said = f"right from -126 on, but exp2_polynomial({_LOW[at]:g}) is {y[at]:.4g}, and should be 0, or next to it: a "
    said += f"masked score is -infinity{why}"
    expect(bool(good[at]), said, diagnosis="wrong-below")
    y, least = _powers(module, whole, _HIGH), torch.exp2(_HIGH.double().clamp(max=126))
    good = (y >= least * (1 - _ALLOWED)) & ((_HIGH > 126) | (y <= least * (1 + _ALLOWED)))
    at = int((~good).int().argmax())
    limited = bool((y[at:] == y[at]).all() and y[at] >= y[at - 1])
    why = "; from there on it is always the same: x is limited too early" if limited else ""
    why = ": an exponent from 129 on runs over" if bool(y[at].signbit()) else why
    said = f"right from -infinity to {_HIGH[at - 1]:g}, but exp2_polynomial({_HIGH[at]:g}) is {y[at]:.4g}, and should "
    said += f"be {'2^126 or more' if _HIGH[at] > 126 else f'{least[at]:.4g}'}{why}"
    expect(bool(good[at]), said, diagnosis="wrong-above")
    y = _powers(module, whole, torch.tensor([torch.nan]))
    sentence = f"exp2_polynomial(NaN) is {y[0]:g}: a NaN among the scores should be seen in the result, not hidden"
    expect(bool(y.isnan()), sentence, diagnosis="nan-hidden")


def _why(x: torch.Tensor, y: torch.Tensor) -> tuple[str, str] | None:
    """(slug, sentence) of a mistake that gives all of this, whatever the polynomial is."""
    limited = bool(y[0] == y[20] > 0)
    x, y = x[x > -20], y[x > -20]
    n, low, want = torch.round(x), x.floor(), torch.exp2(x)
    f, ln2 = x - n, math.log(2)
    terms = torch.stack([(f * ln2) ** k / math.factorial(k) for k in range(5)]).cumsum(0) * torch.exp2(n)
    times, good = float((y / want).median()), (y / want - 1).abs() <= _ALLOWED
    power = f"2^{round(math.log2(times))}" if times > 0 and abs(math.log2(times) % 1 - 0.5) > 0.499 else f"{times:.4g}"
    places = "a float keeps its exponent, with 127 added, in bits 23 to 30"
    said = [
        *(("not-exact-enough", f"the polynomial is Taylor's up to f^{k}, best at 0 only: a term more, or coefficients "
           "that spread the error", terms[k], 1e-6) for k in range(1, 5)),
        ("not-exact-enough", "it is the lecture's polynomial, which errs by 2^-13: a term more", torch.exp2(n) * (
            1 + f * (0.693282902 + f * (0.242211014 + f * 0.0550089516))), 1e-6),
        ("wrong-coefficients", "the polynomial is that of e^f: each power of f needs a factor ln 2 more",
         torch.exp2(n) * torch.exp(f), 3e-3),
        ("wrong-split", "f has the wrong sign: 2^x is 2^n 2^f with f = x - n", torch.exp2(n - f), 3e-3),
        ("other-power", "it is e^x: x is to be split as it is, without a factor", torch.exp(x), 3e-3),
        ("other-power", "it is 2^-x: a sign is wrong", torch.exp2(-x), 3e-3),
        ("not-exact-enough", "2^f is taken to be 1 + f", torch.exp2(low) * (1 + x - low), 1e-5),
        ("wrong-exponent", f"every value is {power} times what it should be: {places}", times * want, 3e-3),
    ]  # fmt: skip
    for slug, sentence, given, near in said:
        if bool(((y / given - 1).abs() < near).all()) and (slug != "wrong-exponent" or abs(times - 1) > 0.01):
            return slug, f"{sentence}\n"
    cut = "rounded by adding 0.5 and cutting towards 0, which is another number below 0", (x + 0.5).trunc()
    for way, whole in (("cut towards 0", x.trunc()), ("rounded down", low), cut):
        far = (x - whole).abs()
        nearly = (y / want - 1).abs() < 0.1  # the polynomial, a little beyond where it is good
        if bool((good[far <= 0.5]).all() and nearly[far < 0.9].all()) and not bool(good[far > 0.9].any()):
            return "wrong-split", f"x is {way}: right are those at most 0.5 from there, so round to the nearest\n"
    if read := _of_the_polynomial(f, y / torch.exp2(n)) or _at_whole_numbers(n[f == 0], y[f == 0], places):
        return read[0], f"{read[1]}\n"
    return ("wrong-below", "it is the same at -126 and -125.7: x is limited too early\n") if limited else None


def _of_the_polynomial(f: torch.Tensor, y: torch.Tensor) -> tuple[str, str] | None:
    """Which of its coefficients is wrong; None of what is no polynomial of f, or is right."""
    some = f.abs() < 0.45
    powers = torch.stack([f[some] ** k for k in range(6)], 1)
    found = torch.linalg.lstsq(powers, y[some, None]).solution[:, 0]
    if not y.isfinite().all() or bool((powers @ found - y[some]).abs().max() > 1e-4):
        return None
    right = torch.tensor([math.log(2) ** k / math.factorial(k) for k in range(6)], dtype=torch.float64)
    if bool((found.flip(0) / right - 1).abs().max() < 0.2):
        return "wrong-coefficients", "the coefficients come in reverse order: 2^f is 1 + ln(2) f + ..."
    off = ((found - right).abs() > 0.02 * right)[:5].nonzero().flatten().tolist()
    k = off[0] if off else 0
    has = round(float(found[k]), 4) + 0.0
    said = f"the polynomial's coefficient of f^{k} is {has:g}, and should be near {right[k]:.4g}"
    return ("wrong-coefficients", said) if len(off) == 1 else None


def _at_whole_numbers(n: torch.Tensor, y: torch.Tensor, places: str) -> tuple[str, str] | None:
    """What is wrong with 2^n, where the polynomial is 1."""
    bits, want = y.float().view(torch.int32), (n.int() + 127) << 23
    off = ((y / torch.exp2(n) - 1).abs() > _ALLOWED).nonzero().flatten().tolist()
    if not off:
        return None
    if bool(((bits >> 23) - n.int()).remainder(256).eq(0).all()):
        return "wrong-exponent", f"n stands in the exponent without the 127: {places}"
    at = off[-1]
    mine, right = (int(x[at]) & 0xFFFFFFFF for x in (bits, want))
    said = f"at x = {float(n[at]):g}, where f is 0, the result is {y[at]:g}, with the bits {mine:#010x}, and should be "
    said += f"{want.view(torch.float32)[at]:g}, with the bits {right:#010x}"
    return "wrong-exponent", said


def _powers(module: CudaModule, whole: Source, x: torch.Tensor) -> torch.Tensor:
    x, y = x.float().contiguous(), torch.zeros(len(x))
    ran(module, whole, None, lambda: module.launch("run", x, y, len(x), echo=False))
    return y


# ---- 11c.2 ----------------------------------------------------------------------------------------------------------
Additions = list[list[tuple[int, int]]]  # of each block: (tile, turn), in its order


def _pairs(M: int, N: int, BLOCK_M: int, BLOCK_N: int, window: int) -> set[tuple[int, int]]:
    """The (tile, block) of which some query sees some key."""
    return {
        (i // BLOCK_M, j // BLOCK_N)
        for i in range(M) for j in range(max(0, i + N - M - window + 1), min(N, i + N - M + 1))
    }  # fmt: skip


def _steps(lists: Additions, resident: int, case: str) -> int:
    """How many steps the grid takes; CheckFailed where blocks wait for ever. As many as are resident run at a time."""
    done, added, steps = [0] * len(lists), Counter[int](), 0
    while running_now := [b for b, todo in enumerate(lists) if done[b] < len(todo)][:resident]:
        ready = [b for b in running_now if added[lists[b][done[b]][0]] == lists[b][done[b]][1]]
        if not ready:
            tile, turn = lists[running_now[0]][done[running_now[0]]]
            turns = {at_turn: b for b, todo in enumerate(lists) for at, at_turn in todo if at == tile}
            holder = turns.get(added[tile])
            at = lists[holder][done[holder]][0] if holder is not None and done[holder] < len(lists[holder]) else tile
            whose = (
                f"turn {added[tile]} is nobody's" if holder is None else
                f"turn {added[tile]} is block {holder}'s, which " + (
                    f"waits at tile {at}" if holder in running_now else "is not launched before another one ends")
            )  # fmt: skip
            said = f"with {resident} block{'s' * (resident > 1)} at a time the grid waits for ever: block "
            said += f"{running_now[0]} waits at tile {tile} for turn {turn}, and {added[tile]} of {len(turns)} blocks "
            said += f"have added there: {whose}"
            raise CheckFailed(said, diagnosis="waits-for-ever", case=case)
        for block in ready:
            added[lists[block][done[block]][0]] += 1
            done[block] += 1
        steps += 1
    return steps


def _expect_turns(additions: Callable[..., Any]) -> str:
    """CheckFailed where a block adds where it should not, where the order is open, or a grid waits too long."""
    names = ("M", "N", "BLOCK_M", "BLOCK_N", "window")
    cases = {shape: ", ".join(f"{name}={x}" for name, x in zip(names, shape, strict=True)) for shape in _GRIDS}
    answers = {
        shape: [_listed_of(additions, b, shape, case) for b in range(-(-shape[1] // shape[3]))]
        for shape, case in cases.items()
    }
    for shape, lists in answers.items():  # before any order: every grid's tiles
        M, N, BLOCK_M, BLOCK_N, _ = shape
        pairs = _pairs(*shape)
        found = Counter((tile, b) for b, todo in enumerate(lists) for tile, _ in todo)
        for tile, b in sorted(pairs | set(found)):
            keys = f"keys {b * BLOCK_N} to {min(N, (b + 1) * BLOCK_N) - 1}"
            queries = f"queries {tile * BLOCK_M} to {min(M, (tile + 1) * BLOCK_M) - 1}"
            times = found[tile, b]
            if not 0 <= tile < -(-M // BLOCK_M):
                said = f"block {b} adds to tile {tile}, and there are {-(-M // BLOCK_M)} tiles, from 0"
            elif (tile, b) not in pairs:
                said = f"block {b} adds to tile {tile}, but none of its {queries} sees one of the {keys}"
            elif times != 1:
                said = f"block {b} adds {times} times to tile {tile}: its {queries} see some of the {keys}, so once"
            else:
                continue
            raise CheckFailed(said, diagnosis="wrong-tiles", case=cases[shape])
    for shape, lists in answers.items():
        case, blocks = cases[shape], len(lists)
        for tile in sorted({tile for todo in lists for tile, _ in todo}):
            who = [(turn, b) for b, todo in enumerate(lists) for at, turn in todo if at == tile]
            twice = next((t for t, n in Counter(t for t, _ in who).items() if n > 1), None)
            sentence = f"at tile {tile} blocks {' and '.join(str(b) for t, b in who if t == twice)} all have turn "
            sentence += f"{twice}: which of them adds first is open, so the last bits of dQ may differ from run to run"
            expect(twice is None, sentence, diagnosis="order-open", case=case)
        for resident in (1, 2, 3):
            _steps(lists, resident, case)
        best = [right_turns(b, *shape) for b in range(blocks)]
        steps, fewest = (_steps(x, blocks, case) for x in (lists, best))
        sentence = f"right, and nobody waits for ever; but with all {blocks} blocks at a time it takes {steps} steps, "
        sentence += f"where {fewest} are enough: in another order of the tiles fewer blocks stand still"
        expect(steps <= fewest, sentence, diagnosis="waits-too-long", case=case)
    return f"{len(_GRIDS)} grids: the same order each time, nobody waits for ever, and no step is lost"


def _listed_of(fn: Callable[..., Any], block: int, shape: Sequence[int], case: str) -> list[tuple[int, int]]:
    case = f"block={block}, {case}"
    with running(case):
        got = fn(block, *shape)
    said = "return a list of (tile, turn), two whole numbers for each addition"
    expect(got is not None, f"the function returns nothing: {said}", diagnosis="returned-none", case=case)
    plain = isinstance(got, list) and all(
        isinstance(x, tuple) and len(x) == 2 and all(type(y) is int for y in x) for x in got
    )
    expect(plain, f"{got!r:.60} is returned: {said}", diagnosis="wrong-type", case=case)
    return got


_GRIDS = (
    (8, 8, 1, 1, 99), (256, 256, 64, 128, 128), (12, 12, 2, 4, 5), (12, 12, 4, 2, 5), (10, 17, 3, 4, 6),
    (17, 10, 4, 3, 4), (17, 10, 3, 4, 40), (9, 30, 2, 5, 3), (30, 9, 5, 2, 7), (7, 7, 3, 3, 1), (20, 20, 1, 1, 6),
    (18, 2, 6, 1, 1),
)  # fmt: skip


def _drawn_grid(r: random.Random) -> tuple[Any, ...]:
    M, N, BLOCK_N = r.randint(1, 40), r.randint(1, 40), r.randint(1, 6)
    return r.randrange(-(-N // BLOCK_N)), M, N, r.randint(1, 6), BLOCK_N, r.choice((r.randint(1, 12), 50))


def _seen_by(late: str, oldest: str) -> str:
    """What a block adds where query i sees the keys from i + oldest to i + late."""
    first = f"tile * BLOCK_M {oldest}"
    return (
        f"[(tile, block - max(0, {first}) // BLOCK_N) for tile in reversed(range(-(-M // BLOCK_M))) if "
        f"block * BLOCK_N < min(M, (tile + 1) * BLOCK_M) {late} and {first} < min(N, (block + 1) * BLOCK_N)]"
    )


_LAST = "min(M, min(N, (block + 1) * BLOCK_N) - 1 - (N - M) + window)"


@rule(
    "11c.2",
    title="Whose turn under a window?", minutes=30,
    hints=[
        "Which queries see a key of this block? The first one sees its first key as the newest that it sees; the last "
        "one sees its last key as the oldest. Of these two you get the tiles. Both ends are cut at 0 and at M.",
        "A turn says how many blocks have added to the tile before. Without a window block 0 adds to every tile that "
        "block 3 adds to, so block 3's turn is 3. Under a window the first blocks no longer reach a late tile: count "
        "from the first block that does.",
        "Where does the tile's first query stop to see? Its oldest key is tile * BLOCK_M + N - M - window + 1, or 0. "
        "That key's block is the first one to add to the tile.",
        "Order: let two neighbouring blocks walk. Upwards, the later one begins at a tile where the one before it has "
        "still to add to an earlier tile first. Downwards each is one tile behind: reversed(range(...)).",
    ],
    returns="tile, turn",
    each="addition",
    item=int,
    inputs=[(b, *shape) for shape in _GRIDS for b in range(-(-shape[1] // shape[3]))],
    draw=_drawn_grid,
    words={"oldest": "the oldest key that the tile sees", "begin": "the first query", "end": "the end of the queries"},
    notes={
        "N - M": "the last query sees the last key", "window": "query i sees `window` keys, up to i + N - M",
        "block - max(0, oldest) // BLOCK_N": "a turn counts from the first block that adds to the tile",
        "reversed(": "downwards each block is one tile behind the one before it, and none stands still",
    },
    rows=[
        Row("waits-for-ever", "the turn is the block's number, and under a window the first blocks do not add to "
            "late tiles: nobody takes their turns", [("block - max(0, oldest) // BLOCK_N", "block")]),
        Row("wrong-tiles", "the walk ends at the last query: under a window it ends behind the last one that sees "
            "the block's last key", [(_LAST, "M")]),
        Row("wrong-tiles", "the walk ends behind the last query that sees the block's first key: later "
            "ones see its last key", [("min(N, (block + 1) * BLOCK_N) - 1", "block * BLOCK_N")]),
        Row("wrong-tiles", "the walk begins at query 0: the first ones see none of these keys",
            [("block * BLOCK_N - (N - M)", "-(N - M)")]),
        *(Row("wrong-tiles", f"query i is taken to see {which}", instead=_seen_by(*keys)) for which, *keys in (
            ("the keys up to i: up to i + N - M", "", "- window + 1"),
            ("the keys up to i + M - N: up to i + N - M", "+ M - N", "+ M - N - window + 1"),
            ("one key more than `window`", "+ N - M", "+ N - M - window"),
            ("one key less than `window`", "+ N - M", "+ N - M - window + 2"),
        )),
        Row("waits-too-long", "the walk goes from the first tile to the last: each block begins where the one before "
            "it comes a step later", [("reversed(range(begin // BLOCK_M, -(-end // BLOCK_M)))",
                                    "range(begin // BLOCK_M, -(-end // BLOCK_M))")]),
    ],
    judged=_expect_turns,
    trials=400,
)  # fmt: skip
def additions(block, M, N, BLOCK_M, BLOCK_N, window):
    """[(tile, turn), ...] of this block, in the order in which it adds; [] where nobody sees its keys."""
    # BEGIN SOLUTION
    begin = max(0, block * BLOCK_N - (N - M))  # the first query that sees one of its keys
    end = min(M, min(N, (block + 1) * BLOCK_N) - 1 - (N - M) + window)  # behind the last one
    todo = []
    for tile in reversed(range(begin // BLOCK_M, -(-end // BLOCK_M))):
        oldest = tile * BLOCK_M + N - M - window + 1
        todo.append((tile, block - max(0, oldest) // BLOCK_N))
    return todo
    # END SOLUTION


right_turns = additions


# ---- 11c.3 and 11c.4: parts of the backward pass --------------------------------------------------------------------
_BACKWARD_DIM = 128
# (heads, kv_heads, seq_q, seq_k, causal): heads that share keys; two heads of keys; rows without a key; four tiles.
_BACKWARD = ((3, 1, 40, 140, True), (2, 2, 70, 70, False), (1, 1, 200, 70, True), (1, 1, 250, 30, False))


_SHARED = "    extern __shared__ __align__(1024) char shared[];\n    const uint32_t k_smem"
_BEFORE = "    __shared__ char before[1024]; if (threadIdx.x == 0) *(volatile char*)before = 0;"


def _inputs(heads: int, kv_heads: int, seq_q: int, seq_k: int, causal: bool) -> list[torch.Tensor]:
    """grad_o, q, k, v, o and lse."""
    sizes = (heads, seq_q), (heads, seq_q), (kv_heads, seq_k), (kv_heads, seq_k)
    grad_o, q, k, v = (normal(1, *size, _BACKWARD_DIM, seed=i).half() for i, size in enumerate(sizes))
    o, lse = reference.attention(q, k, v, causal=causal)
    return [grad_o, q, k, v, o.half(), lse.float()]


def _gradients(shape: Sequence[Any], **options: Any) -> Callable[[CudaModule], Outputs]:
    given = _inputs(*shape)

    def run(module: CudaModule) -> Outputs:
        with MarkedEmpty():
            return list(
                hopper_backward(*given, causal=shape[-1], module=module, echo=False, threads=1, timeout=4.0, timeline=1)
            )

    return run


def _traced(shape: Sequence[Any]) -> Callable[[CudaModule], Any]:
    return all_found(_gradients(shape, timeout=4.0, timeline=1), ended=True)


def _backward(text: Any) -> CudaModule:
    return built(text, check=True, HEAD_DIM=_BACKWARD_DIM, ELEMENT="__half")


def _in_backward(**texts: str) -> Source:
    """The backward pass with a learner's texts in the place of regions. Its shared memory does not begin at 0."""
    text = SOURCE.read_text(encoding="utf-8")
    assert text.count(_SHARED) == 1, "shared memory of keys is laid out in another way"
    whole = Source(text.replace(_SHARED, _BEFORE + _SHARED), SOURCE.stem)
    for name, text in texts.items():
        whole = replaced(whole, name.replace("_", " "), text)
    return whole


def _expect_gradients(module: CudaModule, whole: Source) -> None:
    for shape in _BACKWARD:
        heads, kv_heads, seq_q, seq_k, causal = shape
        case = f"heads={heads}, kv_heads={kv_heads}, seq_q={seq_q}, seq_k={seq_k}{', causal' * causal}"
        got = ran(module, whole, case, functools.partial(_gradients(shape), module))
        grad_o, q, k, v, *_ = _inputs(*shape)
        want = reference.attention_backward(grad_o, q, k, v, causal=causal)
        for name, x, right in zip(("dq", "dk", "dv"), got, want, strict=True):
            expect_close(x, right, what=name, case=case, tol=6e-3 * float(right.abs().max()))


def _read_off(module: CudaModule) -> str:
    """Which dS a wrong dQ is made of, by blocks of 8 x 8: where K is a multiple of the identity, dQ is dS."""
    grad_o, q, k, v, *_ = _inputs(1, 1, 64, _BACKWARD_DIM, False)
    k[0, 0] = 4 * torch.eye(_BACKWARD_DIM)
    o, lse = reference.attention(q, k, v)
    try:
        got = hopper_backward(grad_o, q, k, v, o.half(), lse.float(), module=module, echo=False, threads=1, timeout=4.0)
    except SimtError:
        return ""  # another shape than the one that showed it
    both = got[0], reference.attention_backward(grad_o, q, k, v)[0]
    x, y = (z[0, 0].double().reshape(8, 8, 16, 8).transpose(1, 2).flatten(0, 1) for z in both)

    def near(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cdist(x.flatten(1), y.flatten(1)) < 0.05 * y.flatten(1).norm(dim=1)

    def place(i: int, rows: str, columns: str) -> str:
        r, c = i // 16 * 8, i % 16 * 8
        return f"{rows} {r} to {r + 7}{columns} {c} to {c + 7}"

    held, turned = near(x, y), near(x, y.mT)
    mixed = near(x.flatten(1).sort().values, y.flatten(1).sort().values)
    for i in (~held.diagonal()).nonzero().flatten().tolist():
        for of, how in ((held, ""), (turned, ", transposed"), (mixed, ", in another order")):
            found = of[i].nonzero().flatten().tolist()
            what = f"dS of {place(found[0], 'queries', ' and keys')}{how}" if found else "0"
            if found or not x[i].any():
                said = f"where K is 4 times the identity, dQ is 4 dS: {place(i, 'rows', ', columns')} hold {what}"
                return f"{said}; {int(held.diagonal().sum())} of {len(x)} blocks of 8 x 8 are right\n"
    return ""


def _dq_of_a_square(text: str) -> Source:
    return _in_backward(dQ_of_a_square=text)


_BOTH_STORED = "        named_barrier_sync(1 + CONSUMERS, CONSUMERS * GROUP);\n"
_FENCE, _ARRIVE = "        fence_proxy_async();\n", "if (lane == 0) mbarrier_arrive"
SQUARE = Trials(
    "11c.3", _backward, [_traced(_BACKWARD[0])], region=True, tol=1e-3, most=130,
    place=lambda text: _dq_of_a_square(text).text,
    equal={
        "`1 + CONSUMERS`": "a named barrier that is free there",
        "remainder by `2`": "a parity is the last bit", "lane <= 0": "no lane is below 0",
    },
    unless={"of-both": r"threadIdx\.x[%&]"},
    notes={
        "1 + CONSUMERS": "dS of both consumers has to be there", "CONSUMERS * GROUP": "both consumers meet",
        "nth % 2 * DS_BYTES": "dS of two tiles lies one behind the other", "which * DQ_BYTES": "there are two places "
        "for dQ", "consumer * (DQ_BYTES / CONSUMERS)": "each consumer has its square",
        "nth / 2 % 2 ^ 1": "a place that nobody has used is free", "k > 0": "the first product overwrites dq",
        "consumer * BLOCK * SLAB_ROW": "a slab is BLOCK rows long, and a consumer takes one",
    },
    rows=[
        Row("one-consumer", "multiply_dq waits for its own consumer: dQ sums over the keys of both, so dS of both has "
            "to be there", [(_BOTH_STORED, "        named_barrier_sync(1 + consumer, GROUP);\n")]),
        Row("no-barrier", "multiply_dq waits for nobody: dS of the other consumer may not be there",
            [(_BOTH_STORED, "")]),
        Row("by-first-thread", "one thread for each consumer arrives at dq_full, which waits for each of the 8 warps",
            [(_ARRIVE, "if (first_thread) mbarrier_arrive")]),
        Row("by-every-thread", "every thread arrives at dq_full, which waits for one of each warp",
            [(_ARRIVE, "mbarrier_arrive")]),
        Row("proxy-fence", "the copy engine reads the square by the async proxy: each thread that has stored fences, "
            "after its stores", [(_FENCE, "")]),
        Row("k-by-columns", "K is taken as its rows lie: the product's inner dimension is keys, rows of K, so it is "
            "descriptor_of_rows, and true for B", [
                ("descriptor_of_rows<BLOCK>(k_smem", "descriptor(k_smem"), ("false, true>", "false, false>")]),
        Row("k-by-columns", "B is not said to lie by its rows: the second flag of wgmma_ss",
            [("false, true>", "false, false>")]),
        Row("a-row-per-lane", "a thread's 32 numbers lie in a row: convert reads MMA tile after MMA tile, of each the "
            "128 threads' float4", [("n * GROUP + threadIdx.x % GROUP", "threadIdx.x % GROUP * 8 + n")]),
        Row("other-parity", "dq_empty is waited for with the consumers' parity: a place that nobody has used is free",
            [("nth / 2 % 2 ^ 1", "nth / 2 % 2")]),
        Row("not-read-yet", "nobody waits until the square of the tile before last has been read",
            [("        mbarrier_wait(dq_empty + 8 * which, nth / 2 % 2 ^ 1);", "")]),
        Row("same-columns", "both consumers multiply with the first 64 columns of K", [
            ("k_smem + consumer * BLOCK * SLAB_ROW", "k_smem")]),
        *(Row(slug, sentence, [edit]) for slug, sentence, edit in (
            ("own-keys", "the second consumer's K begins 64 rows on, at its own keys: its columns are a slab, of BLOCK "
             "rows", ("consumer * BLOCK * SLAB_ROW", "consumer * 64 * SLAB_ROW")),
            ("other-slab", "columns_on of A has another height: dS has TILE rows",
             ("columns_on<TILE>", "columns_on<BLOCK>")),
            ("a-transposed", "A is said to lie by its rows, the first flag of wgmma_ss: only B does",
             ("false, true>", "true, true>")),
            ("k-by-columns", "B goes on by columns: its inner dimension is keys, rows of K, so by rows_on",
             ("k_rows + rows_on(k)", "k_rows + columns_on<BLOCK>(k)")),
            ("overwritten", "each product overwrites dq: all but the first are added, by k > 0", ("k > 0", "false")),
            ("half-of-the-keys", "dQ is summed over 64 keys: it is all BLOCK of them",
             ("k < BLOCK / MMA_K", "k < TILE / MMA_K")),
            ("never-committed", "the products are not committed, so that end_step's wgmma_wait waits for none of them",
             ("        wgmma_commit();\n", "")),
            ("of-both", "threadIdx.x counts the threads of both consumers: a square is one consumer's",
             ("threadIdx.x % GROUP", "threadIdx.x")),
            ("of-a-warp", "the warps store at the same places: lane counts the threads of a warp, a square is for 128",
             ("threadIdx.x % GROUP", "lane")),
            ("other-parity", "dq_empty's parity changes with every tile here: a place is used for every other one",
             ("nth / 2 % 2 ^ 1", "nth % 2 ^ 1")),
            ("one-place", "dq_empty of the first place is waited for, by both: each has its own",
             ("dq_empty + 8 * which", "dq_empty")),
            ("one-place", "dq_full of the first place is arrived at, by both: each has its own",
             ("dq_full + 8 * which", "dq_full")),
        )),
    ],
)  # fmt: skip


@exercise(
    "11c.3",
    title="dQ of a tile, handed on",
    minutes=45,
    difficulty="Stretch",
    hints=[
        "dQ of the tile sums over all 128 keys, and the two consumers have stored dS of 64 keys each. So before the "
        "product both have to have come this far: a named barrier of both. Numbers 1 and 2 are in use for each alone.",
        "A is dS [64 queries, BLOCK keys]: descriptor(...) of its place, columns_on<TILE>(k). B is K [BLOCK keys, the "
        "consumer's 64 columns]: the inner dimension is its rows, so descriptor_of_rows<BLOCK>(...) of its slab, "
        "rows_on(k), and wgmma_ss<64, T, false, true>(dq, a, b, k > 0). A slab is BLOCK * SLAB_ROW bytes long. "
        "wgmma_fence() before, wgmma_commit() behind.",
        "A ring of two places: the consumer's full and empty of phase 11 with the parts exchanged. Here you are "
        "the producer: mbarrier_wait(dq_empty + 8 * (nth % 2), nth / 2 % 2 ^ 1), since a new place is free.",
        "float4* square = (float4*)(shared + (dq_smem + ... - k_smem)); square[n * GROUP + threadIdx.x % GROUP] = "
        "make_float4(dq[4 * n], ...) for n < 8. Then each thread fence_proxy_async(), __syncwarp(), and one lane of "
        "each warp mbarrier_arrive(dq_full + 8 * (nth % 2)).",
    ],
)
def dq_of_a_tile(dq_of_a_square: str) -> str:
    text = text_of(dq_of_a_square, "dq_of_a_square")
    whole = _dq_of_a_square(text)
    module = _backward(whole)
    try:
        with explained(lambda: module, SQUARE):
            _expect_gradients(module, whole)
    except CheckFailed as failed:
        if failed.diagnosis == "wrong-value":
            raise CheckFailed(f"{_read_off(module)}{failed.sentence}", case=failed.case) from None
        if failed.diagnosis != "uninitialised-shared":
            raise
        said = f"{failed.sentence.partition('; if')[0]}. Places of dQ: where does a consumer's square begin, counted "
        said += "from `shared`, which is k_smem, and do the consumer's 128 threads fill all of it?"
        raise CheckFailed(said, diagnosis=failed.diagnosis, case=failed.case) from None
    said = "the results are right; but the product is waited for here. The loop waits, after it has issued dK: so "
    said += "that dQ is handed on while dK is computed"
    expect("wgmma_wait" not in blank_comments(text), said, diagnosis="no-overlap")
    return f"{len(_BACKWARD)} cases right, nothing found by the emulator"


def _ending(main_loop: str, store: str) -> Source:
    one = "    begin_part(0);  // a block's only one: there are fewer than multiprocessors\n"
    return _in_backward(main_loop_of_keys=one + main_loop, store_dK_and_dV=f"{store}}}\n")  # the kernel ends there


_ALL_READ = "named_barrier_sync(1 + CONSUMERS, CONSUMERS * GROUP);"
_OWN_READ = "named_barrier_sync(1 + consumer, GROUP);"
ENDING = Trials(
    "11c.4", _backward, [_traced(x) for x in _BACKWARD[:2]], region=True,
    tol=1e-3, most=100,
    place=lambda text: _ending(*parted(text)).text,
    equal={
        "wgmma_wait<0>()": "end_step has waited for all products", "TILE": "at HEAD_DIM 128 a tile is one step",
        "CONSUMERS": "a named barrier that is free there", "first_thread": "the others have stored nothing",
        "head, batch)` comes too late": "either may be stored first",
    },
    unless={"k-overwritten": r"store_tile\(dk,p\.scale,(?!k_smem|v_smem)|"
            r"named_barrier_\w+\((?:1\+CONSUMERS|3),.{0,80}store_tile\(dk,"},
    rows=[
        Row("k-overwritten", "of K all 128 rows are read: by dQ = dS K of the other consumer too, which may be late. "
            "So both have to have waited for their products before anybody stores where K lay",
            [(_ALL_READ, _OWN_READ)]),
        Row("not-waited-for", "nobody waits for the copies: a block may end, and its shared memory with it, before "
            "they are read", [("if (first_thread) bulk_wait<0>();", "")]),
    ],
)  # fmt: skip


@exercise(
    "11c.4",
    title="dK where K lay",
    minutes=20,
    difficulty="Bug hunt",
    bug=[("(1 + CONSUMERS, CONSUMERS * GROUP)", "(1 + consumer, GROUP)")],
    untouched="665e771d6b4d",
    history="Dao-AILab/flash-attention, issue 359, mended in commit 1c41d2b (2023): dK over K, which dQ still reads",
    hints=[
        "Which lines write to shared memory here, and who has read what lay there? Go through the five products: which "
        "rows of K and of V does each of them read?",
        "S and dP of a consumer need its own 64 rows of K and V. Which product sums over keys?",
        "dQ = dS K reads all 128 rows of K, and each consumer computes a part of dQ. So dK of one may be stored only "
        "when the other has waited for its last product: a named barrier of both consumers, as multiply_dq has it.",
    ],
)
def dk_where_k_lay(main_loop: str, store: str) -> str:
    whole = _ending(text_of(main_loop, "main_loop"), text_of(store, "store"))
    module = _backward(whole)
    with explained(lambda: module, ENDING):
        _expect_gradients(module, whole)
    _expect_counted(module)
    return f"{len(_BACKWARD)} cases right, nothing found by the emulator"


def _expect_counted(module: CudaModule) -> None:
    """Raises CheckFailed where more threads come to a named barrier than it counts: which of them let each other go on
    is chance, and the emulator runs but one order.
    """
    warps: dict[tuple[Any, ...], set[int]] = {}
    for e in events_of(module, _gradients(_BACKWARD[0], timeline=1)):
        if e.did.startswith("barrier"):
            warps.setdefault(e.values[:2], set()).add(e.warp)
    for (number, threads), met in warps.items():
        come = 32 * len(met)
        said = f"{come} threads come to barrier {number}, which counts {threads}: any {threads} of them let each other "
        said += "go on, so a consumer may pass that the other has not met"
        expect(come <= threads, said, diagnosis="barrier-counts-too-few")
