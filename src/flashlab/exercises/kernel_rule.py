"""Exercises whose answer is a Triton kernel: `flashlab.exercises.tensor_rule` with a launch.

    @kernel_rule("5.6", title="dq_kernel", minutes=35, hints=[...], writes="DQ_ptr", returns="dq",
                 programs=lambda M, BLOCK_M, **_: -(-M // BLOCK_M), inputs={"48 queries": (q, k, ...), ...}, draw=...)
    @triton.jit
    def dq_kernel(Q_ptr, K_ptr, ..., BLOCK_N: tl.constexpr):
        ...

An input is the kernel's arguments, in their order. A learner's kernel is interpreted with every address watched, or
runs on the GPU; the right text and its changes run on `flashlab.triton_tools.model`, where a stray address is a result
like another. At last the compiler is asked.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from flashlab import runtime
from flashlab.check import CheckFailed, expect, kernel_changes, pattern
from flashlab.check.changes import Edits
from flashlab.check.kernel_changes import HostedText, KernelText
from flashlab.check.lookup import Index, Values, outcome_of
from flashlab.check.mistakes.mask_rule import Mask, Seen, rule_of
from flashlab.check.poison import MarkedEmpty, unwritten
from flashlab.exercises.rule import rule
from flashlab.exercises.tensor_rule import TensorRule, copied
from flashlab.exercises.triton_answers import compiles, explain_undefined, kernel_of, stray
from flashlab.triton_tools.watch import OutOfBounds, Traffic
from flashlab.triton_tools.watch import watched as watched_memory

_CALLS = 200  # of the model's functions, small ones, in a turn
_SIDES = {"BLOCK_M": "B", "BLOCK_N": "T"}  # as the rules of masks call them
NOTHING = 12344.0
"""What a result holds before a kernel writes it: every float has this number, and no result here is as large."""


def apart(x: torch.Tensor, gap: int) -> torch.Tensor:
    """The same values, with `gap` elements of NaN (of whole numbers: -1) behind every row, and behind the last ones."""
    empty = math.nan if x.is_floating_point() else -1
    wide = torch.full((*x.shape[:-1], x.shape[-1] + gap), empty, dtype=x.dtype)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def _address_of(error: BaseException) -> str:
    """`outcome_of`, less what tiles of another size make of a stray address: of its tile whether all is outside."""
    said, _, tile = outcome_of(error).partition("; program")
    outside = re.findall(r"(\d+) of (\d+) elements", tile)
    return said.replace("_ptr", "").lower() + "".join(" in part" for part, whole in outside if part != whole)


def empty(*shape: int, gap: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A result that nothing has written yet."""
    return apart(torch.full(shape, NOTHING, dtype=dtype), gap)


class Keys(NamedTuple):
    """How to read off which keys a kernel of attention counts: with values of which each belongs to one key.

    Attributes:
        given: the kernel's arguments, of the sizes in `shapes`: M queries, N keys, and what the mask depends on.
        visible: Python for which keys j [1, N] the queries i [M, 1] should count. mask: the same in words.
    """

    given: Callable[..., tuple[Any, ...]]
    shapes: Sequence[Mapping[str, int]]
    visible: str
    mask: Mask


@dataclass(frozen=True)
class KernelRule(TensorRule):
    """A `TensorRule` whose function is a kernel.

    Attributes:
        writes: the parameters that it stores to, as `returns` names them. programs: of a launch, from its arguments.
        work: turns of loops and programs of changes that a verdict runs: some seconds.
        keys: of a kernel of attention.
        call: calls what is handed in where that is a function around a kernel, with the arguments of the right one.
        edits: of the function's text, which make it the right one.
    """

    writes: tuple[str, ...] = ()
    programs: Callable[..., int] = lambda **_: 1
    tries: int = 900
    work: int = 14_000
    keys: Keys | None = None
    call: Callable[..., Any] | None = None
    edits: Edits | None = None

    @property
    def right(self) -> Callable[..., Any]:
        return self.index.texts[0].compiled()

    def drawn(self, count: int = 8, seed: int = 0) -> list[tuple[Any, ...]]:
        return super().drawn(count, seed)

    def text(self, other: Any = None) -> KernelText:
        kept = {name: name for name in self.fn.__code__.co_varnames}
        return KernelText(self.fn, self.writes, self.programs, {**kept, **self.words}, other or self.edits)

    def own_text(self, fn: Any, words: Mapping[str, str]) -> KernelText:
        if self.call is not None:
            return HostedText(fn, lambda host, *given: self._called(host, dict(zip(self.params, given, strict=True))))
        return KernelText(fn, self.writes, self.programs, dict(words))

    def with_row(self, row: Any) -> Callable[..., Any]:
        return self.text(row.edits).compiled()

    def asked_of(self, learners: Any) -> None:
        return None  # of a kernel: here its text runs as a function

    @property
    def writes_to_inputs(self) -> str:
        return f"the kernel writes to a tensor that it should only read: {' and '.join(self.writes)} is to be written"

    @cached_property
    def index(self) -> Index:
        rows = [(row, self.with_row(row)) for row in self.rows]
        return Index(
            [self.text(other) for other in (None, *self.also)], self.tried, self.returns, self._values, self.tol, rows,
            self.alike, self.drawn(4), self.notes, kernel_changes, self.tries, without=self.without, most=self.work,
            calls=_CALLS, error=outcome_of if self.call is None else _address_of, case=self.case,
        )  # fmt: skip

    def launched(self, kernel: Any) -> Callable[..., Any]:
        """A function of an input that launches the kernel."""
        kernel = kernel_of(kernel, self.params) if self.call is None else kernel

        def launch(*given: Any) -> Any:
            arguments = dict(zip(self.params, given, strict=True))
            outputs = {name: copied(arguments[name], True) for name in self.writes}
            results: Any = list(outputs.values()) if len(outputs) > 1 else outputs[self.writes[0]]
            with watched_memory() if runtime.INTERPRETED else contextlib.nullcontext() as traffic:
                if self.call is not None:
                    results = self._called(kernel, arguments)
                else:
                    kernel[(self.programs(**arguments),)](*(arguments | outputs).values())
            if traffic is not None:
                self.traffic.undefined |= traffic.undefined
                for name in self.writes if self.call is None else ():
                    size = outputs[name].numel() * outputs[name].element_size()
                    self.stored[name] = max(self.stored.get(name, 0.0), traffic.written_to[name] / size)
                said = "no Triton kernel reads anything here: the work should be done in a kernel of yours, and of a "
                said += "grid of 0 programs none runs"
                expect(traffic.loads > 0 or self.call is None, said, diagnosis="no-kernel")
            return results

        launch.answer = kernel  # type: ignore[attr-defined]
        return launch

    def _called(self, fn: Any, arguments: Mapping[str, Any]) -> Any:
        """What a function around a kernel gives, with `NOTHING` for what nobody wrote into its torch.empty."""
        assert self.call is not None, "only of such a function"
        with MarkedEmpty():
            results = self.call(fn, **arguments)
        if not isinstance(results, (tuple, list)):
            return results
        return [x.masked_fill(unwritten(x), NOTHING) if isinstance(x, torch.Tensor) else x for x in results]

    @cached_property
    def traffic(self) -> Traffic:
        return Traffic()

    @cached_property
    def stored(self) -> dict[str, float]:
        """How often each number of a result was stored, on the input on which it was most."""
        return {}

    def watched_on_first(self, kernel: Any) -> tuple[dict[str, Any], Traffic]:
        """The first input, and what the kernel moves with it."""
        given = {name: copied(x, True) for name, x in zip(self.params, self.inputs[0], strict=True)}
        with watched_memory() as traffic:
            kernel[(self.programs(**given),)](*given.values())
        return given, traffic

    def compare(self, learners: Callable[..., Any]) -> None:
        self.stored.clear()
        super().compare(learners)
        for name, times in self.stored.items():
            said = f"right, but each number of {name.removesuffix('_ptr')} is stored {times:.3g} times: once is asked"
            expect(times <= 1, f"{said}, by one program", diagnosis="stored-again")

    def check(self, answer: Any) -> str:
        self.traffic.undefined.clear()
        try:
            said = super().check(answer)
        except OutOfBounds as error:
            raise stray(error, None) from None
        if self.call is not None:
            return said
        given = dict(zip(self.params, self.inputs[0], strict=True))
        compiles(answer, {name: x.dtype if isinstance(x, torch.Tensor) else x for name, x in given.items()})
        return f"{said}, and it compiles"

    def read_off(self, learners: Callable[..., Any]) -> tuple[str, str] | None:
        """Which keys are counted."""
        if self.keys is None:
            return None
        with contextlib.suppress(Exception):  # another input: what fails there explains nothing
            rule = _counted_twice(self.keys, read := [*self._weights(learners, self.keys)]) or rule_of(
                [_seen(self.keys, *each) for each in read], self.keys.mask)  # fmt: skip
            if rule:
                return "wrong-keys", rule.replace("seq_q", "M").replace("seq_k", "N")
        return None

    def _weights(self, learners: Callable[..., Any], keys: Keys) -> Iterator[tuple[Mapping[str, int], torch.Tensor]]:
        """The sizes, and what each query gives to each key where all scores are alike, [M, N]."""
        for sizes in keys.shapes:
            given = keys.given(**sizes)
            q, k, v = (dict(zip(self.params, given, strict=True))[f"{x}_ptr"] for x in "QKV")
            q.zero_(), k.zero_()
            counted = []
            for first in range(0, sizes["N"], v.shape[-1]):
                mine = torch.arange(first, min(first + v.shape[-1], sizes["N"]))
                v.zero_()[..., mine, mine - first] = 1
                got = learners(*(copied(x, True) for x in given))
                o = (got[0] if isinstance(got, (tuple, list)) else got).detach().cpu()
                counted.append(o.reshape(-1, *o.shape[-2:])[0, :, : len(mine)].double())
            weights = torch.cat(counted, 1)
            if not weights.isfinite().all():
                raise ValueError("NaN says nothing of keys")
            yield sizes, weights

    def makes_no_sense(self, got: Sequence[Any]) -> bool:
        """Whether Triton refuses it: an exception other than a stray address."""
        return any(isinstance(x, str) and " out of bounds: " not in x for x in got)

    def _of_errors(
        self, learners: Callable[..., Any], got: Sequence[Any], errors: Sequence[Exception]
    ) -> tuple[str, str] | None:
        """Of other exceptions than a stray address what Triton says is the cause, or a change of the answer's own."""
        if self.makes_no_sense(got):
            return self._own_slip(learners, raises=True)
        return self.explained(learners, got) or self.index.explain_as_two(got)

    def _not_finite(
        self, got: Sequence[Values], wrong: Sequence[int], nan: Mapping[str, str] | None = None
    ) -> tuple[str, str] | None:
        try:
            explain_undefined(self.traffic, torch.tensor(math.nan), None)
        except CheckFailed as failed:
            if super()._not_finite(got, wrong, {"": failed.sentence}):
                return failed.diagnosis, failed.sentence
        return super()._not_finite(got, wrong)

    def _seen(self, part: int, got: Sequence[Values]) -> str:
        return super()._seen(part, got).replace(f"is {NOTHING:.4g}", "is never stored")

    def _common(self, got: Sequence[Values], wrong: Sequence[int]) -> tuple[str, str] | None:
        for given, mine in zip(self.tried, got, strict=True):
            for name, x in zip(self.returns, mine, strict=True):
                if left := int((x == NOTHING).sum()):
                    said = f"{left} of {x.numel()} elements of {name} are never stored [{self.case(given)}]"
                    return "never-written", said
        return super()._common(got, wrong)


def _seen(keys: Keys, sizes: Mapping[str, int], weights: torch.Tensor) -> Seen:
    i, j = torch.arange(sizes["M"])[:, None], torch.arange(sizes["N"])[None]
    numbers = {_SIDES.get(name, name): x for name, x in sizes.items() if name not in ("M", "N")}
    return Seen(weights > 1e-3 / sizes["N"], eval(keys.visible, {"i": i, "j": j, **sizes}), numbers)


def _counted_twice(keys: Keys, read: Sequence[tuple[Mapping[str, int], torch.Tensor]]) -> str | None:
    """Words for keys that count several times, where every key that is counted should weigh the same."""
    for sizes, weights in read:
        some = weights > 1e-3 / sizes["N"]
        times = weights / weights.masked_fill(~some, math.inf).amin(1, keepdim=True)
        if bool(((times - times.round()).abs()[some] > 0.02).any()):
            return None
        for row in (times.round() > 1).any(1).nonzero().flatten().tolist():
            most = int(times[row].round().max())
            several = pattern.runs(times[row].round() == most, "key")
            named = ", ".join(f"{name}={x}" for name, x in sizes.items())
            return f"query {row} counts {several} {'twice' if most == 2 else f'{most} times'} ({named})"
    return None


def made(fn: Callable[..., Any], returns: tuple[str, ...], **data: Any) -> KernelRule:
    """A rule that is not registered: see `tensor_rule.made`."""
    inputs: Mapping[str, Any] = data.pop("inputs")
    writes = tuple(data.pop("writes").split(", "))
    it = KernelRule(
        fn, returns, inputs=tuple(inputs.values()), names=tuple(inputs), writes=writes, on_device=True,
        **({"answer": fn.__name__} | data),
    )  # fmt: skip
    object.__setattr__(it, "through", it.launched)
    return it


def kernel_rule(id: str, **data: Any) -> Callable[[Any], Any]:
    """Register the decorated kernel as the right answer of exercise `id`; `data`: the fields of `KernelRule`."""

    def register(kernel: Any) -> Any:
        rule(id, make=made, beside=data.pop("beside", 0), **data)(kernel.fn)
        return kernel

    return register
