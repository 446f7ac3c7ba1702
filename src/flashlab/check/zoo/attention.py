"""The zoo: one right forward pass, and the ways in which public kernels got it wrong, each as a change of its text.

The checker is tested against it: the right pass must be accepted with any tile size, every mutant must be rejected, and
where the mistake is one the checker knows, its diagnosis must be the mutant's. A newly met bug is first added here.
Numbers in `origin` are issues of the project named.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

inf = float("inf")
BLOCK_M = 32
BLOCK_N = 32
_numbers = itertools.count()


def load(x, b, h, rows, keep):
    """Rows of head (b, h) of x [batch, heads, seq_len, head_dim], by address, as a kernel does; 0 where not `keep`."""
    with torch._C.DisableTorchFunction():  # nothing here is fresh output (poison.MarkedEmpty), and there are many calls
        by_batch, by_head, by_row, by_column = x.stride()
        offsets = b * by_batch + h * by_head + rows[:, None] * by_row + torch.arange(x.shape[3]) * by_column
        return read(x, offsets, keep[:, None])


def read(x, offsets, keep):
    """What lies `offsets` elements from the start of x; whatever is there, as on a GPU."""
    everything = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    offsets = (offsets + x.storage_offset()).clamp(0, everything.numel() - 1)
    return torch.where(keep, everything[offsets], torch.zeros((), dtype=x.dtype))


def as_contiguous(x):
    """The memory of x, read as if x were contiguous: what a kernel does that is not told the strides."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


def flash_forward(q, k, v, *, causal=False, scale=None):
    """A right forward pass on the CPU, tile by tile: the text that every mutant changes.

    q [batch, heads, seq_q, head_dim], k, v [batch, kv_heads, seq_k, head_dim] -> o like q, lse [batch, heads, seq_q].
    """
    batch, heads, seq_q, head_dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    scale = head_dim**-0.5 if scale is None else scale
    o = torch.empty(batch, heads, seq_q, head_dim, dtype=q.dtype)
    lse = torch.empty(batch, heads, seq_q, dtype=torch.float32)
    for b, h, start_m in itertools.product(range(batch), range(heads), range(0, seq_q, BLOCK_M)):
        h_kv = h // (heads // kv_heads)
        offs_m = start_m + torch.arange(BLOCK_M)
        q_tile = load(q, b, h, offs_m, offs_m < seq_q).float()
        m_i = torch.full((BLOCK_M,), -inf)
        l_i = torch.zeros(BLOCK_M)
        acc = torch.zeros(BLOCK_M, head_dim)
        for start_n in range(0, seq_k, BLOCK_N):
            offs_n = start_n + torch.arange(BLOCK_N)
            k_tile = load(k, b, h_kv, offs_n, offs_n < seq_k).float()
            v_tile = load(v, b, h_kv, offs_n, offs_n < seq_k).float()
            s = (q_tile @ k_tile.T) * scale
            s = torch.where((offs_n < seq_k)[None, :], s, -inf)
            if causal:
                s = torch.where(offs_n[None, :] <= offs_m[:, None] + seq_k - seq_q, s, -inf)
            m_new = torch.maximum(m_i, s.amax(dim=1))
            m_safe = torch.where(m_new == -inf, 0.0, m_new)
            p = torch.exp(s - m_safe[:, None])
            correction = torch.exp(m_i - m_safe)
            l_i = l_i * correction + p.sum(dim=1)
            acc = acc * correction[:, None] + p.to(q.dtype).float() @ v_tile
            m_i = m_new
        o_tile = acc / torch.where(l_i == 0, 1.0, l_i)[:, None]
        lse_tile = torch.where(l_i == 0, -inf, m_i + torch.log(l_i))
        rows = offs_m[offs_m < seq_q]
        o[b, h, rows] = o_tile[: len(rows)].to(o.dtype)
        lse[b, h, rows] = lse_tile[: len(rows)]
    return o, lse


@dataclass(frozen=True)
class Mutant:
    """One mistake: (old, new) pieces of `flash_forward`'s text. `diagnosis` is what the checker should say; None where
    it can only say that the result is wrong."""

    name: str
    changes: tuple[tuple[str, str], ...]
    diagnosis: str | None
    origin: str = ""

    def build(self, **names: Any) -> Callable[..., Any]:
        """The function with the mistake; `names` replaces module globals, BLOCK_N for instance."""
        return build(*self.changes, name=self.name, **names)


def build(*changes: tuple[str, str], name: str = "the right forward pass", **names: Any) -> Callable[..., Any]:
    """`flash_forward` with pieces of its text replaced; ValueError when a piece does not occur exactly once."""
    source = inspect.getsource(flash_forward)
    for old, new in changes:
        if source.count(old) != 1:
            raise ValueError(f"{name}: {old!r} occurs {source.count(old)} times in flash_forward")
        source = source.replace(old, new)
    file = f"<mutant {next(_numbers)}: {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)  # so that a traceback can show it
    scope = {**globals(), **names}
    exec(compile(source, file, "exec"), scope)
    return scope["flash_forward"]


def _mutant(name: str, diagnosis: str | None, *changes: tuple[str, str], origin: str = "") -> Mutant:
    return Mutant(name, changes, diagnosis, origin)


_S = "s = (q_tile @ k_tile.T) * scale"
_TAIL = "s = torch.where((offs_n < seq_k)[None, :], s, -inf)"
_CAUSAL = "offs_n[None, :] <= offs_m[:, None] + seq_k - seq_q"
_M_NEW = "m_new = torch.maximum(m_i, s.amax(dim=1))"
_P = "p = torch.exp(s - m_safe[:, None])"
_CORRECTION = "correction = torch.exp(m_i - m_safe)"
_L = "l_i = l_i * correction + p.sum(dim=1)"
_ACC = "acc = acc * correction[:, None] + p.to(q.dtype).float() @ v_tile"
_O = "o_tile = acc / torch.where(l_i == 0, 1.0, l_i)[:, None]"
_LSE = "lse_tile = torch.where(l_i == 0, -inf, m_i + torch.log(l_i))"
_STORE = "o[b, h, rows] = o_tile[: len(rows)].to(o.dtype)"
_KEYS = "for start_n in range(0, seq_k, BLOCK_N):"
_SKIPPING = "for start_n in range(0, min(seq_k, start_m + BLOCK_M + seq_k - seq_q) if causal else seq_k, BLOCK_N):"
_HEAD = "h_kv = h // (heads // kv_heads)"
_Q = "q_tile = load(q, b, h, offs_m, offs_m < seq_q).float()"
_K = "k_tile = load(k, b, h_kv, offs_n, offs_n < seq_k).float()"
_V = "v_tile = load(v, b, h_kv, offs_n, offs_n < seq_k).float()"
_EMPTY = "o = torch.empty(batch, heads, seq_q, head_dim, dtype=q.dtype)"
_RETURN = "return o, lse"

MUTANTS: tuple[Mutant, ...] = (
    # The online softmax.
    _mutant(
        "no maximum is subtracted",
        "no-max-subtraction",
        ("m_safe = torch.where(m_new == -inf, 0.0, m_new)", "m_new = m_safe = torch.zeros_like(m_i)"),
        origin="17 of 17 public checkers miss it",
    ),
    _mutant("O is not rescaled", "o-not-rescaled", (_ACC, _ACC.replace(" * correction[:, None]", ""))),
    _mutant("l is not rescaled", "l-not-rescaled", (_L, _L.replace(" * correction", ""))),
    _mutant(
        "neither O nor l is rescaled",
        "nothing-rescaled",
        (_ACC, _ACC.replace(" * correction[:, None]", "")),
        (_L, _L.replace(" * correction", "")),
    ),
    _mutant(
        "correction inverted",
        "correction-inverted",
        (_CORRECTION, "correction = torch.where(m_i == -inf, 0.0, torch.exp(m_safe - m_i))"),
    ),
    _mutant(
        "the new tile is rescaled too",
        "rescaled-after-the-sum",
        (_ACC, "acc = (acc + p.to(q.dtype).float() @ v_tile) * correction[:, None]"),
        (_CORRECTION, "correction = torch.where(m_i == -inf, 1.0, torch.exp(m_i - m_safe))"),
    ),
    _mutant("m is never updated", "m-not-updated", ("            m_i = m_new\n", "")),
    _mutant("m starts at 0", "m-starts-at-zero", ("m_i = torch.full((BLOCK_M,), -inf)", "m_i = torch.zeros(BLOCK_M)")),
    _mutant("the maximum of the block only", "m-of-this-block-only", (_M_NEW, "m_new = s.amax(dim=1)")),
    _mutant("the minimum for the maximum", None, (_M_NEW, "m_new = torch.maximum(m_i, s.amin(dim=1))")),
    _mutant(
        "normalised in the loop",
        "normalised-in-the-loop",
        ("m_i = m_new", "m_i = m_new\n            acc = acc / torch.where(l_i == 0, 1.0, l_i)[:, None]"),
    ),
    _mutant(
        "normalised in the loop only",
        "normalised-in-the-loop-only",
        ("m_i = m_new", "m_i = m_new\n            acc = acc / torch.where(l_i == 0, 1.0, l_i)[:, None]"),
        (_O, "o_tile = acc"),
    ),
    _mutant("never normalised", "not-normalised", (_O, "o_tile = acc")),
    _mutant(
        "softmax along the queries",
        "softmax-over-queries",
        (_M_NEW, "m_new = torch.maximum(m_i, s.amax(dim=1))\n            s_max = s.amax(dim=0)"),
        (_P, "p = torch.softmax(torch.where((offs_m < seq_q)[:, None], s, -inf), dim=0).nan_to_num()"),
        (_O, "o_tile = acc"),
        (_CORRECTION, "correction = torch.ones(BLOCK_M)"),
    ),
    # The loop and its tail.
    _mutant(
        "the zero-padded tail is not masked",
        "tail-not-masked",
        (_TAIL, "pass"),
        origin="13 of 17 public checkers miss it",
    ),
    _mutant(
        "l is summed over the padded tail", "tail-in-l", (_L, _L + " + (offs_n >= seq_k).sum() * torch.exp(-m_safe)")
    ),
    _mutant(
        "K and V are read past their end",
        "read-past-the-end",
        (_K, _K.replace("offs_n < seq_k", "offs_n >= 0")),
        (_V, _V.replace("offs_n < seq_k", "offs_n >= 0")),
    ),
    _mutant(
        "V is read past its end",
        "read-past-the-end",
        (_V, _V.replace("offs_n < seq_k", "offs_n >= 0")),
        origin="PyTorch 101967: 0 * NaN",
    ),
    _mutant("the tail's mask is inverted", "mask-inverted", (_TAIL, _TAIL.replace("<", ">="))),
    _mutant(
        "the last block is skipped",
        "last-block-skipped",
        (_KEYS, _KEYS.replace("seq_k,", "max(seq_k - BLOCK_N, 1),")),
        origin="2 of 17 public checkers miss it",
    ),
    _mutant(
        "the tail block is skipped", "tail-skipped", (_KEYS, _KEYS.replace("seq_k,", "seq_k // BLOCK_N * BLOCK_N,"))
    ),
    _mutant("the first block is skipped", "first-block-skipped", (_KEYS, _KEYS.replace("(0,", "(BLOCK_N,"))),
    _mutant(
        "the last key is dropped", "last-keys-dropped", (_TAIL, _TAIL.replace("offs_n < seq_k", "offs_n < seq_k - 1"))
    ),
    _mutant(
        "the last 8 keys are dropped",
        "last-keys-dropped",
        (_TAIL, _TAIL.replace("offs_n < seq_k", "offs_n < seq_k - 8")),
    ),
    # The scale and the base.
    _mutant(
        "the tail's mask on the rows",
        "tail-mask-on-rows",
        (_TAIL, _TAIL.replace("(offs_n < seq_k)[None, :]", "(start_n + torch.arange(BLOCK_M) < seq_k)[:, None]")),
    ),
    _mutant("K does not move on", "k-not-advanced", (_K, _K.replace("offs_n, ", "offs_n - start_n, "))),
    _mutant("V does not move on", "v-not-advanced", (_V, _V.replace("offs_n, ", "offs_n - start_n, "))),
    _mutant(
        "K and V do not move on",
        "kv-not-advanced",
        (_K, _K.replace("offs_n, ", "offs_n - start_n, ")),
        (_V, _V.replace("offs_n, ", "offs_n - start_n, ")),
    ),
    _mutant("no scale", "scale-missing", (_S, _S.replace(" * scale", ""))),
    _mutant("scale applied twice", "scale-twice", (_S, _S.replace("* scale", "* scale * scale"))),
    _mutant("scale 1/d", "scale-one-over-d", (_S, _S.replace("* scale", "/ head_dim"))),
    _mutant("scale 1/sqrt(N)", "scale-one-over-sqrt-n", (_S, _S.replace("* scale", "/ seq_k**0.5"))),
    _mutant("the scale given is ignored", "scale-ignored", (_S, _S.replace("* scale", "* head_dim**-0.5"))),
    _mutant("the scale multiplied as a divisor", "scale-inverted", (_S, _S.replace("* scale", "/ scale"))),
    _mutant(
        "exp2 without log2(e)",
        "exp2-without-log2e",
        (_P, _P.replace("exp", "exp2")),
        (_CORRECTION, _CORRECTION.replace("exp", "exp2")),
    ),
    _mutant(
        "exp with log2(e) in the scale", "exp-with-log2e", (_S, _S.replace("* scale", "* (scale * 1.4426950408889634)"))
    ),
    _mutant(
        "exp2 for P, exp for the correction",
        "mixed-bases",
        (_P, "p = torch.exp2(1.4426950408889634 * (s - m_safe[:, None]))"),
        (_CORRECTION, "correction = torch.exp2(m_i - m_safe)"),
    ),
    # What the log-sum-exp is made of.
    _mutant(
        "lse in base 2",
        "lse-in-base-2",
        (_LSE, _LSE.replace("m_i + torch.log(l_i)", "(m_i + torch.log(l_i)) * 1.4426950408889634")),
    ),
    _mutant("lse with log2(l)", "lse-mixed-bases", (_LSE, _LSE.replace("torch.log(l_i)", "torch.log2(l_i)"))),
    _mutant("lse without log(l)", "lse-without-log-l", (_LSE, _LSE.replace("m_i + torch.log(l_i)", "m_i"))),
    _mutant("lse without m", "lse-without-m", (_LSE, _LSE.replace("m_i + ", ""))),
    _mutant(
        "lse with the wrong sign", "lse-sign", (_LSE, _LSE.replace("m_i + torch.log(l_i)", "-(m_i + torch.log(l_i))"))
    ),
    _mutant("lse with l in place of log(l)", "lse-l-for-log-l", (_LSE, _LSE.replace("torch.log(l_i)", "l_i"))),
    # The causal mask.
    _mutant("no causal mask", "causal-missing", (_CAUSAL, "(offs_n >= 0)[None, :]")),
    _mutant("causal without the diagonal", "causal-without-diagonal", (_CAUSAL, _CAUSAL.replace("<=", "<"))),
    _mutant("causal one too far", "causal-one-too-far", (_CAUSAL, _CAUSAL + " + 1")),
    _mutant(
        "causal one too far, tiles above the diagonal skipped",
        "causal-one-too-far",
        (_KEYS, _SKIPPING),
        (_CAUSAL, _CAUSAL + " + 1"),
    ),
    _mutant(
        "the loop ends a block of queries too early",
        "causal-loop-too-short",
        (_KEYS, _SKIPPING.replace(" + BLOCK_M", "")),
    ),
    _mutant(
        "the loop ends as for seq_q = seq_k", "causal-loop-top-left", (_KEYS, _SKIPPING.replace("+ seq_k - seq_q", ""))
    ),
    _mutant(
        "p is masked after its sum",
        "l-counts-hidden-keys",
        (_KEYS, _SKIPPING),
        (_CAUSAL, "(offs_n >= 0)[None, :]"),
        (_ACC, f"p = torch.where({_CAUSAL}, p, 0.0) if causal else p; {_ACC}"),
    ),
    _mutant("causal aligned top-left", "causal-top-left", (_CAUSAL, _CAUSAL.replace(" + seq_k - seq_q", ""))),
    _mutant(
        "causal offset with the wrong sign",
        "causal-offset-sign",
        (_CAUSAL, _CAUSAL.replace("+ seq_k - seq_q", "- seq_k + seq_q")),
    ),
    _mutant(
        "mask on the wrong axis", "causal-upside-down", (_CAUSAL, "offs_n[None, :] + seq_q >= offs_m[:, None] + seq_k")
    ),
    _mutant(
        "mask only in the first row of tiles",
        "causal-first-tile-only",
        (_CAUSAL, _CAUSAL + " if start_m == 0 else torch.tensor(True)"),
    ),
    _mutant(
        "mask by whole blocks",
        "causal-by-block",
        (_CAUSAL, "(offs_n // BLOCK_N)[None, :] <= ((offs_m + seq_k - seq_q) // BLOCK_N)[:, None]"),
    ),
    _mutant("masked scores set to 0", "masked-with-zero", (_CAUSAL + ", s, -inf)", _CAUSAL + ", s, 0.0)")),
    _mutant(
        "-1e4 for minus infinity",
        "finite-sentinel",
        ("m_i = torch.full((BLOCK_M,), -inf)", "m_i = torch.full((BLOCK_M,), -1e4)"),
        (_TAIL, _TAIL.replace("-inf", "-1e4")),
        (_CAUSAL + ", s, -inf)", _CAUSAL + ", s, -1e4)"),
        origin="FlashInfer 4267",
    ),
    _mutant(
        "-1e6 for minus infinity",
        "finite-sentinel",
        ("m_i = torch.full((BLOCK_M,), -inf)", "m_i = torch.full((BLOCK_M,), -1e6)"),
        (_TAIL, _TAIL.replace("-inf", "-1e6")),
        (_CAUSAL + ", s, -inf)", _CAUSAL + ", s, -1e6)"),
        origin="FlashInfer 4267",
    ),
    _mutant(
        "rows that see no key give NaN",
        "masked-rows-nan",
        ("m_safe = torch.where(m_new == -inf, 0.0, m_new)", "m_safe = m_new"),
        origin="FlashAttention 1778, PyTorch 41508: -inf - (-inf)",
    ),
    _mutant(
        "rows that see no key give the mean of V",
        "masked-rows-not-zero",
        (_CAUSAL + ", s, -inf)", _CAUSAL + ", s, -1e30)"),
        origin="FlashInfer 4452",
    ),
    # Which head, which batch, which address.
    _mutant("K/V head by modulo", "wrong-kv-head", (_HEAD, "h_kv = h % kv_heads")),
    _mutant("K/V head 0 for all", "wrong-kv-head", (_HEAD, "h_kv = 0")),
    _mutant(
        "batch 0 for all", "wrong-batch", (_K, _K.replace("b, h_kv", "0, h_kv")), (_V, _V.replace("b, h_kv", "0, h_kv"))
    ),
    _mutant(
        "batch stride for head stride",
        "wrong-stride",
        (_K, "k_tile = load(k.transpose(0, 1), b, h_kv, offs_n, offs_n < seq_k).float()"),
    ),
    _mutant(
        "inputs taken for contiguous",
        "strides-ignored",
        (
            _K,
            "k_tile = load(as_contiguous(k), b, h_kv, offs_n, offs_n < seq_k).float()",
        ),
        (
            _V,
            "v_tile = load(as_contiguous(v), b, h_kv, offs_n, offs_n < seq_k).float()",
        ),
        origin="FlashAttention 355, fla 1138",
    ),
    _mutant(
        "the output of head 0 for all heads",
        "wrong-head-stored",
        (
            _STORE,
            _STORE.replace("[b, h, rows]", "[b, h - h % 2, rows]").replace(
                "o_tile[: len(rows)].to(o.dtype)",
                "o_tile[: len(rows)].to(o.dtype)\n        o[b, h, rows] = o[b, h - h % 2, rows]",
            ),
        ),
    ),
    # Operands.
    _mutant(
        "K and V exchanged",
        "k-and-v-exchanged",
        (_K, _K.replace("load(k", "load(v")),
        (_V, _V.replace("load(v", "load(k")),
    ),
    _mutant(
        "V transposed inside each tile",
        "v-transposed",
        (_V, _V + "\n            n = min(BLOCK_N, head_dim)\n            v_tile[:n, :n] = v_tile[:n, :n].T.clone()"),
    ),
    _mutant(
        "neighbouring columns of P exchanged",
        "p-columns-exchanged",
        (_ACC, _ACC.replace("p.to", "p[:, torch.arange(BLOCK_N) ^ 1].to")),
        origin="an mma fragment in the wrong order",
    ),
    _mutant(
        "columns of P exchanged in eights",
        "p-columns-exchanged",
        (_ACC, _ACC.replace("p.to", "p[:, torch.arange(BLOCK_N) ^ 8].to")),
        origin="a shuffle by 0x10 for 0b10",
    ),
    _mutant(
        "columns of O exchanged",
        "o-columns-exchanged",
        (_O, _O + "\n        o_tile = o_tile[:, torch.arange(head_dim) ^ 2]"),
        origin="fragments c2 and c3 exchanged",
    ),
    _mutant(
        "rows of O exchanged",
        "o-rows-exchanged",
        (_STORE, "o[b, h, rows] = o_tile[torch.arange(len(rows)).flip(0)].to(q.dtype)"),
    ),
    _mutant(
        "half of head_dim left out of the scores",
        "head-dim-cut",
        (_S, "s = (q_tile[:, : head_dim // 2] @ k_tile[:, : head_dim // 2].T) * scale"),
    ),
    # Precision.
    _mutant(
        "O accumulated in fp16",
        "o-accumulated-in-low-precision",
        (_ACC, "acc = (acc * correction[:, None] + p.to(q.dtype).float() @ v_tile).to(q.dtype).float()"),
        origin="14 of 17 public checkers miss it",
    ),
    _mutant(
        "l accumulated in fp16",
        "l-in-low-precision",
        (_L, "l_i = (l_i * correction + p.sum(dim=1)).to(q.dtype).float()"),
    ),
    _mutant(
        "P rounded to bf16 before the sum",
        "p-rounded-before-the-sum",
        (_P, _P + "\n            p = p.to(torch.bfloat16).float()"),
    ),
    _mutant(
        "scores rounded to the inputs' dtype",
        "scores-in-low-precision",
        (_S, "s = ((q_tile @ k_tile.T) * scale).to(q.dtype).float()"),
    ),
    _mutant(
        "q scaled in the inputs' dtype",
        "scores-in-low-precision",
        (_S, "s = (q_tile * (scale * 1.4426950408889634)).to(q.dtype).float() @ k_tile.T * 0.6931471805599453"),
    ),
    # The output.
    _mutant(
        "the output times 0.8", "output-scaled", (_O, _O + " * 0.8"), origin="passes atol=1e-2 at sequence length 4096"
    ),
    _mutant(
        "the last tile of rows is not written",
        "rows-not-written",
        (_STORE, "if start_m + BLOCK_M < seq_q or start_m == 0:\n            " + _STORE),
    ),
    _mutant(
        "rows of an unfinished tile are not written",
        "rows-not-written",
        ("rows = offs_m[offs_m < seq_q]", "rows = offs_m if offs_m[-1] < seq_q else offs_m[:0]"),
    ),
    _mutant(
        "q is scaled in place",
        "input-modified",
        (
            "scale = head_dim**-0.5 if scale is None else scale",
            "scale = q.mul_(head_dim**-0.5 if scale is None else scale).numel() ** 0",
        ),
    ),
    _mutant("the output overwrites q", "input-modified", (_EMPTY, "o = q")),
    _mutant("output in float32", "wrong-dtype", (_EMPTY, _EMPTY.replace("q.dtype", "torch.float32"))),
    _mutant("lse in the inputs' dtype", "wrong-dtype", (_RETURN, "return o, lse.to(q.dtype)")),
    _mutant("output as [batch, seq_len, heads, head_dim]", "wrong-shape", (_RETURN, "return o.transpose(1, 2), lse")),
    _mutant("no lse", "wrong-type", (_RETURN, "return o")),
    _mutant("nothing returned", "returned-none", (_RETURN, "pass")),
)


def tf32_forward(q, k, v, *, causal=False, scale=None, half=0x1000):
    """The right pass with its operands cut to TF32's ten bits: what `tl.dot` does to float32 unless told otherwise.

    half: what is added before the cut; 0x1000 rounds to nearest, 0 cuts.
    """

    def cut(x):
        return ((x.contiguous().view(torch.int32) + half) & ~0x1FFF).view(torch.float32)

    forward = build(
        (_S, "s = (cut(q_tile) @ cut(k_tile).T) * scale"),
        (_ACC, _ACC.replace("p.to(q.dtype).float() @ v_tile", "cut(p) @ cut(v_tile)")),
        cut=cut,
        name="TF32",
    )
    return forward(q, k, v, causal=causal, scale=scale)
