"""7.3 and 7.5: what the registers hold when a learner's MMA is reached, and where its sums are stored.

The inputs of a run are numbers that say where they come from. So a register that holds another element than m16n8k16
wants is seen, whatever the addresses are made of.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from flashlab.check import CheckFailed
from flashlab.check.cuda_answer import Answer, built, normal
from flashlab.check.pattern import runs
from flashlab.kernels.problem import ELEMENTS
from flashlab.simt import SimtError
from flashlab.simt.sentences import KINDS

_MOST = 16  # MMAs that are noted
_FIRST, _SECOND = 1, 1024  # what the factors' numbers begin with: 0 is nobody's
_PLAIN = ("global-out-of-bounds", "wrong-count", "does-not-compile", "wrong-entry")
_NOTED = f"""
static uint32_t told_registers_[{_MOST}][32][6];
static float told_sums_[{_MOST}][32][4];
static int told_count_[32];
template <class T> static __device__ void told_mma_(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {{
    const int lane = threadIdx.x % 32, n = told_count_[lane]++ % {_MOST};
    for (int i = 0; i < 6; i++) told_registers_[n][lane][i] = i < 4 ? a[i] : i == 4 ? b0 : b1;
    mma_m16n8k16<T>(c, a, b0, b1);
    for (int i = 0; i < 4; i++) told_sums_[n][lane][i] = c[i];
}}
extern "C" void told(int* registers, float* sums, int* count) {{
    memcpy(registers, told_registers_, sizeof told_registers_), memcpy(sums, told_sums_, sizeof told_sums_);
    memcpy(count, told_count_, sizeof told_count_), memset(told_count_, 0, sizeof told_count_);
}}
#define mma_m16n8k16 told_mma_
"""


class Factors(NamedTuple):
    """Of a product [16, depth] by [depth, 8]: what its factors are called, the dtype of the first, and whether the
    second lies as [8, depth]; the result's name."""

    first: str
    second: str
    result: str
    depth: int
    dtype: torch.dtype
    turned: bool
    macros: Mapping[str, int] = MappingProxyType({})

    @property
    def shape(self) -> tuple[int, int]:
        return (8, self.depth) if self.turned else (self.depth, 8)

    def name(self, number: float) -> str:
        """Which element a register's number is."""
        (rows, columns), number = self.shape, number if number == number else 0.0
        for name, begin, count, width in (
            (self.first, _FIRST, 16 * self.depth, self.depth), (self.second, _SECOND, rows * columns, columns)
        ):  # fmt: skip
            if 0 <= (at := number - begin) < count and at == int(at):
                return f"{name}[{int(at) // width}, {int(at) % width}]"
        return "" if number else "0"

    def held(self, register: torch.Tensor) -> str:
        """What a register holds, int32 [1]: two elements, or what else its bits are."""
        halves = register.view(torch.float16).tolist()
        names = [self.name(x) for x in halves]
        whole = self.name(float(register.view(torch.float32)))
        other = [self.name(x) for x in register.view(torch.bfloat16).tolist()]
        if not all(names) and whole not in ("", "0"):
            return f"all 32 bits of {whole}, a float32 that nobody has rounded"
        if not all(names) and all(other):
            return f"{' and '.join(other)} in bfloat16, not float16"
        return " and ".join(name or f"{x:.4g}, which is no element," for name, x in zip(names, halves, strict=True))

    def wanted(self, lane: int, register: int, half: int, depth: int) -> str:
        """What m16n8k16 wants there; registers 4 and 5 are B's."""
        g, t = divmod(lane, 4)
        if register < 4:
            return f"{self.first}[{g + register % 2 * 8}, {depth + t * 2 + register // 2 * 8 + half}]"
        at = g, depth + t * 2 + (register - 4) * 8 + half
        return f"{self.second}[{at[0]}, {at[1]}]" if self.turned else f"{self.second}[{at[1]}, {at[0]}]"


_OPERANDS = "the operands are right, and"


@contextlib.contextmanager
def fragments_told(answer: Answer, factors: Factors) -> Iterator[None]:
    """Has the first register that holds something else told first, or a sum that is stored in another place."""
    try:
        yield
    except CheckFailed as failed:
        if failed.diagnosis in _PLAIN or not (said := _said(answer, factors)):
            raise
        lines = failed.sentence.split("\n")  # what gives the same, which nobody needs beside a rule, and the numbers
        known = lines[-1 if " apart" in said or "in every lane" in said else 0]
        cause = said.startswith(_OPERANDS) and failed.diagnosis != "wrong-value"  # what is told says more then
        both = f"{known}\n{said}" if cause else f"{said}\n{known}"
        raise CheckFailed(both, diagnosis=failed.diagnosis, case=failed.case) from None


def _said(answer: Answer, factors: Factors) -> str:
    include = '#include "ptx.cuh"\n'
    source = replace(answer.whole, text=answer.whole.text.replace(include, include + _NOTED, 1))
    numbers = _FIRST + torch.arange(16.0 * factors.depth).reshape(16, -1)
    second = _SECOND + torch.arange(8.0 * factors.depth).reshape(factors.shape)
    registers = torch.zeros(_MOST, 32, 6, dtype=torch.int32)
    sums, count, result = torch.zeros(_MOST, 32, 4), torch.zeros(32, dtype=torch.int32), torch.zeros(16, 8)

    def run(first: torch.Tensor, second: torch.Tensor) -> None:
        module.launch("run", first.to(factors.dtype), second.half(), result, echo=False, timeout=2.0)
        module.launch("told", registers, sums, count, echo=False)

    try:
        macros: dict[str, Any] = {"ELEMENT": ELEMENTS[torch.float16], **factors.macros}
        module = built(source, check=False, **macros)
        run(numbers, second)
        reached, enough = int(count[0]), factors.depth // 16
        if enough < reached <= _MOST:
            return f"there are {reached} MMAs, and {factors.depth} dimensions take {enough}, of 16 each"
        if reached < enough:
            few = "is 1 MMA" if reached == 1 else f"are {reached} MMAs"
            return f"there {few}, of 16 of the {factors.depth} dimensions each"
        if (wrong := _registers(registers[:reached], factors)) or reached > _MOST:
            return wrong
        first, second = normal(16, factors.depth, seed=1).half(), normal(*factors.shape, seed=2).half()
        run(first, second)
    except (CheckFailed, SimtError, TypeError):
        return ""
    right = first.float() @ (second.T if factors.turned else second).float()
    return _stores(sums[reached - 1], right, result, factors.result)


def _registers(registers: torch.Tensor, factors: Factors) -> str:
    """Of the first MMA in which something is wrong."""
    halves = registers.view(torch.float16).unflatten(2, (6, 2)).tolist()
    for n in range(min(len(halves), factors.depth // 16)):
        held = {
            at: [(factors.name(halves[n][at[0]][at[1]][half]), factors.wanted(*at, half, 16 * n)) for half in (0, 1)]
            for at in product(range(32), range(6))
        }
        off = [at for at, pairs in held.items() if any(mine != wanted for mine, wanted in pairs)]
        for factor, these, width in (
            (factors.first, range(4), factors.depth),
            (factors.second, (4, 5), factors.shape[1]),
        ):
            found = [at for at in off if at[1] in these]
            if not found:
                continue
            lane, r = found[0]
            if times := _times(registers[n][:, list(these)], factors, n, these):
                return f"the registers hold {times:.4g} times the elements of {factor}"
            mine, wanted = factors.held(registers[n, lane, r : r + 1]), " and ".join(x for _, x in held[lane, r])
            where = f"in MMA {n + 1} " if n else ""
            said = f"{where}{_called(r)} of lane {lane} holds {mine}, where m16n8k16 wants {wanted}: "
            rule = _apart([(r, *pair) for (_, r), pairs in held.items() for pair in pairs if r in these], factor, width)
            return said + (rule or f"{len(found)} of {32 * len(these)} registers with {factor} are wrong")
    return ""


def _times(registers: torch.Tensor, factors: Factors, n: int, these: Sequence[int]) -> float | None:
    """How often each register holds what is wanted, [32, registers], if it is the same number in all."""
    numbers = {factors.name(x): x for x in (*range(_FIRST, _SECOND), *range(_SECOND, 2 * _SECOND))}
    wanted = torch.tensor([[[numbers[factors.wanted(lane, r, half, 16 * n)] for half in (0, 1)] for r in these]
                           for lane in range(32)])  # fmt: skip
    times = registers.contiguous().view(torch.float16).unflatten(1, (-1, 2)).float() / wanted
    first = float(times[0, 0, 0])
    return first if first and (times - first).abs().max() < 2e-3 * abs(first) else None


def _called(register: int) -> str:
    return f"a[{register}]" if register < 4 else f"b[{register - 4}]"


def _apart(held: Sequence[tuple[int, str, str]], factor: str, width: int) -> str:
    """Of (register, what it holds, what is wanted) of all lanes: how far apart rows are, or which are shifted."""
    found = [re.findall(rf"{factor}\[(\d+), (\d+)\]", f"{mine} {wanted}") for _, mine, wanted in held]
    if any(len(x) < 2 for x in found):
        return ""
    places = torch.tensor([[[*map(int, x)] for x in both] for both in found])  # [registers, mine or wanted, 2]
    mine, wanted = places.unbind(1)
    for apart in range(1, 4 * width):
        if torch.equal(mine @ torch.tensor([width, 1]), wanted @ torch.tensor([apart, 1])):
            return f"rows of {factor} are taken {apart} elements apart, and are {width} apart"
    shifts: dict[int, set[tuple[int, ...]]] = {}
    for (register, _, _), shift in zip(held, (mine - wanted).tolist(), strict=True):
        shifts.setdefault(register, set()).add(tuple(shift))
    moved = [register for register, x in shifts.items() if x != {(0, 0)}]
    if len(by := {x for register in moved for x in shifts[register]}) > 1 or any(len(x) > 1 for x in shifts.values()):
        return ""
    far = " and ".join(f"{abs(x)} {what} too {'far' if x > 0 else 'near'}"
                       for x, what in zip(*by, ("rows", "columns"), strict=True) if x)  # fmt: skip
    return f"in every lane {' and '.join(map(_called, moved))} {'is' if len(moved) == 1 else 'are'} {far}"


def _stores(sums: torch.Tensor, right: torch.Tensor, result: torch.Tensor, name: str) -> str:
    """Where a lane's sums are stored; one that is found elsewhere before one that is lost."""
    lost = ""
    for lane, i in product(range(32), range(4)):
        row, column = lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2
        mine, wanted = float(sums[lane, i]), float(right[row, column])
        if abs(mine - wanted) > 1e-2:
            return f"{_OPERANDS} c[{i}] of lane {lane} is {mine:.4g} behind the last MMA, not {wanted:.4g}"
        if float(result[row, column]) != mine:
            there = (result == mine).nonzero().tolist()
            times = result / right
            if not there and (times - times[0, 0]).abs().max() < 1e-2 * times[0, 0].abs():
                return f"the sums are right behind the last MMA, and stored are {times[0, 0]:.4g} times them"
            said = f"c[{i}] of lane {lane} is {name}[{row}, {column}], and "
            if there:
                return f"{said}stored at {there[0]}"
            lost = lost or f"{said}neither there nor elsewhere"
    return lost


@contextlib.contextmanager
def sums_told(answer: Answer) -> Iterator[None]:
    """Of sums of the rows of a 16 x 16 matrix: has told first which elements of it are added up."""
    try:
        yield
    except CheckFailed as failed:
        if failed.diagnosis in (*_PLAIN, *KINDS) or not (said := _added_up(answer)):
            raise
        known = failed.sentence.partition("\n")[0]
        raise CheckFailed(f"{said}\n{known}", diagnosis=failed.diagnosis, case=failed.case) from None


def _added_up(answer: Answer) -> str:
    out = torch.zeros(16)

    def run(p: torch.Tensor) -> torch.Tensor:
        module.launch("run", p.half(), out, echo=False, timeout=2.0)
        return out.clone()

    try:
        module, eye = built(answer.whole, check=False, ELEMENT=ELEMENTS[torch.float16]), torch.eye(16)
        begins = run(torch.zeros(16, 16))
        if begins.any():
            return f"where P is 0 sum[{int(begins.nonzero()[0])}] is {float(begins[begins != 0][0]):g}"
        some = normal(16, 16, seed=1).abs().half().float()
        if not torch.allclose(run(2 * some), 2 * run(some), rtol=1e-3):
            return "with 2 P each sum is not twice as large: what else is P multiplied by?"
        rows = torch.stack([run(one[:, None].expand(16, 16)) for one in eye], 1)  # [sum, row of ones]
        columns = torch.stack([run(one[None].expand(16, 16)) for one in eye], 1)
    except (CheckFailed, SimtError, TypeError):
        return ""
    for i in range(16):
        of = rows[i].nonzero().flatten().tolist()
        often = columns[i]
        if of == [i] and (often == 1).all():
            continue
        if not of and not often.any():
            return f"sum[{i}] is never written, or always 0: it is row {i}'s"
        which = "all columns" if (often == often[0]).all() else f"{runs(often != 0, 'column')}"
        times = sorted({*often[often != 0].tolist()})
        counted = f", {times[0]:g} times each," if len(times) == 1 and times != [1.0] else ""
        here = " and ".join(f"row {r}" for r in of[:2]) or "no row"
        return (
            f"sum[{i}] adds up {which}{counted} of {here}{' and others' if of[2:] else ''}: it is row {i}'s, each once"
        )
    return ""
