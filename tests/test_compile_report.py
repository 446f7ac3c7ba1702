"""Compile reports: what they say, for which kernels, what goes wrong clearly, and the cache."""

import errno
import os
import subprocess
import sys
import textwrap

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.errors import PTXASError

from flashlab.triton_tools import compile_child
from flashlab.triton_tools import compile_report as module
from flashlab.triton_tools.compile_report import compile_report, compile_reports

TILE: tl.constexpr = tl.constexpr(64)
HALF = tl.constexpr(0.5)


@triton.jit
def scaled(x):
    return x * HALF


@triton.jit
def gemm_tile(a_ptr, b_ptr, c_ptr, k, scale, D: tl.constexpr):
    """c = scale * a @ b.T over k columns."""
    i = tl.arange(0, TILE)
    d = tl.arange(0, D)
    acc = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, k, D):
        a = tl.load(a_ptr + i[:, None] * k + (start + d)[None, :])
        b = tl.load(b_ptr + i[:, None] * k + (start + d)[None, :])
        acc = tl.dot(a, b.T, acc)
    tl.store(c_ptr + i[:, None] * TILE + i[None, :], scaled(tl.exp2(acc * scale)))


@triton.jit
def slices(x_ptr, n: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, n))
    tl.store(x_ptr + tl.arange(0, 16), x[0:16])


@triton.jit
def copy(x_ptr, y_ptr, n):
    i = tl.arange(0, 1024)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n), mask=i < n)


F16 = torch.float16
GEMM = {"a_ptr": F16, "b_ptr": F16, "c_ptr": torch.float32, "k": 256, "scale": 0.5, "D": 64}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """One cache for this file's tests, not the user's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def test_shared_memory_alone_is_that_of_the_whole_and_lengths_alike_are_compiled_once():
    (alone, other), (whole,) = (
        compile_reports(gemm_tile, some, targets=["sm_90"], num_stages=2, shared_only=only)
        for some, only in (([GEMM, GEMM | {"k": 512}], True), ([GEMM], False))
    )
    assert alone.shared_bytes == whole.shared_bytes > 0 and alone.fits and whole.registers > 0
    assert alone.registers is None and not alone.sass and not alone.from_cache
    assert other.seconds == alone.seconds, "256 and 512 are both divisible by 16"
    assert [module._alike(k) for k in (0, 1, 512, 250, 2**31, 2**63 + 3)] == [16, 1, 16, 17, 2**32 + 16, 2**63 + 17]


def test_arguments_are_specialised_as_a_launch_does():
    shifted = torch.zeros(1032, dtype=F16)[1:]
    arguments = [
        {"x_ptr": F16, "y_ptr": F16, "n": 512},
        {"x_ptr": torch.zeros(1024, dtype=F16), "y_ptr": F16, "n": 64},
        {"x_ptr": shifted, "y_ptr": F16, "n": 512},
        {"x_ptr": F16, "y_ptr": F16, "n": 511},
        {"x_ptr": F16, "y_ptr": F16, "n": 1},
    ]
    aligned, tensor, misaligned, odd, one = compile_reports(copy, arguments, targets=["sm_90"])
    assert aligned.ptx == tensor.ptx
    assert aligned.instructions["LDG"] < misaligned.instructions["LDG"]  # 16 bytes at once, or element by element
    assert aligned.instructions["LDG"] < odd.instructions["LDG"]  # the mask changes between multiples of 16 only
    assert aligned.ptx.count(".param") > one.ptx.count(".param")  # n == 1 is a constant, no argument


def not_a_kernel(x):
    return x


@pytest.mark.parametrize(
    "kernel, arguments, error, message",
    [
        (not_a_kernel, {}, TypeError, "the plain function not_a_kernel"),
        (torch.nn.Linear, {}, TypeError, "a report is for a @triton.jit kernel"),
        (copy, {"x_ptr": F16, "y_ptr": F16}, TypeError, "kernel copy also needs a value for n"),
        (copy, {"x_ptr": F16, "y_pt": F16, "n": 3}, TypeError, "has no argument 'y_pt'; did you mean 'y_ptr'"),
        (copy, {"x_ptr": F16, "y_ptr": "fp16", "n": object()}, TypeError, "argument 'n' of kernel copy is a object"),
    ],
)
def test_clear_errors(kernel, arguments, error, message):
    with pytest.raises(error, match=message):
        compile_report(kernel, arguments)


def test_timeout_is_an_error_and_the_compiler_is_stopped():
    with pytest.raises(TimeoutError, match="compiling gemm_tile took more than 0.05 seconds"):
        compile_report(gemm_tile, GEMM | {"k": 12345}, timeout=0.05)


def test_a_damaged_cache_entry_is_compiled_again():
    arguments = {"x_ptr": F16, "y_ptr": F16, "n": 48}
    want = compile_report(copy, arguments)
    for entry in module.cache.folder("compile").glob("*.json.gz"):
        entry.write_bytes(entry.read_bytes()[:100])
    again = compile_report(copy, arguments)
    assert not again.from_cache and again == want
    assert compile_report(copy, dict(reversed(arguments.items()))).from_cache
    assert not list(module.cache.folder("compile").glob("*.part"))


def error(raised, cause=None, context=None):
    raised.__cause__, raised.__context__ = cause, context
    return raised


FULL = OSError(errno.ENOSPC, "No space left on device")
EXIT = subprocess.CalledProcessError(255, "ptxas")


@pytest.mark.parametrize(
    ("raised", "refusal"),
    [
        (error(ValueError("unsupported tensor index")), True),
        (error(RuntimeError("PassManager::run failed")), True),
        (error(PTXASError("Internal Triton PTX codegen error: uses too much shared data"), context=EXIT), True),
        (error(PTXASError("`ptxas` failed with error code 2"), context=EXIT), True),
        (error(PTXASError("ptxas fatal: No space left on device"), context=EXIT), False),
        (error(PTXASError("`ptxas` failed with error code -9"), context=EXIT), False),
        (FULL, False),
        (error(ValueError("wrapped"), cause=FULL), False),
        (error(ValueError("handled"), context=FULL), False),
        (error(ValueError("handled"), context=FileNotFoundError(2, "there was no entry")), True),
        (MemoryError(), False),
        (subprocess.CalledProcessError(-9, "cuobjdump"), False),
        (ImportError("libcuda"), False),
    ],
)
def test_who_refuses_the_compiler_or_the_machine(raised, refusal):
    assert compile_child.is_refusal(raised) == refusal


def test_only_the_compilers_refusals_are_remembered(monkeypatch):
    arguments, real = {"x_ptr": torch.float32, "n": 32}, module._run_child
    full = [{"job": 0, "started": True}, {"job": 0, "seconds": 1.0, "error": "OSError: full", "refused": False}]
    monkeypatch.setattr(module, "_run_child", lambda *_: ([dict(line) for line in full], 0, ""))
    with pytest.raises(RuntimeError, match="slices could not be compiled on this machine: OSError: full"):
        compile_report(slices, arguments)
    died = "OSError: [Errno 28] No space left on device"  # as it wrote its results
    monkeypatch.setattr(module, "_run_child", lambda *_: ([{"job": 0, "started": True}], 1, died))
    with pytest.raises(RuntimeError, match="ended with status 1: OSError: .* No space left"):
        compile_report(slices, arguments)
    monkeypatch.setattr(module, "_run_child", real)
    first, again = compile_report(slices, arguments), compile_report(slices, arguments)
    assert not first.ok and not first.fits and first.shared_bytes is None and not first.ptx
    assert not first.from_cache and again.from_cache and "unsupported tensor index" in again.error
    assert "x[0:16]" in first.error and "refused" in repr(first) and first.error_line in repr(first)


NOTEBOOK = """
    import flashlab, sys
    from flashlab.triton_tools.compile_report import compile_report
    from flashlab.triton_tools.watch import OutOfBounds, hbm_traffic
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()

    def cell(text):
        shell.run_cell(text).raise_error()

    cell('''
    import torch, triton, triton.language as tl
    import triton.language as language
    BLOCK: language.constexpr = language.constexpr(128)
    WIDTH, EXTRA = language.constexpr(2), language.constexpr(0)
    i, n = object(), torch.ones(3)  # a kernel has its own names, whatever the notebook calls so
    ''')
    cell('''
    @triton.jit
    def inner(x):
        return x * WIDTH

    @triton.jit
    def outer(x):
        return inner(x) + 1

    @triton.autotune([triton.Config({"MORE": 3})], key=["n"])
    @triton.jit
    def kernel(x_ptr, n, MORE: language.constexpr):
        i = language.arange(0, BLOCK)
        language.store(x_ptr + i, outer(language.load(x_ptr + i, mask=i < n)) + MORE, mask=i < n)

    @triton.jit
    def in_place(x_ptr, n, SIZE: tl.constexpr):
        i = language.program_id(0) * SIZE + language.arange(0, SIZE)
        language.store(x_ptr + i, inner(language.load(x_ptr + i, mask=i < n)), mask=i < n + EXTRA)

    def launcher(x, size=32):
        in_place[(triton.cdiv(len(x), size),)](x, len(x), SIZE=size)

    def with_kernel(kernel):
        def launch(x):
            kernel[(1,)](x, len(x), SIZE=128)
        return launch
    ''')
    launcher, x = shell.user_ns["launcher"], shell.user_ns["torch"].ones(100)
    print(hbm_traffic(launcher, x, size=64))
    print(hbm_traffic(shell.user_ns["with_kernel"](shell.user_ns["in_place"]), x).read_from)
    cell("EXTRA = language.constexpr(2)")
    try:
        hbm_traffic(launcher, x)
    except OutOfBounds as error:
        print(error)
    try:
        hbm_traffic(launcher, x, size=shell.user_ns["with_kernel"](1))
    except TypeError as error:
        print(error)
    kernel, arguments = shell.user_ns["kernel"], {"x_ptr": shell.user_ns["torch"].float32, "n": 100, "MORE": 5}
    first = compile_report(kernel, arguments)
    print(first.ok, first.from_cache, compile_report(kernel, arguments).from_cache)
    cell("WIDTH = language.constexpr(7)")  # a constant that a helper's helper reads
    second = compile_report(kernel, arguments)
    print(second.ok, second.from_cache, first.ptx != second.ptx)
    cell("WIDTH = object()")
    try:
        compile_report(kernel, arguments)
    except ValueError as error:
        print(error)
    namespace = dict(shell.user_ns)
    try:
        exec("@triton.jit\\ndef made(x_ptr):\\n    language.store(x_ptr, 1)", namespace)
        compile_report(namespace["made"], {"x_ptr": shell.user_ns["torch"].float32})
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize("interpret", ["1", pytest.param("0", marks=pytest.mark.long)])
def test_kernels_and_launchers_of_notebook_cells(interpret):
    """Both kinds of process: in one @triton.jit makes a JITFunction, in the other an InterpretedFunction. Each asks a
    child of the other kind, for a report or for the traffic."""
    pytest.importorskip("IPython")
    environment = os.environ | {"FLASHLAB_INTERPRET": interpret, "IPYTHONDIR": os.environ["XDG_CACHE_HOME"]}
    environment.pop("TRITON_INTERPRET", None)
    said = subprocess.check_output([sys.executable, "-c", textwrap.dedent(NOTEBOOK)], env=environment, text=True)
    traffic, by_tensor, outside, untaken, *lines = said.splitlines()
    assert traffic.startswith("400 bytes read by 2 loads, 400 bytes written by 2 stores")
    assert outside.startswith("store out of bounds: element [100] of x, which has shape [100]")
    assert by_tensor == "Counter({'x': 400})" and (
        interpret == "1" or untaken.startswith("an argument of launcher cannot be taken to the process that interprets")
    )
    assert lines[0] in ("True False True", "True True True")  # the second process finds the first one's report
    assert lines[1] in ("True False True", "True True True")
    assert lines[2].startswith("inner uses 'WIDTH', a object, which cannot be written out as source")
    if interpret == "1":
        assert lines[3].startswith("there is no source for 'made'")
    else:  # Triton refuses already
        assert lines[3] == "@jit functions should be defined in a Python file"
