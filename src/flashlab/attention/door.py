"""The one door: `flash_attention(q, k, v)`, with its gradient, for a model to call.

    o = flash_attention(q, k, v, causal=True)

Behind it stand several implementations (flashlab.attention.backends): the formula in float64 ("reference"), the loops
in plain PyTorch ("simulation"), PyTorch's own products in blocks of queries ("torch"), the Triton kernels
("triton"), and where flashlab.cuda is imported each step of the CUDA series by its name. `choose_backend` says which
one "auto" takes, and why.

PyTorch's transforms, the same for each backend and for its operator torch.ops.flashlab.<name>:

    backward, torch.func.grad, vjp, jacrev, functional_call;       the gradient, once
        torch.autograd.functional.jacobian, is_grads_batched
    checkpoint, deepcopy of a model, autocast                      as for PyTorch's own attention
    compile, export                                                one node of the graph
    FakeTensor, meta                                               shapes without computing
    create_graph=True                                              a gradient that cannot be differentiated
    jvp, jacfwd, hessian, linearize, a dual tensor;                NotImplementedError: no forward mode
        jvp of grad, grad of jvp
    double backward, a gradient penalty, jacrev of grad, hvp       NotImplementedError: no second derivative
    double backward of a compiled function                         PyTorch's own RuntimeError
    vmap, vmap of grad                                             NotImplementedError: fold it into the batch

`flashlab.attention.reference.attention`, the formula in PyTorch's own operations, has every derivative.
"""

from typing import Any, NamedTuple

import torch

from flashlab.attention.backends import BACKENDS, DTYPES, attend, quick
from flashlab.attention.inputs import check_qkv, one_of, refuse_words, scale_of
from flashlab.attention.options import Window, softcap_of, window_of

_WORDS = "causal, scale, window, softcap and backend"
HOPPER = "p11_flash"  # the backend for compute capability 9.0


class Chosen(NamedTuple):
    """A backend, and why it is the one."""

    backend: str
    reason: str


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window = None,
    softcap: float | None = None,
    backend: str = "auto",
    **others: Any,
) -> torch.Tensor:
    """softmax(scale * q k^T + mask) v, with its gradient.

    Args:
        q: [batch, heads, seq_q, head_dim]; k, v: [batch, kv_heads, seq_k, head_dim]; heads is a multiple of kv_heads,
            and query head h reads key head h // (heads / kv_heads). One dtype and one device. Any strides; a step of
            the CUDA series copies tensors whose rows are not contiguous, or not on 16 bytes.
        causal: query i sees the keys j <= i + seq_k - seq_q: aligned at the end, as in FlashAttention-2 (PyTorch's
            ``is_causal`` is aligned at the beginning).
        scale: 1 / sqrt(head_dim) unless given. Compiled kernels want scores below 2^30: a multiply and add that is
            rounded once leaves so much beside larger ones that 2^x is infinite, and the row NaN.
        window: (left, right), how many keys before and after its own position a query sees; None is no bound, a number
            n is (n, n). With causal the right side is 0.
        softcap: scores become softcap * tanh(score / softcap).
        backend: a name of `flashlab.attention.backends.BACKENDS`, or "auto": see `choose_backend`.
        others: none; the names that other attentions have (attn_mask, is_causal, dropout_p) are told in these words.
    Returns:
        o: like q. A row that sees no key is 0, and has no gradient.
    Under torch.autocast, inputs are converted to its dtype first, as for a matrix product.
    Raises:
        TypeError, ValueError: a sentence that names the argument. NotImplementedError: under torch.vmap, in forward
            mode, and for a second derivative; see the table of this module.
    """
    if others:
        refuse_words("flash_attention", others, _WORDS)
    q, k, v = _autocast(q, k, v)
    left, right = window_of(window, causal)
    cap = softcap_of(softcap)
    if not torch.compiler.is_compiling():  # then the operator's fake checks
        check_qkv(q, k, v, dtypes=DTYPES, same_v=True)
    chosen = _choose(q, left, right, cap, backend)
    return attend(chosen, q, k, v, scale_of(scale, q.shape[-1]), left, right, cap)[0]


def choose_backend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool = False, scale: float | None = None,
    window: Window = None, softcap: float | None = None, backend: str = "auto", **others: Any,
) -> Chosen:  # fmt: skip
    """The backend that `flash_attention` takes for these arguments, and why.

    "auto" takes the Triton kernels where they are compiled and take the inputs, else PyTorch's own products in blocks
    of queries: so on a CPU, where backend="triton" has the kernels interpreted. Before them, on a GPU of capability
    9.0 that has an nvcc, phase 11's last kernel where it takes the inputs: there it is the fastest
    (bench/recorded/hopper_h200.json), and nvcc's seconds at the first call are worth it. It wants |v| below
    2^112 / ceil(seq_k / 128), which float16 always is, and its bits are the same from run to run, but a row's depend on
    the rows beside it. Its gradient is deterministic too.

    Raises:
        TypeError, ValueError: as `flash_attention`; for a backend that does not take the inputs it says why not.
    """
    refuse_words("choose_backend", others, _WORDS)
    q, k, v = _autocast(q, k, v)
    check_qkv(q, k, v, dtypes=DTYPES, same_v=True)
    scale_of(scale, q.shape[-1])
    left, right = window_of(window, causal)
    cap = softcap_of(softcap)
    chosen = _choose(q, left, right, cap, backend)
    if backend != "auto":
        return Chosen(chosen, "it was asked for")
    if chosen == HOPPER:
        return Chosen(
            chosen, f"it is the fastest on this GPU, of capability 9.0, for {q.dtype} and {q.shape[-1]} columns"
        )
    if refusal := BACKENDS["triton"].refusal(q, left, right, cap):
        return Chosen(chosen, f"the backend triton does not take these inputs: {refusal}")
    if chosen != "triton":
        return Chosen(chosen, "Triton kernels are interpreted here, which is slow: backend='triton' asks for them")
    takes = f"the Triton kernels take {q.dtype} with a head_dim of {q.shape[-1]}"
    return Chosen(chosen, f"{takes}; they are compiled for {q.device}")


def _choose(q: torch.Tensor, left: int | None, right: int | None, softcap: float | None, backend: str) -> str:
    """The backend's name. Raises ValueError where there is none of that name, or it does not take the inputs."""
    if backend == "auto":
        here = q.is_cuda and HOPPER in BACKENDS and BACKENDS[HOPPER].refusal(q, left, right, softcap) is None
        return HOPPER if here else quick(q, left, right, softcap)
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise ValueError(f"backend is {backend!r}; it must be {one_of(['auto', *BACKENDS])}")
    if refusal := BACKENDS[backend].refusal(q, left, right, softcap):
        raise ValueError(f"backend is {backend!r}, which does not take these inputs: {refusal}")
    return backend


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors in autocast's dtype where it is on for their device; float64 stays, as with every such operator."""
    first = tensors[0]
    if not isinstance(first, torch.Tensor):
        return tensors
    kind = first.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # (is_autocast_available is nothing that dynamo traces)
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
