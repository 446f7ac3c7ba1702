"""The process in which a source runs: limits, Ctrl-C, many workers, numbers that do not fit, calls at one time."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashlab import simt
from flashlab.simt import process, run

TEXT = """#include "simt.h"
#include <stdint.h>
#include <stdio.h>
#define ENTRY extern "C" int
__device__ int calls;
__global__ void count(int* p) { p[0] = ++calls; }
ENTRY run_count(int* p) { count<<<1, 1>>>(p); return cudaGetLastError(); }

__global__ void work(int* p, int rounds) {
    int x = threadIdx.x;
    for (int i = 0; i < rounds; i++) x = x * 1664525 + 1013904223;
    p[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
ENTRY run_work(int* p, int blocks, int threads, int rounds) {
    work<<<blocks, threads>>>(p, rounds);
    return cudaGetLastError();
}
__global__ void late(int* p) {  // the last block never ends
    while (blockIdx.x == gridDim.x - 1) {}
    p[blockIdx.x] = 1;
}
ENTRY run_late(int* p, int blocks) { late<<<blocks, 1>>>(p); return cudaGetLastError(); }
ENTRY run_launches_without_end(int* p) { for (;;) count<<<1, 1>>>(p); }
ENTRY run_print(int* p) { printf("host\\n"); return p[0]; }
ENTRY run_flood(int* p) { for (int i = 0; i < 200000; i++) printf("%d more bytes than anyone reads\\n", i); return 0; }
extern "C" int64_t wide(int64_t a, uint8_t b, bool c, float d) { return a + b + c + (int)d; }
struct Pair { const float* unused; int a; double b; };
extern "C" double of_struct(const Pair* p) { return p->a + p->b; }
ENTRY run_pointers(float** p) { return p == nullptr; }
__global__ void waits(const float* workspace, float* out) { out[threadIdx.x] = workspace[threadIdx.x] + 1; }
ENTRY run_waits(float* workspace, float* out) { waits<<<1, 32>>>(workspace, out); return cudaGetLastError(); }
__global__ void same(int* p) { if (threadIdx.x % 32 == 0) p[0] = 1; }
ENTRY run_same(int* p) { same<<<1, 64>>>(p); same<<<1, 64>>>(p); return cudaGetLastError(); }
"""


@pytest.fixture(scope="module")
def built() -> simt.Module:
    return simt.compile_cuda(TEXT, name="process.cu")


@pytest.fixture(scope="module")
def checked() -> simt.Module:
    return simt.compile_cuda(TEXT, name="process.cu", check=True)


def ints(n: int = 64) -> np.ndarray:
    return np.zeros(n, np.int32)


# ---- time ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("timeout", [1e-6, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("build", ["fast", "check"])
def test_a_launch_that_is_cut_short_is_no_success(built, checked, build, timeout):
    p = ints(4096)
    with pytest.raises(simt.KernelTimeout) as caught:
        (built if build == "fast" else checked).run_work(p, 16, 256, 1 << 30, timeout=timeout)
    assert not p.any()
    assert re.search("still running|had run|was up", str(caught.value))


@pytest.mark.long
def test_without_a_limit_a_call_ends_when_no_block_does(built, monkeypatch, capfd):
    monkeypatch.setattr(run, "PATIENCE", 3.0)
    with pytest.raises(simt.KernelTimeout, match=r"thread 0 of block 7 was still running in line \d+"):
        built.run_late(ints(), 8)
    said = capfd.readouterr().err
    assert re.search(
        r"run_late: \d+ s so far, late has run \d of its 8 blocks; it is given up after 3 s in which no block ends",
        said,
    )
    monkeypatch.setattr(run, "LONGEST", 1.0)  # a host part may launch for ever
    with pytest.raises(simt.KernelTimeout):
        built.run_launches_without_end(ints())


def test_a_call_that_goes_on_is_not_given_up(monkeypatch):
    """Blocks that end, however slowly, keep a call alive."""

    class Memory:
        progress = (0, 0, 0, "")

    def left(seconds: float, *progress: Any, worked: float | None = None) -> float:
        Memory.progress = progress
        return watch(seconds, seconds if worked is None else worked)

    watch = run._Watch("run", Memory(), None)
    assert left(0, 0, 0, 0, "") == 10
    assert left(4, 1, 100, 0, "kernel") == 10
    assert left(9, 1, 100, 0, "kernel") == 5
    assert left(13, 1, 100, 1, "kernel") == 10
    assert left(20, 1, 100, 1, "kernel") == 3
    assert left(50, 1, 100, 1, "kernel", worked=22) == 1  # it was kept waiting
    assert left(598, 1, 100, 60, "kernel", worked=30) == 2
    assert run._Watch("run", Memory(), 2.5)(1, 0.1) == 1.5


@pytest.mark.parametrize(
    "ticks, awake, want",
    [
        ([0, 0, 0, 0], False, 4.0),  # nobody keeps it from its work: asleep, it is at it
        ([0, 0, 0, 0], True, 1.0),  # it gets no processor: a quarter counts
        ([50, 100, 150, 200], True, 2.0),  # it gets a half of one
        ([100, 200, 300, 400], True, 4.0),
        ([400, 800, 1200, 1600], True, 4.0),  # a thread computes no more than there is time
    ],
)
def test_only_work_counts(monkeypatch, ticks, awake, want):
    """Of four seconds: ``ticks`` (hundredths) are what the busiest thread has computed at the end of each."""
    looks = iter([({}, awake), *(({"1": n, "2": n // 2}, awake) for n in ticks)])
    monkeypatch.setattr(process._Work, "_look", lambda self: next(looks))
    monkeypatch.setattr(process.time, "monotonic", itertools.count().__next__)
    work = process._Work(os.getpid())
    work._tick = 0.01
    assert [work.seconds() for _ in ticks][-1] == want


def test_a_report_that_comes_late_is_waited_for(built, monkeypatch):
    """And what one call says is never taken for the next one's."""
    wait = process.Process._wait

    def slowly(self, deadline, last, frames):
        if "ending" in frames:
            time.sleep(0.1)  # meanwhile nothing of the report is read
            if time.monotonic() < begin + 0.5:
                return
        wait(self, deadline, last, frames)

    monkeypatch.setattr(process.Process, "_wait", slowly)
    monkeypatch.setattr(process, "PATIENCE", 0.2)
    begin = time.monotonic()
    assert [x.grid for x in built.run_work(ints(256), 4, 64, 1).launches] == [(4, 1, 1)]
    begin = time.monotonic()
    assert [x.grid for x in built.run_work(ints(256), 2, 64, 1).launches] == [(2, 1, 1)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["kernel", pytest.param("host", marks=pytest.mark.long)])
def test_ctrl_c_at_any_time(what):
    """In the terminal as in a notebook: KeyboardInterrupt at once, and the module can be called again."""
    entry = "run_late(p, 1)" if what == "kernel" else "run_launches_without_end(p)"
    program = f"""
import os, signal, threading
import numpy as np
from flashlab import simt
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
built = simt.compile_cuda({TEXT!r}, name="process.cu")
p = np.zeros(64, np.int32)
built.run_count(p)
for wait in (0.05, 0.4):
    try:
        threading.Timer(wait, os.kill, (os.getpid(), signal.SIGINT)).start()
        built.{entry}
    except KeyboardInterrupt:
        print("interrupted")
built.run_count(p)
print("p", p[0] > 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.splitlines() == ["interrupted", "interrupted", "p True"], done.stderr


# ---- many workers --------------------------------------------------------------------------------
@pytest.mark.parametrize("threads, block", [(32, 1024), (64, 512), (128, 256), (4096, 32)])
def test_more_workers_than_cores(built, threads, block):
    few, many = ints(128 * block), ints(128 * block)
    built.run_work(few, 128, block, 10, threads=1)
    built.run_work(many, 128, block, 10, threads=threads)
    assert (few == many).all() and many.any()


@pytest.mark.parametrize(
    "option, value",
    [
        ("threads", 0), ("threads", 5000), ("threads", 1.5), ("shared_limit", -1), ("shared_limit", 1 << 20),
        ("multiprocessors", 0),
        *(("timeout", x) for x in (0, -1, -0.5, math.nan, math.inf, -math.inf, True, "10", 1e9)),
    ],
)  # fmt: skip
def test_options_have_a_range(built, option, value):
    kind = "a number of seconds above 0" if option == "timeout" else "an integer from"
    with pytest.raises(ValueError, match=f"{option} is .*; it is {kind}"):
        built.run_count(ints(), **{option: value})


# ---- arguments -----------------------------------------------------------------------------------
def test_numbers_that_do_not_fit(built):
    assert built.wide(1 << 40, 255, True, 2.0).returned == (1 << 40) + 258
    for values, words in [
        ((1 << 63, 0, False, 0), "a is 9223372036854775808, and its type, int64_t, goes from"),
        ((0, 256, False, 0), "b is 256, and its type, uint8_t, goes from 0 to 255"),
        ((0, -1, False, 0), "b is -1"),
        ((0, 0, 2, 0), "c is 2"),
        ((0, 0, False, 1e39), "d is 1e.39, which a float cannot hold"),
        ((0, 0, False, 10**400), "d is .*, which a float cannot hold"),
    ]:
        with pytest.raises(ValueError, match=words):
            built.wide(*values)
    with pytest.raises(ValueError, match="blocks is 4294967396, and its type, int, goes from"):
        built.run_work(ints(), (1 << 32) + 100, 1, 1)
    built.wide(0, 0, False, math.inf)  # which is a number of float's
    for values in [(0.5, 0, False, 0), ("1", 0, False, 0), (None, 0, False, 0), ([1], 0, False, 0)]:
        with pytest.raises(TypeError, match="a is declared int64_t, and got"):
            built.wide(*values)
    assert built.wide(np.int64(3), np.uint8(2), np.bool_(True), np.float32(1)).returned == 7
    assert math.isnan(math.nan) and built.wide(0, 0, False, 3.9).returned == 3


def test_pointers(built):
    class Pair(ctypes.Structure):
        _fields_ = [("unused", ctypes.c_void_p), ("a", ctypes.c_int), ("b", ctypes.c_double)]

    assert built.of_struct(Pair(None, 3, 0.5)).returned == 3.5
    with pytest.raises(TypeError, match="run_pointers: p is a pointer to pointers"):
        built.run_pointers(np.zeros(4, np.float32))
    with pytest.raises(TypeError, match="got an address. The source runs in a process of its own"):
        built.run_count(4096)
    for array, words in [
        (np.zeros(8, np.int32)[::-1], "negative strides"), (np.array([object()]), "plain numbers"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "negated or conjugated"),
        (torch.zeros(4, 4).to_sparse(), "layout"), ([1, 2], "pass a numpy array"),
    ]:  # fmt: skip
        with pytest.raises(TypeError, match=words):
            built.run_count(array)


# ---- what holds nothing ----------------------------------------------------------------------------
def test_memory_that_nobody_has_written(checked):
    out = np.zeros(32, np.float32)
    report = checked.run_waits(np.full(32, np.nan, np.float32), out)
    assert [f.kind for f in report.findings] == ["uninitialised-global"]
    assert "element 0 of workspace, which nobody has written" in report.findings[0].message
    report = checked.run_waits(np.zeros(32, np.float32), out, unwritten=["workspace"])
    assert [f.kind for f in report.findings] == ["uninitialised-global"]
    assert checked.run_waits(np.zeros(32, np.float32), out).ok
    with pytest.raises(ValueError, match="unwritten names 'work'; the parameters of run_waits are workspace, out"):
        checked.run_waits(out, out, unwritten=["work"])


def test_the_same_finding_of_two_launches_is_one(checked):
    report = checked.run_same(ints())
    assert [(f.kind, f.severity) for f in report.findings] == [("global-race", "warning")]
    assert "Both store the same value" in report.findings[0].message and str(report.findings[0]).startswith("warning")


# ---- the process -----------------------------------------------------------------------------------
def test_device_variables_keep_their_values(built):
    p = ints()
    built.run_count(p)
    first = int(p[0])
    built.run_count(p)
    assert p[0] == first + 1


def test_several_calls_at_a_time(built):
    def call(i: int) -> bool:
        p = ints(256)
        built.run_work(p, 1, 256, i)
        x = np.arange(256, dtype=np.uint32)
        for _ in range(i):
            x = x * np.uint32(1664525) + np.uint32(1013904223)
        return bool((p == x.astype(np.int32)).all())

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(24)))


def test_a_call_that_ends_while_another_thread_looks_keeps_its_process(built, monkeypatch):
    """And so the values of the `__device__` variables: a process in a call takes no other, and stays."""
    p = ints()
    built.run_count(p)
    first = int(p[0])
    its, looked, usual = process._processes[str(built.build.library)], threading.Event(), process.Process.alive.fget

    def end_the_call():
        its._between_calls = True
        its.lock.release()
        looked.set()

    def alive(self):
        found = usual(self)
        if self is its and not found and not looked.is_set():
            end_the_call()
        return found

    monkeypatch.setattr(process.Process, "alive", property(alive))
    its.lock.acquire()
    its._between_calls = False
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(built.run_count, p)
        if not looked.wait(0.3):  # the other thread waits for its turn
            end_the_call()
        call.result()
    assert p[0] == first + 1


def test_a_forked_child_has_processes_of_its_own(built):
    p = ints()
    built.run_count(p)
    before = int(p[0])
    child = os.fork()
    if child == 0:
        try:
            built.run_work(p, 1, 64, 1)
            os._exit(0 if p.any() else 1)
        except BaseException:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    built.run_count(p)
    assert p[0] == before + 1  # the parent's is as it was


def test_a_process_that_is_killed_is_replaced(built):
    p = ints()
    built.run_count(p)
    for other in list(process._processes.values()):
        other._popen.kill()  # nothing to one that has ended already
        other._popen.wait()
    built.run_count(p)
    assert p[0] == 1


CONSTRUCTOR = """
struct Slow { Slow() { for (volatile int i = 0;; i = i + 1) {} } } slow;
"""
HOST_LOOP = 'extern "C" int run_host(int* p) { for (volatile int i = 0;; i = i + 1) {} return p[0]; }\n'
OTHER_MOMENTS = (("run_count(p)", ""), ("run_host(p)", HOST_LOOP), ("run_count(p)", CONSTRUCTOR))


@pytest.mark.parametrize(
    "entry, more",
    [("run_late(p, 1)", ""), *(pytest.param(*x, marks=pytest.mark.long) for x in OTHER_MOMENTS)],
    ids=["in a kernel", "between calls", "in a host part", "as it is loaded"],
)
def test_the_process_ends_with_python(entry, more):
    program = f"""
import glob, os, signal, threading
import numpy as np
from flashlab import simt
built = simt.compile_cuda({TEXT + more!r}, name="process.cu")
def killed():
    children = []
    while not children:
        children = [pid for f in glob.glob("/proc/self/task/*/children") for pid in open(f).read().split()]
    print(*children, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
threading.Timer(0.3, killed).start()
p = np.zeros(64, np.int32)
built.{entry}
threading.Event().wait()
"""
    python = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert python.returncode == -signal.SIGKILL, python.stderr
    child = Path(f"/proc/{python.stdout.strip()}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":  # without an end, where it stays
        time.sleep(0.05)


def test_a_constructor_that_does_not_end_is_given_up(little_patience):
    built = simt.compile_cuda(TEXT + CONSTRUCTOR, name="process.cu")
    with pytest.raises(simt.KernelTimeout, match="when the time was up: the constructor of a global variable"):
        built.run_count(ints())
    assert str(built.build.library) not in process._processes


@pytest.mark.parametrize("what, how", [("abort();", "signal 6"), ("_Exit(7);", "exit status 7")])
def test_a_constructor_that_ends_the_process_is_told(what, how):
    built = simt.compile_cuda(f"{TEXT}#include <stdlib.h>\nstruct Bad {{ Bad() {{ {what} }} }} bad;\n")
    with pytest.raises(simt.HostError, match=rf"in the constructor of a global variable \(({how})"):
        built.run_count(ints())


def test_no_more_processes_than_wanted(monkeypatch):
    monkeypatch.setattr(process, "ALIVE", 2)
    usual, held = process.Process.close, []
    monkeypatch.setattr(process.Process, "close", lambda self: (held.append(self.lock.locked()), usual(self)))
    modules = [simt.compile_cuda(f"{TEXT}// {i}\n") for i in range(3)]
    for m in [*modules, *modules]:
        p = ints()
        m.run_count(p)
        assert p[0] >= 1
        assert sum(x.alive for x in process._processes.values()) <= 2
    assert len(held) >= 4 and all(held)  # none that another thread could have taken for its call meanwhile


def test_what_is_printed(built, capfd):
    built.run_print(ints())
    assert capfd.readouterr().out == "host\n"
    report = built.run_print(ints(), echo=False)
    assert capfd.readouterr().out == "" and "host" in report.printed
    flood = built.run_flood(ints(), echo=False).printed
    assert len(flood) < 2 << 20 and re.search(r"and \d+ more bytes", flood)


def test_no_thread_is_left_behind(built):
    before = threading.active_count()
    built.run_count(ints())
    assert threading.active_count() == before
