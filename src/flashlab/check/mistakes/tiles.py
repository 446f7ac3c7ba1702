"""The mistakes of a loop over tiles, known by what they give on a problem of one or two small tiles.

The diagnosis of many cases (flashlab.check.diagnose) knows what attention can get wrong. These are slips of a kernel's
lines: an index that begins at the tile, a division too early, a sum that is exchanged too early or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

Tensor = torch.Tensor
Forward = Callable[..., tuple[Tensor, Tensor]]
Found = tuple[str, str]
_LOG2E = math.log2(math.e)
_ZERO_KEYS = "the keys that do not exist count as keys of zeros, with a score of 0"


def _adds_nothing(forward: Forward, head_dim: int) -> Found | None:
    """Whether o is 0 everywhere: the slug and the sentence."""
    o, lse = forward(*_tensors(16, 16, head_dim), causal=False, scale=None)
    if bool((o == 0).all()) and bool((lse == -math.inf).all()):
        said = "o is 0 and lse -inf everywhere: l is 0 in the end. Is something added to it, and not lost again?"
        return "l-is-0", said
    # With 16 keys all of a larger tile's other rows of V are zeros: other keys' values may be added.
    more = forward(*_tensors(16, 128, head_dim), causal=False, scale=None)[0]
    if bool((o == 0).all()) and bool((more == 0).all()):
        return "nothing-added", "o is 0 everywhere: nothing is added to acc, or it is multiplied by 0"
    return None


def explain(forward: Forward, head_dim: int) -> Found | None:
    """The slug and the sentence of the slip that ``forward(q, k, v, causal=..., scale=...)`` makes, if it is known."""
    q, k, v = _tensors(16, 16, head_dim)
    o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
    one = (q[0, 0].double(), k[0, 0].double(), v[0, 0].double())
    if bool((o == 0).all()) and (found := _adds_nothing(forward, head_dim)):
        return found
    right = _near(o, _softmax(*one))
    if not right:
        for slug, sentence, prediction in _one_tile(*one):
            if _near(o, prediction):
                return slug, sentence
    return _falling(forward, head_dim) or tail(forward, head_dim) or _always_causal(forward, head_dim)


def _near(got: Tensor, want: Tensor) -> bool:
    """Whether two outputs are the same but for the rounding of fp16."""
    return bool((got - want).abs().max() < 0.012 * want.abs().max().clamp(max=1.0))


def _tensors(rows: int, keys: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def normal(n: int) -> Tensor:
        return torch.randn(1, 1, n, head_dim, generator=generator)

    return normal(rows).half(), normal(keys).half(), (normal(keys) + 0.5).half()


def _weights(s: Tensor) -> Tensor:
    return torch.exp(s - s.amax(1, keepdim=True))


def _softmax(q: Tensor, k: Tensor, v: Tensor, factor: float = 1.0, seen: Tensor | None = None) -> Tensor:
    s = factor * (q @ k.T) / math.sqrt(q.shape[1])
    return (s if seen is None else s.masked_fill(~seen, -math.inf)).softmax(1) @ v


def _one_tile(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[str, str, Tensor]]:
    root, d = math.sqrt(q.shape[1]), q.shape[1]
    sentence = "2^x is taken of the raw scores: multiply them by scale_log2, the scale times log2(e)"
    yield "scale-missing", sentence, _softmax(q, k, v, root / _LOG2E)
    sentence = "the scores are not multiplied by the scale, 1 / sqrt(head_dim) unless the caller has another"
    yield "scale-missing", sentence, _softmax(q, k, v, root)
    sentence = "the scale is applied twice: once where the scores are made, and again in the exponent"
    yield "scale-twice", sentence, _softmax(q, k, v, 1 / root)
    yield "scale-twice", sentence, _softmax(q, k, v, _LOG2E / root)
    yield "scale-twice", f"{sentence}, with log2(e) both times", _softmax(q, k, v, _LOG2E * _LOG2E / root)

    if len(k) == len(v):
        sentence = "the weights are multiplied with K, where V belongs: the second product reads the tile of K again"
        yield "k-for-v", sentence, (q @ k.T / root).softmax(1) @ k
    p = _weights(q @ k.T / root)
    total, truth = p.sum(1, keepdim=True), p @ v / p.sum(1, keepdim=True)
    sentence = "acc is divided by the sum inside of the loop, and again after it: leave the division to the end"
    yield "divided-twice", sentence, truth / total
    sentence = "the output is 1/4 of what it should be: the sum is exchanged in the quad with each tile, and once more "
    yield "l-reduced-twice", f"{sentence}at the end. In the loop a lane sums its own columns only", truth / 4
    # A lane t of a quad has the columns 2t and 2t + 1 of every 8, of S and of O.
    key_lane, column_lane = torch.arange(len(k)) // 2 % 4, torch.arange(d) // 2 % 4
    own = torch.stack([p[:, key_lane == t].sum(1) for t in range(4)], 1)[:, column_lane]
    sentence = "a lane divides by the sum of its own columns: a row's sum is that of the quad, two shuffles, masks 1 "
    sentence += "and 2"
    yield "quad-not-reduced", sentence, p @ v / own
    sentence = "acc is divided by a lane's own sum inside of the loop: leave the division to the end"
    yield "divided-twice", sentence, p @ v / own / total


def tail(forward: Forward, head_dim: int) -> Found | None:
    """Keys past the end of the last tile."""
    for keys, alone in ((5, True), (72, False)):
        q, k, v = _tensors(16, keys, head_dim)
        o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
        wide_q, wide_k, wide_v = (x[0, 0].double() for x in (q, k, v))
        if _near(o, _softmax(wide_q, wide_k, wide_v)):
            continue
        for tile in (16, 32, 64, 128):
            more = wide_k.new_zeros(-keys % tile, head_dim)
            if _near(o, _softmax(wide_q, torch.cat([wide_k, more]), torch.cat([wide_v, more]))):
                if alone:
                    return "tail-not-masked", f"{_ZERO_KEYS}: their scores have to be -INFINITY"
                said = f"right in the first tile; in the last, {_ZERO_KEYS}. Key n of a tile is key n_start + n: is "
                said += "n_start in the comparison?"
                return "n-start-forgotten", said
    return None


_HALF = 128  # keys: a multiple of any tile


def _falling(forward: Forward, head_dim: int) -> Found | None:
    """A maximum that is the tile's own: right until it falls so far that the correction is infinite."""
    generator = torch.Generator().manual_seed(6)
    right = {}
    for fall in (20.0, 150.0, -20.0, -150.0):  # of the scores of the keys from _HALF on, in units of ln
        q = 0.05 * torch.randn(1, 1, 16, head_dim, generator=generator)
        k, v = (torch.randn(1, 1, 2 * _HALF, head_dim, generator=generator) for _ in range(2))
        q[..., 0], k[..., 0] = math.sqrt(head_dim), 0.0
        k[:, :, _HALF:, 0] = -fall
        q, k, v = q.half(), k.half(), (v + 0.5).half()
        o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
        want = _softmax(q[0, 0].double(), k[0, 0].double(), v[0, 0].double())
        right[fall] = bool(o.isfinite().all()) and _near(o, want)
        if fall == 150.0 and bool(o.isfinite().all()):
            return None
    if right == {20.0: True, 150.0: False, -20.0: True, -150.0: True}:
        said = "right where the maximum rises from tile to tile, and not finite where the scores of a later tile lie "
        said += "far below it: the new maximum has to take in the old one, not this tile's scores alone"
        return "maximum-of-the-tile", said
    return None


def _always_causal(forward: Forward, head_dim: int) -> Found | None:
    q, k, v = _tensors(16, 16, head_dim)
    o = forward(q, k, v, causal=False, scale=None)[0][0, 0].double()
    seen = torch.ones(16, 16, dtype=torch.bool).tril()
    if _near(o, _softmax(q[0, 0].double(), k[0, 0].double(), v[0, 0].double(), seen=seen)):
        return "always-causal", "the causal mask is applied where none is asked for: is p.causal looked at?"
    return None
