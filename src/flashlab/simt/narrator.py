"""From the runtime's records to a :class:`Report`."""

import functools
import re
from dataclasses import replace

from flashlab.simt import elf
from flashlab.simt.build import RED_ZONE, Build
from flashlab.simt.lines import Place, resolver
from flashlab.simt.process import Reply
from flashlab.simt.report import Counters, Event, Finding, Launch, Report
from flashlab.simt.sentences import ASYNC_READS, COPIES, FATAL, Facts, host_end, sentence

# A site's four counters (runtime/counters.h), by its kind: the names under which they are reported.
_COUNTERS = {
    "shared_load": ("shared_loads", "shared_load_wavefronts", "shared_load_ideal", "shared_load_bytes"),
    "shared_store": ("shared_stores", "shared_store_wavefronts", "shared_store_ideal", "shared_store_bytes"),
    "global_load": ("global_loads", "global_load_sectors", "global_load_ideal", "global_load_bytes"),
    "global_store": ("global_stores", "global_store_sectors", "global_store_ideal", "global_store_bytes"),
    "cp_async": ("cp_async", "cp_async_sectors", "cp_async_ideal", "cp_async_bytes"),
    "shared_atomic": ("shared_atomics",),
    "global_atomic": ("global_atomics",),
    "ldmatrix": ("ldmatrix", "ldmatrix_wavefronts", "ldmatrix_ideal", "ldmatrix_bytes"),
    "stmatrix": ("stmatrix", "stmatrix_wavefronts", "stmatrix_ideal", "stmatrix_bytes"),
    "mma_m16n8k16": ("mma", "mma_flops", "mma_during_copies", "mma_copy_groups"),
    "mma_m16n8k8": ("mma", "mma_flops", "mma_during_copies", "mma_copy_groups"),
    "tma_load": ("tma_loads", "tma_load_bytes", "tma_load_global_bytes"),
    "tma_store": ("tma_stores", "tma_store_bytes", "tma_store_global_bytes"),
    "tma_reduce": ("tma_reduces", "tma_reduce_bytes", "tma_reduce_global_bytes"),
    "bulk_load": ("bulk_loads", "bulk_load_bytes", "bulk_load_global_bytes"),
    "bulk_store": ("bulk_stores", "bulk_store_bytes", "bulk_store_global_bytes"),
    "mbarrier_wait": ("mbarrier_waits", "mbarrier_waits_under_way"),
    "mbarrier_arrive": ("mbarrier_arrivals",),
    "mbarrier_init": (),
    "shuffle": ("shuffles",),
    "vote": ("votes",),
    "syncwarp": ("syncwarps",),
    "barrier": ("barriers",),
    "wgmma_wait": ("wgmma_waits", "wgmma_waits_for_more"),
    "cluster_load": ("cluster_loads", "cluster_load_bytes"),
    "cluster_store": ("cluster_stores", "cluster_store_bytes"),
    **{f"wgmma_m64n{n}k16": ("wgmma", "wgmma_flops", "wgmma_bytes", "wgmma_from_registers") for n in range(8, 257, 8)},
}
Index = tuple[int, int, int]


def _index(number: int, shape: Index) -> Index:
    """The three-dimensional index of a linear one, x first."""
    x, y, _ = shape
    return number % x, number // x % y, number // x // y


def _show(index: Index | None, shape: Index) -> str:
    if index is None:
        return "?"
    return str(index[0]) if shape[1] == shape[2] == 1 else f"({', '.join(map(str, index))})"


class Narrator:
    """Knows the source, the arrays and the arguments of one call.

    arguments: number -> name, bytes, shape and item size of the arrays among the entry's arguments.
    """

    def __init__(self, build: Build, arguments: dict[int, tuple[str, int, tuple[int, ...], int]]):
        self.build = build
        self.arguments = arguments
        self.resolver = resolver(str(build.library))
        self.source = build.text.splitlines()

    def report(self, records: str, findings: str, printed: str, seconds: float, returned: int | float | None) -> Report:
        """The first three are as the runtime gives them (runtime/report.cpp, findings.cpp)."""
        rows = [line.split("\t") for line in records.splitlines()]
        facts = [line.split("\t") for line in findings.splitlines()]
        named = {int(pc) for f in facts for pc in re.findall(r"@(\d+)", f[13])}
        self.resolver.learn({int(r[2]) for r in rows} | {int(f[i]) for f in facts for i in (2, 3)} | named)
        launches = self._launches(rows)
        return Report(
            findings=self._findings(facts, launches),
            launches=launches,
            printed=printed,
            seconds=seconds,
            returned=returned,
            check=self.build.check,
            name=self.build.name,
            source=self.build.text,
            notes=(self.resolver.note,) if self.resolver.note else (),
        )

    def host_sentence(self, entry: str, reply: Reply, seconds: float) -> str:
        """How the host part ended, with its line; nothing where it returned."""
        ending = reply.ending
        self.resolver.learn(ending.pcs)
        line = next((n for n in map(self._own_line, map(self.resolver.place, ending.pcs)) if n), None)
        if not ending.text and reply.complained.strip():
            ending = replace(ending, text=reply.complained.strip().splitlines()[-1])
        return host_end(entry, ending, f" in line {line}" if line else "", seconds)

    def _launches(self, rows: list[list[str]]) -> list[Launch]:
        launches: list[Launch] = []
        for row in rows:
            if row[0] == "launch":
                name = self.resolver.functions.get(int(row[2]), "??")
                name = row[1] if name in ("", "??") else re.sub(r"^void |\(.*", "", name)
                n = [int(x) for x in row[3:10]]
                launches.append(Launch(name, (n[0], n[1], n[2]), (n[3], n[4], n[5]), n[6], Counters(), {}))
                continue
            line = self._own_line(self.resolver.place(int(row[2]))) or 0
            launch = launches[-1]
            if row[0] == "event":
                launch.events.append(Event(int(row[3]), int(row[4]), row[1], line or None, (int(row[5]), int(row[6]))))
                continue
            for counters in (launch.counters, launch.by_line.setdefault(line, Counters())):
                for name, value in zip(_COUNTERS[row[1]], row[3:], strict=False):
                    counters[name] += int(value)
                if row[1].startswith(("mma_", "wgmma_m")):
                    counters[row[1]] += int(row[3])
        return launches

    def _own_lines(self, place: Place | None) -> list[int]:
        """The lines in the learner's source, the innermost first; those in headers where none is in the source."""
        frames = (place, *place.callers) if place else ()
        own = [p.line for p in frames if p.file == self.build.name or p.file.endswith("/" + self.build.name)]
        return own or [p.line for p in frames]

    def _own_line(self, place: Place | None) -> int | None:
        return next(iter(self._own_lines(place)), None)

    def _findings(self, rows: list[list[str]], launches: list[Launch]) -> list[Finding]:
        ended: dict[int, int] = {}  # launch -> the first block that ended it
        for row in rows:
            if row[0] in FATAL or (row[0] == "divergent" and row[1] != row[13]):
                ended[int(row[6])] = min(ended.get(int(row[6]), 1 << 62), int(row[7]))
        timed_out = {int(row[6]) for row in rows if row[0] == "timeout"}
        early = {
            (self.resolver.place(int(row[2])), self.resolver.place(int(row[3])))
            for row in rows if row[0] == "read-before-wait" and row[1] not in COPIES
        }  # fmt: skip
        # Blocks that store in two lines: whether the one's came between two of the other is a matter of luck.
        stores = [[self.resolver.place(int(pc)) for pc in row[2:4]] for row in rows
                  if row[:2] == ["global-race", "store"] and row[13] == "store" and row[15] == "0"]  # fmt: skip
        in_two_lines = {place for pair in stores if pair[0] != pair[1] for place in pair}
        found, seen = [], set()
        overwritten: set[int] = set()
        for row in sorted(rows, key=lambda r: (int(r[6]), r[15] == "1", int(r[7]), int(r[8]))):
            kind, how, words = row[0], row[1], row[13]
            other_block, warning = int(row[14]), row[15] == "1"
            pc, other_pc, thread, other, number, block, _, times, *v = (int(x) for x in row[2:13])
            if block > ended.get(number, block) and not (number in timed_out and kind == "global-race"):
                continue  # whether that block had begun is a matter of luck (a race may be why the time was up)
            place, other_place = self.resolver.place(pc), self.resolver.place(other_pc)
            if other < 0:  # of a signal: where it hit, and as second best where the thread was seen last
                place, other_place = place or other_place, None
            if kind == "divergent" and how == words and place and place == other_place:
                continue  # one line, compiled twice
            if kind == "read-before-wait" and how in COPIES and (other_place, place) in early:
                continue  # of the readers, those that came before the copy began: the others are told of
            if kind == "global-race" and how == words == "store" and place == other_place and place in in_two_lines:
                continue
            key = (kind, how, place, other_place, words)
            if key in seen:
                continue
            seen.add(key)
            if number in ended:
                times = 1  # the other blocks of a launch that was cut short saw more or less of it
            launch = launches[number] if number < len(launches) else None
            found.append(
                self._finding(
                    kind, how, words, place, other_place, launch, thread, other, block, other_block, v, times, warning
                )
            )
            if words in ASYNC_READS:
                overwritten.add(id(found[-1]))
        return self._told_once(found, overwritten)

    def _told_once(self, found: list[Finding], overwritten: set[int]) -> list[Finding]:
        """One finding for each mistake. overwritten: the ids of findings of writes to what the async proxy reads."""
        # Bytes that arrive too late for one thread arrive without a barrier for another;
        # what the lanes of a warp do to each other, two warps do; and what two threads do, two blocks do.
        # An operand that is read before it is written is overwritten when it is read again: the first is the cause.
        first: dict[frozenset, Finding] = {}
        for f in found:
            if id(f) in overwritten:
                first.setdefault(self._lines(f), f)
        found = [f for f in found if id(f) not in overwritten or first[self._lines(f)] is f]
        late = {self._lines(f) for f in found if f.kind in ("read-before-wait", "stage-overwritten")}
        found = [f for f in found if f.kind != "race" or self._lines(f) not in late]
        races = {self._lines(f) for f in found if f.kind in ("race", "global-race") and f.severity == "error"}
        found = [f for f in found if f.severity == "error" or self._lines(f) not in races]
        between_blocks: dict[frozenset, Finding] = {}  # a load of a line, its store, or both: a matter of luck
        for f in found:
            if f.kind == "global-race" and f.other_block is not None:
                between_blocks.setdefault(self._lines(f), f)
        found = [f for f in found if f.kind != "global-race" or between_blocks.get(self._lines(f), f) is f]
        # Who reads too early finds nothing there: that is told after the race that it is a part of.
        in_a_race = set().union(*races, *late)
        return sorted(
            found, key=lambda f: f.kind in ("uninitialised-shared", "uninitialised-global") and f.line in in_a_race
        )

    def _where(self, place) -> str:
        line, *callers = self._own_lines(place) or [0]
        called = f" (called from line {callers[0]})" if callers and callers[0] != line else ""
        return f" in line {line}{called}" if line else ""

    @staticmethod
    def _lines(finding: Finding) -> frozenset:
        return frozenset((finding.line, finding.other_line))

    def _finding(
        self, kind, how, words, place, other_place, launch, thread, other, block, other_block, v, times, warning
    ) -> Finding:  # fmt: skip
        def whole(shape: Index) -> Index:
            x, y, z = (max(1, n) for n in shape)
            return x, y, z

        threads, blocks = (whole(launch.block), whole(launch.grid)) if launch else ((1, 1, 1), (1, 1, 1))
        me = _index(thread, threads) if thread >= 0 else None
        them = _index(other, threads) if other >= 0 else None
        at = _index(block, blocks)
        line, other_line = self._own_line(place), self._own_line(other_place)
        facts = Facts(
            how=how,
            words=words,
            v=tuple(v),
            who=f"thread {_show(me, threads)} of block {_show(at, blocks)}",
            whom=f"thread {_show(them, threads)}"
            + (f" of block {_show(_index(other_block, blocks), blocks)}" if other_block >= 0 else ""),
            here=self._where(place),
            there=self._where(other_place),
            kernel=launch.kernel if launch else "a kernel",
            warning=warning,
            shared=self._shared,
            declared=self._declared,
            beyond=self._beyond,
            variable=functools.partial(_variable_name, str(self.build.library)),
            argument=lambda number: self.arguments.get(number, ("", 0, (), 1)),
            block=lambda number: _show(_index(number, blocks), blocks),
            line=lambda pc: f" in line {n}" if (n := self._own_line(self.resolver.place(pc))) else "",
        )
        return Finding(
            kind=kind,
            message=sentence(kind, facts),
            line=line,
            other_line=other_line,
            file=place.file if place else "",
            text=self.source[line - 1].strip() if line and line <= len(self.source) else "",
            block=at,
            thread=me,
            other_thread=them,
            times=times,
            severity="warning" if warning else "error",
            other_block=_index(other_block, blocks) if other_block >= 0 else None,
            fatal=kind in FATAL or (kind == "divergent" and how != words),
            kernel=launch.kernel if launch else "",
        )

    def _shared(self, address: int, count: int) -> str:
        """Names bytes of shared memory. The static arrays come first, the dynamic one is the last."""
        dynamic = self.build.dynamic
        if address >= dynamic:
            return f"bytes {address - dynamic} to {address - dynamic + count - 1} of the dynamic shared memory"
        for symbol in self.build.shared:
            if symbol.offset <= address < symbol.offset + symbol.size:
                return f"{symbol.array} at byte {address - symbol.offset}"
        return "shared memory"

    def _declared(self, address: int) -> tuple[str, int]:
        """The array of shared memory that has this address, and the alignment that it is declared with."""
        if address >= self.build.dynamic:
            return "the dynamic shared memory", self.build.dynamic_align
        for s in self.build.shared:
            if s.offset <= address < s.offset + s.size:
                return s.array, s.align
        return "", 0

    def _beyond(self, offset: int, count: int) -> str:
        """What bytes of shared memory are that belong to no array of the kernel: what they are near to."""
        address = self.build.dynamic + offset
        for s in self.build.shared:
            over = address + count - s.offset - s.size
            if s.offset <= address < s.offset + s.size:
                return f"the last {over} of {count} lie beyond the end of {s.array} ({s.size} bytes)" if over > 0 else \
                    f"{s.array}, which is another kernel's"  # fmt: skip
        before = max((s for s in self.build.shared if s.offset <= address), key=lambda s: s.offset, default=None)
        if before and address + count - before.offset - before.size <= RED_ZONE:
            over = address + count - before.offset - before.size
            return f"{over} byte{'s' * (over > 1)} beyond the end of {before.array} ({before.size} bytes)"
        after = min((s for s in self.build.shared if s.offset > address), key=lambda s: s.offset, default=None)
        if after and after.offset - address <= RED_ZONE:
            return f"{after.offset - address} bytes before the start of {after.array}"
        if self.build.dynamic - address <= RED_ZONE:
            return f"{self.build.dynamic - address} bytes before the dynamic shared memory"
        return "outside of every __shared__ array"


@functools.lru_cache(maxsize=256)
def _variable_name(library: str, address: int) -> str:
    """The module's variable at an address."""
    for s in elf.variables(library):
        if s.offset <= address < s.offset + s.size:
            return elf.base_name(s.name)
    return "a variable"
