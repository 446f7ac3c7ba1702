"""The interpreter's repairs, its bounds checks and its byte counters."""

import functools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from flashlab import flash_attention, runtime
from flashlab.triton_tools.repairs import REPAIRS, narrow, widen
from flashlab.triton_tools.watch import OutOfBounds, Traffic, Window, hbm_traffic, watched

interpreted = pytest.mark.skipif(not runtime.INTERPRETED, reason="kernels are compiled in this process")
CASES = Path(__file__).with_name("interpreter_cases.py")

# For each repair the cases that it puts right: its canaries.
CANARIES = {
    "cast_impl": ["f32_to_bf16", "int_to_bf16", "exp2_log2"],
    "binary_op": ["arithmetic", "comparison", "where", "own_reduction"],
    "create_fma": ["fma"],
    "create_maxnumf": ["maximum_of_nan"],
    "create_minnumf": ["minimum_of_nan"],
    "create_dot": ["dot", "dot_tf32"],
    "create_atomic_rmw": ["atomic_add"],
    "get_bf16": ["clamp"],
    "reductions": ["reductions"],
    "warnings": ["no_warnings"],
    "index": ["range_over_an_argument"],
    "members": ["maths_by_methods"],
    "patching": ["patched_once"],  # speed: right without it, and slow
    "types": ["described_once"],  # speed
}
# Right without them too, and have to stay so.
RIGHT_ANYWAY = ["nan_to_bf16", "bf16_to_f32", "maximum", "abs", "dot_f16"]
NUMPY = tuple(int(part) for part in np.__version__.split(".")[:2])
# Repairs that only some of the versions need on which the course runs, and whether these are they.
NEEDED_HERE = {"index": triton.__version__.startswith("3.6.") and NUMPY >= (2, 4)}


@functools.cache
def answers(mode):
    """What interpreter_cases.py says in this one of its modes."""
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "FLASHLAB_INTERPRET")}
    return json.loads(subprocess.check_output([sys.executable, CASES, mode], env=environment))


@pytest.mark.long  # another release of Triton or numpy changes it, or a change of the repairs
@pytest.mark.parametrize("repair", CANARIES)
def test_each_repair_is_still_needed(repair):
    stack = f"Triton {triton.__version__} with numpy {np.__version__}"
    for case in CANARIES[repair]:
        right, _ = answers("plain")[case]
        if NEEDED_HERE.get(repair, True):
            assert not right, (f"{stack} does without the repair {repair}: when every version of the course does, take "
                               "it out of src/flashlab/triton_tools/repairs.py")  # fmt: skip
        else:
            assert right, f"{stack} needs the repair {repair} after all: see NEEDED_HERE"


@pytest.mark.slow
@pytest.mark.parametrize("case", [*RIGHT_ANYWAY, *(case for cases in CANARIES.values() for case in cases)])
def test_right_with_the_repairs(case):
    right, wrong = answers("repaired")[case]
    assert right, wrong


@pytest.mark.slow
def test_every_repair_has_a_canary_and_every_case_is_listed():
    assert set(CANARIES) == set(REPAIRS)
    assert set(answers("repaired")) == {case for cases in CANARIES.values() for case in cases} | set(RIGHT_ANYWAY)


def test_narrow_agrees_with_torch_on_every_kind_of_float():
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64, generator=torch.Generator().manual_seed(1))
    values = torch.cat([bits.to(torch.int32).view(torch.float32), torch.tensor([0.0, -0.0, 3.4e38, 1e-45])])
    want = values.to(torch.bfloat16)
    got = torch.from_numpy(widen(narrow(values.numpy())))
    assert ((got == want.float()) | (got.isnan() & want.isnan())).all()


# ---- bounds ---------------------------------------------------------------------------------------------------------


@triton.jit
def copy_rows(x_ptr, y_ptr, rows, stride, BLOCK: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = i[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    if MASKED:
        tl.store(y_ptr + at, tl.load(x_ptr + at, mask=i[:, None] < rows), mask=i[:, None] < rows)
    else:
        tl.store(y_ptr + at, tl.load(x_ptr + at), mask=i[:, None] < rows)


def copy_launcher(x):
    copy_rows[(triton.cdiv(len(x), 4),)](x, torch.zeros_like(x), len(x), 16, BLOCK=4, WIDTH=16, MASKED=True)


BOTH = torch.ones(8, 16)  # two tensors, one behind the other
WIDE = torch.ones(4, 32)
OUTSIDE = {
    "rows beyond the last": (torch.ones(10, 16), {}, 10, 16, False,
                             r"(?s)load out of bounds: element \[10, 0\] of x, which has shape \[10, 16\].*32 of 64"),
    "the tensor behind it": (BOTH[:4], dict(v=BOTH[4:]), 8, 16, True, r"element \[4, 0\] of x"),
    "the gap between rows": (WIDE[:, :16], {}, 4, 32, True, r"element \[0, 16\] of x, which has shape \[4, 16\]"),
    "between two elements": (WIDE[:, ::2], {}, 4, 16, True,
                             r"1 elements beyond \[0, 0\], between two elements of x"),
}  # fmt: skip


@interpreted
@pytest.mark.parametrize("x, others, rows, width, masked, words", OUTSIDE.values(), ids=OUTSIDE)
def test_a_load_out_of_bounds_names_tensor_and_element(x, others, rows, width, masked, words):
    with pytest.raises(OutOfBounds, match=words), watched(x=x, **others):
        copy_rows[(3,)](x, torch.zeros(12, 32), rows, x.stride(0), BLOCK=4, WIDTH=width, MASKED=masked)


@interpreted
def test_a_store_out_of_bounds_writes_nothing():
    x, buffer = torch.ones(4, 16), torch.zeros(6, 16)
    y = buffer[:2]  # two more rows of memory come after it, so that a real store would not crash
    with pytest.raises(OutOfBounds, match=r"store out of bounds: element \[2, 0\] of y"), watched(y=y):
        copy_rows[(1,)](x, y, 4, 16, BLOCK=4, WIDTH=16, MASKED=True)
    assert (buffer == 0).all()


@interpreted
@pytest.mark.parametrize(
    "x",
    [torch.ones(10, 16), torch.ones(16, 10).T, torch.ones(10, 64)[:, ::4], torch.ones(1, 16).expand(10, 16)],
    ids=["rows", "columns", "every fourth", "expanded"],
)
def test_strided_tensors_in_bounds_pass(x):
    @triton.jit
    def total(x_ptr, y_ptr, row, column, ROWS: tl.constexpr):
        i = tl.arange(0, 16)
        x = tl.load(x_ptr + i[:, None] * row + i[None, :] * column, mask=i[:, None] < ROWS, other=0.0)
        tl.store(y_ptr, tl.sum(tl.sum(x, 1), 0))

    y = torch.zeros(1)
    with watched(x=x) as traffic:
        total[(1,)](x, y, x.stride(0), x.stride(1), ROWS=10)
    assert y.item() == 160 and traffic.read_from == {"x": 640}


@interpreted
def test_after_the_context_nothing_is_checked_or_counted():
    x = torch.ones(8, 16)
    with watched(x=x) as traffic:
        copy_launcher(x)
    before = traffic.bytes
    copy_launcher(x)
    assert traffic.bytes == before > 0


def test_watched_wants_tensors_or_the_interpreter():
    with pytest.raises((TypeError, RuntimeError), match="tensors by name|compiled in this process"), watched(q=3):
        pass


# ---- threads --------------------------------------------------------------------------------------------------------


@triton.jit
def counted_rows(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)
    tl.store(y_ptr + i, x + tl.num_programs(0) + tl.max(x, 0) * 0, mask=i < n)


@pytest.fixture
def eager_threads():
    """Threads that change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_launches_from_several_threads(eager_threads):
    """Each with a grid of its own; forward and backward passes among them, and one thread that is watched."""

    def rows(number):
        for blocks in (1, 2, 5):
            x = torch.full((16 * blocks,), float(number), device=runtime.device())
            y = torch.zeros_like(x)
            counted_rows[(blocks,)](x, y, x.numel(), BLOCK=16)
            assert (y == number + blocks).all()

    def attention(number):
        drawn = torch.randn(3, 1, 2, 20 + number, 16, generator=torch.Generator().manual_seed(number))
        q, k, v = (x.to(runtime.device()).requires_grad_() for x in drawn)
        found, want = (flash_attention(q, k, v, causal=True, backend=name) for name in ("triton", "reference"))
        gradients = (torch.autograd.grad(o.sum(), (q, k, v)) for o in (found, want))
        torch.testing.assert_close(*gradients, rtol=0, atol=1e-5)

    def watching(number):
        if runtime.INTERPRETED:
            with watched():
                rows(number)

    with ThreadPoolExecutor(4) as pool:
        started = [pool.submit(work, number) for number in range(6) for work in (rows, attention, rows, watching)]
    for each in started:
        each.result()


@interpreted
def test_what_another_thread_launches_is_not_counted():
    x = torch.ones(8, 16)
    with watched(x=x) as traffic, ThreadPoolExecutor(1) as pool:
        pool.submit(copy_launcher, x).result()
    assert traffic.bytes == 0


@interpreted
def test_a_grid_that_is_a_function_may_launch():
    x, y, z = torch.ones(32), torch.zeros(32), torch.zeros(32)

    def grid(_):
        counted_rows[(2,)](x, z, 32, BLOCK=16)
        return (2,)

    with watched(y=y, z=z) as traffic:
        counted_rows[grid](x, y, 32, BLOCK=16)
    assert (y == 3).all() and (z == 3).all() and traffic.written_to == {"y": 128, "z": 128}


# ---- traffic --------------------------------------------------------------------------------------------------------


@interpreted
def test_bytes_loads_stores_sectors():
    x = torch.ones(10, 16, dtype=torch.float16)
    with watched(x=x) as traffic:
        copy_launcher(x)  # three programs of four rows; a row is 32 bytes
    assert (traffic.bytes_read, traffic.bytes_written, traffic.bytes) == (320, 320, 640)
    assert (traffic.loads, traffic.stores) == (3, 3)
    assert traffic.read_from == {"x": 320} and traffic.written_to == {"y_ptr": 320}
    assert 20 <= traffic.sectors <= 26  # 10 rows each way, one more a program where the tensor is not aligned to 32
    assert "320 bytes read by 3 loads" in repr(traffic)


def test_hbm_traffic_names_and_leaves_the_originals():
    x = torch.ones(8, 16, device=runtime.device())
    traffic = hbm_traffic(double_in_place, x)
    assert isinstance(traffic, Traffic)
    assert traffic.read_from == {"x": 512} and traffic.written_to == {"x": 512}
    assert (x == 1).all()


def double_in_place(x):
    doubling[(1,)](x, x.numel(), BLOCK=128)


@triton.jit
def doubling(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x_ptr + i, tl.load(x_ptr + i, mask=i < n) * FACTOR, mask=i < n)


FACTOR: tl.constexpr = tl.constexpr(2)


def test_a_view_of_far_apart_rows_costs_nothing_to_watch():
    far = Window(0, "X_ptr", 0, 4, (2, 3), (2**40, 1))
    offsets = np.array([0, 8, 12, 4 * 2**40, 4 * 2**40 + 8, 4 * 2**40 + 12, 2, -4])
    assert far.missing(offsets).tolist() == [False, False, True, False, False, True, True, True]
