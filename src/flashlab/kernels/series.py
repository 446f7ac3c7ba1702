"""The kernel series: which files there are, in the order of the course, and what each can be compiled for.

A step is a whole ``.cu`` file: the one before it with one idea more. Its number says its phase: ``p8_4_swizzle`` is
step 4 of phase 8. Beside the ladder stand exhibits, an idea that another ladder has and this one has not: the file of
one holds the regions in which it differs from the step beside it, and the rest is that step's.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flashlab.kernels import regions
from flashlab.runtime import cache

FOLDER = Path(__file__).parent
PTX = FOLDER / "ptx"  # where the headers are that say an instruction as a function
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Step:
    """One file of the series, or of the exhibits beside it.

    defines: macros it knows besides HEAD_DIM and ELEMENT, with the values to try; the first is the default.
    """

    name: str  # the file's, without ``.cu``
    idea: str  # in one phrase, what is new
    head_dims: tuple[int, ...] = (64, 128)  # which the file can be compiled for
    defines: dict[str, tuple[int, ...]] = field(default_factory=dict)
    dtypes: tuple[torch.dtype, ...] = HALVES  # of its tensors; the first is the default
    beside: str = ""  # of an exhibit, the step from which it differs
    adds: bool = False  # o and lse are float32, and merged with what is there

    @property
    def phase(self) -> int:
        return int(self.name[1:].split("_")[0])

    @property
    def path(self) -> Path:
        """The whole source. That of an exhibit is put together, and kept in the build cache."""
        (folder,) = FOLDER.glob(f"p{self.phase:02d}_*")
        file = folder / f"{self.name}.cu"
        if not self.beside:
            return file
        text = regions.edited(step(self.beside).path.read_text(encoding="utf-8"), file.read_text(encoding="utf-8"))
        made = cache.kept("exhibits", cache.key(self.name, text), lambda place: _write(place / file.name, text))
        return made.folder / file.name


def _write(path: Path, text: str) -> dict[str, Any]:
    path.write_text(text, encoding="utf-8")
    return {}


_FLOAT = (torch.float32,)

_STAGES: dict[str, tuple[int, ...]] = {"STAGES": (2, 1, 3)}

SERIES = (
    Step("p6_1_fa1", "FlashAttention-1's loops: K and V outside, O and its statistics in global memory", dtypes=_FLOAT),
    Step("p6_2_loop_order", "the loops swapped: a row's state stays in registers", dtypes=_FLOAT),
    Step("p6_3_tiles", "every tile in shared memory, 4 x 4 scores per thread", dtypes=_FLOAT),
    Step("p6_4_registers", "S in registers, 8 x 8 scores per thread, maxima by shuffles", dtypes=_FLOAT),
    Step("p6_5_overlap", "cp.async: the next tile is on its way", dtypes=_FLOAT),
    Step("p6_6_shapes", "the tile's shape follows the grid and the device", dtypes=_FLOAT),
    Step("p7_naive", "one warp, one 16 x 16 tile at a time"),
    Step("p8_1_split_q", "64 x 64 tiles, four warps that divide the query rows"),
    Step("p8_2_cp_async", "copies that go past the registers"),
    Step("p8_3_stages", "the next tile is copied while this one is worked on", defines=_STAGES),
    Step("p8_4_swizzle", "no bank conflicts: the XOR swizzle", defines=_STAGES),
    Step("p8_5_registers", "Q in registers, ldmatrix.x4", defines=_STAGES),
    Step("p8_6_store", "16-byte stores of O, through shared memory", defines=_STAGES),
    Step("p9_1_masks", "masked tiles first, then a loop without a mask"),
    Step("p9_2_addresses", "addresses out of the loop"),
    Step("p9_3_rescale", "O is rescaled only when the maximum has moved far"),
    Step("p9_4_warp_tiles", "32 query rows per warp"),
    Step("p9_5_prefetch", "a fragment is loaded one step before its MMAs"),
    Step("p9_6_order", "causal: the long blocks first"),
    Step("p9_7_tiles", "lower tiles for small grids; HEAD_DIM = 256", head_dims=(64, 128, 256)),
    Step("p9_8_devices", "smaller tiles of K and V where shared memory is smaller", head_dims=(64, 128, 256)),
    Step("p9_flash", "several blocks share the keys, when rows are few", head_dims=(64, 128, 256)),
)
"""Every step that runs on any GPU from capability 8.0 on, in the order of the course."""

SIDE = (
    Step("p8_side_split_kv", "four warps that divide the keys", defines=_STAGES, beside="p8_4_swizzle"),
    Step("p8_side_tile_d", "slices of HEAD_DIM: shared memory that does not grow with it", beside="p8_5_registers",
         head_dims=(64, 128, 256, 512)),
    Step("p8_side_shuffle_store", "16-byte stores of O, by shuffles", defines=_STAGES, beside="p8_5_registers"),
    Step("p8_side_shared_kv", "K and V take turns in one buffer", beside="p8_6_store"),
    Step("p8_side_shared_qkv", "Q, K and V take turns in one buffer", beside="p8_side_shared_kv"),
    Step("p8_side_fp16_acc", "S and O accumulated in fp16", defines=_STAGES, beside="p8_6_store",
         dtypes=(torch.float16,)),
)  # fmt: skip
"""The exhibits beside the ladder."""


_TURNS: dict[str, tuple[int, ...]] = {"PING_PONG": (1, 0)}
_SCHEDULER: dict[str, tuple[int, ...]] = _TURNS | {"DYNAMIC": (1, 0)}
_POLYNOMIAL: dict[str, tuple[int, ...]] = _SCHEDULER | {"POLYNOMIAL": (0, 4)}

HOPPER = (
    Step("p11_1_tma", "tiles are brought by TMA, and counted by mbarriers"),
    Step("p11_2_wgmma", "S by wgmma: Q and K are read where they lie"),
    Step("p11_3_operands", "O by wgmma: P from registers, V as it lies"),
    Step("p11_4_producer", "one warp copies, four compute; barriers for full and empty stages"),
    Step("p11_5_consumers", "two or three consumers, and setmaxnreg"),
    Step("p11_6_overlap", "the scores of the next tile before the output of this one"),
    Step("p11_7_ping_pong", "the consumers take turns at the tensor cores", defines=_TURNS),
    Step("p11_8_persistent", "blocks that stay, causal work in order", defines=_TURNS),
    Step("p11_9_scheduler", "whoever is free takes the next part", defines=_SCHEDULER),
    Step("p11_10_epilogue", "O leaves by TMA, while the next part begins", defines=_SCHEDULER),
    Step("p11_11_rescale", "O is rescaled only when the maximum has moved far", defines=_SCHEDULER),
    Step("p11_12_polynomial", "some exponentials by arithmetic", defines=_POLYNOMIAL),
    Step("p11_13_parts", "the next part begins before this one has ended", defines=_POLYNOMIAL),
    Step("p11_14_trust", "a full tile's maxima are looked at only in need", defines=_POLYNOMIAL | {"TRUST": (1, 0)}),
    Step("p11_15_portions", "a tile's exponentials in three portions", defines=_POLYNOMIAL | {"TRUST": (1, 0)}),
    Step("p11_16_learns", "a doubt lowers P, and leaves room for more", defines=_POLYNOMIAL | {"TRUST": (1, 0)}),
    Step("p11_flash", "tiles for small grids; every head size", head_dims=(64, 80, 96, 112, 128, 160, 192, 256),
         defines=_POLYNOMIAL | {"DYNAMIC": (1, 0, 2), "BLOCK_N": (128, 96), "TRUST": (1, 0), "LATE_TURN": (1, 0)}),
)  # fmt: skip
"""Phase 11, a ladder of its own: it begins at p9_1_masks, and runs on capability 9.0 alone (or emulated)."""

HOPPER_SIDE = (
    Step("p11_side_rounded", "O is divided by the sum of the rounded weights", beside="p11_flash",
         head_dims=HOPPER[-1].head_dims, defines=HOPPER[-1].defines),
    Step("p11_side_part", "o and lse are float32, and what is there is added to", beside="p11_flash",
         head_dims=HOPPER[-1].head_dims, defines=HOPPER[-1].defines, adds=True),
)  # fmt: skip
"""The exhibits beside that one."""


DECODING = (
    Step("p12_1_groups", "a block per sequence and key head: a key is read once for a group"),
    Step("p12_2_splits", "a sequence's keys in several parts, and a kernel that merges them"),
    Step("p12_3_pages", "pages, a table, and lengths on the device"),
    Step("p12_4_copies", "each warp copies tiles ahead, into a ring of its own"),
    Step("p12_5_mma", "the heads of a group are the rows of an MMA"),
    Step("p12_6_last_block", "the last block to arrive merges the parts"),
    Step("p12_7_shares", "equal shares of all keys, for a grid that stays"),
    Step("p12_decode", "several queries, large groups, pages that hold whole tiles", head_dims=(64, 128, 256)),
)
"""Phase 12, a ladder of its own: not attention over whole tensors, but over a cache (cache.cuh, struct Cache)."""
DECODING_SIDE = (
    Step("p12_side_cluster", "one sequence: the parts of a head meet in a cluster", head_dims=(64, 128, 256)),
)

ALL = SERIES + SIDE + HOPPER + HOPPER_SIDE + DECODING + DECODING_SIDE


def steps(*phases: int) -> tuple[Step, ...]:
    """The steps of these phases, without the exhibits."""
    return tuple(s for s in SERIES + HOPPER + DECODING if s.phase in phases)


def step(name: str) -> Step:
    """The step, or the exhibit, of that name. Raises KeyError, with the names there are."""
    for s in ALL:
        if s.name == name:
            return s
    raise KeyError(f"no step {name!r} in the series; there are {', '.join(s.name for s in ALL)}")


def path(name: str) -> Path:
    """A file of the series, or another in its folders: path("p6_1_fa1"), path("p7_one_mma"), path("ptx.cuh").

    Raises FileNotFoundError, with the names there are.
    """
    wanted = name if name.endswith((".cu", ".cuh")) else f"{name}.cu"
    found = next((p for p in sorted(FOLDER.rglob("*.cu*")) if p.name == wanted), None)
    if found is None:
        there = ", ".join(sorted(p.name for p in FOLDER.rglob("*.cu*")))
        raise FileNotFoundError(f"there is no {wanted} in the series; there are {there}")
    return next((s.path for s in ALL if s.beside and s.name == found.stem), found)


def source(name: str) -> str:
    """The text of `path(name)`."""
    return path(name).read_text(encoding="utf-8")


def whole(name: str) -> str:
    """The same, with the headers that are parts of it, which no ``#pragma once`` begins, where it includes them."""

    def text_of(include: re.Match[str]) -> str:
        return include[0] if "#pragma once" in source(include[1]) else whole(include[1])

    return re.sub(r'^#include "p\d+_\w+/(\w+\.cuh)"\n', text_of, source(name), flags=re.MULTILINE)
