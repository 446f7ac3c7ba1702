"""Ranks as threads of one process: for a notebook, and for tests.

    outputs = run(4, function, shards_of_q, shards_of_k)       # function(link, q, k) on each rank

The threads talk by the same gloo as processes on CPUs would, over sockets of this machine. Eight ranks are there in a
third of a second, because nobody imports torch again; the function may be defined in a notebook's cell. A group whose
ranks all came to a good end serves the next run too.
"""

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from flashlab.distributed.link import TIMEOUT, Event, Link, RankLost


class RanksFailed(RuntimeError):
    """Ranks that ended with different errors; `errors` has them by rank."""

    def __init__(self, errors: dict[int, BaseException], world: int) -> None:
        self.errors = errors
        first = next((r for r, e in errors.items() if not isinstance(e, RankLost)), min(errors))
        others = f"; {len(errors) - 1} more could not go on without it" if len(errors) > 1 else ""
        super().__init__(f"rank {first} of {world} ended with {type(errors[first]).__name__}: {errors[first]}{others}")


class _Groups:
    """The connected groups of so many ranks: `whole` by rank, and those of some of them by (rank, name)."""

    def __init__(self, world: int, timeout: float) -> None:
        self.store, self.world, self.timeout = dist.HashStore(), world, timeout
        self.known: dict[tuple[int, str], Any] = {}

    def of(self, rank: int, name: str, place: int, size: int) -> Any:
        if (rank, name) not in self.known:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=self.timeout)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
            store = dist.PrefixStore(name, self.store)
            self.known[rank, name] = dist.ProcessGroupGloo(store, place, size, options)
        return self.known[rank, name]

    def link(self, rank: int, trace: list[Event] | None) -> Link:
        def part(name: str, ranks: list[int]) -> Any:
            return self.of(rank, name, ranks.index(rank), len(ranks))

        return Link(self.of(rank, "all", rank, self.world), part, trace, self.timeout)

    def leave(self, rank: int) -> None:
        """Forget a rank's groups: their sockets close, and the others know."""
        for key in [key for key in self.known if key[0] == rank]:
            del self.known[key]


SETTLE = 0.05
"""Seconds between a rank's error and the end of its sockets. Gloo frees a connection that the other side has closed
while a thread of its own may still be busy with that news, and then writes to freed memory: once in 1200 runs."""
_IDLE: dict[tuple[int, float], _Groups] = {}  # by world and timeout: groups that wait for the next run
atexit.register(_IDLE.clear)  # while gloo's threads can still end


def run(
    world: int, function: Callable[..., Any], *of_ranks: Sequence[Any], timeout: float = TIMEOUT,
    trace: list[Event] | None = None,
) -> list[Any]:  # fmt: skip
    """function(link, ...) on `world` threads; what they return, by rank.

    Args:
        of_ranks: for each further argument of the function a list with one element per rank.
        timeout: seconds that a rank waits for another. trace: see `Link`.
    Raises:
        ValueError: a list of another length. RanksFailed: ranks that ended with errors; where all of them ended with
            one and the same, that is raised itself.
    """
    for argument in of_ranks:
        if len(argument) != world:
            raise ValueError(f"there are {world} ranks, and an argument has {len(argument)} elements: one per rank")
    results, errors = [None] * world, dict[int, BaseException]()
    links: list[Link | None] = [None] * world
    all_connected = threading.Barrier(world)
    groups = _IDLE.pop((world, timeout), None) or _Groups(world, timeout)

    def work(rank: int) -> None:
        try:
            link = groups.link(rank, trace)
            links[rank] = link  # until all have ended: what it sent last may still be on its way
            all_connected.wait(timeout)  # gloo writes to stderr where a rank is gone before others have connected
            results[rank] = function(link, *(argument[rank] for argument in of_ranks))
        except BaseException as error:  # SystemExit too: a rank that leaves
            errors[rank] = error
            time.sleep(SETTLE)
            groups.leave(rank)
            if (mine := links[rank]) is not None:
                mine.close()
            else:
                all_connected.abort()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = errors[min(errors)]
        if len(errors) == world and len({(type(e), str(e)) for e in errors.values()}) == 1:
            raise first
        raise RanksFailed(dict(sorted(errors.items())), world) from next(
            (e for e in errors.values() if not isinstance(e, RankLost)), first
        )
    if not any(link and link.busy for link in links):  # what nobody fetched would reach the next run
        _IDLE[world, timeout] = groups
    return results
