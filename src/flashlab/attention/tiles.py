"""Which tile a Triton kernel takes: recorded choices for each class of chips, and measured anew on request.

A good tile is large, because each row of K and V that is loaded is used by BLOCK_M queries; and it has to fit: into the
shared memory of a block (99 KiB on consumer GPUs, 163 on an A100, 227 on an H100), and into 255 registers a thread.
`Choice.source` says what a recorded choice rests on: "measured" on a GPU of that class, or "compiled": among the usual
tiles a large one that fits and does not spill, but was never timed there.
"""

import itertools
import json
import math
from collections.abc import Callable
from functools import cache as remember
from pathlib import Path
from typing import NamedTuple

import torch
import triton

from flashlab import runtime
from flashlab.runtime import cache


class Tile(NamedTuple):
    """What a kernel is compiled with."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


class Choice(NamedTuple):
    """The tile for head_dims up to `head_dim`."""

    head_dim: int
    tile: Tile
    source: str  # "measured" or "compiled"


class Work(NamedTuple):
    """What the choice depends on: kernel is "forward", "dkdv" or "dq"; rows and seq are the lengths of the two sides,
    rows those that one program keeps a block of; heads are those of all batches, each with programs of its own."""

    kernel: str
    head_dim: int
    dtype: torch.dtype
    masked: bool
    rows: int
    seq: int
    heads: int


def chip_class(capability: tuple[int, int] | None) -> str:
    """ "hopper", "ampere" or "consumer"; a chip that is not known gets what fits everywhere. None is no GPU."""
    if capability is None:
        return "interpreter"
    if capability in ((8, 0), (8, 7)):
        return "ampere"
    return "hopper" if capability[0] in (9, 10) else "consumer"


def _choices(*rows: tuple[int, tuple[int, int, int, int]]) -> tuple[Choice, ...]:
    return tuple(Choice(head_dim, Tile(*tile), "compiled") for head_dim, tile in rows)


# By kernel and class of chips. dkdv keeps BLOCK_N keys and walks over BLOCK_M queries at a time, dq the other way.
_TABLE: dict[tuple[str, str], tuple[Choice, ...]] = {
    ("forward", "hopper"): _choices((64, (128, 64, 4, 3)), (128, (128, 64, 8, 3)), (256, (128, 64, 8, 2))),
    ("forward", "ampere"): _choices((64, (128, 64, 4, 3)), (128, (128, 64, 8, 2)), (256, (64, 64, 8, 2))),
    ("forward", "consumer"): _choices((64, (128, 64, 4, 3)), (128, (128, 64, 8, 2)), (256, (64, 32, 8, 2))),
    ("dkdv", "hopper"): _choices((128, (64, 128, 8, 3)), (256, (64, 32, 8, 2))),
    ("dkdv", "ampere"): _choices((64, (32, 128, 8, 2)), (128, (64, 64, 8, 2)), (256, (32, 32, 8, 1))),
    ("dkdv", "consumer"): _choices((64, (32, 128, 8, 2)), (128, (32, 64, 8, 2)), (256, (32, 32, 8, 1))),
    ("dq", "hopper"): _choices((128, (128, 64, 8, 3)), (256, (128, 32, 8, 2))),
    ("dq", "ampere"): _choices((64, (128, 32, 8, 2)), (128, (64, 64, 8, 2)), (256, (32, 32, 8, 1))),
    ("dq", "consumer"): _choices((64, (128, 32, 8, 2)), (128, (64, 32, 8, 2)), (256, (32, 32, 8, 1))),
}
# Of float32, on any chip: three products of split operands need many registers, and so small tiles.
_FLOAT32 = {
    "forward": _choices((64, (32, 32, 4, 2)), (128, (32, 32, 8, 2)), (256, (32, 16, 8, 2))),
    "dkdv": _choices((64, (32, 32, 4, 2)), (128, (16, 32, 8, 1)), (256, (16, 16, 8, 1))),
    "dq": _choices((64, (32, 32, 4, 2)), (128, (16, 32, 4, 2)), (256, (16, 16, 8, 2))),
}
_INTERPRETED = _choices((256, (64, 64, 4, 1)))


def _product(
    all_m: tuple[int, ...], all_n: tuple[int, ...], all_stages: tuple[int, ...], all_warps: tuple[int, ...] = (4, 8)
) -> tuple[Tile, ...]:
    return tuple(Tile(*sizes) for sizes in itertools.product(all_m, all_n, all_warps, all_stages))


SEARCH: dict[str, tuple[Tile, ...]] = {
    "forward": _product((64, 128), (32, 64, 128), (2, 3, 4)),
    "dkdv": _product((32, 64), (64, 128), (2, 3)),
    "dq": _product((64, 128), (32, 64), (2, 3)),
    "forward, small": _product((16, 32, 64), (64, 128), (3,), (4,)),
    "dkdv, small": _product((32, 64, 128), (16, 32, 64), (3,), (4,)) + _product((32, 64, 128), (16,), (3,), (2, 8)),
    "dq, small": _product((16, 32, 64), (64, 128), (3,), (4,)) + _product((16,), (32, 64, 128), (3,), (2, 8)),
}
"""What `tune` tries: the search space of the Triton tutorial "Fused Attention". A tile that does not fit drops out."""


def search(kernel: str, head_dim: int, small: bool = False) -> tuple[Tile, ...]:
    """The tiles of SEARCH that can be good; small: where large ones would leave multiprocessors without a program, and
    for float32, whose products take more registers.

    What a program adds up has to fit into the 255 registers of its threads: a tile that does not is slow at best, and
    with Triton 3.6 one of them, dq's (128, 32, 4, 3) at head_dim 256, writes where it must not. And 64 rows are one
    product of four warps: eight would do half of it each, and were slowest wherever they were timed.
    """
    columns = max(16, triton.next_power_of_2(head_dim))

    def fits(tile: Tile) -> bool:
        rows = tile.BLOCK_N if kernel == "dkdv" else tile.BLOCK_M
        added_up = rows * columns * (2 if kernel == "dkdv" else 1)
        return added_up <= 255 * 32 * tile.num_warps and not (rows == 64 and tile.num_warps == 8 and head_dim <= 128)

    return tuple(filter(fits, SEARCH[f"{kernel}, small" if small else kernel]))


MEASURED = Path(__file__).with_name("tiles.json")
"""What `flashlab bench industrial --only tune` found, by `name_of`: {name: [[head_dim, tile], ...]}."""


def name_of(kernel: str, chip: str, float32: bool, masked: bool, few: bool) -> str:
    """Under which the measured choices are kept: "forward hopper 16-bit masked", say; "few" if tuned where the larger
    tiles would leave multiprocessors without a program."""
    return " ".join([kernel, chip, "float32" if float32 else "16-bit", mask_name(masked), *["few"] * few])


@remember
def recorded(kernel: str, chip: str, dtype: torch.dtype, masked: bool = False, few: bool = False) -> tuple[Choice, ...]:
    """The choices for one kernel, class of chips and dtype, by rising head_dim; measured ones go before others, and
    those for few programs before those for many."""
    float32 = dtype == torch.float32
    known = _INTERPRETED if chip == "interpreter" else _FLOAT32[kernel] if float32 else _TABLE[kernel, chip]
    choices = {choice.head_dim: choice for choice in known}
    for size in (False, True)[: 1 + few]:
        found = _measured().get(name_of(kernel, chip, float32, masked, size), [])
        choices |= {head_dim: Choice(head_dim, Tile(*tile), "measured") for head_dim, tile in found}
    return tuple(choices[head_dim] for head_dim in sorted(choices))


def mask_name(masked: bool) -> str:
    return "masked" if masked else "whole"


@remember
def _measured() -> dict[str, list[tuple[int, list[int]]]]:
    return json.loads(MEASURED.read_text(encoding="utf-8")) if MEASURED.exists() else {}


def choose(work: Work, device: torch.device) -> Tile:
    """The tile for a launch: what `tune` found on this machine, else the recorded choice.

    Few rows take a smaller BLOCK_M: a program computes all the rows of its block, those that are not there too.
    """
    name, chip, multiprocessors = _gpu(device)
    if known := _tuned().get(_key(work, name)):
        return known

    def best(few: bool) -> Tile:
        choices = recorded(work.kernel, chip, work.dtype, work.masked, few)
        return next(choice.tile for choice in choices if work.head_dim <= choice.head_dim)

    tile = best(few=False)
    if _programs(work, tile) < multiprocessors:
        tile = best(few=True)
    if work.rows <= 64 and work.kernel != "dkdv":
        rows = min(tile.BLOCK_M, max(16, triton.next_power_of_2(work.rows)))
        return tile._replace(BLOCK_M=rows, num_warps=min(tile.num_warps, 4))
    return tile


def cdiv(rows: int, block: int) -> int:
    """Blocks for so many rows. triton.cdiv, made for kernels too, takes 5 to 10 us a call."""
    return -(-rows // block)


def leaves_idle(work: Work, tile: Tile, device: torch.device) -> bool:
    """Whether a multiprocessor, which has room for two programs, runs fewer: then another kernel may run beside it."""
    return _programs(work, tile) < 2 * _gpu(device)[2]


def _programs(work: Work, tile: Tile) -> int:
    return work.heads * cdiv(work.rows, tile.BLOCK_N if work.kernel == "dkdv" else tile.BLOCK_M)


def tune(work: Work, device: torch.device, launch: Callable[[Tile], None]) -> Tile:
    """Time launch(tile) for each tile of the search space, and remember the fastest for work of this kind.

    It is remembered in this process and in the cache folder (flashlab.runtime.cache), by the GPU's name.
    Raises RuntimeError where kernels are interpreted, and where no tile fits.
    """
    if runtime.INTERPRETED:
        raise RuntimeError("tuning times compiled kernels on a GPU, and in this process they are interpreted")
    times: dict[Tile, float] = {}
    small = work.dtype == torch.float32 or _programs(work, Tile(64, 64, 4, 2)) < _gpu(device)[2]
    for tile in search(work.kernel, work.head_dim, small):
        try:
            launch(tile)  # compiles
        except triton.OutOfResources:
            continue
        times[tile] = triton.testing.do_bench(lambda tile=tile: launch(tile), warmup=10, rep=50, return_mode="median")
    if not times:
        raise RuntimeError(f"no tile of the search space fits on {_gpu(device)[0]}")
    best = min(times, key=times.__getitem__)
    _tuned()[_key(work, _gpu(device)[0])] = best
    _store()
    return best


@remember
def _gpu(device: torch.device) -> tuple[str, str, int]:
    """The name, the class and the multiprocessors of a device; asked once, since every launch wants to know."""
    if device.type != "cuda":
        return "no GPU", chip_class(None), 0
    known = torch.cuda.get_device_properties(device)
    return known.name, chip_class((known.major, known.minor)), known.multi_processor_count


def _key(work: Work, gpu: str) -> str:
    """Work of one kind: lengths and heads count by their powers of two."""
    sizes = [math.ceil(math.log2(max(1, size))) for size in (work.rows, work.seq, work.heads)]
    kind = [work.kernel, str(work.dtype), work.head_dim, mask_name(work.masked), *sizes]
    return "/".join(map(str, [gpu, triton.__version__, *kind]))


def _file() -> Path:
    return cache.folder("tiles") / "tuned.json"


@remember
def _tuned() -> dict[str, Tile]:
    """What this machine has tuned: read once, kept for the process."""
    try:
        return {key: Tile(*numbers) for key, numbers in json.loads(_file().read_text()).items()}
    except (OSError, ValueError, TypeError, cache.CacheError):
        return {}


def _store() -> None:
    try:
        cache.write_whole(_file(), json.dumps({key: list(tile) for key, tile in _tuned().items()}, indent=1).encode())
    except (OSError, cache.CacheError):
        pass  # an unwritable cache costs a tuning the next time
