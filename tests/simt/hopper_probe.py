"""Descriptors, layouts, swizzles and TMA boxes on a GPU, beside the emulator: the same sources, compared byte for byte.

    python -m tests.simt.hopper_probe OUT.json     (in the repository; needs an H100 or H200 and nvcc; a minute or two)

It prints what differs, and writes a checksum of each answer of the GPU, and the whole answer where the emulator's
differs. data/hopper_probe_h200.json is what it wrote on an H200; test_hopper_probe.py compares the emulator with it.

The cases are those of the emulator's own tests: descriptors that kernels use, and some that make no sense (wrong
strides, a base offset, a start inside the pattern); boxes of every rank, type and swizzle, at the edges of tensors.
"""

from __future__ import annotations

import ctypes
import datetime
import json
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from flashlab.cuda.toolchain import nvcc
from flashlab.simt.build import INCLUDE

from .conftest import KERNELS, module
from .test_hopper_copies import memory_of, numbers, random_box
from .wgmma_model import BYTES, cases, descriptor, image

SHAPES = (8, 24, 64, 176, 256)
BOXES = 150
Run = Callable[..., int]  # of an entry, with arrays


def operands(runs: dict[int, Callable[[str], Run]]) -> Iterator[tuple[str, np.ndarray]]:
    """What each descriptor names: name and answer, of A and of B, K-major and not, in both types."""
    words = np.array([descriptor(*d) for d in cases()], np.uint64)
    for n in SHAPES:
        some = words if n == 64 else words[::7]
        for operand in ("a", "b") if n == 64 else ("b",):
            for trans in (0, 1):
                for bf16 in (0, 1):
                    columns = n if operand == "b" else 16
                    found = np.zeros((2, len(some), 64, columns), np.float32)
                    for half, out in zip(image(), found, strict=True):
                        bits = half.view(np.uint16)
                        if bf16:  # the same words, as a bfloat16 reads them: small ones alone are whole numbers
                            bits = (half.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
                        runs[n](f"run_decode_{operand}")(bits, BYTES, some, out, len(some), trans, bf16)
                    for i, desc in enumerate(some):
                        yield f"{operand} n{n} trans{trans} bf16{bf16} {desc:#018x}", found[:, i]


def boxes(run: Callable[[str], Run]) -> Iterator[tuple[str, np.ndarray]]:
    """What TMA makes of a box: in shared memory after a load; in global memory after a store."""
    for seed in range(BOXES):
        box, other, kind, shift = random_box(seed)
        x, y, out = memory_of(box, seed), memory_of(box, seed + 1000), np.zeros(max(box.bytes, 16), np.uint8)
        run("run_box")(x, x.copy(), out.view(np.uint32), numbers(box, other, kind, shift, 0))
        yield f"load {seed} {box}", out
        run("run_box")(x, y, np.zeros(4, np.uint32), numbers(box, other, kind, shift, 1))
        yield f"store {seed} {box}", y


# ---- the two machines -------------------------------------------------------------------------------
def emulated(name: str, defines: dict[str, object]) -> Callable[[str], Run]:
    built = module(name, False, **({"defines": defines} if defines else {}))

    def entry(called: str) -> Run:
        def run(*args: object) -> int:
            built.launch(called, *args)
            return 0

        return run

    return entry


def on_gpu(name: str, defines: dict[str, object], host: tuple[str, ...] = ()) -> Callable[[str], Run]:
    """Arrays go to the GPU and come back; those of the entries in `host` stay where they are if they are the last."""
    import torch

    work = Path(tempfile.mkdtemp())
    command = [nvcc(), "-std=c++17", "-I", str(INCLUDE), "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-w",
               "-Xcompiler", "-fPIC", *(f"-D{k}={v}" for k, v in defines.items()),
               "-o", str(work / "probe.so"), str(KERNELS / name)]  # fmt: skip
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(work / "probe.so"))

    def entry(called: str) -> Run:
        def run(*args: object) -> int:
            passed, there = [], []
            for i, arg in enumerate(args):
                if not isinstance(arg, np.ndarray):
                    passed.append(ctypes.c_int(int(arg)))  # type: ignore[call-overload]
                elif called in host and i == len(args) - 1:
                    passed.append(ctypes.c_void_p(arg.ctypes.data))
                else:
                    tensor = torch.from_numpy(arg.view(np.uint8).reshape(-1)).cuda()
                    there.append((arg, tensor))
                    passed.append(ctypes.c_void_p(tensor.data_ptr()))
            error = getattr(library, called)(*passed)
            torch.cuda.synchronize()
            assert error == 0, f"{called} returned {error}"
            for arg, tensor in there:
                if arg.flags.writeable:
                    arg.view(np.uint8).reshape(-1)[:] = tensor.cpu().numpy()
            return error

        return run

    return entry


def answers(machine: Callable[..., Callable[[str], Run]]) -> Iterator[tuple[str, np.ndarray]]:
    yield from operands({n: machine("wgmma_probe.cu", {"PROBE_N": n}) for n in SHAPES})
    host = {} if machine is emulated else {"host": ("run_box",)}
    yield from boxes(machine("hopper_copies.cu", {}, **host))


def checksum(answer: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(answer).tobytes())


def main(out: Path) -> int:
    import torch

    record: dict = {"gpu": torch.cuda.get_device_name(), "date": datetime.date.today().isoformat(), "checksums": {},
                    "differs": {}}  # fmt: skip
    for (name, real), (same, ours) in zip(answers(on_gpu), answers(emulated), strict=True):
        assert name == same
        record["checksums"][name] = checksum(real)
        if real.tobytes() != ours.tobytes():
            record["differs"][name] = real.astype(float).reshape(-1).tolist()
            first = np.flatnonzero(real.reshape(-1) != ours.reshape(-1))[:4]
            print(f"{name}: the GPU has {real.reshape(-1)[first]} where the emulator has {ours.reshape(-1)[first]}")
        if len(record["checksums"]) % 500 == 0:
            out.write_text(json.dumps(record))
    out.write_text(json.dumps(record))
    print(f"{len(record['checksums'])} answers, {len(record['differs'])} differ")
    return bool(record["differs"])


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
