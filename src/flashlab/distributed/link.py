"""A rank's place among the others, and what it may ask of them; torch.distributed does all of it.

    link = connect(group)             None: the group that torchrun started; or any group; or a Link
    coming, arrived = link.pass_on(x)       starts sending x to the next rank, and receiving what the previous one sends

On GPUs that is NCCL, on CPUs gloo, with ranks as processes or as threads (flashlab.distributed.threads). A Link counts
the bytes that its rank sends; given a `trace`, it also notes what the rank did when.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

HEAD_START = 20_000
"""Cycles, 10 us, that a GPU's next kernel waits for after a transfer was begun. NCCL copies by blocks of its own: they
find no place once a kernel has blocks on every multiprocessor, and then nothing is sent while that computes."""
TIMEOUT = 60.0  # seconds that a rank waits for another before it gives up


class RankLost(RuntimeError):
    """Another rank has ended, or does not answer."""


class Event(NamedTuple):
    """What a rank did: "block", "send" (what it sends is on its way) or "wait", in seconds of time.perf_counter; pairs
    of a query and a key of a block, bytes of a send."""

    rank: int
    step: int
    what: str
    begin: float
    end: float
    amount: int = 0


@dataclass
class Counts:
    """Of one rank, in all groups that it belongs to: bytes that it has sent to others."""

    sent: int = 0


class Link:
    """One rank's end of a group.

    Args:
        group: a ProcessGroup of torch.distributed, or a backend of one (ProcessGroupGloo).
        part: makes a group of some of its ranks: (name, the ranks) -> group.
        trace: a list to which events are added; None notes nothing.
        counts: of the rank, where it has them from another group.
    Attributes:
        rank, world: its number, and how many there are.
    """

    def __init__(
        self, group: Any, part: Callable[[str, list[int]], Any] | None = None, trace: list[Event] | None = None,
        timeout: float = TIMEOUT, counts: Counts | None = None,
    ) -> None:  # fmt: skip
        self.group, self.part, self.trace, self.timeout = group, part, trace, timeout
        self.rank, self.world = group.rank(), group.size()
        self.counts = Counts() if counts is None else counts
        self.step = 0
        self.agreed: set[tuple[int, ...]] = set()
        self._tag, self._pending = 0, list[list[Any]]()
        self._meshes = dict[int, tuple[Link, Link]]()

    # ---- what it may ask for

    def pass_on(self, x: Any) -> tuple[Any, Callable[[], None]]:
        """Start sending x, a tensor or a tuple of them, to the next rank of the ring. Returns what the previous one's
        will be in, and a function that waits for both. Until then none of the tensors may be touched."""
        if self.world == 1:
            return x, lambda: None
        going = [y.contiguous() for y in (x if isinstance(x, tuple) else (x,))]
        coming = [torch.empty_like(y) for y in going]
        to, source = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        sent = sum(y.nbytes for y in going)
        self.counts.sent += sent
        begin, step = time.perf_counter(), self.step
        with self._heard(source):
            if isinstance(self.group, dist.ProcessGroup):  # NCCL wants all at once, or each would wait for the other
                sends = [dist.P2POp(dist.isend, y, group=self.group, group_peer=to) for y in going]
                gets = [dist.P2POp(dist.irecv, y, group=self.group, group_peer=source) for y in coming]
                works = dist.batch_isend_irecv(sends + gets)
                if going[0].is_cuda:
                    torch.cuda._sleep(HEAD_START)
            else:
                works = []
                for y, into in zip(going, coming, strict=True):
                    self._tag += 1
                    works += [self.group.recv([into], source, self._tag), self.group.send([y], to, self._tag)]
        self._pending.append(works)  # the list itself: see `close`

        def arrived() -> None:
            asked = time.perf_counter()
            with self._heard(source):
                while works:
                    works[-1].wait()
                    works.pop()
            self._pending.remove(works)
            self.note("send", begin, sent, step)
            self.note("wait", asked, 0, step)

        return tuple(coming) if isinstance(x, tuple) else coming[0], arrived

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank: [world, ...]."""
        found = x.new_empty(self.world, *x.shape)
        with self._heard():
            self.group._allgather_base(found.view(-1), x.reshape(-1)).wait()
        self.counts.sent += (self.world - 1) * x.nbytes
        return found

    def all_to_all(self, x: torch.Tensor) -> torch.Tensor:
        """x [world, ...]: x[i] goes to rank i; the result's [i] is from rank i."""
        found, x = torch.empty_like(x, memory_format=torch.contiguous_format), x.contiguous()
        with self._heard():
            self.group.alltoall_base(found, x, [], []).wait()
        self.counts.sent += x.nbytes // self.world * (self.world - 1)
        return found

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of all ranks' x."""
        total = x.clone()
        with self._heard():
            self.group.allreduce([total]).wait()
        return total / self.world

    def split(self, heads: int) -> tuple["Link", "Link"]:
        """Two links of this rank on a mesh of world / heads by heads ranks: of the ring, and of the `heads` neighbours.

        Every rank has to call it; the groups are made once. Raises ValueError where the ranks form no such mesh.
        """
        if heads < 1 or self.world % heads:
            raise ValueError(
                f"{self.world} ranks form no mesh with groups of {heads}: start a multiple of {heads}, or take a "
                f"divisor of {self.world}"
            )
        if heads in self._meshes:
            return self._meshes[heads]
        at = self.rank // heads
        beside = self._of("heads", heads, at, [list(range(i, i + heads)) for i in range(0, self.world, heads)])
        around = self._of("ring", heads, self.rank % heads, [list(range(i, self.world, heads)) for i in range(heads)])
        self._meshes[heads] = around, beside
        return around, beside

    def _of(self, name: str, heads: int, mine: int, groups: list[list[int]]) -> "Link":
        if self.part is not None:
            return Link(self.part(f"{name}{heads}.{mine}", groups[mine]), None, self.trace, self.timeout, self.counts)
        known = dist.get_process_group_ranks(self.group)
        group, _ = dist.new_subgroups_by_enumeration([[known[i] for i in ranks] for ranks in groups])
        return Link(group, None, self.trace, self.timeout, self.counts)

    # ---- what is noted, and what is said

    def note(self, what: str, begin: float, amount: int = 0, step: int | None = None) -> None:
        """Add an event that ends now to the trace, if there is one."""
        if self.trace is not None:
            step = self.step if step is None else step
            self.trace.append(Event(self.rank, step, what, begin, time.perf_counter(), amount))

    def agree(self, what: str, numbers: tuple[int, ...], said: Callable[[tuple[int, ...]], str]) -> None:
        """Raise ValueError, on every rank, unless all ranks have the same numbers; asked once for each.

        said: what such numbers mean, for the sentence.
        """
        if self.world == 1 or numbers in self.agreed:
            return
        mine, sent = torch.tensor(numbers, device=self.device), self.counts.sent
        sizes = self.all_gather(torch.tensor([len(numbers)], device=mine.device)).flatten().tolist()
        if len(set(sizes)) == 1:
            found = [tuple(row) for row in self.all_gather(mine).tolist()]
            self.counts.sent = sent  # no part of the work
            other = next((r for r in range(self.world) if found[r] != found[0]), None)
            if other is None:
                self.agreed.add(numbers)
                return
            differ = f"rank 0 has {said(found[0])}, and rank {other} {said(found[other])}"
        else:
            differ = "they have different numbers of documents"
        raise ValueError(f"{what} has to be the same on all {self.world} ranks: {differ}")

    @contextmanager
    def _heard(self, other: int | None = None) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            who = "the others" if other is None else f"rank {other}"
            raise RankLost(
                f"rank {self.rank} of {self.world} waited for {who} in step {self.step}, and in vain: a rank has ended "
                f"or has not answered within {self.timeout:g} s; what it said itself is the cause"
            ) from error

    @property
    def device(self) -> torch.device:
        """Where its tensors are: this process's GPU with NCCL, else the CPU."""
        on_gpu = isinstance(self.group, dist.ProcessGroup) and self.group.name() == "nccl"
        return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")

    @property
    def busy(self) -> bool:
        """Whether something that it began to send was not waited for."""
        return bool(self._pending) or any(link.busy for mesh in self._meshes.values() for link in mesh)

    def close(self) -> None:
        """Leave the group, so that the other ranks notice at once: what is still on its way holds its sockets too."""
        for works in self._pending:
            works.clear()
        self.group = None


Group = Link | dist.ProcessGroup | None  # what a function takes as its group: see `connect`
_LINKS: WeakKeyDictionary[Any, Link] = WeakKeyDictionary()


def connect(group: Group = None) -> Link:
    """The link of a group; of the whole of torch.distributed, if None.

    Raises:
        RuntimeError: there is no group yet. TypeError: something else.
    """
    if isinstance(group, Link):
        return group
    if group is None:
        if not dist.is_initialized():
            raise RuntimeError(
                "there are no ranks yet: start them with `torchrun --nproc-per-node 2 ...` and flashlab.distributed."
                "start(), or as threads of this process with flashlab.distributed.run(2, function)"
            )
        group = dist.group.WORLD
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is a {type(group).__name__}; a process group, a Link or None is needed")
    if group not in _LINKS:
        _LINKS[group] = Link(group)
    return _LINKS[group]


def start(timeout: float = TIMEOUT) -> Link:
    """Join the ranks that torchrun has started: NCCL where each has a GPU, else gloo.

    With gloo a rank that waits in vain raises RankLost. With NCCL nobody waits on the CPU: NCCL's watchdog ends a rank
    after the timeout. Under both torchrun ends all ranks as soon as one has ended with an error.

    Raises:
        RuntimeError: torchrun has not started this process; more ranks on this machine than GPUs.
    """
    missing = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name not in os.environ]
    if missing:
        raise RuntimeError(f"{', '.join(missing)} not set: start the ranks with `torchrun --nproc-per-node 2 ...`")
    device = None
    if torch.cuda.is_available():
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise RuntimeError(
                f"there are {there} GPUs, and this is local rank {local}: start one rank per GPU, or hide the GPUs "
                "(CUDA_VISIBLE_DEVICES=) for gloo"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    wait = timedelta(seconds=timeout)
    dist.init_process_group("nccl" if device else "gloo", timeout=wait, device_id=device)
    link = connect()
    link.timeout = timeout
    return link
