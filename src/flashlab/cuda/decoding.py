"""Phase 12's kernels as functions on tensors: a few queries per sequence over a cache, whole or in pages.

    o, lse = decode(q, k_cache, v_cache, lengths, page_table, scale=0.125)

The last step, p12_decode, is a backend of `flashlab.flash_attention_with_cache`. It runs on any GPU from capability 8.0
on, built by nvcc, or in the emulator. On Hopper its exhibit p12_side_cluster takes its place for one sequence.
"""

import ctypes
import functools
from typing import Any

import torch

from flashlab.attention import decode as kernels
from flashlab.attention.cache_door import append_reference
from flashlab.attention.inputs import check_no_gradient
from flashlab.attention.tiles import cdiv
from flashlab.cuda.inline import CudaModule, load_inline
from flashlab.kernels.problem import ELEMENTS, Strides, fitting, rows_fit
from flashlab.kernels.series import DECODING, DECODING_SIDE, HALVES

STEPS = {s.name: s for s in DECODING + DECODING_SIDE}
LAST, CLUSTER = DECODING[-1].name, DECODING_SIDE[0].name
ROWS, TILE, PARTS_PER_SM = 16, 16, 8
"""Of the sources: rows of a block, keys of a tile; two parts for each block that a multiprocessor may have room for."""
LARGEST, SHORT = 16, 16384
"""Blocks of a cluster; and keys of a sequence that p12_side_cluster is taken for. In a longer one few blocks read, and
how fast depends on where a chip has its multiprocessors: 1 x 65536 took 65 us on one H200 and 78 on another."""
WARPS = {64: 8, 128: 8, 256: 4}  # of its blocks
SHARED = 131 << 10  # bytes of shared memory that a block of the last step takes
SMALLER = {d: (("WARPS", warps), ("STAGES", stages)) for d, warps, stages in ((64, 4, 6), (128, 4, 3), (256, 2, 3))}
"""Macros of the last step for blocks of 98 KB. They are slower on an H200 (66 us become 70 at 16 sequences of 4096
keys), but two of them keep a multiprocessor busy where it has many short pieces (64 sequences of 2048: 135 to 130)."""


class Cache(ctypes.Structure):
    """struct Cache of cache.cuh, field by field."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "o", "lse", "table", "lengths", "part_o", "part_lse",
                                                "counters")),
        *((name, Strides) for name in ("q_stride", "k_stride", "v_stride", "o_stride")),
        ("table_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("batch", "kv_heads", "group", "queries", "page", "width", "page_shift",
                                       "more")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("splits", "sms", "pages")),
    ]  # fmt: skip


@functools.cache
def compiled(
    name: str, head_dim: int, dtype: torch.dtype, backend: str, check: bool = False,
    defines: tuple[tuple[str, int], ...] = (),
) -> CudaModule:  # fmt: skip
    """A step's source, compiled. backend, check: as in `load_inline`; defines: its other macros."""
    macros: dict[str, Any] = {"HEAD_DIM": head_dim, "ELEMENT": ELEMENTS[dtype], **dict(defines)}
    return load_inline(STEPS[name].path, backend=backend, check=check, defines=macros)


def decode(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor,
    page_table: torch.Tensor | None = None, *, scale: float, left: int | None = None, softcap: float | None = None,
    new: int = 0, name: str | None = None, splits: int | None = None, sms: int | None = None,
    backend: str | None = None, check: bool = False, defines: tuple[tuple[str, int], ...] = (), **launch: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Attention over a cache, causal at the end, of inputs that `flashlab.attention.cache_door` has checked.

    Args:
        q: [batch, heads, queries, head_dim], fp16 or bf16, head_dim 64, 128 or 256.
        k_cache, v_cache: [pages, kv_heads, page, head_dim]; without a table [batch, kv_heads, keys, head_dim].
        lengths: [batch]; a sequence has lengths + new keys. page_table: [batch, width]. int32; others are converted.
        name: of the step. Those before the last take one query and a head_dim of 64 or 128; those before p12_3_pages a
            contiguous cache that is full, whatever lengths says. None: the last, or for one short sequence
            p12_side_cluster, on a GPU that runs all of its clusters at once.
        splits: of steps 2 to 6; what `flashlab.attention.decode.splits_for` says, if None. Of p12_side_cluster: the
            blocks of a cluster, 1 to 16.
        sms: multiprocessors to plan for; the GPU's own, if None.
        backend, check, defines: of the build, see `compiled`. launch: options of the emulator's launch.
    Returns:
        o: like q. lse: [batch, heads, queries], float32. A row that sees no key gives 0 and -inf.
    """
    assert left is None and softcap is None, "the kernels have neither window nor softcap: see `refusal`"
    check_no_gradient(q=q, k_cache=k_cache, v_cache=v_cache)
    batch, heads, queries, head_dim = q.shape
    kv_heads, page = k_cache.shape[1:3]
    out, lse = torch.empty_like(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    width = 1 if page_table is None else page_table.shape[1]
    if q.numel() == 0:
        return out, lse
    if page * width == 0 or k_cache.numel() == 0:
        return out.zero_(), lse.fill_(float("-inf"))
    multiprocessors, shared = _device(q.device)
    sms = sms or multiprocessors
    group = heads // kv_heads
    pairs = batch * kv_heads * cdiv(group * queries, ROWS)
    if name is None:
        native = backend in (None, "nvcc") and backend_for(q, check) == "nvcc" and not defines
        takes = native and batch == 1 and page * width <= SHORT and _capability(q) >= (9, 0)
        splits = cluster_blocks(q.device, head_dim, q.dtype, pairs, cdiv(page * width, TILE)) if takes else None
        name = CLUSTER if splits else LAST
    number = [*STEPS].index(name) + 1
    _expect_taken(name, q, k_cache, v_cache, page_table)
    if number < 5:
        defines = (*defines, ("ROWS", group))
    elif name == LAST and not defines and (pairs > 2 * sms or shared < SHARED):
        defines = SMALLER[head_dim]
    built = compiled(name, head_dim, q.dtype, backend or backend_for(q, check), check, defines)
    q, o = fitting(q.resolve_neg()), fitting(out)
    lengths = lengths.to(torch.int32).contiguous()
    table = page_table if page_table is None else page_table.to(torch.int32)
    if table is not None and table.stride(1) != 1:
        table = table.contiguous()
    planned = functools.partial(kernels.splits_for, pairs, page * width, group, 64, q.element_size(), sms)
    splits = 1 if number in (1, 7, 8) else splits or planned()
    if name == CLUSTER and not 1 <= splits <= LARGEST:
        raise ValueError(f"a cluster of {name} has 1 to {LARGEST} blocks, and splits is {splits}")
    shift = 31 if table is None else page.bit_length() - 1 if page & (page - 1) == 0 else -1
    shapes = Cache(
        *[None] * 10, *(Strides(*x.stride()[:3]) for x in (q, k_cache, v_cache, o)),
        0 if table is None else table.stride(0), batch, kv_heads, group, queries, page, width, shift, new,
        scale, splits, sms, k_cache.shape[0],
    )  # fmt: skip
    part_rows = 0 if name == CLUSTER else PARTS_PER_SM * sms * ROWS if number > 6 else splits * batch * heads
    part_o = torch.empty((part_rows, head_dim), device=q.device)
    part_lse = torch.empty(part_rows, device=q.device)
    counters = counters_of(q.device, pairs)
    if built.backend == "emulator":
        launch = {"unwritten": ("o", "lse", "part_o", "part_lse"), **launch}
    built.launch("decode", q, k_cache, v_cache, table, lengths, o, lse, part_o, part_lse, counters, shapes, **launch)
    return o if o is out else out.copy_(o), lse


@functools.cache
def cluster_blocks(device: torch.device, head_dim: int, dtype: torch.dtype, clusters: int, tiles: int) -> int | None:
    """How many blocks a cluster has best for so many tiles of keys: no more than let all clusters run at once on this
    GPU, and of those that give a warp as many tiles the fewest. None where even 4 are too many."""
    built = compiled(CLUSTER, head_dim, dtype, "nvcc")
    shapes = Cache(batch=1, kv_heads=1, group=1, queries=1, page=TILE)
    for shapes.splits in range(LARGEST, 3, -1):
        if built.launch("at_once", shapes) >= clusters:
            warps = WARPS[head_dim]
            return cdiv(tiles, warps * cdiv(tiles, warps * shapes.splits))
    return None


def _expect_taken(
    name: str, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, page_table: torch.Tensor | None
) -> None:
    """Raise ValueError where a step does not take these tensors."""
    for what, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.data_ptr() % 16:
            raise ValueError(
                f"{what} begins {x.data_ptr() % 16} bytes behind a 16-byte boundary: the kernel copies 16 bytes at once"
            )
    batch, heads, queries, head_dim = q.shape
    kv_heads, page = k_cache.shape[1:3]
    group, keys = heads // kv_heads, page * (1 if page_table is None else page_table.shape[1])
    if name not in (LAST, CLUSTER) and (queries > 1 or group > ROWS or head_dim not in STEPS[name].head_dims):
        raise ValueError(f"{name} takes one query per sequence, up to 16 heads of a group, and a head_dim of 64 or 128")
    if [*STEPS].index(name) < 2 and page_table is not None:
        raise ValueError(f"{name} takes a contiguous cache: pages begin with p12_3_pages")
    if batch * kv_heads * cdiv(group * queries, ROWS) * (cdiv(keys, TILE) + 2 * TILE) >= 2**31:
        raise ValueError(f"{batch} sequences of up to {keys} keys are too many tiles for one launch: split them")


def append(k_cache, v_cache, k_new, v_new, lengths, page_table) -> None:
    """As `flashlab.attention.decode.append`, by it on a GPU."""
    function = kernels.append if k_new.is_cuda else append_reference
    function(k_cache, v_cache, k_new, v_new, lengths, page_table)


def refusal(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, left: int | None, softcap: float | None
) -> str | None:
    """Why p12_decode does not take these inputs, as a clause; None where it does."""
    if q.dtype not in HALVES or q.shape[-1] not in STEPS[LAST].head_dims:
        return f"it takes float16 or bfloat16 with a head_dim of 64, 128 or 256, and q is {q.dtype} with {q.shape[-1]}"
    if left is not None or softcap is not None:
        return "it has neither window nor softcap"
    if q.device.type not in ("cpu", "cuda", "meta"):
        return f"it runs on a GPU of Nvidia, or emulated on the CPU, and q is on {q.device}"
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not rows_fit(x):
            return f"{name} has strides {x.stride()}; its rows must be contiguous, and multiples of 16 bytes apart"
    capability = _capability(q)
    if capability < (8, 0):
        return f"it needs compute capability 8.0, and this GPU has {capability[0]}.{capability[1]}"
    return None


def _capability(q: torch.Tensor) -> tuple[int, int]:
    """Of q's GPU; torch.compile may not look at the device, and what it generates needs a newer one anyway."""
    if q.device.type != "cuda" or torch.compiler.is_compiling():
        return 8, 0
    return torch.cuda.get_device_capability(q.device)


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block may have; on a CPU those of an H200."""
    if device.type != "cuda":
        return kernels.SMS, 227 << 10
    found: Any = torch.cuda.get_device_properties(device)  # torch's stubs lack a field
    return found.multi_processor_count, found.shared_memory_per_block_optin


def backend_for(q: torch.Tensor, check: bool = False) -> str:
    """Of `load_inline`, for tensors like q."""
    return "nvcc" if q.is_cuda and not check else "emulator"


_COUNTERS: dict[tuple[torch.device, int], list[torch.Tensor]] = {}


def counters_of(device: torch.device, count: int) -> torch.Tensor:
    """So many zeros, int32: each launch leaves them as zeros, so that the next one on this stream can have them.

    Two launches that run at once need counters of their own: CUDA graphs that were recorded on one stream are not to be
    replayed at the same time. One that grew too small is kept, as a graph may still use it.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    kept = _COUNTERS.setdefault((device, torch.cuda.current_stream(device).cuda_stream), [])
    if not kept or len(kept[-1]) < count:
        new = torch.zeros(max(4096, 2 * count), dtype=torch.int32, device=device)
        if torch.cuda.is_current_stream_capturing():  # of the graph: it sets them to zero whenever it is replayed
            return new
        kept.append(new)
    return kept[-1]
