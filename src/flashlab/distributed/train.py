"""Phase 10's language model, trained with its sequence split over ranks: the same losses as on one.

    torchrun --nproc-per-node 4 -m flashlab.distributed.train
    torchrun --nproc-per-node 4 -m flashlab.distributed.train --way ulysses --steps 20 --check

Every rank has the whole model and its own rows of the text. All but attention looks at one row at a time, so nothing
there has to change. Three things do: rotary embedding turns a row by its place in the whole text; attention is one that
goes over ranks; and before each update the gradients are averaged, since the loss is the mean over all ranks' rows.
"""

import argparse
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from flashlab.attention.inputs import one_of
from flashlab.distributed.gather import all_gather_attention
from flashlab.distributed.layout import LAYOUTS, shard
from flashlab.distributed.link import TIMEOUT, Group, Link, connect, start
from flashlab.distributed.ring import ring_attention
from flashlab.distributed.ulysses import mesh_attention, ulysses_attention
from flashlab.models import text
from flashlab.models.language_model import BYTES, Block, Config, LanguageModel, make_optimizer, train_step
from flashlab.models.layer import RotaryAttention
from flashlab.models.train import distance, drawn, fit, rising

SMALL = Config(width=256, depth=2, heads=16, kv_heads=8, vocabulary=BYTES, positions=1024, attention="flash")
WAYS: dict[str, Callable[..., torch.Tensor]] = {
    "ring": ring_attention, "gather": all_gather_attention, "ulysses": ulysses_attention,
}  # fmt: skip
"""By the names on the command line; "mesh" beside them."""
_DRAWING = threading.Lock()  # the generator of first weights belongs to the process, and ranks may be its threads


def split_model(
    model: LanguageModel, link: Link, seq_len: int, *, way: str = "ring", layout: str = "zigzag", heads: int = 1
) -> LanguageModel:
    """The model, changed so that it reads this rank's rows of texts of seq_len tokens.

    Args:
        way: a name of `WAYS`, or "mesh". layout: of the sequence. heads: ranks of a mesh that share heads.
    Raises:
        ValueError: a way of another name; a text that the ranks do not share evenly.
    """
    attention: Callable[..., torch.Tensor]
    options: dict[str, Any]
    names = [*WAYS, "mesh"]
    if way not in names:
        raise ValueError(f"way is {way!r}; it must be {one_of([repr(name) for name in names])}")
    if way == "mesh":
        attention, options = mesh_attention, {"mesh": link.split(heads)}
    else:
        attention, options = WAYS[way], {"group": link}
    model.cos, model.sin = (  # row n of the table is where row n of this rank stands
        shard(table[:seq_len], link.rank, link.world, layout=layout, heads=heads) for table in (model.cos, model.sin)
    )
    for block in model.blocks:
        assert isinstance(block, Block), "the model is made of blocks"
        block.attention.core = RotaryAttention(functools.partial(attention, layout=layout, **options))
    return model


def average_gradients(model: nn.Module, link: Link) -> None:
    """Every rank's gradients become the mean over the ranks, in one message."""
    found = [w.grad for w in model.parameters() if w.grad is not None]
    mean = link.mean(torch.cat([g.flatten() for g in found]))
    for g, part in zip(found, mean.split([g.numel() for g in found]), strict=True):
        g.copy_(part.view_as(g))


def fit_split(
    config: Config, *, group: Group = None, way: str = "ring", layout: str = "zigzag", heads: int = 1, steps: int = 10,
    batch: int = 2, seq_len: int = 256, lr: float = 1e-3, seed: int = 0, device: torch.device | str = "cpu",
) -> list[float]:  # fmt: skip
    """Train on the lessons' text as `flashlab.models.train.fit` does, on all ranks; the loss of each step.

    Args:
        config, steps, batch, seq_len, lr, seed: as there; seq_len is of the whole sequence. group: the ranks.
        way, layout, heads: as `split_model`.
    Raises:
        ValueError: as `split_model` and `flashlab.distributed.shard`.
    """
    link = connect(group)
    heads = heads if way == "mesh" else 1
    with _DRAWING:
        model = drawn(config, seed)
    split_model(model, link, seq_len, way=way, layout=layout, heads=heads).to(device)
    optimizer = make_optimizer(model, lr=lr)
    rise, pieces, losses = rising(optimizer, steps), text.batches(text.load(), batch, seq_len, seed=seed), []
    for _ in range(steps):
        tokens, targets = (
            shard(x, link.rank, link.world, layout=layout, heads=heads, dim=1).to(device) for x in next(pieces)
        )
        loss = train_step(
            model, optimizer, tokens, targets,
            done=lambda what: average_gradients(model, link) if what == "backward" else None,
        )  # fmt: skip
        losses.append(link.mean(loss).item())
        rise.step()
    return losses


def main(arguments: Sequence[str] | None = None) -> None:
    """The program; rank 0 prints. Raises SystemExit where --check finds other losses than on one rank."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m flashlab.distributed.train", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--way", choices=[*WAYS, "mesh"], default="ring")
    parser.add_argument("--layout", choices=LAYOUTS, default=None, help="zigzag, and contiguous for ulysses")
    parser.add_argument("--heads", type=int, default=2, help="of --way mesh: ranks that share heads")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--seq-len", type=int, default=256, help="tokens of the whole sequence")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds to wait for another rank")
    parser.add_argument("--check", action="store_true", help="train on one rank too, and compare the losses")
    given = parser.parse_args(arguments)
    link = start(given.timeout)
    layout = given.layout or ("contiguous" if given.way == "ulysses" else "zigzag")
    try:
        options = dict(steps=given.steps, seq_len=given.seq_len, batch=2, device=link.device)
        losses = fit_split(SMALL, group=link, way=given.way, layout=layout, heads=given.heads, **options)
        if link.rank == 0:
            for step, loss in enumerate(losses):
                print(f"step {step}: {loss:.4f}", flush=True)
            if given.check:
                far = distance(losses, fit(SMALL, **options)[1])
                print(f"{link.world} ranks and one: losses differ by at most {far:.1e}")
                if not far < 1e-3:
                    raise SystemExit("the losses of many ranks and of one are not the same")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
