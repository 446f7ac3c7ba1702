"""What a run found and counted: the classes that a learner sees."""

from collections import Counter
from dataclasses import dataclass, field

from flashlab.simt.errors import KernelFindings

_SHARED = ("shared_load", "shared_store", "ldmatrix", "stmatrix")


class Counters(Counter):
    """Counts by name; a name that never counted is 0.

    Instructions are counted once for a warp (``barriers``: once for a block):
    ``shared_loads``, ``shared_stores``, ``global_loads``, ``global_stores``, ``cp_async``, ``ldmatrix``,
    ``stmatrix``, ``mma``, ``shuffles``, ``votes`` (and matches, reductions), ``syncwarps``, ``barriers``,
    ``shared_atomics``, ``global_atomics``.

    ``tma_loads``, ``tma_stores``, ``tma_reduces``, ``bulk_loads``, ``bulk_stores``: copies of the async proxy, each
    issued by one thread. ``mbarrier_waits``, and of those ``mbarrier_waits_under_way`` whose phase had not ended yet;
    ``mbarrier_arrivals``. Waits and arrivals of the lanes of a warp, made together, count once.

    ``*_wavefronts``: passes through shared memory, and ``*_ideal``: those that would be left if no bank were
    asked for two words. ``*_sectors``: 32-byte pieces of global memory touched, and their ``*_ideal``: the
    fewest that hold those bytes.
    ``*_bytes``: what the lanes asked for; of global memory unless the name says shared, ldmatrix or stmatrix. Of a TMA
    or bulk copy: of shared memory, with the zeros for what lies outside; ``*_global_bytes``, of global memory.
    ``mma_flops``: multiplications and additions.
    ``wgmma``: executed by a warpgroup, and so are ``wgmma_m64n128k16`` (one for each shape), ``wgmma_flops``,
    ``wgmma_bytes`` (read of shared memory) and ``wgmma_from_registers`` (those with A in registers). ``wgmma_waits``:
    executed by a warp; ``wgmma_waits_for_more``: those that waited for a group not waited for before.
    ``cluster_loads``, ``cluster_stores`` and their ``_bytes``: what goes to the shared memory of a cluster's blocks.
    ``mma_during_copies``: MMAs with a cp.async of the block issued and not waited for; ``mma_copy_groups``: groups of
    such copies of the warp itself, summed over its MMAs.

    A fast build sees no plain loads and stores: it counts the rest.
    """

    @property
    def wavefronts(self) -> int:
        """Passes through shared memory, of loads, stores, ldmatrix and stmatrix."""
        return sum(self[f"{n}_wavefronts"] for n in _SHARED)

    @property
    def bank_conflicts(self) -> int:
        """Wavefronts beyond the ideal."""
        return self.wavefronts - sum(self[f"{n}_ideal"] for n in _SHARED)

    def __repr__(self) -> str:
        return f"Counters({', '.join(f'{k}={v}' for k, v in sorted(self.items()) if v)})"


@dataclass(frozen=True)
class Finding:
    """Something a kernel did wrong, once, with its first occurrence (of the lowest block).

    Attributes:
        kind: a slug, such as "race" or "global-out-of-bounds".
        message: one sentence with the lines, the block and the thread.
        line, other_line: in the source; None where unknown or there is none.
        text: the source at ``line``.
        block, thread: CUDA indices (x, y, z); ``thread`` is None for what concerns a whole launch.
        other_thread: of a race, the one that was there before.
        times: how often it was seen, in all launches; once where blocks meet, since how often is a matter of luck.
        fatal: the launch ended there.
        severity: "error"; or "warning" for what can be meant so and then does no harm.
        other_block: of other_thread, where it is in another.
    """

    kind: str
    message: str
    line: int | None = None
    other_line: int | None = None
    file: str = ""
    text: str = ""
    block: tuple[int, int, int] = (0, 0, 0)
    thread: tuple[int, int, int] | None = None
    other_thread: tuple[int, int, int] | None = None
    times: int = 1
    fatal: bool = False
    kernel: str = ""
    severity: str = "error"
    other_block: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        warning = "warning, " if self.severity == "warning" else ""
        return f"{warning}{self.kind}: {self.message}" + (f" (seen {self.times} times)" if self.times > 1 else "")


@dataclass(frozen=True)
class Event:
    """What a warp did: kept where the call was made with ``timeline=``, in the order in which it happened here.

    Attributes:
        block, warp: linear numbers, the warp's in its block.
        did: what; ``values`` depends on it.

            ==================================  =====================================================================
            "wgmma", "execute"                  issued, computed: its number in the warpgroup (from 1), N
            "commit"                            the number of the last wgmma of the group, the group's (from 1)
            "wait", "wait-end"                  the number of the last wgmma waited for, the groups left under way
            "arrive"                            at an mbarrier: its shared address, the bytes that are announced
            "mbarrier-wait", "mbarrier-passed"  its shared address, the parity
            "load", "store"                     of TMA or in bulk: the shared address, bytes
            "barrier", "barrier-passed"         __syncthreads (number 0) or bar.sync: the number, threads
            "barrier-arrive"                    bar.arrive: the number, threads
            "registers"                         setmaxnreg: registers per thread, 0
            ==================================  =====================================================================

        line: in the source; None where unknown.
    """

    block: int
    warp: int
    did: str
    line: int | None
    values: tuple[int, int]


@dataclass(frozen=True)
class Launch:
    """One kernel launch of a run. ``events``: of its first blocks, block by block, as many as ``timeline`` said."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    counters: Counters
    by_line: dict[int, Counters] = field(repr=False)
    events: list[Event] = field(default_factory=list, repr=False)


@dataclass(frozen=True)
class Report:
    """What came of calling an entry of a module.

    It is about kernels. The host part is plain C++ that runs as it stands: memory freed twice, or an array of ``new[]``
    overrun, is told only where it ends the process.

    Attributes:
        findings: in the order of the launches and blocks they occurred in.
        launches: one for each kernel launched.
        counters: their sum.
        by_line: the same by line of the source; what happens in a header, at the line that called it.
        printed: what the kernels printed.
        seconds: of the call.
        returned: by the entry.
        check: whether plain loads and stores were seen.
        notes: what could not be determined, and why.
    """

    findings: list[Finding]
    launches: list[Launch]
    printed: str
    seconds: float
    returned: int | float | None
    check: bool
    name: str
    source: str = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing was found, or nothing but warnings."""
        return not any(f.severity == "error" for f in self.findings)

    @property
    def counters(self) -> Counters:
        total = Counters()
        for launch in self.launches:
            total.update(launch.counters)
        return total

    @property
    def by_line(self) -> dict[int, Counters]:
        total: dict[int, Counters] = {}
        for launch in self.launches:
            for line, counters in launch.by_line.items():
                total.setdefault(line, Counters()).update(counters)
        return dict(sorted(total.items()))

    def raise_if_findings(self) -> "Report":
        """Returns itself, or raises :class:`KernelFindings` with the first of the errors among the findings."""
        errors = [f for f in self.findings if f.severity == "error"]
        if errors:
            more = len(errors) - 1
            raise KernelFindings(str(errors[0]) + (f" ... and {more} more" if more else ""), self)
        return self

    def __str__(self) -> str:
        head = f"{self.name}: {f'{len(self.findings)} findings' if self.findings else 'no findings in its kernels'}"
        return "\n".join([head, *(f"  {f}" for f in self.findings)])

    __repr__ = __str__
