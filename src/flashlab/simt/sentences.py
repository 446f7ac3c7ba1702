"""The sentence for each kind of finding."""

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass

from flashlab.simt.errors import RAISED
from flashlab.simt.process import Ending

# After these the launch cannot go on. (So it is with a divergence in which two different operations meet.)
FATAL = RAISED.keys() - {"divergent", "shared-out-of-bounds"} | {"copy-size", "interrupted"}

# What an operation does to shared memory, and did.
_VERBS = {
    "load": ("reads", "read"), "store": ("writes", "wrote"), "access": ("touches", "touched"),
    "ldmatrix": ("reads with ldmatrix", "read with ldmatrix"), "wgmma": ("reads with wgmma", "read with wgmma"),
    "stmatrix": ("writes with stmatrix", "wrote with stmatrix"),
    "cp.async": ("fills with cp.async", "filled with cp.async"),
    "tma_load": ("fills with tma_load", "filled with tma_load"),
    "bulk_load": ("fills with bulk_load", "filled with bulk_load"),
    "tma_store": ("reads with tma_store", "read with tma_store"),
    "bulk_store": ("reads with bulk_store", "read with bulk_store"),
    "tma_reduce_add": ("reads with tma_reduce_add", "read with tma_reduce_add"),
    "atomic": ("updates with an atomic", "updated with an atomic"),
    "mbarrier_init": ("initialises as an mbarrier", "initialised as an mbarrier"),
    "cluster_store": ("writes with cluster_store", "wrote with cluster_store"),
    "cluster_load": ("reads with cluster_load", "read with cluster_load"),
}  # fmt: skip
# The same of global memory, where it is not the same.
_GLOBAL_VERBS = {
    "cp.async": ("reads with cp.async", "read with cp.async"),
    "tma_load": ("reads with tma_load", "read with tma_load"),
    "bulk_load": ("reads with bulk_load", "read with bulk_load"),
    "tma_store": ("writes with tma_store", "wrote with tma_store"),
    "bulk_store": ("writes with bulk_store", "wrote with bulk_store"),
    "tma_reduce_add": ("updates with tma_reduce_add", "updated with tma_reduce_add"),
    "volatile": ("updates through a volatile", "updated through a volatile"),
}  # fmt: skip
_WRITES = ("store", "stmatrix", "cp.async", "tma_load", "bulk_load")
_BULK_LOADS = ("tma_load", "bulk_load")
COPIES = ("cp.async", *_BULK_LOADS)
ASYNC_READS = {"tma_store": "bulk_wait_read", "bulk_store": "bulk_wait_read", "tma_reduce_add": "bulk_wait_read",
                "wgmma": "wgmma_wait"}  # fmt: skip

_CONFIGURATION = {
    "grid-empty": "the grid has no blocks",
    "block-empty": "the block has no threads",
    "grid.x": "grid.x is {0}; the limit is {1}",
    "grid.y": "grid.y is {0}; the limit is {1} (put the large dimension on x)",
    "grid.z": "grid.z is {0}; the limit is {1} (put the large dimension on x)",
    "threads": "a block of {0} threads; the limit is {1}",
    "block.z": "block.z is {0}; the limit is {1}",
    "shared": "{0} bytes of dynamic shared memory a block; the limit is {1}",
    "shared-opt-in": "{0} bytes of dynamic shared memory a block: above {1} a kernel has to be "
    "allowed to, with cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes)",
    "bounds": "a block of {0} threads; the kernel's __launch_bounds__ promise at most {1}",
    "cluster": "a cluster of {0} blocks; it has 1 to {1}",
    "cluster-yz": "a cluster of {0} blocks in y and {1} in z; the emulator has clusters along x only",
    "cluster-opt-in": "a cluster of {0} blocks: above {1} a kernel has to be allowed to, with "
    "cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)",
    "cluster-grid": "grid.x is {0}, which is no multiple of the {1} blocks of a cluster",
    "memory": "a block, or a whole cluster, needs {0} threads, and the system has room for the stacks of {1} "
    "(vm.max_map_count, ulimit -v)",
    "os-threads": "the system has no thread left to run it",
}


@dataclass(frozen=True)
class Facts:
    """What a sentence is made of."""

    how: str  # the runtime's: what was done
    words: str  # a word or two
    v: tuple[int, int, int]
    who: str  # the threads, in words
    whom: str
    here: str  # " in line 12", or nothing
    there: str
    kernel: str
    warning: bool  # it may be meant so
    shared: Callable[[int, int], str]  # names bytes of shared memory: address, number
    declared: Callable[[int], tuple[str, int]]  # the array at an address, and its alignment; 0: not known
    beyond: Callable[[int, int], str]  # what bytes are that belong to no array: offset from the dynamic part, number
    variable: Callable[[int], str]  # of the module, at an address
    argument: Callable[[int], tuple[str, int, tuple[int, ...], int]]  # by number: name, bytes, shape and item size
    line: Callable[[int], str]  # " in line 12" of an address in the module, or nothing
    block: Callable[[int], str]  # the index of a block, by its number

    @property
    def does(self) -> str:
        return f"{_VERBS[self.how][0]}{self.here}"

    @property
    def did(self) -> str:
        return f"{_VERBS[self.words][1]}{self.there}"

    @property
    def does_globally(self) -> str:
        return f"{(_GLOBAL_VERBS.get(self.how) or _VERBS[self.how])[0]}{self.here}"

    @property
    def did_globally(self) -> str:
        return f"{(_GLOBAL_VERBS.get(self.words) or _VERBS[self.words])[1]}{self.there}"

    @property
    def bytes(self) -> str:
        """The bytes of shared memory that the first two numbers say."""
        return self.shared(self.v[0], self.v[1])

    @property
    def place(self) -> str:
        """What lies at an offset in an argument, or in the module's variables: the first and third number."""
        number, _, offset = self.v
        if number < 0:
            return self.variable(offset)
        name, _, shape, item = self.argument(number)
        return f"{_element(offset // item, shape)} of {name}" if shape else name

    @property
    def cluster_block(self) -> str:
        """The block that the first two numbers say: its number, and its rank."""
        return f"block {self.block(self.v[0])} (rank {self.v[1]} of its cluster)"

    @property
    def array(self) -> str:
        """The argument that the first number says."""
        return self.argument(self.v[0])[0]

    @property
    def mbarrier(self) -> str:
        return f"the mbarrier{self.there.replace(' in', ' of')} ({self.shared(self.v[2], 8)})"


def _element(number: int, shape: tuple[int, ...]) -> str:
    """With its place in each dimension; past the end the first one is too large."""
    at, rest = list[int](), number
    for size in reversed(shape[1:]):
        rest, place = divmod(rest, size)
        at.insert(0, place)
    return f"element [{rest}, {', '.join(map(str, at))}], number {number}," if at else f"element {number}"


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}{'' if n == 1 else 's'}"


def lanes(mask: int) -> str:
    """The lanes of a mask, as "0-3, 7"."""
    runs, lane = [], 0
    while lane < 32:
        if mask >> lane & 1:
            end = lane
            while end < 31 and mask >> (end + 1) & 1:
                end += 1
            runs.append(str(lane) if lane == end else f"{lane}-{end}")
            lane = end
        lane += 1
    return ", ".join(runs) or "none"


# ---- shared memory ---------------------------------------------------------------------------------
def _race(f: Facts) -> str:
    if f.how.startswith("cluster_"):
        own = f.who.partition(" of ")[2] == f.whom.partition(" of ")[2]
        missing = "barrier" if own else "cluster barrier (cluster_arrive ... cluster_wait)"
        missing = f"wait for the copy with a {missing} behind it" if f.words in COPIES else missing
        return f"{f.does} shared memory of {f.cluster_block} that {f.whom} {f.did}: no {missing} stands between"
    same = ". Both store the same value, so that it may do no harm" if f.warning else ""
    if f.how in _WRITES and f.words in _WRITES and not f.warning:
        same = ". Both write there: has each thread a place of its own?"
    return f"{f.does} shared memory that {f.whom} {f.did}, with no barrier between{same}"


def _elsewhere(f: Facts) -> str:
    """What else it may be, where a wgmma reads these bytes."""
    return f". Or does a descriptor of that wgmma lead out of its tile, to {f.bytes}?"


def _still_filled(f: Facts) -> str:
    copy = f"a {f.words} of {f.whom}{f.there}"
    if f.words in _BULK_LOADS:
        elsewhere = _elsewhere(f) if f.how == "wgmma" else ""
        return (
            f"{f.does} shared memory that {copy} fills, without having waited for the phase of "
            f"its mbarrier that the copy counts in{elsewhere}"
        )
    return f"{f.does} shared memory that {copy} is still filling"


def _in_flight(f: Facts) -> str:
    """What a store of the async proxy writes to global memory is touched too early."""
    store = f.words.removeprefix("in flight ")
    return (
        f"{f.does_globally} {f.place}, where a {store} of {f.whom}{f.there} may still be going "
        "to write: only bulk_wait of its group says that it has written, bulk_wait<0> for all groups (bulk_wait_read "
        "says that shared memory has been read)"
    )


def _read_before_wait(f: Facts) -> str:
    if f.words.startswith("in flight"):
        return _in_flight(f)
    if f.how in COPIES:  # the reader came first
        wait = "mbarrier_wait, then read" if f.how in _BULK_LOADS else "cp_async_wait), then a barrier, then read"
        wait = f"({wait})" if f.how in _BULK_LOADS else f"({wait}"
        if f.words == "wgmma":
            return (
                f"{f.does} shared memory that the wgmma{f.there} (warpgroup of {f.whom}) has "
                f"read already: wait for the copies {wait}{_elsewhere(f)}"
            )
        return f"{f.does} shared memory that {f.whom} has {f.did} already: wait for the copies {wait}"
    if f.words in _BULK_LOADS:
        return _still_filled(f)
    return (
        f"{_still_filled(f)}. What is read has to be committed and waited for (cp_async_commit, cp_async_wait, then a "
        "barrier); and a copy for a later tile may not go where this one lies"
    )


def _stage_overwritten(f: Facts) -> str:
    if f.words == "wgmma":
        return _wgmma_overwritten(f)
    if f.words in ASYNC_READS:
        return (
            f"{f.does} shared memory that a {f.words} of {f.whom}{f.there} may still be reading: "
            f"only after {ASYNC_READS[f.words]} is it free again"
        )
    if f.words == "ldmatrix, not waited for":
        return (
            f"overwrites with {f.how}{f.here} shared memory that {f.whom} reads with ldmatrix{f.there}, which nobody "
            "has waited for: an arrival at an mbarrier does not, but the first use of the registers does (what is seen "
            "here: by a product or stmatrix), or fence_proxy_async before the arrival"
        )
    if f.words in _BULK_LOADS:
        return _still_filled(f)
    if f.words == "cp.async":
        return (
            f"{_still_filled(f)}: two copies to one place are under way. Has the first been committed and waited for "
            "(cp_async_commit, cp_async_wait), or does the second come too early, or go to the wrong place?"
        )
    return (
        f"overwrites with {f.how}{f.here} shared memory that {f.whom} {f.did}, "
        "with no barrier between: the stage is still in use"
    )


def _shared_out_of_bounds(f: Facts) -> str:
    offset, size, limit = f.v
    if offset < 0:
        return f"{f.does} shared memory: {f.beyond(offset, size)}"
    return f"{f.does} bytes {offset} to {offset + size - 1} of dynamic shared memory; the launch asked for {limit}"


# ---- global memory ---------------------------------------------------------------------------------
def _global_out_of_bounds(f: Facts) -> str:
    does = f.does_globally
    if f.words == "null":
        return f"{does} through a null pointer, or nearly one"
    if f.words == "wild-or-misaligned":
        return f"{does} a wild address, or a misaligned one with a 16-byte access"
    if f.words.startswith("local memory"):
        return f"{does} {f.words}"
    name, size, shape, item = f.argument(f.v[0])
    if f.words != "near" or not name:
        return f"{does} global memory that belongs to no argument of the entry"
    offset, number = f.v[2], f.v[1]
    array = f"{name} (shape {list(shape)})"
    if offset < 0:
        return f"{does} {_count(-offset, 'byte')} before the start of {array}"
    if offset < size:
        return f"{does} {_count(number, 'byte')} that run over the end of {array}"
    return f"{does} {_element(offset // item, shape)} of {array}, {_count(offset + number - size, 'byte')} past its end"


def _global_race(f: Facts) -> str:
    if f.words.startswith("in flight"):
        return _in_flight(f)
    if "volatile" in (f.how, f.words):
        between = "a load and a store are no atomic, and an update between the two is lost. Use atomicAdd or its like"
    elif f.how == "store" and f.words == "store":
        between = "only one of the two is kept. Is the index that of this thread and block alone?"
    elif " of block" in f.whom:
        between = (
            "nothing orders two blocks but a __threadfence() and an atomic on each side, with barriers to the others"
        )
    else:
        between = "with no barrier between"
    same = " Both store the same value, so that it may do no harm" if f.warning else ""
    joint = ", " if between == "with no barrier between" else ": "
    return f"{f.does_globally} {f.place}, which {f.whom} {f.did_globally}{joint}{between}{same}"


def _uninitialised_local(f: Facts) -> str:
    if f.how == "load":
        return f"reads{f.here} a local variable that was never set"
    if f.how.startswith(("wgmma", "mma")):  # "mma's A"
        operation, _, part = f.how.partition("'s ")
        return f"gives {operation}{f.here} registers that were never set ({part})"
    does = {"store": "stores", "stmatrix": "stores with stmatrix", "shuffle": "gives to a shuffle"}[f.how]
    return f"{does}{f.here} a value that was never set"


def _unaligned_array(f: Facts, address: int, multiple: int) -> str:
    """Where an array of shared memory is not declared with the alignment that it needs."""
    array, align = f.declared(address)
    if not 0 < align < multiple:
        return ""
    return f": {array} is aligned to {_count(align, 'byte')} only. Declare it with __align__({max(16, multiple)})"


def _misaligned(f: Facts) -> str:
    if not (f.words == "shared" or f.how in ("ldmatrix", "stmatrix")):
        return f"{f.does} {f.v[1]} bytes of global memory at an address that is no multiple of {f.v[1]}"
    unaligned = _unaligned_array(f, f.v[0], f.v[1])
    matrix = "; an address counts bytes, and an index elements" if f.how in ("ldmatrix", "stmatrix") else ""
    said = f"{f.does} {f.v[1]} bytes of shared memory at an address that is no multiple of {f.v[1]}"
    return said + (unaligned or f": {f.bytes}{matrix}")


# ---- copies ----------------------------------------------------------------------------------------
def _never_waited(f: Facts) -> str:
    if f.how == "wgmma":
        missing = "committed" if f.v[0] else "waited for (wgmma_wait)"
        return f"{f.who} ends while its wgmma{f.here} is under way: its group was never {missing}"
    if f.how in _BULK_LOADS:
        return f"the block ends while a {f.how} of {f.who}{f.here} is in flight: nobody has waited for its mbarrier"
    if f.how in ASYNC_READS:
        missing = "its group was never committed" if f.v[0] else "its group was never waited for (bulk_wait_read)"
        return f"{f.who} ends while its {f.how}{f.here} may still be reading shared memory: {missing}"
    missing = "committed" if f.v[0] else "waited for"
    return f"{f.who} ends while its cp.async{f.here} is in flight: its group was never {missing}"


# ---- warpgroups ------------------------------------------------------------------------------------
def _warps(mask: int, first: int) -> str:
    """The warps of a mask, of which bit 0 is warp `first`, as "warps 4 and 5"."""
    numbers = [str(first + i) for i in range(32) if mask >> i & 1]
    return f"warp{'s' * (len(numbers) > 1)} {' and '.join(filter(None, (', '.join(numbers[:-1]), numbers[-1])))}"


def _wgmma_registers(f: Facts) -> str:
    does = {"load": "reads", "store": "writes"}[f.how]
    missing = "wgmma_wait" if f.v[0] else "wgmma_commit and wgmma_wait"
    if f.words == "A":
        return (
            f"{does}{f.here} registers that hold A of the wgmma{f.there}, which is still under way and may not "
            f"have read them: they have to stay as they are until {missing}"
        )
    return (
        f"{does}{f.here} an accumulator of the wgmma{f.there}, which is still under way: the sums are there, "
        f"and may be touched, after {missing}"
    )


def _wgmma_overwritten(f: Facts) -> str:
    does = f"{f.does} shared memory that the wgmma{f.there} (warpgroup of {f.whom})"
    if f.v[2]:
        return (
            f"{does} may still be reading: nothing between says that it has ended. A barrier does, at which a thread "
            f"of that warpgroup arrives after its wgmma_wait, and which counts its arrival, too{_elsewhere(f)}"
        )
    return (
        f"{does} is still reading: no wgmma_wait of that warpgroup has ended it yet. A write comes after that wait, "
        f"with a barrier between; or before the wgmma is issued{_elsewhere(f)}"
    )


def _wgmma_fence(f: Facts) -> str:
    what = "the registers of A" if f.how == "A" else "the accumulators"
    if f.v[0]:
        return (
            f"issues wgmma{f.here}, and {what} have been written since the last wgmma_fence: without one after "
            "the write, wgmma may use what they held before"
        )
    return f"issues wgmma{f.here} with no wgmma_fence before it: wgmma may use {what} as they were before"


def _wgmma_form(f: Facts) -> str:
    mine, theirs = f"m64n{f.v[0]}k16", f"m64n{f.v[1]}k16"
    shapes = f": {mine} against {theirs}" if mine != theirs else ": their operands differ in kind"
    return (
        f"issues wgmma{f.here} where {f.whom} of its warpgroup issued another{f.there}{shapes}. The four warps "
        "have to issue the same wgmma in the same order"
    )


def _wgmma_warps(f: Facts) -> str:
    mask, first, _ = f.v
    group = f"the four warps {first} to {first + 3}"
    told = f", and wgmma_wait{f.there} waits for it for ever" if f.how == "wgmma_wait" else ""
    return (
        f"issues wgmma{f.here}, which needs {group}, but only {_warps(mask, first)} of them "
        f"{'have' if mask & (mask - 1) else 'has'} come to it{told}"
    )


def _registers_direction(f: Facts) -> str:
    wanted, now, at_launch = f.v
    way = "fewer" if f.how == "setmaxnreg_inc" else "more"
    launched = f", {at_launch} at the launch" * (now != at_launch)
    return f"calls {f.how}<{wanted}>{f.here}, which is {way} than the {now} registers that it has{launched}"


def _registers_missing(f: Facts) -> str:
    wanted, total, held = f.v
    return (
        f"waits for ever in setmaxnreg_inc<{wanted}>{f.here}: the launch gave the block {total} registers "
        f"({f.words} per thread), of which the other warps hold {held}; {32 * wanted} for this warp are not left"
    )


def _registers_warps(f: Facts) -> str:
    mask, first, count = f.v
    return (
        f"has executed setmaxnreg{f.here} more often than others of its warpgroup: {_warps(mask, first)} of "
        f"warps {first} to {first + count - 1}. All warps of a warpgroup have to execute it"
    )


# ---- mbarriers, TMA and bulk copies ----------------------------------------------------------------
def _proxy_fence(f: Facts) -> str:
    what = "wgmma" if f.how == "wgmma" else "a copy"
    if f.words.startswith("global "):
        return (
            f"{f.does_globally} {f.place}, which {f.whom} {_VERBS[f.words[7:]][1]}{f.there}, "
            f"with no fence_proxy_async_global between: {what} need not see what stores have written, nor come after it"
        )
    return (
        f"{f.does} shared memory that {f.whom} {f.did}, with no "
        f"fence_proxy_async between: {what} need not see what stores have written, nor come after it"
    )


def _mbarrier_arrivals(f: Facts) -> str:
    if f.v[1] < 0:
        return (
            f"comes to {f.how}{f.here} with its warp, of which {_count(f.v[0], 'thread')} "
            f"{'has' if f.v[0] == 1 else 'have'} ended a phase of {f.mbarrier} by the same instruction: it counts "
            f"{_count(f.v[0], 'arrival')}, and every thread that comes is one. Is one thread alone meant to arrive?"
        )
    arrivals = "its one arrival" if f.v[0] == 1 else f"all its {f.v[0]} arrivals"
    return (
        f"comes to {f.how}{f.here}, where the phase of {f.mbarrier} that is under way has {arrivals} already "
        f"and waits for {f.v[1]} bytes of copies: one arrival too many, or too early"
    )


_NUMBERS = {
    "arrivals": " with {0} arrivals; they are 1 to {1}",
    "parity": " with the parity {0}; it is 0 or 1, the lowest bit of the number of the phase",
    "bytes": ", which makes {0} bytes for one phase; an mbarrier counts up to {1}",
}


def _bulk_misaligned(f: Facts) -> str:
    beyond, multiple = f.v[0], f.v[1]
    if f.words == "bytes":
        return f"asks {f.how}{f.here} for {beyond} bytes; their number is a multiple of {multiple}"
    if f.words == "corner":
        off = f"{beyond} bytes beyond a multiple of {multiple} in dimension 0"
        return f"gives {f.how}{f.here} a corner that lies {off}"
    what = {
        "shared": "address of shared memory",
        "global": "address of global memory",
        "map": "tensor map",
        "mbarrier": "address of an mbarrier",
    }[f.words]
    array = _unaligned_array(f, f.v[2], multiple) if f.words in ("shared", "mbarrier") else ""
    return f"gives {f.how}{f.here} the {what} {beyond} bytes beyond a multiple of {multiple}{array}"


def _tensor_map(f: Facts) -> str:
    if f.words:
        return (
            f"gives {f.how}{f.here} a tensor map in {f.words} memory, where TMA does not find it: give it the "
            "address of the kernel's own `const __grid_constant__ CUtensorMap` parameter, or of a map in __constant__ "
            "or global memory"
        )
    if not f.v[0]:
        return f"gives {f.how}{f.here} the address of something that is no tensor map"
    return f"gives {f.how}{f.here} {_count(f.v[1], 'coordinate')}; the tensor map has {f.v[0]}"


# ---- collectives -----------------------------------------------------------------------------------
def _divergent(f: Facts) -> str:
    if f.how == f.words:
        return (
            f"meets {f.whom} in {f.how}, but comes from another place:{f.here or ' unknown'} against"
            f"{f.there or ' unknown'}"
        )
    masks = f" (masks {f.v[0]:#010x} and {f.v[1]:#010x})" if f.v[0] != f.v[1] else ""
    return (
        f"comes to {f.how}{f.here} while {f.whom} waits in {f.words}{f.there}: "
        f"not all lanes of the mask take the same way{masks}"
    )


def _deadlock(f: Facts) -> str:
    words, phases, barriers, cluster = f.words.split("|")
    other = f"; {f.whom} waits in {words}{f.there}" if words else ""
    left = f"{_count(f.v[0], 'thread')} of {f.v[1]} left, and none can go on"
    waits = "".join(f". {_barrier_wait(row.split(','))}" for row in barriers.split(";") if row)
    waits += "".join(f". {_phase_wait(f, row.split(','))}" for row in phases.split(";")[:6] if row)
    rows = [row.split(",") for row in cluster.split(";") if row]
    late = [f"{_count(int(n), 'thread')} of block {f.block(int(block))}" for block, n in rows]
    waits += f". The cluster barrier waits for {' and '.join(late)}" if late else ""
    return f"waits for ever in {f.how}{f.here}{other}; {left}{waits}"


def _barrier_wait(row: list[str]) -> str:
    """Who waits at which named barrier, and how many have not come (runtime/deadlock.cpp)."""
    number, arrived, expected, waiting, warps = (int(x) for x in row)
    who = [f"warp{'s' * (warps & (warps - 1) > 0)} {lanes(warps)}"] * (warps > 0)
    who += [f"{arrived - waiting} that did not wait (named_barrier_arrive)"] * (arrived > waiting)
    return f"Barrier {number} has {arrived} of the {expected} threads that it waits for: {', and '.join(who)}"


def _phase_wait(f: Facts, row: list[str]) -> str:
    """Who waits for which phase of an mbarrier, and what that phase lacks (runtime/deadlock.cpp)."""
    warps, at, made = int(row[0]), int(row[1][1:]), int(row[2][1:])
    address, parity, phase, missing, count, expected, brought = (int(x) for x in row[3:])
    names = lanes(warps)
    who = f"Warps {names} wait" if warps & (warps - 1) else f"Warp {names} waits"
    what = f"parity {parity} of the mbarrier{f.line(made).replace(' in', ' of')} ({f.shared(address, 8)})"
    if not count:
        return f"{who}{f.line(at)} for {what}, which is no mbarrier any more"
    lacks = [f"{missing} of {_count(count, 'arrival')} missing"] if missing else []
    if expected > brought:
        lacks.append(f"{expected} bytes expected, {brought} brought by the copies that were issued")
    if missing == count and not expected and not brought:
        ended = f"phase {phase - 1}, of parity {(phase - 1) % 2}, has ended" if phase else "no phase has ended yet"
        lacks = [f"nobody has arrived at it ({_count(count, 'arrival')} missing), and {ended}"]
    return f"{who}{f.line(at)} for {what}: phase {phase} is under way, " + " and ".join(lacks)


# ---- the end of a thread, and of a launch ----------------------------------------------------------
def _unfinished(f: Facts) -> str:
    return f"{f.kernel} had run {f.v[0]} of its {_count(f.v[1], 'block')}"


def _timeout(f: Facts) -> str:
    if f.how == "launch":
        return f"{_unfinished(f)} when the time was up"
    running = f"{f.who} was still running{f.here} when the time was up"
    if not f.words:
        return f"{running}: a loop that does not end, or too much work"
    word, _, never = f.words.partition(" ")
    waits = f"{running}: it waits for {f.place}, which stays {f.v[1]}"
    if never:
        return f"{waits}, and which nobody has stored"
    last = "update it with an atomic" if f.how == "atomic" else "store it"
    return f"{waits}; the last to {last} was {f.whom}{f.there}" if f.how else waits


_INSTEAD = {
    "malloc": "pass the memory to the kernel, or use __shared__", "throw": "a kernel has no exceptions: use assert",
    "exit": "use return, or __trap()", "abort": "use assert, or __trap()",
}  # fmt: skip
_INSTEAD |= dict.fromkeys(("calloc", "realloc", "free", "new", "new[]", "delete"), _INSTEAD["malloc"])
_INSTEAD |= dict.fromkeys(("_exit", "_Exit", "quick_exit"), _INSTEAD["exit"])


def _wrong_stream(f: Facts) -> str:
    what, argument = (f.words, "last") if f.words else (f"the launch of {f.kernel}", "fourth launch")
    return (
        f"{what}{f.here} is not put into the stream that the function is given: on a GPU it may run before its inputs "
        f"are there. The {argument} argument is (cudaStream_t)stream"
    )


# By kind: what the thread did (a template of the facts `f`, or a function of them).
_SENTENCES: dict[str, str | Callable[[Facts], str]] = {
    "race": _race,
    "lanes-disagree": (
        "and {f.whom} of one warp store different values{f.here} to the same place, with one instruction: one "
        "of them is kept, and CUDA does not say which"
    ),
    "global-race": _global_race,
    "acquire-missing": (
        "{f.does_globally} {f.place}, which {f.whom} {f.did_globally} and published: the flag "
        "or count was looked at, but no __threadfence() stands behind that look (acquire), so an old value may be read"
    ),
    "uninitialised-global": "{f.does_globally} {f.place}, which nobody has written",
    "uninitialised-local": _uninitialised_local,
    "exited-threads": (
        "waits in {f.how}{f.here} for a block of which only {f.v[0]} of {f.v[1]} threads are left: {f.whom} "
        "has returned before the barrier"
    ),
    "read-before-wait": _read_before_wait,
    "stage-overwritten": _stage_overwritten,
    "uninitialised-shared": lambda f: (
        f"{f.does} shared memory that nobody has written: {f.bytes}"
        + f" of block {f.block(f.v[2])}" * (f.words == "remote")
    ),
    "shared-out-of-bounds": _shared_out_of_bounds,
    "index-out-of-bounds": lambda f: (
        f"uses{f.here} index {f.v[0]} of an array of type " + re.sub(r"\s*\[", " [", f.words.strip("'"), count=1)
    ),
    "not-shared": "takes{f.here} the shared-memory address of a pointer that does not point there",
    "global-out-of-bounds": _global_out_of_bounds,
    "read-only": "{f.does_globally} {f.array}, which the entry declares const",
    "misaligned": _misaligned,
    "never-waited": _never_waited,
    "copy-size": "asks cp.async{f.here} for {f.v[0]} source bytes of {f.v[1]}",
    "divergent": _divergent,
    "deadlock": _deadlock,
    "lanes-missing": lambda f: (
        f"executes {f.how}{f.here} with lanes {lanes(f.v[0])} only, but it needs all 32: "
        + (f"the warp has only {f.v[1]} threads" if f.v[1] < 32 else "the others have exited")
    ),
    "exited-lanes": lambda f: (
        f"calls {f.how}{f.here} with a mask that names lanes {lanes(f.v[0])}, which have exited or never come here"
    ),
    "mask-without-self": (
        "calls {f.how}{f.here} with the mask {f.v[0]:#010x}, in which its own lane, {f.v[1]}, is missing"
    ),
    "shuffle-lane": (
        "asks{f.here} for the value of lane {f.v[0]}, which does not take part in the shuffle (mask {f.v[1]:#010x})"
    ),
    "barrier-arguments": (
        "uses barrier {f.v[0]}{f.here} for {f.v[1]} threads: the id is 0 to 15, the number a multiple of 32"
    ),
    "barrier-threads": (
        "comes to barrier {f.v[0]}{f.here} as one of {f.v[1]} threads, and {f.whom} came to it{f.there} as one "
        "of {f.v[2]}: who meet at a barrier have to say the same number"
    ),
    "cluster-rank": ("{f.does} shared memory of rank {f.v[0]}, in a cluster of {f.v[1]}: ranks begin at 0"),
    "cluster-begin": (
        "{f.does} shared memory of {f.cluster_block}, which need not have begun: no cluster barrier "
        "(cluster_arrive, then cluster_wait) stands before the first such access of a thread"
    ),
    "cluster-end": (
        "{f.does} shared memory of {f.cluster_block}, which may have ended by then, and its shared "
        "memory with it: no cluster barrier (cluster_arrive, then cluster_wait) behind the access holds that block back"
    ),
    "cluster-barrier": lambda f: (
        f"comes to {f.how}{f.here} "
        + (
            "again, with no cluster_wait since its last arrival"
            if f.how == "cluster_arrive"
            else "with no arrival to wait for: cluster_arrive comes first, and once for each wait"
        )
    ),
    "wgmma-registers": _wgmma_registers,
    "wgmma-fence": _wgmma_fence,
    "wgmma-differs": (
        "issues wgmma{f.here} with another {f.words} than {f.whom} of its warpgroup{f.there}: it has to be the "
        "same in all 128 threads"
    ),
    "wgmma-form": _wgmma_form,
    "wgmma-warps": _wgmma_warps,
    "wgmma-block": (
        "issues wgmma{f.here} in a block of {f.v[2]} threads: it needs a warpgroup of 128, and from warp "
        "{f.v[1]} on there are {f.v[0]}"
    ),
    "registers-direction": _registers_direction,
    "registers-missing": _registers_missing,
    "registers-warps": _registers_warps,
    "proxy-fence": _proxy_fence,
    "mbarrier-missing": "comes to {f.how}{f.here}, and there is no mbarrier at that place: {f.bytes}",
    "mbarrier-again": (
        "comes to mbarrier_init{f.here} where {f.mbarrier} is: what is there already ends with mbarrier_inval first"
    ),
    "mbarrier-too-early": (
        "comes to {f.how}{f.here} for {f.mbarrier}, with no barrier since {f.whom} made it: it need not be there yet"
    ),
    "mbarrier-fence": (
        "issues a {f.how}{f.here} that counts at {f.mbarrier}, with no fence_mbarrier_init since {f.whom} made "
        "it: the copy need not find it"
    ),
    "mbarrier-touched": ("{f.does} shared memory that is an mbarrier, made by {f.whom}{f.there}: {f.bytes}"),
    "mbarrier-arrivals": _mbarrier_arrivals,
    "mbarrier-bytes": (
        "comes to {f.how}{f.here}, and then the copies bring {f.v[1]} bytes to a phase of {f.mbarrier} that "
        "has all its arrivals and expects {f.v[0]}"
    ),
    "mbarrier-number": lambda f: f"comes to {f.how}{f.here}{_NUMBERS[f.words].format(*f.v)}",
    "mbarrier-in-use": lambda f: (
        f"comes to mbarrier_inval{f.here} for {f.mbarrier}, while "
        + (
            "a copy that counts at it is on its way"
            if f.v[0]
            else f"{_count(f.v[1], 'thread')} waited there: they never go on"
        )
    ),
    "bulk-size": "asks {f.how}{f.here} for {f.v[0]} bytes; a block has at most {f.v[1]} of shared memory",
    "bulk-misaligned": _bulk_misaligned,
    "tensor-map": _tensor_map,
    "store-corner": (
        "gives {f.how}{f.here} the coordinate {f.v[0]} in dimension {f.v[1]}: only a load may begin before the "
        "tensor, a store may not"
    ),
    "reduce-type": (
        "calls tma_reduce_add{f.here} with a tensor map of a type that it cannot add: it adds 32-bit integers, "
        "UINT64, FLOAT16, BFLOAT16 and FLOAT32"
    ),
    "assert": "fails the assertion `{f.words}`{f.here}",
    "trap": "stops{f.here}: __trap(), or code that must not be reached",
    "division-by-zero": "divides an integer by zero{f.here}",
    "stack-overflow": lambda f: (
        f"uses{f.here} more than {f.v[0] // 1024} KB of local memory: deep recursion, or large arrays"
    ),
    "timeout": _timeout,
    "interrupted": lambda f: (
        f"{_unfinished(f)} when it was interrupted"
        if f.how == "launch"
        else f"{f.who} was running{f.here} when it was interrupted"
    ),
    "host-call": lambda f: f"calls {f.words}{f.here}, which is not emulated in a kernel: {_INSTEAD[f.words]}",
    "launch-in-kernel": (
        "launches {f.words}{f.here}: a kernel that launches another is not emulated: launch it on the host"
    ),
    "launch-configuration": lambda f: f"the launch of {f.kernel} was refused: " + _CONFIGURATION[f.words].format(*f.v),
    "wrong-stream": _wrong_stream,
}
KINDS = tuple(_SENTENCES)
_WHOLE = {"never-waited", "timeout", "interrupted", "launch-configuration", "wrong-stream"}  # the subject is another


def sentence(kind: str, facts: Facts) -> str:
    """One sentence: who did what, where, and against whom."""
    made = _SENTENCES[kind]
    said = made.format(f=facts) if isinstance(made, str) else made(facts)
    return said if kind in _WHOLE else f"{facts.who} {said}"


# ---- the host part ---------------------------------------------------------------------------------
_SIGNALS: dict[int, str] = {
    signal.SIGFPE: "divides an integer by zero",
    signal.SIGILL: "comes to code that must not be reached",
    signal.SIGTRAP: "comes to code that must not be reached",
    signal.SIGABRT: "ends with abort()",
}


def host_end(entry: str, ending: Ending, here: str, seconds: float) -> str:
    """How the host part of an entry ended instead of returning; nothing where it returned.

    here: " in line 12", or nothing. seconds: what the call was allowed.
    """
    who = f"the host part of {entry}"
    said = f": {ending.text}" if ending.text else ""
    check = "a watched build looks for the kernel's line"
    sentences = {
        "returned": "",
        "stuck": f"{who} was still running{here} when the time was up ({seconds:g} s)",
        "exit": f"{who} calls {ending.text}({ending.code}){here}",
        "assert": f"{who} fails the assertion `{ending.text}`{here}",
        "exception": f"{who} throws an exception{here}{said}",
        "device-call": f"{who} calls{here} what only a kernel can call: launch a kernel that does",
        "refused": f"{entry} could not be called: the system has no {ending.text or 'such function'}",
    }
    if ending.kind in sentences:
        return sentences[ending.kind]
    if ending.kind == "signal" and ending.host:
        if ending.code in (signal.SIGSEGV, signal.SIGBUS):
            if ending.stack:
                return f"{who} overflows its stack{here}: a recursion that does not end, or large local arrays"
            wild = "a null pointer" if ending.address < 65536 else "a pointer to memory that is not its own"
            return f"{who} follows {wild}{here}"
        return f"{who} {_SIGNALS.get(ending.code, f'was ended by signal {ending.code}')}{here}{said}"
    if ending.kind == "signal":
        return f"the emulator was ended by signal {ending.code} while a kernel of {entry} ran{said}: {check}"
    if ending.code in (signal.SIGKILL, signal.SIGTERM):
        return f"the process that ran {entry} was killed (signal {ending.code}): by the source, or for want of memory"
    how = f"with signal {ending.code}" if ending.code else "by itself"
    return f"the process that ran {entry} ended {how}{said}: {check}"
