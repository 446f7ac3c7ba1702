"""Every exercise, given every kind of answer that is none: a sentence, never a raw exception, never a pass."""

import ast
import inspect
import re

import numpy as np
import pytest
import torch
import triton
from triton.compiler.errors import CompilationError

from flashlab import runtime
from flashlab.check import CheckFailed
from flashlab.exercises import answers, check
from flashlab.exercises.registry import exercises, find
from flashlab.simt import SimtError, find_compiler

IDS = [id for id, e in exercises().items() if e.order < (90,)]
try:
    find_compiler()
except SimtError:
    IDS = [id for id in IDS if int(id.split(".")[0]) < 6]


class Odd:
    """A value whose every operation raises."""

    def __repr__(self):
        raise ValueError("no repr")

    def __len__(self):
        raise ValueError("no length")

    def __bool__(self):
        raise ValueError("no truth")


def generator(*args, **options):
    yield 1


async def coroutine(*args, **options):
    return 1


def endless(*args, **options):
    return endless(*args, **options)


def misspelt(*args, **options):
    return torch.zeross(3)


def unknown(*args, **options):
    return no_such_name  # noqa: F821


def raising(*args, **options):
    raise ValueError


def asserting(*args, **options):
    assert not args and not options, "nothing wanted"


def leaving(*args, **options):
    raise SystemExit(1)


def too_few():
    return 1


def too_many(a, b, c, d, e, f, g, h):
    return 1


def indexing(first, *args, **options):
    return first["no such key"]


@triton.jit
def stray_kernel(x_ptr):
    pass


RETURNED = {
    "None": None, "a list": [1, 2], "an empty tuple": (), "a string": "abc", "a negative number": -7,
    "NaN": float("nan"), "an array": np.zeros((3, 2)), "seven numbers": (1, 2, 3, 4, 5, 6, 7), "Nones": (None, None),
    "strings": ("a", "b"), "a dictionary": {"a": 1}, "a tensor of five axes": torch.zeros(2, 3, 4, 5, 6),
    "an odd object": Odd(), "a function": print, "a complex number": 1j, "a dtype": torch.float16,
    "lists in a list": [[1], [2, 3]],
}  # fmt: skip
HANDED_IN = {
    "a list": [1, 2], "a number": 3, "a string": "abc", "a dictionary": {"a": 1}, "a tensor": torch.zeros(3),
    "an array": np.zeros(3), "bytes": b"x", "a class": Odd, "an odd object": Odd(), "a module": torch,
    "a built-in function": len, "another kernel": stray_kernel,
}  # fmt: skip
FUNCTIONS = (
    generator, coroutine, endless, misspelt, unknown, raising, asserting, leaving, too_few, too_many, indexing,
)  # fmt: skip


WRONG = HANDED_IN | {function.__name__: function for function in FUNCTIONS}
for name, value in RETURNED.items():
    WRONG[f"a function that returns {name}"] = lambda *args, value=value, **options: value


@pytest.mark.filterwarnings("ignore:coroutine", "ignore:Using a non-tuple")
@pytest.mark.parametrize("id", IDS)
@pytest.mark.every(8)
def test_a_wrong_kind_of_answer_gets_a_sentence(id):
    parameters = inspect.signature(find(id).run).parameters
    for kind, answer in WRONG.items():
        with pytest.raises(CheckFailed) as caught:
            check(id, *[answer] * len(parameters))
            pytest.fail(f"{id} accepts {kind}")
        failed = caught.value
        assert failed.diagnosis not in ("", "not-solved-yet"), kind
        assert len(str(failed)) >= 20, (kind, str(failed))
        assert "object at 0x" not in str(failed), (kind, str(failed))


@pytest.mark.parametrize("id", [id for id in ("0.2", "1.1", "2.3", "3.2", "7.1", "8.1", "9.2") if id in IDS])
def test_an_interrupt_passes_through(id):
    def stopped(*args, **options):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check(id, *[stopped] * len(inspect.signature(find(id).run).parameters))


def test_a_kernel_is_told_its_own_line():
    @triton.jit
    def copy(x_ptr, y_ptr, stride_xr, stride_xc, stride_yr, stride_yc, ROWS: triton.language.constexpr, COLS):
        missing + x_ptr  # noqa: B018, F821

    with pytest.raises(CheckFailed) as caught:
        check("3.1", copy)
    line = inspect.getsourcelines(copy.fn)[1] + 2
    where = f"in line {line} of test_wrong_kinds.py" if runtime.INTERPRETED else "in its line 2"
    assert f"{where}, `missing + x_ptr" in str(caught.value)
    assert re.search("NameError.*missing", str(caught.value))
    assert caught.value.case == "every second column of a wider matrix, 32 × 4"


def test_what_the_compiler_refuses_is_told_with_its_line():
    """As a launch on a GPU raises it: the whole text, a node of it, and perhaps a reason, or one that it came from."""
    text = "def f(x_ptr):\n    for i in range(3):\n        break\n"
    node = ast.parse(text).body[0].body[0].body[0]
    for error in (CompilationError(text, node, "unsupported AST node type: Break"), CompilationError(text, node, None)):
        error.__cause__ = ValueError("unsupported AST node type: Break")
        said = answers.told(error, lambda: None, answers.Called(), "a case")
        assert said.sentence == (
            "the compiler refuses your kernel: unsupported AST node type: Break, in its line 3, `break`"
        )
        assert said.diagnosis == "does-not-compile"
