"""Phase 12: one query per sequence over long caches, paged and contiguous, beside SDPA and kernels with pages.

bf16; CUDA graphs that go through copies of the cache which together exceed the L2. Pages of 16 or of 1 (peers: 16 or
128), the table permuted; SDPA reads a contiguous cache, FlashInfer is planned beforehand, FlexAttention takes
the faster of two settings: `setting`, and of one that does not run why: `refused`. Before it is
timed, each way is compared with float64 on its longest and its shortest sequence: one that is wrong has no time. Rows:
batch, heads, kv_heads, keys, head_dim, ragged, name; times, gb_s of K and V read once, error (of its bound).

generate: GPT-2 small in bf16 behind `keys` tokens of each text. ms of a token for the whole batch, by the wall clock,
launches and all; cache_bytes; `same`: the share of SDPA's tokens that it writes too. Ways differ in attention alone:
the same kernel appends to every cache.
"""

import functools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from flashlab import flash_attention_with_cache, runtime
from flashlab.attention.cache_door import gathered
from flashlab.attention.tiles import cdiv
from flashlab.bench import harness, peers, timing
from flashlab.bench.harness import Data, Row, Way
from flashlab.bench.rows import by, where
from flashlab.check.training import wanted, worst
from flashlab.cuda import decoding
from flashlab.kernels.series import DECODING
from flashlab.models.caches import PagedCache, StaticCache
from flashlab.models.generate import recorded, step
from flashlab.models.language_model import LanguageModel, config
from flashlab.table import Table

OURS, WHOLE, ONES = "p12_decode, pages of 16", "p12_decode, contiguous", "p12_decode, pages of 1"
CUDNN, FLASHINFER = "cuDNN, contiguous", "FlashInfer, pages of 16"
RAGGED = (8192, 64, 300, 4096, 1, 1500, 64, 7000) * 2


class Case(NamedTuple):
    """Sequences of `keys` keys; ragged: keys is their mean, and RAGGED has their lengths."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    head_dim: int = 128
    ragged: bool = False

    @property
    def lengths(self) -> tuple[int, ...]:
        return RAGGED if self.ragged else (self.keys,) * self.batch

    @property
    def cache_bytes(self) -> int:
        return 2 * 2 * sum(self.lengths) * self.kv_heads * self.head_dim


EVEN = Case(16, 32, 8, sum(RAGGED) // 16)
UNEVEN = EVEN._replace(ragged=True)
LARGE = (Case(1, 32, 8, 65536), Case(16, 32, 8, 4096), Case(64, 32, 8, 2048), Case(32, 64, 8, 8192))
MICROSECONDS = {
    Case(1, 32, 8, 8192): 13.0, Case(1, 32, 4, 1024): 6.5, Case(1, 32, 4, 4096): 8.5, Case(1, 16, 16, 16384, 64): 20.0,
    UNEVEN: 48.0,
}  # fmt: skip
"""Goals of OURS on an H200, as all here set before anything was measured."""
OF_CUDNN, OF_EVEN, OF_WHOLE, ONES_OF_WHOLE = 1.0, 1.10, 1.03, 1.15
"""The large caches, in cuDNN's speed; the ragged batch, in its even twin's time; pages of 16 and of 1, in the time of a
contiguous cache."""
CASES = (*LARGE, *MICROSECONDS, EVEN)
QUICK = (Case(2, 4, 2, 70, 64),)
OF_STEPS = (LARGE[1], LARGE[2], Case(1, 32, 8, 8192), Case(1, 32, 4, 1024))

WRITING = ((1, 8192), (1, 1024), (16, 8192))
"""Texts, and tokens that each has already, of the part "generate"."""
GRAPH = "SDPA, static cache, compiled, graph"
OURS_WRITES = "p12_decode, paged cache, compiled, graph"
_WRITE = {"SDPA, static": ("sdpa", "static"), "p12_decode, static": ("p12_decode", "static"),
          "p12_decode, paged": ("p12_decode", "paged"), "Triton, paged": ("triton", "paged")}  # fmt: skip
WRITERS = {GRAPH: (*_WRITE["SDPA, static"], "compiled"), OURS_WRITES: (*_WRITE["p12_decode, paged"], "compiled")} | {
    f"{name} cache{', ' * bool(how)}{how}": (*way, how) for how in ("graph", "") for name, way in _WRITE.items()
}
"""By name: the backend of `flashlab.models.generate`, the cache, and what is recorded in a graph."""
OF_SDPA = 1.2  # the goal of p12_decode with a paged cache, in GRAPH's speed


def jobs() -> list[Row]:
    """What counts first."""
    writing: list[Row] = [{"part": "generate", "batch": batch, "keys": keys} for batch, keys in WRITING]
    return _jobs("work", CASES) + writing + _jobs("steps", OF_STEPS)


def quick_jobs() -> list[Row]:
    return _jobs("work", QUICK)


def _jobs(part: str, cases: Sequence[Case]) -> list[Row]:
    return [{"part": part} | case._asdict() for case in cases]


# ---- inputs ----------------------------------------------------------------------------------------------------------
class Filled:
    """A cache of a case: k and v, lengths, and the table (page None: contiguous, no table)."""

    def __init__(self, case: Case, page: int | None, seed: int) -> None:
        device = runtime.device()
        pages, rows, self.table = case.batch, max(case.lengths), None
        if page is not None:
            need = [cdiv(n, page) for n in case.lengths]
            pages, rows = sum(need), page
            generator = torch.Generator(device).manual_seed(seed)
            order = torch.randperm(pages, generator=generator, device=device).int()
            self.table = torch.zeros(case.batch, max(need), dtype=torch.int32, device=device)
            for i, mine in enumerate(order.split(need)):
                self.table[i, : len(mine)] = mine
            self.order, self.need = order, need
        shape = (pages, case.kv_heads, rows, case.head_dim)
        self.k, self.v = harness.draw(shape, shape, dtype=torch.bfloat16, seed=seed)
        self.lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)

    def sequence(self, i: int, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The n keys and values of a sequence, in their order."""
        if self.table is None:
            return self.k[i : i + 1, :, :n], self.v[i : i + 1, :, :n]
        width = cdiv(n, self.k.shape[2])
        there = torch.arange(width * self.k.shape[2], device=self.k.device)[None] < n
        k, v = (gathered(x, self.table[i : i + 1, :width], there)[:, :, :n] for x in (self.k, self.v))
        return k, v


def ways(case: Case, part: str) -> dict[str, tuple[int | None, Callable[[torch.Tensor, Filled], Way]]]:
    """By name the page size of the cache, and what makes of q and a cache the function that is timed."""

    def door(backend: str) -> Callable[[torch.Tensor, Filled], Way]:
        return lambda q, x: lambda: flash_attention_with_cache(q, x.k, x.v, x.lengths, x.table, backend=backend)

    def kernel(name: str | None) -> Callable[[torch.Tensor, Filled], Way]:
        scale = case.head_dim**-0.5
        return lambda q, x: lambda: decoding.decode(q, x.k, x.v, x.lengths, x.table, scale=scale, name=name)[0]

    if part == "steps":
        found = {s.name: (None if i < 2 else 16, kernel(s.name)) for i, s in enumerate(DECODING)}
        return found | ({decoding.CLUSTER: (16, kernel(None))} if case.batch == 1 else {})
    found = {
        OURS: (16, door("p12_decode")), WHOLE: (None, door("p12_decode")), ONES: (1, door("p12_decode")),
        "Triton, pages of 16": (16, door("triton")), FLASHINFER: (16, _flashinfer),
    }  # fmt: skip
    found |= {f"FlashAttention-4, pages of {page}": (page, _fa4) for page in (16, 128)}
    if not case.ragged:
        found |= {
            CUDNN: (None, lambda q, x: peers.sdpa("CUDNN_ATTENTION", q, x.k, x.v)),
            "FlashAttention-2, contiguous": (None, lambda q, x: peers.sdpa("FLASH_ATTENTION", q, x.k, x.v)),
        }
    if harness.on_gpu():  # on a CPU it is compiled for half a minute
        one, two = (functools.partial(_flex, whole) for whole in (False, True))
        lists = {"one list": one, "two lists": two}
        found |= {f"FlexAttention, pages of {page}": (page, Fastest(case, lists)) for page in (16, 128)}
        found |= {} if case.ragged else {"FlexAttention, contiguous": (None, one)}
    return found


class Fastest:
    """Makes the way that is the fastest, on the first cache, of those of some settings that run and are right."""

    def __init__(self, case: Case, settings: Mapping[str, Callable[[torch.Tensor, Filled], Way]]) -> None:
        self.case, self.settings, self.told = case, settings, dict[str, Any]()

    def __call__(self, q: torch.Tensor, x: Filled) -> Way:
        def right(name: str) -> Way:
            work = self.settings[name](q, x)
            refuse(off(self.case, q, x, work()))
            return work

        if not self.told:
            able, refused = timing.made(self.settings, right)
            times, more = harness.times_of(able, rounds=3)
            if not times:
                raise RuntimeError("; ".join(dict.fromkeys((refused | more).values())))
            self.told = {"setting": min(times, key=lambda name: times[name]["ms"]), "refused": refused | more}
        return self.settings[self.told["setting"]](q, x)


@functools.cache
def _workspace(device: torch.device) -> torch.Tensor:
    """For all wrappers: one of them runs at a time."""
    return torch.empty(256 << 20, dtype=torch.uint8, device=device)


def _flashinfer(q: torch.Tensor, x: Filled) -> Way:
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    batch, heads, _, head_dim = q.shape
    kv_heads, page = x.k.shape[1:3]
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(_workspace(q.device), "HND", use_tensor_cores=True)
    begins = torch.tensor([0, *x.need], device=q.device).cumsum(0).int()
    last = (x.lengths - 1) % page + 1
    wrapper.plan(begins, x.order, last, heads, kv_heads, head_dim, page, q_data_type=q.dtype, kv_data_type=q.dtype)
    return lambda: wrapper.run(q[:, :, 0], (x.k, x.v))[:, :, None]


def _fa4(q: torch.Tensor, x: Filled) -> Way:
    """FlashAttention-4, which refuses to split keys on capability 9.0. Given parts as sequences of their own, for its
    own kernel to combine, it ended in an illegal access (4.0.0b36, 1 x 65536, two parts).
    """
    theirs, why = peers.fa4("flash_attn_varlen_func")
    if theirs is None:
        raise RuntimeError(why)
    rows, k, v = q.transpose(1, 2).contiguous(), x.k.transpose(1, 2), x.v.transpose(1, 2)
    return lambda: theirs(rows, k, v, seqused_k=x.lengths, page_table=x.table)[0].transpose(1, 2)


def _flex(whole: bool, q: torch.Tensor, x: Filled) -> Way:
    """FlexAttention, with pages by the mask of PyTorch's PagedAttention: in one list, which it shares out evenly, or
    (whole) with those that need no mask in a list of their own. K and V are put in its layout beforehand. Without a
    mask a contiguous cache is one block for it, read by one part of its grid."""
    from torch.nn.attention.experimental._paged_attention import PagedAttention
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, noop_mask

    k, v, page, device = x.k, x.v, 128, q.device
    if x.table is None:
        blocks = create_block_mask(noop_mask, None, None, 1, k.shape[2], device=device.type)
    else:
        pages, _, page, _ = k.shape
        paged = PagedAttention(pages, page, len(q), device.type)
        for i, mine in enumerate(x.order.split(x.need)):
            paged.physical_to_logical[i, mine.long()] = torch.arange(len(mine), device=device)
        table = F.pad(x.table, (0, pages - x.table.shape[1]))[:, None, None]  # [batch, 1, 1, pages]
        full, count = (((x.lengths + more) // page)[:, None, None] for more in (0, page - 1))
        last = table.gather(-1, (count - 1).long()[..., None].expand_as(table))
        blocks = BlockMask.from_kv_blocks(
            count - full if whole else count, last if whole else table, full if whole else None,
            table if whole else None, (128, page), paged.get_mask_mod(None, x.lengths), (1, pages * page),
        )  # fmt: skip
        k, v = (y.transpose(0, 1).flatten(1, 2)[None] for y in (k, v))  # [1, kv_heads, all keys, head_dim]
    # Its own for capability 9.0, with more stages of short pages; PyTorch 2.13 takes one stage.
    tiles = {"BLOCK_N": min(page, 64), "num_stages": 3 if page > 16 else 6, "num_warps": 2}
    return peers.flex(q, k, v, mask=blocks, tiles=tiles)


# ---- measuring -------------------------------------------------------------------------------------------------------
def measure(job: Row) -> list[Row]:
    if job["part"] == "generate":
        return generate(job)
    case = Case(**{name: job[name] for name in Case._fields})
    (q,) = harness.draw((case.batch, case.heads, 1, case.head_dim), dtype=torch.bfloat16, seed=0)
    sets = timing.input_sets(case.cache_bytes, most=64) if harness.on_gpu() else 1
    caches: dict[int | None, list[Filled]] = {}
    known, errors = ways(case, job["part"]), {}

    def make(name: str) -> list[Way]:
        page, way = known[name]
        if page not in caches:
            caches[page] = [Filled(case, page, seed) for seed in range(sets)]
        works = [way(q, x) for x in caches[page]]
        errors[name] = {"error": off(case, q, caches[page][0], works[0]())} | getattr(way, "told", {})
        refuse(errors[name]["error"])
        return works

    able, reasons = timing.made(known, make)
    times, more = harness.times_of(able)
    found = {name: row | {"gb_s": case.cache_bytes / row["ms"] / 1e6} for name, row in times.items()}
    rows = {row["name"]: row | errors.get(row["name"], {}) for row in harness.rows_of(job, found, reasons | more)}
    return [rows[name] for name in known]


class Writer:
    """A model behind `keys` random tokens of each of `batch` texts, with room for `more`."""

    def __init__(self, model: LanguageModel, name: str, batch: int, keys: int, more: int) -> None:
        self.backend, kind, self.how = WRITERS[name]
        options: dict[str, Any] = dict(dtype=torch.bfloat16, device=runtime.device(), capacity=keys + more)
        if kind == "paged":
            self.cache: StaticCache = PagedCache(model.config, batch, batch * cdiv(keys + more, 16), **options)
        else:
            self.cache = StaticCache(model.config, batch, **options)
        self.model, self.batch = model, batch
        self.further: Callable[..., torch.Tensor] = functools.partial(
            step, model, cache=self.cache, backend=self.backend
        )
        shape = (batch, model.config.key_heads, keys, model.config.head_dim)
        self.cache.reserve([keys] * batch)
        for layer in range(model.config.depth):
            self.cache.write(layer, *harness.draw(shape, shape, dtype=torch.bfloat16, seed=layer))

    def write(self, last: torch.Tensor, tokens: int) -> tuple[torch.Tensor, float]:
        """[batch, tokens], on the CPU, behind `last`, [batch, 1] there; and the seconds that they took."""
        written = [last.to(runtime.device())]
        start = time.perf_counter()
        for _ in range(tokens):
            self.cache.reserve([1] * self.batch)
            if self.how:
                compiled = self.how == "compiled"
                self.further = recorded(self.model, written[-1], self.cache, self.backend, compiled=compiled)
                self.how = ""
            written.append(self.further(written[-1]).argmax(-1, keepdim=True))
        return torch.cat(written[1:], 1).cpu(), time.perf_counter() - start


@torch.no_grad()
def generate(job: Row, size: str = "small", tokens: int = 32, rounds: int = 7) -> list[Row]:
    """The rows of a part "generate": each way goes on with its text, in turns."""
    batch, keys = job["batch"], job["keys"]
    most = tokens * (rounds + 1)
    peers.many_shapes()
    torch.manual_seed(0)
    model = LanguageModel(config(size, positions=keys + most))
    for weight in model.parameters():
        weight.mul_(4 if weight.ndim == 2 else 1)  # as a model starts, all tokens are nearly as likely
    model = model.to(runtime.device(), torch.bfloat16)
    rows = {name: job | {"name": name} for name in WRITERS}
    writers, texts = {}, {}
    for name, row in rows.items():
        try:
            writers[name] = writer = Writer(model, name, batch, keys, most)
            row["cache_bytes"] = sum(x.numel() * x.element_size() for x in (*writer.cache.k, *writer.cache.v))
            texts[name], _ = writer.write(torch.zeros(batch, 1, dtype=torch.long), tokens)  # and compiles
            row["same"] = (texts[name] == texts.get(GRAPH, texts[name])).double().mean().item()
        except Exception as error:
            row["unavailable"] = timing.reason(error)
    times: dict[str, list[float]] = {name: [] for name in texts}
    for _ in range(rounds):
        for name in random.sample(list(texts), len(texts)):
            texts[name], seconds = writers[name].write(texts[name][:, -1:], tokens)
            times[name].append(1e3 * seconds / tokens)
    for name, took in times.items():
        rows[name] |= timing.summary(took)
    return list(rows.values())


def refuse(error: float) -> None:
    if not error <= 1:
        raise ValueError(f"wrong: o is off by {error:.3g} times its bound")


def off(case: Case, q: torch.Tensor, x: Filled, o: torch.Tensor) -> float:
    """The error of the longest and of the shortest sequence, as a multiple of its bound: right is at most 1."""
    found = []
    for n in {max(case.lengths), min(case.lengths)}:
        i = case.lengths.index(n)
        right = wanted(q[i : i + 1], *x.sequence(i, n), causal=True)
        found.append(worst({"o": right["o"]}, o=o[i : i + 1])[1])
    return max(found, key=lambda error: (error != error, error))  # a NaN is the largest


# ---- what a record says ----------------------------------------------------------------------------------------------
def goals(data: Data) -> list[dict[str, Any]]:
    """Each goal: of which case, what, found (None: not measured), wanted, met."""
    there = side_by_side(data)
    found: list[dict[str, Any]] = []

    def us(case: Case, name: str) -> float | None:
        return there.get(said(case), {}).get(name)

    def add(case: Case, what: str, a: float | None, b: float | None, wanted: float, at_least: bool = False) -> None:
        value = a / b if a and b else None
        met = value is not None and (value >= wanted if at_least else value <= wanted)
        found.append({"case": list(case), "what": what, "found": value, "wanted": wanted, "met": met})

    for case in LARGE:
        ours, whole = us(case, OURS), us(case, WHOLE)
        add(case, "speed, of cuDNN's", us(case, CUDNN), ours, OF_CUDNN, at_least=True)
        add(case, "pages of 16, of a contiguous cache's time", ours, whole, OF_WHOLE)
        add(case, "pages of 1, the same", us(case, ONES), whole, ONES_OF_WHOLE)
    for case, most in MICROSECONDS.items():
        add(case, "microseconds", us(case, OURS), 1.0, most)
    by_job = {(row["batch"], row["keys"], row["name"]): row.get("ms") for row in where(data["rows"], part="generate")}
    for batch, keys in WRITING if by_job else ():
        sdpa, ours = (by_job.get((batch, keys, name)) for name in (GRAPH, OURS_WRITES))
        small = config("small")
        case = Case(batch, small.heads, small.key_heads, keys, small.head_dim)
        add(case, "a token's speed, of SDPA's in a graph", sdpa, ours, OF_SDPA, at_least=True)
    add(UNEVEN, "time, of its even twin's", us(UNEVEN, OURS), us(EVEN, OURS), OF_EVEN)
    return found


def said(case: Case) -> str:
    """The name of a case in tables."""
    keys = "ragged" if case.ragged else str(case.keys)
    return f"{case.batch} x {keys}, {case.heads}/{case.kv_heads}, D {case.head_dim}"


def side_by_side(data: Data, part: str = "work") -> dict[str, dict[str, float]]:
    """Microseconds by work and name, in the record's order; {} where nothing was measured. "steps": of the ladder."""
    at = by([row for row in where(data["rows"], part=part) if "ms" in row], *Case._fields)
    return {said(Case(*key)): {name: 1e3 * row["ms"] for name, row in rows.items()} for key, rows in at.items()}


def goal_table(data: Data) -> Table:
    rows = [
        [said(Case(*goal["case"])), goal["what"], f"{goal['wanted']:g}",
         "not measured" if goal["found"] is None else f"{goal['found']:.3g}", "met" if goal["met"] else "not met"]
        for goal in goals(data)
    ]  # fmt: skip
    return Table.of(rows, ["work, heads, D", "goal", "wanted", "is", ""], align="llrrl")


def table(data: Data) -> Table:
    """Microseconds, the spread and GB/s of all; below them the goals."""
    cells = []
    for row in data["rows"]:
        if row["part"] == "generate":
            work = f"{row['batch']} x {row['keys']}, a token"
            row = row | ({"gb_s": row["batch"] / row["ms"] * 1e3} if "ms" in row else {})  # tokens in a second
        else:
            work = said(Case(**{name: row[name] for name in Case._fields}))
        told = [row.get("unavailable", "")[:50], "", ""]
        if "ms" in row:
            us, fastest, slowest = (f"{1e3 * row[name]:.1f}" for name in ("ms", "fastest", "slowest"))
            told = [us, f"{fastest} to {slowest}", f"{row['gb_s']:.0f}"]
        cells.append([work, row["name"], *told])
    for work, what, goal, value, met in goal_table(data).rows:
        cells.append([work, f"goal: {what}", value, goal, met])
    columns = ["work, heads, D", "name", "us, or found", "fastest to slowest, or wanted", "GB/s, or tokens/s"]
    return Table.of(cells, columns, align="llrrr", caption="one query per sequence, bf16")


BENCH = harness.Bench(__name__, "decoding is", (*Case._fields, "name"), facts={"dtype": "bfloat16"})
main = BENCH.main
