"""Phase 13 on several GPUs of one host: one sequence over all of them, beside one GPU and PyTorch's context_parallel.

    flashlab bench ring                                   # on all GPUs here; writes recorded/ring_<gpu>[_x<GPUs>].json
    flashlab bench ring --quick                                  # tiny, two ranks as threads with gloo, on any machine

Rows: heads, kv_heads, n (the whole sequence), causal, pass ("forward" or "both"), name; ms (of the slowest rank, of
calls in a row that take 40 ms, issued while the GPU still waits; median of the rounds, all names in turns), fastest,
slowest; of_ideal: one GPU's time over the ranks and over this; peak_bytes of a rank; error (forward): rms of sampled
rows against float64. The part "link" has what a rank sends to the next while it receives as much, in the same run.

The names: one GPU, the whole sequence; flashlab.distributed's ring, zigzag or contiguous (alone without a mask), not
sending while computing, with all heads at once (not as few as keep a GPU busy), or as a graph; its all-gather and
Ulysses; rings of pairs, on more than two GPUs: pairs exchange heads; and context_parallel over two backends of SDPA.
"""

import argparse
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import flashlab
from flashlab.bench import harness, records, timing
from flashlab.bench.harness import Data, Row, Way
from flashlab.bench.records import NoGpu
from flashlab.bench.rows import of as rows_of
from flashlab.bench.rows import where
from flashlab.distributed import all_gather_attention, mesh_attention, ring_attention, shard, start, ulysses_attention
from flashlab.distributed.layout import places
from flashlab.distributed.link import Link
from flashlab.distributed.scaling import Machine, one_gpu, simulate
from flashlab.distributed.threads import run
from flashlab.table import Table

ONE, ZIGZAG, CONTIGUOUS = "one GPU", "ring, zigzag", "ring, contiguous"
CUDNN, FA2 = "context_parallel, cuDNN", "context_parallel, FlashAttention-2"
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FA2: SDPBackend.FLASH_ATTENTION}
ALTERNATELY, GATHER, ULYSSES, PAIRS = "ring, one after the other", "all-gather", "Ulysses", "rings of pairs"
AT_ONCE = "ring, all heads at once"
OURS = {True: ZIGZAG, False: CONTIGUOUS}  # what counts, causal or not
SIMULATED = {ZIGZAG: ("ring", "zigzag"), CONTIGUOUS: ("ring", "contiguous"), GATHER: ("gather", "zigzag"),
             ULYSSES: ("ulysses", "zigzag"), PAIRS: ("mesh", "zigzag")}  # fmt: skip
"""How flashlab.distributed.scaling names the ways."""


class Case(NamedTuple):
    """One line of the table; bf16, head_dim 128, batch 1."""

    heads: int
    kv_heads: int
    n: int
    causal: bool
    which: str

    @property
    def row(self) -> Row:
        return dict(heads=self.heads, kv_heads=self.kv_heads, n=self.n, causal=self.causal) | {"pass": self.which}


CASES = (
    Case(16, 16, 65536, True, "forward"), Case(16, 16, 16384, True, "forward"), Case(16, 16, 65536, True, "both"),
    Case(16, 16, 65536, False, "forward"), Case(8, 8, 262144, True, "forward"), Case(32, 8, 65536, True, "forward"),
    Case(32, 8, 65536, True, "both"), Case(16, 16, 2**19, True, "both"),
)  # fmt: skip
LONG = CASES[-1]  # of this the memory counts: only one GPU and the ring are measured
QUICK = (Case(4, 2, 64, True, "both"), Case(4, 2, 64, False, "forward"))
MANY = tuple(Case(heads, heads, n, True, which) for n in (2**16, 2**18, 2**20) for heads in (16, 8)
             for which in ("forward", "both"))  # fmt: skip
"""On more than two GPUs."""
GOALS: dict[Case, float] = {CASES[0]: 0.97, CASES[1]: 0.80, CASES[2]: 0.93, CASES[3]: 0.985, CASES[4]: 0.985}
"""The share of the ideal that the ring is to reach on two GPUs; set before anything was measured."""
GOALS_OF_MANY = {4: 0.95, 8: 0.92}  # the same on so many, at 262144 tokens
OVER_PEER, ERROR, LONGEST = 1.2, 1.1, 0.975
"""Both passes, at 65536 on two GPUs and at 262144 on more: times as fast as context_parallel. The error, of one GPU's.
The longest sequence, of as many times one GPU's as there are ranks: 1.95 of 2."""


PAUSE = 4_000_000
"""Cycles, 2 ms, for which a GPU waits before it is timed: in the middle of a model Python is as far ahead. What takes
longer to issue than to run is timed so all the same: calls in a row."""


# ---- what is timed ---------------------------------------------------------------------------------------------------
def ways(link: Link, case: Case, whole: Sequence[torch.Tensor], graphs: bool) -> dict[str, Callable[[], Way]]:
    """By name a function that prepares one, and returns what is to be timed; whole: q, k, v and dO."""

    def passes(inputs: Sequence[torch.Tensor], attention: Callable[..., torch.Tensor]) -> Way:
        q, k, v, grad_o = inputs
        if case.which == "forward":
            return lambda: attention(q, k, v)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return lambda: (o := attention(*leaves), torch.autograd.grad(o, leaves, grad_o))[0]

    @functools.cache  # a layout's shards are the same for every way
    def mine(layout: str, heads: int) -> list[torch.Tensor]:
        return [shard(x, link.rank, link.world, layout=layout, heads=heads) for x in whole]

    def over_ranks(function: Callable[..., torch.Tensor], layout: str, heads: int = 1, **options: Any) -> Way:
        if heads > 1:
            options["mesh"] = link.split(heads)
        else:
            options["group"] = link
        return passes(mine(layout, heads), functools.partial(function, causal=case.causal, layout=layout, **options))

    best = "zigzag" if case.causal else "contiguous"
    ring = functools.partial(over_ranks, ring_attention)
    brief = case.n <= 2**18  # where a call takes seconds, what says nothing new is left out
    found: dict[str, Callable[[], Way]] = {
        ONE: lambda: passes(whole, functools.partial(flashlab.flash_attention, causal=case.causal)),
        CONTIGUOUS: functools.partial(ring, "contiguous"),
        OURS[case.causal]: lambda: ring(best),
    }
    if case == LONG:
        return {name: found[name] for name in (ONE, OURS[case.causal])}
    if brief:
        found[ALTERNATELY] = lambda: ring(best, overlap=False)
        found[AT_ONCE] = lambda: ring(best, together=case.kv_heads)
    if graphs:
        found["ring, as a graph"] = lambda: _recorded(ring(best))
    found[GATHER] = lambda: over_ranks(all_gather_attention, best)
    found[ULYSSES] = lambda: over_ranks(ulysses_attention, "contiguous")
    if link.world > 2 and link.world % 2 == 0:
        found[PAIRS] = lambda: over_ranks(mesh_attention, best, heads=2)
    if whole[0].is_cuda and case.heads == case.kv_heads:
        peers = BACKENDS if brief else {CUDNN: BACKENDS[CUDNN]}
        found |= {name: functools.partial(_context_parallel, case, backend, whole) for name, backend in peers.items()}
    return found


def _recorded(work: Way) -> Way:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        work()
    return graph.replay


def _context_parallel(case: Case, backend: SDPBackend, whole: Sequence[torch.Tensor]) -> Way:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    buffers = [x.clone() for x in whole]
    entered = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers))
    both = case.which == "both"

    def work() -> Any:
        q, k, v, grad_o = mine
        with sdpa_kernel(backend):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
            return torch.autograd.grad(o, (q, k, v), grad_o) if both else o

    entered.__enter__()  # it cuts the buffers, and changes SDPA until it is left: `work.close`
    mine = [x.detach().requires_grad_(both and i < 3) for i, x in enumerate(buffers)]
    work.close = lambda: entered.__exit__(None, None, None)  # type: ignore[attr-defined]
    return work


# ---- time, over ranks ------------------------------------------------------------------------------------------------
AT_LEAST_MS, MOST_MS = 40.0, 25e3
"""Calls in a row take so long, that a start which ranks do not share to 0.1 ms counts for little; the rounds of a case
together no longer than that, if two do."""


def milliseconds(link: Link, work: Way, times: int = 1) -> float:
    """Of the slowest rank, one of `times` calls in a row; all begin together."""
    link.all_gather(torch.zeros(1, device=link.device))

    def several() -> None:
        for _ in range(times):
            work()

    if link.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda._sleep(PAUSE)
        took = timing.milliseconds(several, torch.cuda.current_stream())
    else:
        start = time.perf_counter()
        several()
        took = 1e3 * (time.perf_counter() - start)
    return link.all_gather(torch.tensor([took / times], device=link.device)).max().item()


def link_speed(link: Link, mib: int, rounds: int) -> Row:
    """10^9 bytes per second that a rank sends to the next while it receives as much."""
    x = torch.empty(mib << 20, dtype=torch.uint8, device=link.device)

    def both_ways() -> None:
        _, arrived = link.pass_on(x)
        arrived()

    both_ways()
    found = timing.summary([milliseconds(link, both_ways) for _ in range(rounds)])
    return {"part": "link", "mib": mib, "name": "pass_on", "gb_s": x.nbytes / found["ms"] / 1e6} | found


def measure(link: Link, case: Case, rounds: int, graphs: bool = False) -> list[Row]:
    """The rows of a case; the same on every rank."""
    device = link.device
    generator = torch.Generator(device).manual_seed(case.n)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    head_dim = 128 if device.type == "cuda" else 16
    whole = [torch.randn(1, h, case.n, head_dim, device=device, generator=generator).to(dtype) for h in heads]
    rows: list[Row] = []
    able: dict[str, Way] = {}
    for name, prepare in ways(link, case, whole, graphs).items():
        row: Row = {"part": "ring"} | case.row | {"name": name}
        work = None
        try:
            work = prepare()
            if device.type == "cuda":
                row["peak_bytes"] = timing.allocated(work)  # the first call: it compiles
            else:
                work()
            if case.which == "forward" and name in (ONE, OURS[case.causal]):
                row["error"] = _error(link, case, whole, work(), name)
            if hasattr(work, "close"):  # it changes SDPA for all: timed by itself
                row |= _timed(link, {name: work}, rounds)[name]
            else:
                able[name] = work
        except Exception as error:  # of all ranks alike
            row["unavailable"] = timing.reason(error)
        finally:
            if hasattr(work, "close"):
                work.close()  # type: ignore[union-attr]
        rows.append(row)
    by_name = {row["name"]: row for row in rows}
    for name, found in _timed(link, able, rounds).items():
        by_name[name] |= found
    for row in rows:
        if "ms" in row and "ms" in by_name[ONE] and row["name"] != ONE:
            row["of_ideal"] = by_name[ONE]["ms"] / link.world / row["ms"]
    return rows


def _timed(link: Link, able: Mapping[str, Way], rounds: int) -> dict[str, Row]:
    """Milliseconds by name, a round after the other; no more rounds than `MOST_MS` allows, but two."""
    first = {name: milliseconds(link, work) for name, work in able.items()}
    least = AT_LEAST_MS if link.device.type == "cuda" else 0.0
    often = {name: max(1, math.ceil(least / ms)) for name, ms in first.items()}
    a_round = sum(often[name] * ms for name, ms in first.items())
    long = a_round * rounds > MOST_MS
    times = {name: [ms] if long else [] for name, ms in first.items()}
    for number in range(max(1, int(MOST_MS / a_round) - 1) if long else rounds):
        for name in timing.order(able, number):
            times[name].append(milliseconds(link, able[name], often[name]))
    return {name: timing.summary(samples) for name, samples in times.items()}


def _error(link: Link, case: Case, whole: Sequence[torch.Tensor], o: torch.Tensor, name: str) -> float:
    """The rms error of some 64 rows of the first head, over all ranks, relative to their rms."""
    q, k, v = (x[0, 0].double() for x in whole[:3])
    mine = places(case.n, link.rank, link.world, layout="zigzag" if case.causal else "contiguous").to(q.device)
    picked = torch.arange(0, len(mine), max(1, len(mine) // 64), device=q.device)
    stand = mine[picked]
    s = q[stand] @ k.T * q.shape[-1] ** -0.5
    if case.causal:
        s = s.masked_fill(torch.arange(case.n, device=q.device)[None, :] > stand[:, None], float("-inf"))
    want = torch.softmax(s, -1) @ v
    got = o[0, 0, stand if name == ONE else picked].double()
    sums = link.all_gather(torch.stack([(got - want).pow(2).sum(), want.pow(2).sum()])).sum(0)
    return (sums[0] / sums[1]).sqrt().item()


# ---- what a record says ----------------------------------------------------------------------------------------------
def of(data: Data, case: Case) -> dict[str, Row]:
    """The rows of a case, by name."""
    return {row["name"]: row for row in where(data["rows"], part="ring", **case.row)}


def goals(data: Data) -> list[tuple[str, float | None, float, bool]]:
    """(what, found, wanted, met) of the goals for so many GPUs."""
    found: list[tuple[str, float | None, float, bool]] = []

    def add(what: str, value: float | None, wanted: float, most: bool = False) -> None:
        found.append((what, value, wanted, value is not None and (value <= wanted if most else value >= wanted)))

    wanted_of = GOALS
    if (ranks := data["ranks"]) > 2:
        wanted_of = {case: GOALS_OF_MANY[ranks] for case in MANY if case.n == 2**18 and ranks in GOALS_OF_MANY}
    for case, wanted in wanted_of.items():
        rows = of(data, case)
        mask = "causal" if case.causal else "full"
        what = f"{case.heads} heads, N {case.n}, {mask}, {case.which}"
        ours, one = rows.get(OURS[case.causal], {}), rows.get(ONE, {})
        add(f"{what}: of the ideal", ours.get("of_ideal"), wanted)
        if "error" in ours and "error" in one:
            add(f"{what}: error, of one GPU's", ours["error"] / one["error"], ERROR, most=True)
        peers = [rows[name]["ms"] for name in BACKENDS if "ms" in rows.get(name, {})]
        if case.which == "both" or ranks > 2:
            ratio = min(peers) / ours["ms"] if peers and "ms" in ours else None
            add(f"{what}: times context_parallel", ratio, OVER_PEER)
    longest = LONG if ranks == 2 else max(MANY, key=lambda case: (case.which == "both", case.n, case.heads))
    rows = of(data, longest)
    if all("peak_bytes" in rows.get(name, {}) for name in (ONE, ZIGZAG)):
        ratio = _memory(rows[ONE], longest, 1) / _memory(rows[ZIGZAG], longest, ranks) / ranks
        add(f"N {longest.n}, both: longest sequence by memory, of one GPU's times the ranks", ratio, LONGEST)
    return found


def simulated_machine(hopper: Data) -> Machine:
    """The machine that scaling.simulate takes, from phase 11's record: its kernels' speeds, causal, at head_dim 128."""
    forward, backward = (
        {row["N"]: row["tflops"] for row in where(rows_of(hopper), part=part, name=name, causal=True, D=128)}
        for part, name in (("variants", "p11_flash"), ("backward", "p11"))
    )
    return Machine(forward, backward=backward)


def simulated(machine: Machine, case: Case, name: str, ranks: int) -> float | None:
    """The share of the ideal that the simulation gives; None for a way that it does not know."""
    if name not in SIMULATED or not case.causal:
        return None
    way, layout = SIMULATED[name]
    both = case.which == "both"
    alone = one_gpu(machine, case.n, heads=case.heads, head_dim=128, both=both)
    options: dict[str, Any] = dict(heads=case.heads, kv_heads=case.kv_heads, head_dim=128, layout=layout, group=2)
    return alone / ranks / simulate(way, machine, ranks, case.n, both=both, **options)


def _memory(row: Row, case: Case, ranks: int) -> float:
    """Bytes of a rank: its q, k, v and dO, and what a pass makes. All of it grows with the length."""
    return row["peak_bytes"] + 2 * 128 * (2 * case.heads + 2 * case.kv_heads) * case.n / ranks


def table(data: Data) -> Table:
    """Every case and name: milliseconds, the share of the ideal, memory, error."""
    cells = []
    for row in where(data["rows"], part="ring"):
        heads = f"{row['heads']}/{row['kv_heads']}" if row["heads"] != row["kv_heads"] else str(row["heads"])
        what = f"{heads}, {row['n']}, {'causal' if row['causal'] else 'full'}, {row['pass']}"
        ms = f"{row['ms']:.3f}" if "ms" in row else row["unavailable"][:40]
        peak = f"{row['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in row else ""
        ideal, error = (f"{row[k]:{f}}" if k in row else "" for k, f in (("of_ideal", ".3f"), ("error", ".2e")))
        cells.append([what, row["name"], ms, ideal, peak, error])
    speed = next((row["gb_s"] for row in where(data["rows"], part="link")), float("nan"))
    caption = f"{data['ranks']} ranks, each sends {speed:.1f} GB/s while it receives as much; bf16, head_dim 128"
    columns = ["heads, N, mask, pass", "name", "ms", "of ideal", "MiB", "error"]
    return Table.of(cells, columns, align="llrrrr", caption=caption)


def goals_table(data: Data) -> Table:
    cells = [[what, "not measured" if value is None else f"{value:.3f}", f"{wanted:g}", "yes" if met else "no"]
             for what, value, wanted, met in goals(data)]  # fmt: skip
    return Table.of(cells, [f"goal, set for {data['ranks']} GPUs", "found", "wanted", "met"], align="lrrl")


# ---- as a program ----------------------------------------------------------------------------------------------------
def measure_all(
    link: Link, quick: bool, graphs: bool = False, save: Callable[[list[Row]], None] = lambda rows: None
) -> list[Row]:
    """All rows, on every rank; rank 0 saves after each case."""
    rows = [link_speed(link, 1 if quick else 512, 2 if quick else 9)]
    for case in QUICK if quick else CASES if link.world == 2 else MANY:
        rows += measure(link, case, 2 if quick else 9, graphs)
        if link.rank == 0:
            save(rows)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """The bench as a program; under torchrun each rank is one. Raises NoGpu."""
    parser = records.parser(__doc__, "ring")
    parser.add_argument("--ranks", type=int, default=None, help="how many GPUs; all of this machine by default")
    parser.add_argument("--graphs", action="store_true", help="the ring as a CUDA graph too")
    given = parser.parse_args(arguments)
    if "RANK" in os.environ:
        link = start()
        try:
            _as_rank(link, given)
        finally:
            dist.destroy_process_group()
    elif given.quick:
        ranks = given.ranks or 2
        rows = run(ranks, lambda link: measure_all(link, True))[0]
        records.keep(given.out, _record(records.machine(), ranks, rows), table, given)
    else:
        there = torch.cuda.device_count()
        ranks = given.ranks or there
        if ranks < 2 or ranks > there:
            raise NoGpu(f"a ring takes two GPUs at least, and PyTorch sees {there}; --quick runs on any machine")
        rest = [x for x in (sys.argv[1:] if arguments is None else arguments) if x not in ("bench", "ring")]
        started = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        if (done := harness.again(*started, "-m", "flashlab.bench.ring", *rest)).returncode:
            raise SystemExit(done.returncode)


def _as_rank(link: Link, given: argparse.Namespace) -> None:
    path = records.place("ring", given)
    if path is not None and given.out is None and link.world > 2:
        path = path.with_stem(f"{path.stem}_x{link.world}")

    with timing.measured() as machine:

        def save(rows: list[Row]) -> None:
            if path is not None:
                records.write_json(path, _record(machine, link.world, rows))

        rows = measure_all(link, given.quick, given.graphs, save)
    if link.rank == 0:
        data = _record(machine, link.world, rows)
        records.keep(path, data, table, given)
        if not given.json:
            print(goals_table(data))


def _record(machine: Mapping[str, Any], ranks: int, rows: list[Row]) -> Data:
    return {"bench": "ring", "machine": dict(machine), "ranks": ranks, "rows": rows}


if __name__ == "__main__":
    records.entry(main)
