"""The door for a step of generation: `flash_attention_with_cache`, over a cache that is whole or in pages.

    o = flash_attention_with_cache(q, k_cache, v_cache, lengths, page_table, k_new=k, v_new=v)

It writes the new keys and values into the cache, and lets each query see them and all that were there before. Nothing
on a GPU is read by the host: the launches depend on shapes alone, so that a CUDA graph of a step can be replayed after
`lengths` and `page_table` have been changed in place.

Two operators of PyTorch are behind it, with shapes for torch.compile: torch.ops.flashlab.decode, and
torch.ops.flashlab.append_to_cache, which changes the cache. There is no gradient: generation needs none.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensor

from flashlab.attention import decode as kernels
from flashlab.attention.backends import BACKENDS, DTYPES
from flashlab.attention.inputs import check_qkv, one_of, scale_of
from flashlab.attention.options import Window, softcap_of, window_of
from flashlab.runtime import INTERPRETED
from flashlab.runtime.dispatch import operator

Tensors = tuple[torch.Tensor, torch.Tensor]
_INTEGERS = (torch.int32, torch.int64)


def flash_attention_with_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    page_table: torch.Tensor | None = None,
    *,
    k_new: torch.Tensor | None = None,
    v_new: torch.Tensor | None = None,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    backend: str = "auto",
    return_lse: bool = False,
    check: bool = False,
) -> torch.Tensor | Tensors:
    """softmax(scale * q k^T + mask) v over the keys of a cache, causal at the end: the last query sees all of them.

    Args:
        q: [batch, heads, queries, head_dim]: one query per sequence, or a few (a part of a prompt, a draft). heads is a
            multiple of kv_heads, as for `flash_attention`.
        k_cache, v_cache: [pages, kv_heads, page, head_dim], q's dtype; a page has any number of keys. Without a
            page_table it is [batch, kv_heads, keys, head_dim]. Any strides: that of [pages, page, kv_heads, head_dim]
            is its transpose(1, 2).
        lengths: [batch], int32 or int64, on q's device: how many keys each sequence has, before k_new. It is not
            changed. What lies behind them in the cache is never looked at.
        page_table: [batch, width], likewise: key j of a sequence is row j % page of page page_table[i, j // page].
            Numbers that no key needs may be anything.
        k_new, v_new: [batch, kv_heads, new, head_dim], written into the cache in place, from lengths on.
        scale, softcap: as for `flash_attention`. window: how many keys before its own position a query sees.
        backend: "triton"; "p12_decode", the CUDA kernel; "reference", which gathers the keys, in float32 (float64 where
            q is); or "auto": "triton" where the kernels are compiled and take the inputs.
        return_lse: return o and the log of the sum of the exponentials.
        check: read lengths and page_table on the GPU, and raise where they lead out of the cache. This waits for the
            device, and cannot be captured in a CUDA graph. On a CPU it is always done. Unchecked, a length beyond the
            room for keys counts as that, and a wrong page reads, or with k_new writes, foreign memory.
    Returns:
        o: like q; and with return_lse lse, [batch, heads, queries], float32. A query that sees no key, as in an empty
        sequence, gives 0 and -inf.
    Raises:
        TypeError, ValueError: a sentence that names the argument. NotImplementedError: at a gradient, and under vmap.
    """
    left, _ = window_of(window, causal=True)
    cap = softcap_of(softcap)
    if not torch.compiler.is_compiling():  # then the operators' fakes check
        check_cache(q, k_cache, v_cache, lengths, page_table, k_new, v_new)
    new = 0 if k_new is None else k_new.shape[2]
    chosen = _choose(q, k_cache, v_cache, left, cap, backend)
    if (check or q.device.type == "cpu") and not torch.compiler.is_compiling() and not isinstance(q, FakeTensor):
        check_places(k_cache, lengths, page_table, new)
    if k_new is not None:
        torch.ops.flashlab.append_to_cache(k_cache, v_cache, k_new, v_new, lengths, page_table, chosen)
    factor = scale_of(scale, q.shape[-1])
    o, lse = _decode(q, k_cache, v_cache, lengths, page_table, factor, left, cap, new, chosen)
    return (o, lse) if return_lse else o


def check_cache(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor,
    page_table: torch.Tensor | None, k_new: torch.Tensor | None = None, v_new: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Raise TypeError or ValueError unless shapes, dtypes and devices are those of one cache; reads no element."""
    paged = page_table is not None
    names = ("q", "k_cache", "v_cache")
    check_qkv(q, k_cache, v_cache, dtypes=DTYPES, same_v=True, paged=paged, names=names)
    _check_integers("lengths", lengths, q, 1, "[batch]")
    capacity = k_cache.shape[2]
    if page_table is not None:
        _check_integers("page_table", page_table, q, 2, "[batch, width]")
        capacity *= page_table.shape[1]
        if k_cache.shape[2] == 0:
            raise ValueError(f"k_cache is {list(k_cache.shape)}; a page has room for at least one key")
    if (k_new is None) != (v_new is None):
        raise ValueError("k_new and v_new go together: pass both, or neither")
    if k_new is None or v_new is None:
        return
    check_qkv(q, k_new, v_new, dtypes=DTYPES, same_v=True, names=("q", "k_new", "v_new"))
    if k_new.shape[1] != k_cache.shape[1]:
        raise ValueError(f"k_new has {k_new.shape[1]} heads, but k_cache has {k_cache.shape[1]}: they go in pairs")
    if k_new.shape[2] > capacity:
        room = f"page_table is {page_table.shape[1]} pages wide" if page_table is not None else "k_cache is full"
        raise ValueError(
            f"k_new has {k_new.shape[2]} keys per sequence, and there is room for {capacity}: {room}, which is too "
            "few even for empty sequences"
        )


def _check_integers(name: str, x: torch.Tensor, q: torch.Tensor, rank: int, layout: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed, {layout}, on the device of q")
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{name} is {x.dtype}; it counts, so it must be {one_of([str(dtype) for dtype in _INTEGERS])}")
    if x.ndim != rank or x.shape[0] != q.shape[0]:
        raise ValueError(f"{name} is {list(x.shape)}; with a batch of {q.shape[0]} it must be {layout}")
    if x.device != q.device:
        raise ValueError(f"{name} is on {x.device} and q on {q.device}: one device for all, please")


def check_places(k_cache: torch.Tensor, lengths: torch.Tensor, page_table: torch.Tensor | None, new: int) -> None:
    """Raise ValueError where a sequence has no room for its keys, or a key's page is not there; reads the device."""
    if lengths.is_meta or lengths.numel() == 0:
        return
    page = k_cache.shape[2]
    width = 1 if page_table is None else page_table.shape[1]
    total = lengths.long() + new
    wrong = ((lengths < 0) | (total > page * width)).nonzero()[:, 0].tolist()
    if wrong:
        i = wrong[0]
        more = f" and {new} new ones" if new else ""
        raise ValueError(
            f"lengths[{i}] is {lengths[i].item()}{more}; sequence {i} has room for 0 to {page * width} keys"
            + ("" if page_table is None else f": page_table has {width} pages of {page} per sequence")
        )
    if page_table is None:
        return
    used = torch.arange(width, device=lengths.device)[None, :] * page < total[:, None]
    wrong = (used & ((page_table < 0) | (page_table >= k_cache.shape[0]))).nonzero().tolist()
    if wrong:
        i, j = wrong[0]
        raise ValueError(
            f"page_table[{i}, {j}] is {page_table[i, j].item()}; the pages of k_cache are 0 to {k_cache.shape[0] - 1}, "
            f"and sequence {i} has {total[i].item()} keys in {-(-total[i].item() // page)} pages"
        )


def _choose(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, left: int | None, softcap: float | None, backend: str
) -> str:
    """The backend's name. Raises ValueError where there is none of that name, or it does not take the inputs."""
    if backend == "auto":
        refused = INTERPRETED or CACHE_BACKENDS["triton"].refusal(q, k_cache, v_cache, left, softcap)
        return "reference" if refused else "triton"
    if not isinstance(backend, str) or backend not in CACHE_BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be {one_of(['auto', *CACHE_BACKENDS])}")
    if refusal := CACHE_BACKENDS[backend].refusal(q, k_cache, v_cache, left, softcap):
        raise ValueError(f"backend is {backend!r}, which does not take these inputs: {refusal}")
    return backend


# ---- the formula ----------------------------------------------------------------------------------------------------


def gathered(cache: torch.Tensor, page_table: torch.Tensor | None, there: torch.Tensor) -> torch.Tensor:
    """[batch, kv_heads, keys, head_dim], the keys in their order; 0 where `there`, [batch, keys], is False."""
    if page_table is not None:
        pages = torch.arange(page_table.shape[1], device=cache.device) * cache.shape[2]
        used = there[:, pages] if page_table.shape[1] else page_table.bool()
        batch, width = page_table.shape
        cache = cache[page_table.masked_fill(~used, 0).long()].transpose(1, 2)  # [batch, kv_heads, width, page, ...]
        cache = cache.reshape(batch, cache.shape[1], width * cache.shape[3], cache.shape[4])
    return torch.where(there[:, None, :, None], cache, cache.new_zeros(()))


def decode_reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, lengths: torch.Tensor,
    page_table: torch.Tensor | None, *, scale: float, left: int | None, softcap: float | None, new: int,
) -> Tensors:  # fmt: skip
    """The formula over the gathered keys, in float32, or in float64 where q is."""
    batch, heads, queries, head_dim = q.shape
    kv_heads, page = k_cache.shape[1:3]
    capacity = page if page_table is None else page * page_table.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    keys = torch.arange(capacity, device=q.device)
    total = (lengths.long() + new).clamp(0, capacity)
    there = keys[None, :] < total[:, None]
    if k_cache.shape[0] == 0:
        there = there[:, :0]
        keys, page_table = keys[:0], None
        k_cache, v_cache = (x.new_empty((batch, kv_heads, 0, head_dim)) for x in (k_cache, v_cache))
    k, v = (gathered(x, page_table, there).to(wide) for x in (k_cache, v_cache))
    rows = heads // kv_heads * queries  # that read a key head
    s = q.to(wide).reshape(batch, kv_heads, rows, head_dim) @ k.mT * scale
    s = s.reshape(batch, heads, queries, len(keys))
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    position = total[:, None] - queries + torch.arange(queries, device=q.device)
    seen = keys <= position[:, :, None]
    if left is not None:
        seen &= keys >= position[:, :, None] - left
    s = s.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(torch.isneginf(lse), 0.0)[..., None])
    o = (p.reshape(batch, kv_heads, rows, len(keys)) @ v).reshape(q.shape)
    return torch.empty_like(q).copy_(o), lse.float()


def append_reference(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, lengths: torch.Tensor,
    page_table: torch.Tensor | None,
) -> None:  # fmt: skip
    """As `flashlab.attention.decode.append`, by indices; raises IndexError where there is no room."""
    page = k_cache.shape[2]
    at = lengths.long()[:, None] + torch.arange(k_new.shape[2], device=k_new.device)
    which = torch.arange(len(lengths), device=k_new.device)[:, None].expand_as(at)
    if page_table is not None:
        which, at = page_table.long().gather(1, at // page), at % page
    for cache, added in ((k_cache, k_new), (v_cache, v_new)):
        cache.transpose(1, 2)[which, at] = added.transpose(1, 2)


class CacheBackend(NamedTuple):
    """What computes, what appends, and why it does not take (q, k_cache, v_cache, left, softcap), a clause or None."""

    decode: Callable[..., Tensors]
    append: Callable[..., None]
    refusal: Callable[..., str | None]


CACHE_BACKENDS = {
    # Its kernels take the dtypes, head_dims and devices of phase 4's.
    "triton": CacheBackend(kernels.decode, kernels.append, lambda q, *others: BACKENDS["triton"].refusal(q)),
    "reference": CacheBackend(decode_reference, append_reference, lambda *inputs: None),
}
"""The backends of `flash_attention_with_cache`, by name; flashlab.cuda.operators adds the CUDA kernel's."""


# ---- the operators --------------------------------------------------------------------------------------------------


def _compute(q, k_cache, v_cache, lengths, page_table, scale, left, softcap, new, backend) -> Tensors:
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        options: dict[str, Any] = dict(scale=scale, left=left, softcap=softcap, new=new)
        return CACHE_BACKENDS[backend].decode(q, k_cache, v_cache, lengths, _rows(page_table), **options)


def _checked(q, k_cache, v_cache, lengths, page_table, scale, left, softcap, new, backend) -> None:
    check_cache(q, k_cache, v_cache, lengths, page_table)
    _choose(q, k_cache, v_cache, left, softcap, backend)


def _run(*arguments) -> Tensors:
    _checked(*arguments)
    return _compute(*arguments)


def _fake(*arguments) -> Tensors:
    _checked(*arguments)
    q = arguments[0]
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _refuse(*given: Any) -> NoReturn:
    raise NotImplementedError(
        "flash_attention_with_cache has no gradient, and is not batched by torch.vmap: flashlab.flash_attention has a "
        "gradient, and a batch dimension of its own"
    )


def _rows(page_table: torch.Tensor | None) -> torch.Tensor | None:
    """The kernels walk along a row of the table."""
    return page_table if page_table is None or page_table.stride(1) == 1 else page_table.contiguous()


_decode = operator(
    "decode",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? page_table, float scale, SymInt? left, "
    "float? softcap, SymInt new, str backend) -> (Tensor, Tensor)",
    _run, fake=_fake, compute=_compute, backward=_refuse, vmap=_refuse, tensors=5,
    who="flash_attention_with_cache", instead="flashlab.flash_attention has a gradient",
)  # fmt: skip


@torch.library.custom_op(
    "flashlab::append_to_cache",
    mutates_args=("k_cache", "v_cache"),
    schema="(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k_new, Tensor v_new, Tensor lengths, Tensor? page_table, "
    "str backend) -> ()",
)
def _append(
    k_cache: torch.Tensor, v_cache: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, lengths: torch.Tensor,
    page_table: torch.Tensor | None, backend: str,
) -> None:  # fmt: skip
    CACHE_BACKENDS[backend].append(k_cache, v_cache, k_new, v_new, lengths, _rows(page_table))


@_append.register_fake
def _append_shapes(k_cache, v_cache, k_new, v_new, lengths, page_table, backend) -> None:
    check_cache(k_new, k_cache, v_cache, lengths, page_table, k_new, v_new)
