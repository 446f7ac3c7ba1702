"""When the warpgroups of a block might have done what they did: emulated events under a small model of Hopper's clocks.

The emulator knows what each warp issued and what it waited for, but has no time. Here the events of one block get one:

    found = replay(report.launches[0], lines)      # of a call with timeline=1; lines: those of Q K^T
    found.share                                    # of the time in which the tensor cores work, once they have begun

The model. Tensor cores: one queue, first come, first served; an m64nNk16 takes N / 2 clocks. Exponentials: 16 per
clock; the warpgroups that compute some share them. Copies: one queue of 64 bytes per clock, and 600 clocks on the way.
An instruction takes one clock, and everything else nothing. A warpgroup is represented by its first warp.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from flashlab.simt.report import Event, Launch

ROWS = 64  # of a wgmma
GROUP = 128  # threads of a warpgroup
SLICE = 16  # clocks for which a warpgroup has the unit for exponentials, before another gets it
MULTIPLY_ADDS, EXPONENTIALS, COPIED_BYTES = 2048, 16, 64  # of an SM, per clock
COPY_CLOCKS = 600  # on the way


@dataclass
class Span:
    """What was done or waited for, in clocks from the block's start.

    group: the warpgroup. what: "scores" and "output" (products), "exponentials" (of one tile: longer where another
    warpgroup has the unit too), "copy"; or what it waited for: "products", "bytes", "release" (an mbarrier that brings
    no bytes), "barrier".
    """

    group: int
    what: str
    begin: float
    end: float


@dataclass(frozen=True)
class Replay:
    """A block's run as the model has it. groups: the warpgroups' numbers, the producer's too. clocks: its end."""

    spans: list[Span]
    groups: list[int]
    clocks: float

    def of(self, *what: str) -> list[Span]:
        return [s for s in self.spans if s.what in what]

    @property
    def share(self) -> float:
        """The part of the time in which the tensor cores work, from the first product's begin to the last one's end."""
        products = self.of("scores", "output")
        busy = sum(s.end - s.begin for s in products)
        return busy / (max(s.end for s in products) - min(s.begin for s in products))


@dataclass
class _Barrier:
    """Of either kind: when each of its phases ended, and what has come for the phase under way."""

    ended: list[float] = field(default_factory=list)
    came: int = 0
    bytes_left: int = 0
    last: float = 0.0


@dataclass
class _Group:
    number: int
    threads: int
    events: list[Event]
    at: int = 0
    clock: float = 0.0
    ends: dict[int, tuple[float, int]] = field(default_factory=dict)  # of a wgmma: when; N if it is one of the scores
    waited: int = 0  # the last wgmma that was waited for
    owed: float = 0.0  # clocks of exponentials
    computing: Span | None = None  # the exponentials that it is at
    turn: int | None = None  # the phase of the named barrier that it has come to
    announced: int | None = None  # the mbarrier of its next copies


def replay(launch: Launch, score_lines: Collection[int]) -> Replay:
    """The first block of a launch whose events were kept, under the model.

    Args:
        launch: of a call with ``timeline=1``.
        score_lines: the lines of those wgmma whose results are exponentiated after the wait for them.

    Raises:
        ValueError: no events, or they do not fit together: nobody can go on.
    """
    events = [e for e in launch.events if e.block == 0]
    if not events:
        raise ValueError("the launch has no events: make the call with timeline=1")
    return _Run(events, math.prod(launch.block), frozenset(score_lines)).through()


class _Run:
    def __init__(self, events: list[Event], threads: int, score_lines: frozenset[int]) -> None:
        self.score_lines = score_lines
        leaders = sorted({e.warp for e in events if e.warp % 4 == 0})
        self.groups = [
            _Group(w // 4, min(GROUP, threads - 32 * w), [e for e in events if e.warp == w]) for w in leaders
        ]
        self.arrivals: dict[int, set[int]] = defaultdict(set)  # who arrives at an mbarrier, each once per phase
        self.brings: set[int] = set()  # mbarriers for which bytes are announced
        for e in events:
            if e.did == "arrive" and e.warp in leaders:
                self.arrivals[e.values[0]].add(e.warp)
                if e.values[1]:
                    self.brings.add(e.values[0])
        self.barriers: dict[int, _Barrier] = defaultdict(_Barrier)  # mbarriers by address
        self.named: dict[int, _Barrier] = defaultdict(_Barrier)
        self.tensor = self.exponentials = self.copies = 0.0  # when each unit is free
        self.spans: list[Span] = []

    def through(self) -> Replay:
        """Always the warpgroup goes on that is the furthest behind; one that cannot is asked again after the others."""
        ready = [(g.clock, i) for i, g in enumerate(self.groups)]
        stuck: set[int] = set()
        while ready:
            _, i = heapq.heappop(ready)
            group = self.groups[i]
            if self.step(group):
                for j in {*stuck, i}:
                    heapq.heappush(ready, (self.groups[j].clock, j))
                stuck.clear()
            elif group.at < len(group.events):
                stuck.add(i)
        if stuck:
            e = self.groups[min(stuck)].events[self.groups[min(stuck)].at]
            raise ValueError(f"the events do not fit together: warp {e.warp} cannot go on at {e.did} in line {e.line}")
        ends = [s.end for s in self.spans] + [g.clock for g in self.groups]
        return Replay(_joined(self.spans), [g.number for g in self.groups], max(ends))

    def step(self, group: _Group) -> bool:
        """Does a warpgroup's next event, or a slice of its exponentials. False: it is at its end, or has to wait."""
        event = group.events[group.at] if group.at < len(group.events) else None
        if group.owed and (event is None or event.did not in ("arrive", "wait-end")):
            self.exponentiate(group)
            return True
        if event is None:
            return False
        first, second = event.values
        went = True
        if event.did == "wgmma":
            self.multiply(group, first, second, event.line in self.score_lines)
        elif event.did == "wait":
            self.finish(group, first)
        elif event.did == "arrive":
            self.arrive(group, first, second)
        elif event.did == "load":
            self.copy(group, second)
        elif event.did == "mbarrier-wait":
            went = self.pass_phase(group, first, second)
        elif event.did in ("barrier", "barrier-arrive"):
            went = self.meet(group, first, second, waits=event.did == "barrier")
        group.at += went
        return went

    def multiply(self, group: _Group, number: int, n: int, scores: bool) -> None:
        begin = max(group.clock, self.tensor)
        self.tensor = begin + ROWS * n * 16 / MULTIPLY_ADDS
        group.ends[number] = (self.tensor, n if scores else 0)
        self.spans.append(Span(group.number, "scores" if scores else "output", begin, self.tensor))
        group.clock += 1

    def finish(self, group: _Group, last: int) -> None:
        if last <= group.waited:
            return
        self.wait(group, "products", group.ends[last][0])
        keys = max(group.ends[i][1] for i in range(group.waited + 1, last + 1))
        group.owed += ROWS * keys / EXPONENTIALS
        group.waited = last

    def exponentiate(self, group: _Group) -> None:
        take = min(SLICE, group.owed)
        begin = max(group.clock, self.exponentials)
        group.clock = self.exponentials = begin + take
        group.owed -= take
        if group.computing is None:
            group.computing = Span(group.number, "exponentials", begin, group.clock)
            self.spans.append(group.computing)
        group.computing.end = group.clock
        if not group.owed:
            group.computing = None

    def arrive(self, group: _Group, address: int, announced: int) -> None:
        barrier = self.barriers[address]
        barrier.came += 1
        barrier.bytes_left += announced
        if announced:
            group.announced = address
        self.complete(address, group.clock)
        group.clock += 1

    def copy(self, group: _Group, size: int) -> None:
        begin = max(group.clock, self.copies)
        self.copies = begin + size / COPIED_BYTES
        there = self.copies + COPY_CLOCKS
        self.spans.append(Span(group.number, "copy", begin, there))
        if group.announced is not None:
            self.barriers[group.announced].bytes_left -= size
            self.complete(group.announced, there)
        group.clock += 1

    def complete(self, address: int, clock: float) -> None:
        barrier = self.barriers[address]
        barrier.last = max(barrier.last, clock)
        if barrier.came == len(self.arrivals[address]) and not barrier.bytes_left:
            barrier.ended.append(barrier.last)
            barrier.came, barrier.last = 0, 0.0

    def pass_phase(self, group: _Group, address: int, parity: int) -> bool:
        ended = self.barriers[address].ended
        so_far = sum(clock <= group.clock for clock in ended)
        if so_far % 2 == parity:  # the phase of that parity is under way
            if so_far == len(ended):
                return False
            self.wait(group, "bytes" if address in self.brings else "release", ended[so_far])
        return True

    def meet(self, group: _Group, number: int, threads: int, *, waits: bool) -> bool:
        barrier = self.named[number]
        if group.turn is None:
            group.turn = len(barrier.ended)
            barrier.came += group.threads
            if barrier.came >= threads:
                barrier.ended.append(group.clock)
                barrier.came = 0
        if waits:
            if len(barrier.ended) <= group.turn:
                return False
            self.wait(group, "barrier", barrier.ended[group.turn])
        group.turn = None
        return True

    def wait(self, group: _Group, what: str, until: float) -> None:
        if until > group.clock:
            self.spans.append(Span(group.number, what, group.clock, until))
            group.clock = until


def _joined(spans: Iterable[Span]) -> list[Span]:
    """In the order of their begins; a warpgroup's products of a kind that follow at once are one."""
    found: list[Span] = []
    last: dict[tuple[int, str], Span] = {}
    for s in sorted(spans, key=lambda s: (s.begin, s.end)):
        before = last.get((s.group, s.what))
        if before and s.what in ("scores", "output") and s.begin <= before.end:
            before.end = s.end
            continue
        found.append(s)
        last[s.group, s.what] = s
    return found
