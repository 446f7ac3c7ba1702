"""The one validator of q, k and v: each function asks it, and a mistake gets the same sentence everywhere.

A kernel cannot check: with a wrong shape it reads the wrong memory and returns numbers. So its launcher asks
`check_qkv` first, and `scale_of` for the scale.
"""

import math
from collections.abc import Sequence
from typing import Any, SupportsFloat

import torch
import torch.autograd.forward_ad as forward_ad
from torch._C._functorch import is_batchedtensor
from torch._subclasses.fake_tensor import FakeTensor

from flashlab.runtime.untraced import untraced

TILE_SIDES = (16, 32, 64, 128, 256)
"""The head_dims that a Triton kernel takes whole: `tl.arange` wants powers of two, `tl.dot` at least 16."""

_LAYOUTS = {2: "[rows, head_dim], one head", 4: "[batch, heads, seq_len, head_dim]"}
_LARGEST = 2.0**104  # of a scale: it leaves 2^23 for a dot product before float32 ends


def check_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    rank: int = 4,
    dtypes: Sequence[torch.dtype] | None = None,
    head_dims: Sequence[int] | None = None,
    keys_needed: bool = False,
    same_v: bool = False,
    on_gpu: bool = False,
    no_grad: bool = False,
    paged: bool = False,
    names: tuple[str, str, str] = ("q", "k", "v"),
) -> None:
    """Raise, in a sentence that says what to do, unless q, k and v are inputs of one attention.

    Args:
        q: [batch, heads, seq_q, head_dim], or [M, head_dim] where `rank` is 2.
        k, v: [batch, kv_heads, seq_k, head_dim or v_dim], or [N, ...]; heads is a multiple of kv_heads.
        dtypes: what is taken, the same for all three; None takes any floating dtypes, mixed ones too.
        head_dims: what is taken; None takes any of at least 1.
        keys_needed: k and v must have at least one row.
        same_v: v must have the head_dim of k.
        on_gpu: they must be on a GPU, because the kernel is compiled for it; else on any device, one for all three.
        no_grad: none may want a derivative, because a kernel's result has none.
        paged: the first dimension of k and v counts pages, and says nothing of the batch.
        names: what the caller calls them.
    Raises:
        TypeError: something that is no tensor, or a layout or dtype that is not taken. ValueError: everything else.
    """
    tensors = dict(zip(names, (q, k, v), strict=True))
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
        if x.is_nested or x.layout is not torch.strided:
            _refuse_layout(name, x)
        if x.ndim != rank:
            raise ValueError(f"{name} must be {_LAYOUTS[rank]}, but it has {x.ndim} dimensions{_remedy(name, x, rank)}")
        _refuse_negated(name, x)
    _check_dtypes(tensors, dtypes)
    if not q.device == k.device == v.device:
        where = ", ".join(f"{name} is on {x.device}" for name, x in tensors.items())
        raise ValueError(f"one device for all three, please: {where}")
    if no_grad:
        check_no_gradient(**tensors)
    if on_gpu and not q.is_cuda:
        raise ValueError(f"{names[0]} is on {q.device}, but kernels are compiled for the GPU: move it to cuda")
    _check_sizes(names, q, k, v, keys_needed, same_v, paged)
    if head_dims is not None and q.shape[-1] not in head_dims:
        _refuse_head_dim(q.shape[-1], head_dims)


def _check_sizes(
    names: tuple[str, str, str], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keys_needed: bool, same_v: bool,
    paged: bool,
) -> None:  # fmt: skip
    """Raise unless the sizes of q, k and v go together; see `check_qkv`."""
    name_q, name_k, name_v = names
    if q.shape[-1] != k.shape[-1]:
        found = f"{name_q} has head_dim {q.shape[-1]}, but {name_k} has {k.shape[-1]}"
        raise ValueError(f"{found}: no dot product between them")
    if same_v and k.shape != v.shape:
        raise ValueError(f"{name_k} is {list(k.shape)} and {name_v} is {list(v.shape)}; they must have one shape")
    if q.ndim == 4:
        if not paged and not q.shape[0] == k.shape[0] == v.shape[0]:
            sizes = ", ".join(f"{name} has {x.shape[0]}" for name, x in zip(names, (q, k, v), strict=True))
            raise ValueError(f"one batch size for all three, please: {sizes}")
        heads, kv_heads = q.shape[1], k.shape[1]
        if kv_heads != v.shape[1]:
            raise ValueError(f"{name_k} has {kv_heads} heads, but {name_v} has {v.shape[1]}: they go in pairs")
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} key heads evenly: take a multiple of them")
    if k.shape[-2] != v.shape[-2]:
        rows = f"{name_k} has {k.shape[-2]} rows, but {name_v} has {v.shape[-2]}"
        raise ValueError(f"{rows}: each key needs one value")
    if k.shape[-1] == 0 or (keys_needed and k.shape[-2] == 0):
        raise ValueError(f"{name_k} is {list(k.shape)}: a softmax needs at least one key of one feature")


def scale_of(scale: SupportsFloat | None, head_dim: int) -> float:
    """The factor on the scores as a float: `scale`, or 1 / sqrt(head_dim) where it is None.

    Raises:
        TypeError: something that is no number.
        ValueError: NaN, infinite, or over 2^104; a tensor that wants a gradient.
    """
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    value = number_of(
        "scale", scale, "None for 1 / sqrt(head_dim)", "multiply q by it and pass scale=1.0, or pass scale.item()"
    )
    if not abs(value) <= _LARGEST:
        raise ValueError(
            f"scale is {value}; it must be a finite number up to 2^104, so that float32 can hold the scores: "
            "leave it out for 1 / sqrt(head_dim)"
        )
    return value


def number_of(name: str, given: SupportsFloat, otherwise: str, instead: str) -> float:
    """An option as a float; infinity where it is too large for one.

    Args:
        otherwise: what may stand there too; instead: what to do where it wants a gradient. For the sentences.
    Raises:
        TypeError: something that is no number. ValueError: a tensor that wants a gradient, which is not computed.
    """
    if isinstance(given, str | bytes | bool) or str(getattr(given, "dtype", "")).endswith("bool"):
        raise TypeError(f"{name} is {given!r}; it must be a number, or {otherwise}")
    if isinstance(given, torch.Tensor) and (wish := _wish(given)):
        raise ValueError(f"{name} {wish}, and none is computed for it: {instead}")
    try:
        return float(given)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        raise TypeError(f"{name} is a {type(given).__name__}; it must be one number, or {otherwise}") from None
    except OverflowError:
        return math.inf


def check_causal(causal: bool) -> None:
    """Raise TypeError unless it is True or False: every string but the empty one would count as True."""
    if causal is not True and causal is not False:
        what = "a tensor" if isinstance(causal, torch.Tensor) else repr(causal)
        raise TypeError(f"causal is {what}; it must be True or False, and no mask of another kind is taken")


@untraced  # traced, a tangent is not seen
def check_no_gradient(**tensors: torch.Tensor) -> None:
    """Raise ValueError, by their names, where a tensor wants a derivative, or has no memory: a bare kernel reads that,
    and its result has none."""
    for name, x in tensors.items():
        if wish := _wish(x):
            raise ValueError(
                f"{name} {wish}, and this kernel's result has none: pass {name}.detach(), or call it under "
                "torch.no_grad(); flashlab.flash_attention has a gradient"
            )
        if is_batchedtensor(x):
            raise ValueError(f"{name} is mapped by torch.vmap, and a kernel is not: fold that dimension into the batch")
        if x.is_meta or isinstance(x, FakeTensor):
            what = "on meta" if x.is_meta else "a FakeTensor"
            raise ValueError(f"{name} is {what}, and a kernel reads memory; flashlab.flash_attention gives the shapes")


def check_results(
    q: torch.Tensor, wide: dict[str, Any], rows: dict[str, Any], *, dtypes: bool = True, no_grad: bool = False
) -> None:
    """Raise unless what comes from the forward pass, and the gradients, go with q; by their names.

    Args:
        wide: are like q; rows: are [batch, heads, seq_q], float32. Of grad_lse None passes.
        dtypes: False takes any. no_grad: as of `check_qkv`.
    Raises:
        TypeError, ValueError: one that does not, or that wants a derivative.
    """
    for name, x in (wide | rows).items():
        if x is None and name == "grad_lse":
            continue
        shape, dtype = (q.shape, q.dtype) if name in wide else (q.shape[:3], torch.float32)
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}; a torch.Tensor is needed")
        if x.is_nested or x.layout is not torch.strided:
            _refuse_layout(name, x)
        if x.shape != shape:
            raise ValueError(f"{name} is {list(x.shape)}; with this q it must be {list(shape)}")
        if x.dtype != dtype and dtypes:
            raise TypeError(f"{name} is {x.dtype}; it must be {dtype}: convert with .to({dtype})")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: one device for all, please")
        if no_grad:
            _refuse_negated(name, x)
            check_no_gradient(**{name: x})


def _wish(x: torch.Tensor) -> str | None:
    """Which derivative would be lost without a word if x were read as mere numbers."""
    if x.requires_grad and torch.is_grad_enabled():
        return "requires a gradient"
    forward_mode = forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled()
    return "has a tangent" if forward_mode and forward_ad.unpack_dual(x).tangent is not None else None


_OTHER_WORDS = {
    "attn_mask": "causal= and window= say which keys a query sees, and no other mask is taken "
    "(torch.nn.functional.scaled_dot_product_attention takes any)",
    "is_causal": "say causal=, which is aligned at the end: the last query stands beside the last key "
    "(is_causal begins at the first key, which is the same only where q and k have as many rows)",
    "dropout_p": "there is no dropout: leave it out",
    "enable_gqa": "leave it out: k and v may have fewer heads than q without a word",
    "softmax_scale": "say scale=",
    "window_size": "say window=(left, right)",
}


def refuse_words(function: str, words: dict[str, object], known: str) -> None:
    """Raise TypeError for arguments of other attentions, in a sentence that translates the first."""
    for word in words:
        raise TypeError(f"{function} has no {word}: {_OTHER_WORDS.get(word, f'it takes {known}')}")


def check_block(name: str, rows: int | None, *, power_of_two: bool = False) -> None:
    """Raise unless a tile's number of rows is an int of at least 1 (for Triton a power of two of at least 16).

    None passes: it stands for the caller's default.

    Raises:
        TypeError: not an int. ValueError: too small, or no power of two.
    """
    if rows is None:
        return
    if isinstance(rows, bool) or not isinstance(rows, int):
        raise TypeError(f"{name} is a number of rows, an int, not {rows!r}")
    if power_of_two and (rows < 16 or rows & (rows - 1)):
        raise ValueError(f"{name} is {rows}: a block is a power of two of at least 16 rows")
    if rows < 1:
        raise ValueError(f"{name} is {rows}: a block has at least one row")


def _remedy(name: str, x: torch.Tensor, rank: int) -> str:
    if rank == 2 and x.ndim == 4:
        return f"; take one head, {name}[batch, head]"
    if rank == 4 and x.ndim in (2, 3):
        return f"; add the missing ones, {name}[{', '.join(['None'] * (4 - x.ndim))}]"
    return ""


def _refuse_negated(name: str, x: torch.Tensor) -> None:
    if x.is_neg():  # its memory holds the numbers with the other sign
        raise ValueError(f"{name} is a view that PyTorch negates when it reads it: pass {name}.resolve_neg()")


def _refuse_layout(name: str, x: torch.Tensor) -> None:
    if x.is_nested:
        what = f"a nested tensor, and a kernel takes rows of one length: call it for each x[None] of {name}.unbind()"
    else:
        layout = str(x.layout).removeprefix("torch.").lstrip("_")
        what = f"{layout}, and a kernel reads rows in memory: pass {name}.to_dense()"
    raise TypeError(f"{name} is {what}")


def _check_dtypes(tensors: dict[str, torch.Tensor], dtypes: Sequence[torch.dtype] | None) -> None:
    for name, x in tensors.items():
        if not x.dtype.is_floating_point and dtypes is None:
            raise TypeError(f"{name} is {x.dtype}; attention needs floating point: convert with {name}.float()")
    found = [x.dtype for x in tensors.values()]
    if dtypes is None:
        return
    if len(set(found)) > 1:
        listed = ", ".join(f"{name} is {x.dtype}" for name, x in tensors.items())
        raise TypeError(f"one dtype for all three, please: {listed}")
    if found[0] not in dtypes:
        allowed = one_of([str(dtype) for dtype in dtypes])
        raise TypeError(f"{next(iter(tensors))} is {found[0]}; {allowed} is taken: convert with .to({dtypes[0]})")


def _refuse_head_dim(head_dim: int, head_dims: Sequence[int]) -> None:
    sentence = f"head_dim is {head_dim}; this kernel is compiled for {one_of([str(n) for n in head_dims])}"
    if head_dim & (head_dim - 1):
        sentence += ", because a tile's sides are powers of two"
    if head_dim < max(head_dims):
        sentence += f": pad the last dimension with zeros, and pass scale={head_dim}**-0.5"
    raise ValueError(sentence)


def one_of(words: Sequence[str]) -> str:
    """ "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
