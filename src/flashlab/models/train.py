"""A short training run, and how far apart two loss curves are.

Two attentions that compute the same thing round in different places. Training then carries those differences on: after
some steps the weights differ a little, and the losses with them. So two right attentions do not give equal curves. What
is equal within noise? A yardstick is a run with the same attention whose first weights are changed by less than a
rounding (`jitter`). Its curve differs from the first by what rounding alone can do.
"""

import torch

from flashlab import runtime
from flashlab.models import text
from flashlab.models.language_model import Config, LanguageModel, make_optimizer, train_step


def fit(
    config: Config, *, steps: int = 100, batch: int = 8, seq_len: int = 256, lr: float = 1e-3, seed: int = 0,
    autocast: torch.dtype | None = None, jitter: float = 0.0, device: torch.device | str | None = None,
) -> tuple[LanguageModel, list[float]]:  # fmt: skip
    """Train a model on the lessons' text; return it, and the loss of each step in nats per byte.

    The first weights and the batches depend on the seed alone: neither on the attention nor on the device.

    Args:
        config: of the model; its vocabulary has to hold 256 bytes, its positions seq_len.
        lr: rises to this in the first tenth of the steps.
        autocast: the dtype of matrix products, or None.
        jitter: first, each weight is multiplied by 1 + jitter * a random number from -1 to 1.
        device: where; None is the GPU where there is one.
    Raises:
        ValueError: a vocabulary of fewer than 256 tokens, or steps below 1; and what `LanguageModel` raises.
    """
    if config.vocabulary < 256 or steps < 1:
        raise ValueError(
            f"the vocabulary has {config.vocabulary} tokens and steps is {steps}; bytes need 256, and a run one step"
        )
    where = runtime.device() if device is None else torch.device(device)
    model = drawn(config, seed, jitter).to(where)
    optimizer = make_optimizer(model, lr=lr)
    rise = rising(optimizer, steps)
    pieces = text.batches(text.load(), batch, seq_len, seed=seed, device=where)
    losses = []
    for _ in range(steps):
        losses.append(train_step(model, optimizer, *next(pieces), autocast=autocast))  # no .item(): it would wait
        rise.step()
    return model, torch.stack(losses).tolist()


def drawn(config: Config, seed: int, jitter: float = 0.0) -> LanguageModel:
    """A model on the CPU whose first weights depend on the seed alone; jitter as in `fit`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LanguageModel(config)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1 + jitter * (2 * torch.rand_like(weight) - 1))
    return model


def rising(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate rises in the first tenth of the steps, then stays."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, steps // 10)))


def distance(a: list[float], b: list[float]) -> float:
    """The largest difference of two loss curves at one step, in nats per byte; NaN where one has a NaN.

    Raises:
        ValueError: curves of different lengths.
    """
    if len(a) != len(b):
        raise ValueError(f"one curve has {len(a)} steps and the other {len(b)}; they have to be equally long")
    return (torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64)).abs().max().item()
