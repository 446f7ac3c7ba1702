"""Offsets of the lanes of a warp, by which the emulator's model of shared memory is compared with a GPU."""

from __future__ import annotations

import random


def patterns() -> list[tuple[int, int, str, list[int]]]:
    """Operation (0 load, 1 store, 2 ldmatrix, 3 stmatrix), size, name, 32 offsets (-1: the lane is out)."""
    rng = random.Random(2026)
    found = []
    for operation in (0, 1):
        for size in (2, 4, 8, 16):

            def add(name: str, offsets: list[int]) -> None:
                found.append((operation, size, name, offsets))  # noqa: B023

            for stride in (1, 2, 3, 4, 8, 16, 32, 33):
                add(f"stride {stride}", [lane * stride * size for lane in range(32)])
            if operation == 0:  # several lanes storing to one word: which of them wins is undefined
                add("one address", [0] * 32)
                add("two addresses, by half", [lane // 16 * size for lane in range(32)])
                add("two addresses of one bank, by half", [lane // 16 * 128 for lane in range(32)])
                add("pairs share", [lane // 2 * size for lane in range(32)])
                add("pairs share, stride 2", [lane // 2 * 2 * size for lane in range(32)])
                add("quads share", [lane // 4 * size for lane in range(32)])
                add("halves the same", [lane % 16 * size for lane in range(32)])
                add("quarters the same", [lane % 8 * size for lane in range(32)])
                add("lanes l and l ^ 2 the same", [(lane & 1 | lane >> 1 & ~1) * size for lane in range(32)])
            add("first half", [lane * size if lane < 16 else -1 for lane in range(32)])
            add("even lanes", [lane * size if lane % 2 == 0 else -1 for lane in range(32)])
            add("one lane", [64 if lane == 5 else -1 for lane in range(32)])
            add("rows of 128 bytes", [lane * 128 for lane in range(32)])
            add("rows of 144 bytes", [lane * 144 for lane in range(32)])
            add("swizzled rows", [lane * 128 + (lane % 8) * 16 for lane in range(32)])
            add("reversed", [(31 - lane) * size for lane in range(32)])
            for i in range(6):
                spread = (64, 128, 256, 512, 1024, 1024)[i]
                places = rng.sample(range(spread), 32) if operation else [rng.randrange(spread) for _ in range(32)]
                add(f"random {i}", [p * size for p in places])
    for operation in (2, 3):
        for size in (1, 2, 4):
            for name, row in {
                "contiguous": lambda i: i * 16,
                "rows of 64 bytes": lambda i: i * 64,
                "rows of 128 bytes": lambda i: i * 128,
                "rows of 256 bytes": lambda i: i * 256,
                "rows of 144 bytes": lambda i: i * 144,
                "swizzled rows of 128 bytes": lambda i: i * 128 + i % 8 * 16,
                "swizzled rows of 64 bytes": lambda i: i * 64 + (i // 2 % 4) * 16,
            }.items():
                found.append((operation, size, name, [row(lane) for lane in range(32)]))
            for i in range(4):
                places = rng.sample(range(512), 32)
                found.append((operation, size, f"random {i}", [p * 16 for p in places]))
            if operation == 2:
                found.append((operation, size, "one row", [0] * 32))
    return found
