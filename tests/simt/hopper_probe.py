"""Descriptors, layouts, swizzles and TMA boxes on a GPU, beside the emulator: the same sources, compared byte for byte.

    python -m tests.simt.hopper_probe OUT.json     (in the repository; needs an H100 or H200 and nvcc; a minute or two)

It prints what differs, and writes a checksum of each answer of the GPU. data/hopper_probe_h200.json is what it wrote on
an H200; test_hopper_probe.py compares the emulator with it.

What is asked is what that record names: descriptors that kernels use, and some that make no sense (wrong strides, a
base offset, a start inside the pattern); boxes of every rank, type and swizzle, at the edges of tensors.
"""

from __future__ import annotations

import ctypes
import dataclasses
import datetime
import functools
import json
import re
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from flashlab.simt import SimtError

from .conftest import compile_for_hopper, module
from .test_hopper_copies import memory_of, numbers, random_box

RECORD = Path(__file__).parent / "data" / "hopper_probe_h200.json"
BYTES = 32 * 1024  # of the image that the descriptors look at
Machine = Callable[..., None]  # source, macros, entry, and its arrays and numbers


def asked() -> tuple[dict[tuple[str, ...], list[int]], list[str]]:
    """Descriptors by operand, its rows, trans and bf16; and the boxes."""
    descriptors, boxes = defaultdict(list), []
    for name in json.loads(RECORD.read_text())["checksums"]:
        if found := re.fullmatch(r"([ab]) n(\d+) trans(\d) bf16(\d) (0x\w+)", name):
            descriptors[found.groups()[:4]].append(int(found[5], 16))
        else:
            boxes.append(name)
    return descriptors, boxes


def operands(machine: Machine) -> Iterator[tuple[str, np.ndarray]]:
    """What each descriptor names: name and answer, of A and of B, K-major and not, in both types."""
    number = np.arange(BYTES // 2)
    images = number % 2048, number // 2048  # as float16 they say together which word is meant
    for (operand, n, trans, bf16), descriptors in asked()[0].items():
        some = np.array(descriptors, np.uint64)
        found = np.zeros((2, len(some), 64, int(n) if operand == "b" else 16), np.float32)
        for half, out in zip(images, found, strict=True):
            bits = half.astype(np.float16).view(np.uint16)
            if int(bf16):  # the same words, as a bfloat16 reads them: small ones alone are whole numbers
                bits = (half.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            given = (bits, BYTES, some, out, len(some), int(trans), int(bf16))
            machine("wgmma_probe.cu", {"PROBE_N": int(n)}, f"run_decode_{operand}", *given)
        for i, desc in enumerate(some):
            yield f"{operand} n{n} trans{trans} bf16{bf16} {desc:#018x}", found[:, i]


def box_case(name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
    """x, y, out and numbers of "load 7" or "store 7", and which of y and out is the answer. "crooked": off by one."""
    how, seed = name.split()[-2:]
    box, other, kind, shift = random_box(int(seed))
    if name.startswith("crooked"):
        moved = ((at[0] + 1, *at[1:]) for at in (box.corner, other))
        box, other = dataclasses.replace(box, corner=next(moved)), next(moved)
    x, out = memory_of(box, int(seed)), np.zeros(max(box.bytes, 16), np.uint8)
    y = memory_of(box, int(seed) + 1000) if how == "store" else x.copy()
    return x, y, out.view(np.uint32), numbers(box, other, kind, shift, int(how == "store")), int(how == "load")


REFUSED = np.frombuffer(b"refused", np.uint8)


def answer_of(name: str, machine: Machine) -> np.ndarray:
    """What TMA makes of a box: in shared memory after a load; in global memory after a store. Or that it refuses."""
    case = box_case(name)
    try:
        machine("hopper_copies.cu", {}, "run_box", *case[:4])
    except (RuntimeError, SimtError) as error:  # of PyTorch; of the emulator
        if not re.search("illegal instruction|in dimension", str(error)):
            raise
        return REFUSED
    return case[1 + case[4]].view(np.uint8)


# ---- the two machines -------------------------------------------------------------------------------
def emulated(name: str, defines: dict[str, object], called: str, *args: object) -> None:
    module(name, False, **({"defines": defines} if defines else {})).launch(called, *args)


@functools.cache
def compiled(name: str, defines: tuple[tuple[str, object], ...]) -> Path:
    found = Path(tempfile.gettempdir()) / f"{'-'.join([name, *(f'{k}{v}' for k, v in defines)])}.so"
    if not found.exists():
        compile_for_hopper(name, found, "-shared", "-w", "-Xcompiler", "-fPIC", *(f"-D{k}={v}" for k, v in defines))
    return found


def on_gpu(name: str, defines: dict[str, object], called: str, *args: object) -> None:
    """Arrays go to the GPU and come back; the last one of run_box stays where it is: the host reads it."""
    import torch

    passed, there = [], []
    for i, arg in enumerate(args):
        if not isinstance(arg, np.ndarray):
            passed.append(ctypes.c_int(int(arg)))  # type: ignore[call-overload]
        elif called == "run_box" and i == len(args) - 1:
            passed.append(ctypes.c_void_p(arg.ctypes.data))
        else:
            tensor = torch.from_numpy(arg.view(np.uint8).reshape(-1)).cuda()
            there.append((arg, tensor))
            passed.append(ctypes.c_void_p(tensor.data_ptr()))
    error = getattr(ctypes.CDLL(str(compiled(name, tuple(defines.items())))), called)(*passed)
    torch.cuda.synchronize()
    assert error == 0, f"{called} returned {error}"
    for arg, tensor in there:
        if arg.flags.writeable:
            arg.view(np.uint8).reshape(-1)[:] = tensor.cpu().numpy()


def there(name: str) -> np.ndarray:
    return answer_of(name, on_gpu)


def answers() -> Iterator[tuple[str, np.ndarray]]:
    """The emulator's, all of them."""
    yield from operands(emulated)
    for name in asked()[1]:
        yield name, answer_of(name, emulated)


def answers_there() -> Iterator[tuple[str, np.ndarray]]:
    """A GPU's. Each box in a process of its own: after one that it refuses a process has no GPU any more."""
    yield from operands(on_gpu)
    compiled("hopper_copies.cu", ())
    with ProcessPoolExecutor(12, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        yield from zip(asked()[1], pool.map(there, asked()[1]), strict=True)


def checksum(answer: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(answer).tobytes())


def main(out: Path) -> int:
    import torch

    record: dict = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "checksums": {}}
    differ = 0
    try:
        for (name, real), (same, ours) in zip(answers_there(), answers(), strict=True):
            assert name == same
            record["checksums"][name] = checksum(real)
            if real.tobytes() != ours.tobytes():
                differ += 1
                print(f"{name}: the GPU has {real.reshape(-1)}, the emulator {ours.reshape(-1)}")
    finally:  # a fault on the GPU ends it: what was compared is kept
        out.write_text(json.dumps(record))
    print(f"{len(record['checksums'])} answers, {differ} differ")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
