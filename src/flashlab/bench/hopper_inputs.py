"""What q, k and v of the bench of phase 11 are like: drawn, made for trust or against it, or captured from models.

Since step 14 phase 11 computes a full tile of keys under the maximum of the tiles before. Where a sum says that this
was too low, a warp computes it again, and from step 16 on lowers it. What that costs depends on the scores. `shaped`
gives drawn inputs scores of another kind; `captured` has those of a language model; `doubts` counts such tiles.

A model that comes as a package is captured beforehand, by tools/capture_scores.py, which writes the file that
`flashlab bench hopper --captured FILE` reads. The course's own is trained where it is measured, in less than a minute.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flashlab import runtime

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v
KEYS = 128  # of a tile of p11_flash, where it trusts
STEP = 12.0
"""By how much a tile's scores lie above those before it. 9.7 more than the maximum so far, and a tile is in doubt."""
RAISED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "random": lambda tile, place: torch.zeros_like(tile),
    "a sink": lambda tile, place: 30 * ((tile == tile.max()) & (place == 0)),
    "every 8th tile rises": lambda tile, place: STEP * (tile // 8),
    "three tiles rise": lambda tile, place: STEP * tile.clamp(max=3),
    "every tile rises, a ramp": lambda tile, place: STEP * (tile + (KEYS - 1 - place) / KEYS),
    "every tile rises at its start": lambda tile, place: STEP * (tile + 1) * (place == 0),
    "every tile rises at its end": lambda tile, place: STEP * (tile + 1) * (place == KEYS - 1),
}
"""How much every query's score of a key is raised, by the tile it is in, counted from the last (a block walks from the
last to the first), and its place in that tile. A sink: the first key is far above all others, as in language models."""
WIDE = "three times as wide"
MADE = (*RAISED, WIDE)
OWN, PACKAGE = "flashlab's, on the lessons", "SmolLM2-135M"
LAYERS = {OWN: 8, PACKAGE: 30}  # the models whose scores are captured, and how many layers they have


def shaped(kind: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Gives q and k, drawn, scores of this kind, in place; "zeros" is zeros in all three. Raises KeyError for a kind
    that is none."""
    if kind == WIDE:
        q *= 3
    elif kind == "zeros":
        for x in (q, k, v):
            x.zero_()
    elif kind != "random":
        keys = torch.arange(k.shape[2])
        tile = keys // KEYS
        raised = RAISED[kind](tile.max() - tile, keys % KEYS)
        q[..., 0], k[..., 0] = q.shape[3] ** 0.5, raised.to(k)


class Doubts(NamedTuple):
    """doubted: tiles of 16 rows and KEYS keys that are computed again, of so many computed under an older maximum."""

    doubted: int
    trusted: int


def doubts(q: torch.Tensor, k: torch.Tensor, *, causal: bool, most: float = 16384.0) -> Doubts:
    """What p11_15_portions, which forgets its doubts, does with q and k: its rule in PyTorch, tile by tile.

    q, k: [batch, heads, rows, head_dim]. p11_flash computes few of them again: it learns from a doubt.

    A warp has 16 rows. A quad of lanes has a row, and each lane sums its own 32 of a tile's probabilities, computed
    under the maximum so far. Where one sum is above `most`, the warp computes the tile again, and looks at its maxima.
    The first tile of 64 rows is always looked at, and so are those that some row of them does not see whole.
    """
    n = q.shape[2]
    q, k = (torch.nn.functional.pad(x.flatten(0, 1), (0, 0, 0, -n % KEYS)).float() for x in (q, k))
    rows = torch.arange(q.shape[1], device=q.device)
    group = rows // 64 * 64
    end = -((-(group + 64).clamp(max=n) if causal else -torch.full_like(rows, n)) // KEYS)  # tiles that are seen
    full = ((group + 1) // KEYS).clamp(max=n // KEYS) if causal else torch.full_like(rows, n // KEYS)
    scale = math.log2(math.e) / q.shape[2] ** 0.5
    maximum = torch.full(q.shape[:2], -math.inf, device=q.device)
    doubted = trusted = 0
    for j in range(q.shape[1] // KEYS - 1, -1, -1):
        keys = slice(j * KEYS, (j + 1) * KEYS)
        s = q @ k[:, keys].mT  # [heads, rows, KEYS]
        seen = rows[keys] <= rows[:, None] if causal else rows[keys] < n
        s.masked_fill_(~seen, -math.inf)
        top = torch.maximum(maximum, s.amax(-1))
        base = torch.where(maximum == -math.inf, 0.0, maximum)
        lanes = ((s - base[..., None]) * scale).exp2_().unflatten(-1, (16, 4, 2)).sum((-3, -1))
        bad = ~(lanes.amax(-1) <= most) | (maximum == -math.inf)
        bad = bad.unflatten(1, (-1, 16)).any(-1).repeat_interleave(16, 1)  # a warp's rows share a decision
        trust = (j < full) & (j != end - 1) & (group < n)
        doubted += int((bad & trust)[:, ::16].sum())
        trusted += int(trust[::16].sum()) * q.shape[0]
        maximum = torch.where((j < end) & (~trust | bad), top, maximum)
    return Doubts(doubted, trusted)


# ---- language models -------------------------------------------------------------------------------------------------
def filling(inputs: Inputs, shape: list[int]) -> Inputs:
    """The heads of some inputs, again and again, so that there are as many as [batch, heads, rows, head_dim] has.

    Raises ValueError where rows or head_dim differ."""
    q, k, v = inputs
    if list(q.shape[2:]) != shape[2:]:
        raise ValueError(f"captured were heads of {list(q.shape[2:])}, and heads of {shape[2:]} are to be measured")
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    found = []
    for x in (q, k, v):
        x = x.to(runtime.device(), torch.bfloat16).flatten(0, 1)
        which = torch.arange(shape[0] * shape[1], device=x.device) % len(x)
        found.append(x[which].unflatten(0, shape[:2]).contiguous())
    return found[0], found[1], found[2]


@functools.cache
def trained(width: int = 512, heads: int = 4, positions: int = 4096, steps: int = 400) -> tuple[list[Inputs], float]:
    """q, k, v of each layer of a model that has read the lessons' bytes, as they enter attention; and its last loss."""
    from flashlab.models import text
    from flashlab.models.language_model import Config
    from flashlab.models.layer import RotaryAttention
    from flashlab.models.rope import rope
    from flashlab.models.train import fit

    about = Config(width, LAYERS[OWN], heads, vocabulary=256, positions=positions, attention="sdpa")
    model, losses = fit(about, steps=steps, seq_len=positions, autocast=torch.bfloat16)
    found: list[Inputs] = []

    def keep(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        q, k, v, cos, sin = given
        found.append((rope(q, cos, sin).bfloat16(), rope(k, cos, sin).bfloat16(), v.bfloat16()))

    for module in model.modules():
        if isinstance(module, RotaryAttention):
            module.register_forward_pre_hook(keep)
    tokens, _ = next(text.batches(text.load(), 4, positions, seed=1, device=runtime.device()))
    with torch.no_grad(), torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        model(tokens)
    return found, losses[-1]


@functools.cache
def _file(path: Path) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)


def captured(model: str, layer: int, shape: list[int], path: Path | None) -> tuple[Inputs | None, Doubts]:
    """The inputs of one layer, None where the file does not have them, and its doubts over all heads.

    Raises FileNotFoundError where the model is not captured."""
    if model == OWN:
        inputs = trained()[0][layer]
        return filling(inputs, shape), doubts(*inputs[:2], causal=True)
    if path is None or not path.exists():
        raise FileNotFoundError(f"{model} is not captured here: run tools/capture_scores.py, and name its file")
    kept = _file(path)
    some = kept["inputs"].get(layer)
    return some and filling(some, shape), Doubts(*kept["doubts"][layer])
