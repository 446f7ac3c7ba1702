"""What a function did on one case: its output beside the right one. The diagnosis has nothing else to go by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from flashlab.check.cases import Case
from flashlab.check.tolerance import Truth, within


@dataclass(frozen=True)
class Observation:
    """What a function returned for a case, on the CPU, beside what it should have returned."""

    case: Case
    truth: Truth
    o: torch.Tensor  # float64
    lse: torch.Tensor | None  # float64; None when the function is not asked for it
    unwritten: torch.Tensor  # boolean, like o: elements that nobody wrote
    lse_unwritten: bool = False  # all of lse

    @cached_property
    def o_ok(self) -> bool:
        return within(self.o, self.truth.o, self.truth.o_bound)

    @cached_property
    def lse_ok(self) -> bool:
        return self.lse is None or within(self.lse, self.truth.lse, self.truth.lse_bound)

    @cached_property
    def ok(self) -> bool:
        return self.o_ok and self.lse_ok
