"""An attention layer with grouped-query attention and rotary embedding: timed, profiled, and one call of it as a trace.

Two cases. "published" is the shape of published/gqa_layer_profile.csv, as its figures tell it (see the tests): batch *
heads 512, N 1024, D 16, float32, two query heads for a key head, no mask, no projections. "present" is a layer of
today: batch 4, 32 query heads, 8 key heads, N 4096, D 128, bf16, causal, with its four projections.

original                  K and V repeated, the scores in memory, RoPE in PyTorch's small operations
original, compiled        the same through torch.compile; `replaced` says whether it put fused attention in
ours, RoPE apart          our attention kernel, RoPE as in the original
ours                      our attention kernel, and our kernel for RoPE
SDPA                      PyTorch's attention, RoPE as in the original; `backend` is the one that it chooses
SDPA, FlashAttention-2    and with each backend that runs here, cuDNN and memory-efficient too; where one refuses
                          grouped heads, K and V are repeated for it, and the row has `repeated`
SDPA, compiled            the layer with SDPA through torch.compile, which fuses RoPE too

time       case, scope, pass, name; times; peak_bytes of one call at its worst moment, beside inputs and weights;
           difference: the largest one from the original's output, forward. scope is "layer" (RoPE and, where the case
           has them, projections) or "attention" (alone). pass is "forward" (without gradients) or "both"
compiled   the same rows, of the compiled ones, with the original and ours beside them in turns: scope "layer" alone
profile    case, pass, layer (a name from above); op, kernel (true: it ran on the GPU), totals of so many runs: calls,
           times, bytes, flops (or null); total_ms: of all kernels. The TOP rows, and what the published table names
timeline   case, pass, layer; one row: the MOST_EVENTS longest events [name, start us, duration us, where], where the
           last is "stream 7" for a kernel and "thread 1" for an operation that no other one called
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn.attention import SDPBackend
from torch.profiler import ProfilerActivity, record_function
from torch.profiler import profile as torch_profile

from flashlab import runtime
from flashlab.bench import harness, peers, published, timing
from flashlab.bench.harness import NOT_YET, Data, Row, Way, jobs_of
from flashlab.bench.rows import where
from flashlab.models.layer import ATTENTIONS, AttentionLayer, RotaryAttention
from flashlab.models.rope import rope_table
from flashlab.table import Table

ORIGINAL, APART, OURS, SDPA = "original", "ours, RoPE apart", "ours", "SDPA"
BACKENDS = {
    "SDPA, FlashAttention-2": "FLASH_ATTENTION",
    "SDPA, cuDNN": "CUDNN_ATTENTION",
    "SDPA, memory-efficient": "EFFICIENT_ATTENTION",
}
COMPILED = {"original, compiled": ORIGINAL, "SDPA, compiled": SDPA}  # what torch.compile was given
NAMES = (ORIGINAL, "original, compiled", APART, OURS, SDPA, *BACKENDS, "SDPA, compiled")
SCOPES = ("layer", "attention")
PASSES = ("forward", "both")
TOP = 40
MOST_EVENTS = 300
RUNS = {"published": 100, "present": 20}
"""Of a profile; as many as were published, so that their totals can stand beside ours. Elsewhere 3."""
PUBLISHED_LAYERS = {"original": ORIGINAL, "flash": APART}
"""Which of NAMES is meant by a layer of the published table: its RoPE is small operations in both."""
OUR_KERNEL = "flash_attention_kernel"  # the name of the forward kernel in a profile


@dataclass(frozen=True)
class Case:
    """The shape of a layer; projections: with the four matrices around attention."""

    batch: int
    heads: int
    kv_heads: int
    seq_len: int
    head_dim: int
    dtype: str
    causal: bool
    projections: bool


CASES = {
    "published": Case(32, 16, 8, 1024, 16, "float32", causal=False, projections=False),
    "present": Case(4, 32, 8, 4096, 128, "bfloat16", causal=True, projections=True),
    "tiny": Case(1, 4, 2, 32, 16, "float32", causal=False, projections=False),
    "tiny, projections": Case(1, 4, 2, 32, 16, "float32", causal=True, projections=True),
}


# ---- what is measured ------------------------------------------------------------------------------------------------
def jobs() -> list[Row]:
    """The most telling first; what has to be compiled by torch.compile last."""
    three = (ORIGINAL, APART, OURS)
    found = [_time("published", "layer", "forward"), _time("present", "layer", "both")]
    found += _of("profile", "published", "forward", *three)
    found += [_time("present", "layer", "forward"), _time("published", "layer", "both")]
    found += _of("profile", "present", "both", *three, SDPA)
    found += _of("timeline", "published", "forward", *three) + _of("timeline", "present", "both", *three)
    found += jobs_of("time", case=("published", "present"), scope=["attention"], **{"pass": PASSES})
    found += [_time(case, "layer", which, "compiled") for which in PASSES for case in ("published", "present")]
    return found


def quick_jobs() -> list[Row]:
    """Of every part something, tiny; without torch.compile, which takes its time."""
    found = [_time("tiny", "layer", "forward"), _time("tiny, projections", "layer", "both")]
    found += [_time("tiny", "attention", "forward")]
    return found + [job for part in ("profile", "timeline") for job in _of(part, "tiny", "forward", ORIGINAL, OURS)]


def _time(case: str, scope: str, which: str, part: str = "time") -> Row:
    return {"part": part, "case": case, "scope": scope, "pass": which}


def _of(part: str, case: str, which: str, *layers: str) -> list[Row]:
    return jobs_of(part, case=[case], **{"pass": [which]}, layer=layers)


def names_of(part: str, scope: str) -> list[str]:
    """Who is timed in a part and scope; alone, attention is the same with either RoPE."""
    if part == "compiled":
        return [ORIGINAL, OURS, *COMPILED]
    return [name for name in NAMES if name not in COMPILED and (scope == "layer" or name != APART)]


# ---- the layers ------------------------------------------------------------------------------------------------------
Attention = Callable[..., torch.Tensor]  # (q, k, v, *, causal) -> o


def sdpa_by(backend: str, repeat: bool) -> Attention:
    """scaled_dot_product_attention by one backend, grouped heads too; repeat: K and V for every query head first."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        if repeat:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return peers.sdpa(backend, q, k, v, causal)()

    return attention


def draw(case: Case, scope: str) -> list[torch.Tensor]:
    """What a layer reads, the same each time, each wanting a gradient.

    Returns:
        [x], [batch, seq_len, heads * head_dim], for a layer with projections; else [q, k, v], each
        [batch, heads or kv_heads, seq_len, head_dim].
    """
    heads = (case.heads, case.kv_heads, case.kv_heads)
    shapes: list[tuple[int, ...]] = [(case.batch, h, case.seq_len, case.head_dim) for h in heads]
    if scope == "layer" and case.projections:
        shapes = [(case.batch, case.seq_len, case.heads * case.head_dim)]
    return harness.draw(*shapes, dtype=getattr(torch, case.dtype), seed=case.seq_len + case.head_dim, grad=len(shapes))


def build(name: str, case: Case, scope: str) -> tuple[nn.Module, Row]:
    """One of NAMES as a module, with the same weights each time; and what its rows say of it.

    Raises what a backend of SDPA raises that does not take these inputs.
    """
    about: Row = {}
    plain = COMPILED.get(name, name)
    attention: Attention
    if plain in BACKENDS:
        repeat = not _takes_groups(BACKENDS[plain], case)
        attention = sdpa_by(BACKENDS[plain], repeat)
        about = {"backend": BACKENDS[plain]} | ({"repeated": True} if repeat else {})
    else:
        attention = ATTENTIONS[{ORIGINAL: "eager", APART: "flash", OURS: "flash", SDPA: "sdpa"}[plain]]
        if name == SDPA:
            about = {"backend": chosen(case)}
    core = RotaryAttention(attention, causal=case.causal, fused_rope=plain == OURS)
    module: nn.Module = _projected(core, case) if scope == "layer" and case.projections else core
    if name in COMPILED:
        peers.many_shapes()
        module.compile(**peers.COMPILE)
    return module, about


def _projected(core: RotaryAttention, case: Case) -> AttentionLayer:
    """The layer around a core. Its weights come from a generator of their own: a CUDA graph whose recording failed
    leaves PyTorch's unusable."""
    width = case.heads * case.head_dim
    with torch.device("meta"):
        layer = AttentionLayer(width, case.heads, case.kv_heads, causal=case.causal).to(getattr(torch, case.dtype))
    layer.to_empty(device=runtime.device())
    generator = torch.Generator(runtime.device()).manual_seed(0)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_(std=width**-0.5, generator=generator)
    layer.core = core
    return layer


def _few(case: Case) -> list[torch.Tensor]:
    """q, k, v of one batch of the case, for questions."""
    return [x.detach() for x in draw(replace(case, batch=1), "attention")]


def _takes_groups(backend: str, case: Case) -> bool:
    """Whether a backend takes fewer key heads than query heads here; True as well where it takes nothing."""
    try:
        sdpa_by(backend, repeat=False)(*_few(case), causal=case.causal)
        return True
    except RuntimeError:
        return False


def chosen(case: Case) -> str:
    """The backend that PyTorch chooses for such inputs."""
    q, k, v = (x.requires_grad_() for x in _few(case))
    grouped = case.heads != case.kv_heads
    return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=case.causal, enable_gqa=grouped)).name


def pass_of(module: nn.Module, case: Case, scope: str, which: str, inputs: Sequence[torch.Tensor]) -> Way:
    """The function to time: "forward" without gradients, or "both", with those of the inputs and of the weights."""
    tables = rope_table(case.seq_len, case.head_dim, device=runtime.device()) if scope == "layer" else ()
    if which == "forward":
        return torch.no_grad()(lambda: module(*inputs, *tables))
    wanted = [*inputs, *module.parameters()]
    (grad,) = harness.draw(inputs[0].shape, dtype=inputs[0].dtype, seed=1)  # o is like q
    return lambda: torch.autograd.grad(module(*inputs, *tables), wanted, grad)


# ---- measuring -------------------------------------------------------------------------------------------------------
def measure(job: Row) -> list[Row]:
    if job["part"] in ("time", "compiled"):
        return measure_times(job)
    case = CASES[job["case"]]
    way = pass_of(build(job["layer"], case, "layer")[0], case, "layer", job["pass"], draw(case, "layer"))
    if job["part"] == "timeline":
        longest = sorted(one_call(way), key=lambda e: -e.us)[:MOST_EVENTS]
        return [job | {"events": [list(e) for e in sorted(longest, key=lambda e: e.start_us)]}]
    rows = profiled(way, RUNS.get(job["case"], 3))
    named = {r["op"] for r in published.load("gqa_layer_profile")}
    return [job | row for i, row in enumerate(rows) if i < TOP or row["op"] in named]


def measure_times(job: Row) -> list[Row]:
    """A row for each name, timed in turns. Where the inputs would stay in L2, a second set is gone through in turn."""
    case, scope, which = CASES[job["case"]], job["scope"], job["pass"]
    sets = harness.sets_of(draw(case, scope))
    about: dict[str, Row] = {}

    def make(name: str) -> list[Way]:
        module, about[name] = build(name, case, scope)
        already = peers.replaced()
        several = [pass_of(module, case, scope, which, one) for one in sets]
        if name in COMPILED:
            several[0]()  # which compiles it
            about[name]["replaced"] = peers.replaced() > already
        return several

    ways, reasons = timing.made(names_of(job["part"], scope), make)
    found, more = harness.times_of(ways)
    first = {name: ways[name][0] for name in found}
    if harness.on_gpu():
        for name, way in first.items():
            about[name]["peak_bytes"] = timing.allocated(way)
    if which == "forward" and ORIGINAL in first:
        want = first[ORIGINAL]().float()
        for name in first.keys() - {ORIGINAL}:
            about[name]["difference"] = (first[name]().float() - want).abs().max().item()
    return harness.rows_of(job, {name: row | about[name] for name, row in found.items()}, reasons | more)


# ---- profiles --------------------------------------------------------------------------------------------------------
class Event(NamedTuple):
    """Something of one call: when it begins and how long it takes, in microseconds; "stream 7" or "thread 1"."""

    name: str
    start_us: float
    us: float
    where: str


def _activities() -> list[ProfilerActivity]:
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if harness.on_gpu() else [])]


def _wait() -> None:
    if harness.on_gpu():
        torch.cuda.synchronize()


CALL = "one call"
_NO_OPS = (CALL, "[memory]", "cudaDeviceSynchronize", "cudaStreamSynchronize", "Activity Buffer Request")


def profiled(way: Way, runs: int) -> list[Row]:
    """Rows of torch.profiler's table for some runs of a function, the dearest first; see the module's docstring."""
    way()
    _wait()
    with torch_profile(activities=_activities(), profile_memory=True, with_flops=True) as found:
        for _ in range(runs):
            way()
        _wait()
    rows: list[Row] = []
    for a in found.key_averages():
        if a.key in _NO_OPS or getattr(a, "is_user_annotation", False):
            continue
        row: Row = {"op": a.key[:200], "kernel": a.device_type == DeviceType.CUDA, "runs": runs, "calls": a.count}
        for kind in ("device", "self_device", "cpu", "self_cpu"):
            row[f"{kind}_ms"] = round(getattr(a, f"{kind}_time_total") / 1e3, 6)
        row |= {f"{kind}_bytes": getattr(a, f"{kind}_memory_usage") for kind in ("device", "self_device", "cpu")}
        rows.append(row | {"flops": a.flops or None})
    total = sum(row["self_device_ms"] for row in rows if row["kernel"])
    by = "self_device_ms" if total else "self_cpu_ms"
    return [row | {"total_ms": round(total, 6)} for row in sorted(rows, key=lambda row: -row[by])]


def one_call(way: Way) -> list[Event]:
    """What one call does, by its start, counted from the first event: kernels and, of the CPU, the outermost
    operations."""
    way()
    with torch_profile(activities=_activities()) as found:
        way()  # the first one under the profiler is slow
        _wait()
        with record_function(CALL):
            way()
            _wait()
    events: Any = found.events()
    call = next(e for e in events if e.name == CALL and e.device_type == DeviceType.CPU)
    begin, end = call.time_range.start, call.time_range.end
    kept: list[Event] = []
    for e in events:
        start, us = e.time_range.start, e.time_range.elapsed_us()
        if e.name in _NO_OPS or not begin <= start <= end or getattr(e, "is_user_annotation", False):
            continue
        if e.device_type == DeviceType.CUDA:
            kept.append(Event(e.name[:200], start, us, f"stream {e.device_resource_id}"))
        elif e.cpu_parent is None or e.cpu_parent.name == CALL:
            kept.append(Event(e.name[:200], start, us, f"thread {e.thread}"))
    zero = min((e.start_us for e in kept), default=0.0)
    return sorted((e._replace(start_us=round(e.start_us - zero, 3), us=round(e.us, 3)) for e in kept),
                  key=lambda e: e.start_us)  # fmt: skip


# ---- reading ---------------------------------------------------------------------------------------------------------
def _time_rows(data: Data, case: str, scope: str, which: str) -> dict[str, Row]:
    """By name, in NAMES' order; the compiled ones from their own part."""
    rows = where(data["rows"], case=case, scope=scope, **{"pass": which})
    found = {row["name"]: row for row in rows if (row["part"] == "compiled") == (row["name"] in COMPILED)}
    return {name: found[name] for name in NAMES if name in found}


def times(data: Data, case: str, scope: str = "layer", which: str = "forward") -> dict[str, float]:
    """Milliseconds by name, in NAMES' order; who has none is not there."""
    return {name: row["ms"] for name, row in _time_rows(data, case, scope, which).items() if "ms" in row}


def ratio(data: Data, case: str, name: str, over: str, scope: str = "layer", which: str = "forward") -> float | None:
    """How many times as fast as `over` a name is; None where one of them has no time.

    Both are from the same turns where there are such: a compiled one is compared with what was timed beside it.
    """
    part = "compiled" if name in COMPILED or over in COMPILED else "time"
    found = {row["name"]: row["ms"] for row in where(data["rows"], part=part, case=case, scope=scope, **{"pass": which})
             if "ms" in row}  # fmt: skip
    if name not in found or over not in found:
        found = times(data, case, scope, which)
    return found[over] / found[name] if name in found and over in found else None


def best_sdpa(data: Data, case: str, scope: str = "layer", which: str = "forward") -> str | None:
    """The fastest of PyTorch's own attentions, not compiled; None where none was timed."""
    found = times(data, case, scope, which)
    return min((name for name in (SDPA, *BACKENDS) if name in found), key=lambda name: found[name], default=None)


def times_table(data: Data, case: str) -> Table:
    """Every name: ms of the layer and of attention alone, forward and both; MiB of both; how many times as fast as the
    original the layer is, in both."""
    kinds = [(scope, which) for scope in SCOPES for which in PASSES]
    found = {kind: _time_rows(data, case, *kind) for kind in kinds}
    rows = []
    for name in NAMES:
        if not any(name in by_name for by_name in found.values()):
            continue
        cells = [_said(by_name.get(name, {}), "ms") for by_name in found.values()]
        faster = ratio(data, case, name, ORIGINAL, which="both")
        peak = _said(found["layer", "both"].get(name, {}), "peak_bytes")
        rows.append([name, *cells, peak, f"{faster:.2f}" if faster else ""])
    columns = ["", *(f"{scope}, {which}" for scope, which in kinds), "MiB, layer, both", "times as fast"]
    caption = f"ms, {data['machine']['gpu'] or 'a CPU'}; times as fast as the original: the layer, both; "
    caption += "compiled: in turns of their own"
    return Table.of(rows, columns, align="l" + "r" * 6, caption=caption if rows else NOT_YET)


def _said(row: Row, column: str) -> str:
    if column in row:
        return f"{row[column]:.3f}" if column == "ms" else f"{row[column] / 2**20:.0f}"
    return harness.short(row) if "unavailable" in row else ""


def profile(data: Data, case: str, layer: str, which: str = "forward") -> list[Row]:
    """The rows of a profile, the dearest first; [] where there is none."""
    rows = where(data["rows"], part="profile", case=case, layer=layer, **{"pass": which})
    return [row for row in rows if "op" in row]


def profile_table(
    data: Data, case: str, layer: str, which: str = "forward", most: int = 10, kernels: bool = False
) -> Table:
    """A profile per run, as torch.profiler prints it; kernels: only what ran on the GPU."""
    rows = [row for row in profile(data, case, layer, which) if row["kernel"] or not kernels]
    return rows_table(rows[:most], data["machine"]["gpu"])


def rows_table(rows: Sequence[Row], gpu: str | None = None) -> Table:
    """Rows of `profiled` per run: the time of itself and with what it called, its share, calls, MiB, GFLOPs."""
    where, memory = ("device", "device_bytes") if any(r["self_device_ms"] for r in rows) else ("cpu", "cpu_bytes")
    total = rows[0]["total_ms"] if rows and where == "device" else sum(r["self_cpu_ms"] for r in rows)
    cells = [
        [
            short(r["op"]), f"{r[f'self_{where}_ms'] / r['runs']:.4f}", f"{r[f'{where}_ms'] / r['runs']:.4f}",
            f"{r[f'self_{where}_ms'] / total:.1%}" if total else "", f"{r['calls'] / r['runs']:.4g}",
            f"{r[memory] / r['runs'] / 2**20:.1f}" if r[memory] else "",
            f"{r['flops'] / r['runs'] / 1e9:.2f}" if r["flops"] else "",
        ]
        for r in rows
    ]  # fmt: skip
    unit = "ms on the GPU" if where == "device" else "ms on the CPU"
    columns = ["", f"{unit}, itself", "with what it calls", "share", "calls", "MiB", "GFLOPs"]
    caption = f"per run, {gpu}" if gpu else "per run, on a CPU"
    return Table.of(cells, columns, align="lrrrrrr", caption=caption if cells else NOT_YET)


_KINDS = (
    (r"gemm|cutlass|nvjet|xmma|cublas", "matrix product"), (r"softmax", "softmax"), (r"CatArray", "cat"),
    (r"vectorized_elementwise|unrolled_elementwise|elementwise_kernel", "elementwise"), (r"reduce_kernel", "reduction"),
    (r"fmha|flash_fwd|flash_bwd|cudnn.*(attn|sdpa)", "fused attention of PyTorch"), (r"index", "index"),
)  # fmt: skip


def short(op: str) -> str:
    """The name of a kernel in a few words: its kind and what it computes, where the compiler's name tells."""
    if op.startswith(("aten::", "flashlab::", "autograd::")) or not re.search(r"[<(]|::|gemm|nvjet|cutlass|xmma", op):
        return op[:60]
    kind = next((kind for pattern, kind in _KINDS if re.search(pattern, op)), "")
    inside = op.partition("<")[2]
    what = re.search(r"CUDAFunctor_(\w+)|(?!Binary|Unary|AUnary|BUnary)\b(\w+?)(?:Functor|_kernel_cuda)\b", inside)
    name = re.sub(r"^void |\(anonymous namespace\)::|<.*", "", op).split("::")[-1]
    detail = (what.group(1) or what.group(2)).lower() if what else name
    return f"{kind}: {detail}"[:60] if kind else detail[:60]


def kernel_shares(data: Data, case: str, layer: str, which: str = "forward") -> list[tuple[str, float, int]]:
    """(short name, ms per run, calls per run) of the kernels of a profile, the dearest first; same names together."""
    ms, calls = Counter[str](), Counter[str]()
    for r in profile(data, case, layer, which):
        if r["kernel"]:
            ms[short(r["op"])] += r["self_device_ms"] / r["runs"]
            calls[short(r["op"])] += round(r["calls"] / r["runs"])
    return [(name, took, calls[name]) for name, took in ms.most_common()]


def timeline(data: Data, case: str, layer: str, which: str = "forward") -> list[Event]:
    """The events of one call, by their start; [] where it was not recorded."""
    rows = where(data["rows"], part="timeline", case=case, layer=layer, **{"pass": which})
    return [Event(*event) for row in rows for event in row.get("events", [])]


def milliseconds(text: Any) -> float:
    """Of a time as torch.profiler prints it: "2.267s", "673.615ms", "400.000us"."""
    number, unit = re.fullmatch(r"([\d.]+)(s|ms|us)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * {"s": 1e3, "ms": 1.0, "us": 1e-3}[unit]


BENCH = harness.Bench(__name__, "the layer is", ("case", "scope", "pass", "layer", "name", "op"), minutes=5.0)
main, recorded, record = BENCH.main, BENCH.recorded, BENCH.record
