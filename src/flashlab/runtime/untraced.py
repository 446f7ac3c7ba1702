"""torch.compiler.disable, without its price."""

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def untraced(fn: Callable[P, R]) -> Callable[P, R]:
    """fn, which torch.compile leaves alone. torch._disable_dynamo imports torch._dynamo at the first call, 2.5 seconds
    of a CPU: needless where nobody else has, for then nothing is traced."""
    hidden = torch._disable_dynamo(fn)

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return hidden(*args, **kwargs) if "torch._dynamo" in sys.modules else fn(*args, **kwargs)

    return call
