"""Which value of a learner's kernel is wrong, and what belongs there? `value_mend`, for CUDA.

What the expressions of a right kernel give is kept for each thread, turn by turn; one expression of the learner's gets
these values in the place of its own.
"""

from __future__ import annotations

import ast
import contextlib
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from flashlab.check.changes import Change
from flashlab.check.cuda_text import CudaText, Declaration
from flashlab.check.failed import CheckFailed
from flashlab.check.value_mend import Spot, Values, Watched, found_in, nth_time, where_most
from flashlab.cuda import CompileError
from flashlab.simt import SimtError

_MOST, _SPOTS = 200_000, 400  # values of a spot, spots
_BLOCK, _THREADS = 1024, 64 * 1024  # numbers of a block's threads, of a launch's
_ROOM = 6_000_000  # values of all spots
_PACKED = 2**24
_HOOK = "flashlab_value"
_SEEN = (ast.BinOp, ast.Call, ast.Compare, ast.UnaryOp, ast.IfExp, ast.BoolOp, ast.Subscript)
_PRELUDE = f"""#include <type_traits>
#include <stdlib.h>
#include <string.h>
struct FlashlabValue {{ int thread; double x; }} __attribute__((packed));
static FlashlabValue* flashlab_noted[{_SPOTS}];
static int flashlab_count[{_SPOTS}], flashlab_spots = 0, flashlab_put_at = -1, flashlab_threads = 0;
static const double* flashlab_instead;
static int flashlab_next[{_THREADS}], flashlab_end[{_THREADS}];
__attribute__((noinline, no_sanitize("thread"))) static double flashlab_at(int spot, double x) {{
    const bool put = flashlab_put_at == spot;
    if (spot >= flashlab_spots && !put) return x;
    const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    const int in_block = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    const int thread = block * {_BLOCK} + in_block;
    if (put) {{
        const bool more = thread < flashlab_threads && flashlab_next[thread] < flashlab_end[thread];
        return more ? flashlab_instead[flashlab_next[thread]++] : x;
    }}
    const int i = __atomic_fetch_add(&flashlab_count[spot], 1, __ATOMIC_RELAXED);
    if (i < {_MOST}) flashlab_noted[spot][i] = {{thread, x}};
    return x;
}}
template <class T> static std::decay_t<T> {_HOOK}(int spot, T&& x) {{
    if constexpr (std::is_arithmetic_v<std::decay_t<T>>) return (std::decay_t<T>)flashlab_at(spot, (double)x);
    return x;
}}
extern "C" int flashlab_note(int spots) {{
    for (int i = 0; i < spots; i++) {{
        if (!flashlab_noted[i]) flashlab_noted[i] = (FlashlabValue*)malloc({_MOST} * sizeof(FlashlabValue));
        flashlab_count[i] = 0;
    }}
    flashlab_spots = spots, flashlab_put_at = -1;
    return 0;
}}
extern "C" int flashlab_count_of(int* out, int spots) {{
    memcpy(out, flashlab_count, spots * sizeof(int));
    return 0;
}}
extern "C" int flashlab_read(int spot, int* out) {{
    memcpy(out, flashlab_noted[spot], flashlab_count[spot] * sizeof(FlashlabValue));
    return 0;
}}
extern "C" int flashlab_put(int spot, const int* ends, int threads, const int* values, int count) {{
    free((void*)flashlab_instead);
    flashlab_instead = (double*)memcpy(malloc(count * sizeof(double)), values, count * sizeof(double));
    for (int i = 0; i < threads; i++) flashlab_next[i] = i ? ends[i - 1] : 0, flashlab_end[i] = ends[i];
    flashlab_put_at = spot, flashlab_threads = threads, flashlab_spots = 0;
    return 0;
}}
"""


def value_mended(
    it: Any, text: CudaText, right: CudaText, order: Sequence[int], until: float, say: Callable[[CudaText, Change], str]
) -> tuple[str, float]:
    """`found_in` an answer's text.

    it: the exercise's `Trials`. order: of its runs, one that is wrong first. until: the time to end.
    """
    with contextlib.suppress(SimtError, OverflowError):  # its process has ended; a number beyond all
        mine, theirs = _Run(it, text, order), _Run(it, right, order)
        return found_in(mine, [theirs], order[0], lambda: time.monotonic() > until, say)
    return "", 0.0


def _spots(text: CudaText) -> Iterator[Spot]:
    """Every expression that may be a number: what a variable is set to, and its parts."""
    lines = _lines(text.tree)
    for holder in ast.walk(text.tree):
        for name, value in ast.iter_fields(holder):
            for at, node in enumerate(value) if isinstance(value, list) else ((None, value),):
                array = text.kinds.get(getattr(node, "id", ""), set()) & {"array", "pointer"}
                if isinstance(node, ast.expr) and not array and name not in ("func", "targets", "target"):
                    target, whole = _set_to(holder, name, at)
                    if whole is not None and (
                        (whole and not isinstance(node, ast.Constant)) or isinstance(node, _SEEN)
                    ):
                        last = isinstance(holder, ast.Return) or text.kind_of(text.types.get(target, "")) == "pointer"
                        yield Spot((holder, name, at), node, target, lines[id(node)], last)


def _lines(tree: ast.AST) -> dict[int, int]:
    """Of each node in which statement it stands, as they come."""
    lines: dict[int, int] = {}

    def visit(node: ast.AST, line: int) -> int:
        lines[id(node)] = line = line + isinstance(node, ast.stmt)
        for child in ast.iter_child_nodes(node):
            line = visit(child, line)
        return line

    visit(tree, 0)
    return lines


def _set_to(holder: ast.AST, name: str, at: int | None) -> tuple[str, bool | None]:
    """The variable that is set to a node, and whether it is handed on as it is; None of what is no number."""
    if isinstance(holder, ast.Expr):
        return "", None
    if isinstance(holder, Declaration) and at is not None:
        before = holder.texts[at]
        if "&" in before:
            return "", None
        found = re.findall(r"(\w+)\s*=\s*$", before)
        return (found[0] if found else ""), True
    if isinstance(holder, ast.Assign) and name == "value":
        of = holder.targets[0]
        while isinstance(of, ast.Subscript):
            of = of.value
        return getattr(of, "id", ""), True
    return "", (isinstance(holder, ast.AugAssign) and name == "value") or isinstance(holder, ast.Call)


class _Run(Watched):
    text: CudaText

    def __init__(self, it: Any, text: CudaText, order: Sequence[int]):
        super().__init__()
        self.it, self.text, self.order, self.spots = it, text, order, [*_spots(text)][:_SPOTS]
        left: set[int] = set()  # what does not compile
        while True:
            edits = [(x.slot, ast.Call(ast.Name(_HOOK, ast.Load()), [ast.Constant(k), x.node], []))
                     for k, x in enumerate(self.spots) if k not in left]  # fmt: skip
            with text.changed(Change("", "", 0.0, tuple(edits))):
                code = _PRELUDE + it.place(it.unread(text.all_in_one([])))
            try:
                self.module = it.build(code)
                break
            except CheckFailed as failed:
                error, lines = failed.__context__, code.splitlines()
                at = [m.line for m in error.messages if m.line] if isinstance(error, CompileError) else []
                bad = {int(n) for k in at if k <= len(lines) for n in re.findall(rf"{_HOOK}\((\d+),", lines[k - 1])}
                names = {k for k in bad - left if isinstance(self.spots[k].node, ast.Name)}  # handed on by reference
                if bad <= left:
                    raise
                left |= names or bad
        self.module.timeout = 2.0

    def noted(self, i: int) -> dict[int, Values]:
        self.module.launch("flashlab_note", len(self.spots))
        run = self.it.runs[i]
        with contextlib.suppress(SimtError):
            getattr(run, "traced", run)(self.module)
        found, room, count = {}, _ROOM, torch.zeros(len(self.spots), dtype=torch.int32)
        self.module.launch("flashlab_count_of", count, len(self.spots))
        for k, n in enumerate(count.tolist()):
            if not 0 < n < min(_MOST, room):
                continue
            out = torch.zeros(3 * n, dtype=torch.int32)
            self.module.launch("flashlab_read", k, out)
            rows, room = out.reshape(n, 3).numpy(), room - n
            order = np.argsort(rows[:, 0], kind="stable")
            threads, values = rows[order, 0], np.ascontiguousarray(rows[order, 1:]).view(np.float64)[:, 0]
            found[k] = Values(threads, threads.tobytes(), values)
        self.module.launch("flashlab_note", 0)
        return found

    def fits(self, mine: Values, instead: Values) -> bool:
        whole = [bool((x.flat == np.floor(x.flat)).all()) for x in (mine, instead)]
        return mine.shapes == instead.shapes and (whole[0] or not whole[1])

    def does(self, at: int, right: Watched, by: int, moved: bool = False) -> bool:
        for i in self.order:
            if (values := right.on(i).get(by)) is None:
                return False
            threads, flat = values.each, values.flat + moved * 0.125
            if moved and bool((values.flat == np.floor(values.flat)).all()):
                flat = values.flat + 1.0
            rows = np.ascontiguousarray(flat).view(np.int32)
            ends = np.searchsorted(threads, np.arange(threads[-1] + 1), side="right").astype(np.int32)
            if len(ends) > _THREADS:
                return False
            given = torch.from_numpy(ends), len(ends), torch.from_numpy(rows.copy()), len(flat)
            self.module.launch("flashlab_put", at, *given)
            if not self.it.gives(self.module, i):
                return False
        return True

    def is_right(self, change: Change) -> bool:
        with contextlib.suppress(CheckFailed, AssertionError):
            module, refused = self.it._built(self.text, [change], 0.0)
            module.launch("flashlab_choose", 1)
            return not refused and all(self.it.gives(module, i) for i in self.order)
        return False

    def foreign(self, name: str, right: Watched) -> str:
        others = getattr(right.text, "others", {})
        return self.text._other(others[name]) if name in others else name

    def told(self, mine: Values, right: Values) -> str:
        k = int(np.argmax(~np.isclose(mine.flat, right.flat, rtol=1e-2, equal_nan=True)))
        thread = mine.each[k]
        first = int(np.searchsorted(mine.each, thread))
        last = int(np.searchsorted(mine.each, thread, side="right"))
        k = first + where_most(mine.flat[first:last], right.flat[first:last])
        when = f", {nth_time(k - first + 1)}," if last - first > 1 else ","
        old, new = map(_number, (mine.flat[k], right.flat[k]))
        return f"is {old} in thread {thread % _BLOCK} of block {thread // _BLOCK}{when} and should be {new}"


def _number(x: float) -> str:
    """In words; two packed ones, and addresses, in base 16."""
    return f"{int(x):#x}" if _PACKED <= x < math.inf and x == int(x) else f"{x:.5g}"
