"""The simulation with one mistake each, as a kernel's author makes them.

A mutant is an edit of `flashlab.attention.simulation_backward` by its exact text. ``found`` is the diagnosis that
`verify(..., grads=True)` has to give, or None where any will do.

The mistakes come from public kernels and their issue trackers: ragged tails (PyTorch 153799), gradients of grouped
heads, masks, a backward pass that is always causal (triton 4541 and 5660), delta of the wrong rows.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from pathlib import Path

import torch

from flashlab.attention import reference, simulation_backward
from flashlab.check.changes import edited

SOURCE = Path(simulation_backward.__file__)


@dataclass(frozen=True)
class Mutant:
    """One wrong backward pass."""

    name: str
    edits: tuple[tuple[str, str], ...]
    found: str | None = None

    def module(self) -> types.ModuleType:
        """The edited simulation. Raises ValueError where it has changed and an edit no longer fits."""
        text = edited(SOURCE.read_text(encoding="utf-8"), self.edits, f"{SOURCE.name}, {self.name}")
        module = types.ModuleType("mutant")
        exec(compile(text, f"{SOURCE.name} ({self.name})", "exec"), vars(module))
        return module


def attention_with(module: types.ModuleType, BLOCK_M: int = 16, BLOCK_N: int = 32):
    """fn(q, k, v, *, causal, scale) -> o, right, with the gradient of a module's `flash_attention_backward_sim`."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v, causal, scale):
            o, lse = reference.attention(q, k, v, causal=causal, scale=scale)
            o, lse = o.to(q.dtype), lse.float()
            ctx.save_for_backward(q, k, v, o, lse)
            ctx.options = dict(causal=causal, scale=scale)
            return o

        @staticmethod
        def backward(ctx, grad_o):
            found = module.flash_attention_backward_sim(grad_o, *ctx.saved_tensors, BLOCK_M, BLOCK_N, **ctx.options)
            return *found, None, None

    return lambda q, k, v, *, causal, scale: Attention.apply(q, k, v, causal, scale)


def _mutant(name: str, *edits: tuple[str, str], found: str | None = None) -> Mutant:
    return Mutant(name, edits, found)


_DS_KEYS = "ds = p * (do @ v.T - delta[rows, None])"
_DS_QUERIES = "ds = p * (do @ v.T - delta[:, None])"
_MASK = "p = p.masked_fill(j[None, :] > i[:, None] + distance, 0.0)"
_LEAK = "p = p.masked_fill((j[None, :] > i[:, None] + distance) & (lse != 0)[:, None], 0.0)"
_NO_KEY = 'lse.float().masked_fill(torch.isneginf(lse), float("inf"))'
_ALL_ROWS = ("max(0, start_n - (N - M)) if causal else 0", "0")
_ALL_KEYS = ("min(N, start_m + len(q) + N - M) if causal else N", "N")
_SEEN_KEYS = "start_m + N - M - start_n if causal else None, scale)\n        dv"
_SEEN_QUERIES = "start_m + N - M - start_n if causal else None, scale)\n        ds = p * (do @ v.T - delta[:, None])"

MUTANTS = (
    _mutant(
        "delta is left out",
        (_DS_KEYS, "ds = p * (do @ v.T)"),
        (_DS_QUERIES, "ds = p * (do @ v.T)"),
        found="delta-missing",
    ),
    _mutant("delta is left out in dQ alone", (_DS_QUERIES, "ds = p * (do @ v.T)")),
    _mutant("dQ without the scale", ("return scale * dq", "return dq"), found="dq-not-scaled"),
    _mutant("dK without the scale", ("return scale * dk, dv", "return dk, dv"), found="dk-not-scaled"),
    _mutant("dQ with the scale twice", ("return scale * dq", "return scale * scale * dq"), found="dq-scaled-twice"),
    _mutant(
        "a key head keeps the gradient of its last query head alone",
        ("dk[b, h // group, columns] += parts[0]", "dk[b, h // group, columns] = parts[0]"),
        ("dv[b, h // group, columns] += parts[1]", "dv[b, h // group, columns] = parts[1]"),
        found="group-not-summed",
    ),
    _mutant("no causal mask in the backward pass", (_MASK, "pass"), _ALL_ROWS, _ALL_KEYS, found="causal-mask-missing"),
    _mutant(
        "the causal mask begins at the first key",
        (_SEEN_KEYS, _SEEN_KEYS.replace(" + N - M", "")),
        (_SEEN_QUERIES, _SEEN_QUERIES.replace(" + N - M", "")),
        _ALL_ROWS,
        _ALL_KEYS,
        found="causal-aligned-top-left",
    ),
    _mutant(
        "the causal mask is there in every case",
        ("    scale = scale_of(scale, q.shape[3])\n", "    scale, causal = scale_of(scale, q.shape[3]), True\n"),
        found="causal-always",
    ),
    _mutant("the causal mask is off by one", (_MASK, _MASK.replace(" > ", " >= "))),
    _mutant("a causal block begins a tile too late", ("start_n - (N - M))", "start_n + BLOCK_M - (N - M))")),
    _mutant("a causal row ends a tile too early", ("min(N, start_m + len(q) + N - M)", "min(N, start_m + N - M)")),
    _mutant(
        "the last queries are left out of dK and dV", ("range(begin, M, BLOCK_M)", "range(begin, M // 16 * 16, 16)")
    ),
    _mutant("the last keys are left out of dQ", ("range(0, end, BLOCK_N)", "range(0, end // 32 * 32, 32)")),
    _mutant("dV from dS", ("dv = dv + p.to(dO.dtype)", f"{_DS_KEYS}\n        dv = dv + ds.to(dO.dtype)")),
    _mutant("dS is transposed in square tiles", ("dq + ds.to(", "dq + (ds.T if len(ds) == len(k) else ds).to(")),
    _mutant("delta is that of the first rows", (_DS_KEYS, "ds = p * (do @ v.T - delta[: len(q), None])")),
    _mutant("dK is overwritten by each block", ("dk = dk + ds.to(Q.dtype)", "dk = ds.to(Q.dtype)")),
    _mutant("delta from absolute values", ("(O.float() * dO.float()).sum", "(O.float() * dO.float()).abs().sum")),
    _mutant("delta with O from the next row", ("(O.float() * dO.float())", "(O.float().roll(1, 0) * dO.float())")),
    _mutant("P is rounded to eight bits", ("p.to(dO.dtype).float()", "p.to(torch.bfloat16).float()")),
    _mutant("P of rows without a key is not 0", (_NO_KEY, _NO_KEY.replace('float("inf")', "0.0")), (_MASK, _LEAK)),
)
