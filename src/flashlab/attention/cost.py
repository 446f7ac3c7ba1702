"""What attention costs: operations and bytes by formula, and a meter that counts what torch code really does.

    naive_cost, fused_cost, flash_cost, fa1_cost, fa2_cost      a `Cost` each, from shapes alone
    Meter, trace_ops, peak_bytes                                counted, operation by operation, on any device
    attainable_tflops                                           the roofline

Sources: the naive algorithm and its IO count are Algorithm 0 of Dao et al., "FlashAttention" (2022), the tiled ones
Algorithm 1 of it and of Dao, "FlashAttention-2" (2023); the roofline is Williams, Waterman and Patterson, "Roofline"
(2009).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from flashlab.runtime import GpuLimits

# ---- formulas -------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """What one line of an algorithm moves (bytes from and to HBM) and computes.

    matmul_flops counts 2 for each multiply-add of a matrix product, other_flops 1 for each element that an exp, max,
    sum, add, multiply or divide touches.
    """

    line: str
    bytes_read: int
    bytes_written: int
    matmul_flops: int = 0
    other_flops: int = 0

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.other_flops


@dataclass(frozen=True)
class Cost:
    """A cost line by line, and its sums."""

    lines: tuple[Line, ...]

    @property
    def total(self) -> Line:
        """All of the lines as one."""
        return Line("all lines", *map(sum, zip(*(line[1:] for line in self.lines), strict=True)))

    bytes_read = property(lambda self: self.total.bytes_read)
    bytes_written = property(lambda self: self.total.bytes_written)
    bytes = property(lambda self: self.bytes_read + self.bytes_written)
    matmul_flops = property(lambda self: self.total.matmul_flops)
    other_flops = property(lambda self: self.total.other_flops)
    flops = property(lambda self: self.total.flops)

    @property
    def intensity(self) -> float:
        """Arithmetic intensity: FLOPs for each byte moved, the roofline's x-axis."""
        return self.flops / self.bytes


def naive_cost(seq_len: int, head_dim: int, *, seq_q: int | None = None, heads: int = 1, itemsize: int = 2) -> Cost:
    """What naive_attention costs, line by line, if every line reads its inputs from HBM and writes its result there.

    seq_len is N, the keys; seq_q is M, the queries (as many by default); heads stands for batch * heads; itemsize is
    the bytes of an element. The softmax counts five FLOPs a score: max, subtract, exp, sum, divide.
    """
    n, d = seq_len, head_dim
    m = n if seq_q is None else seq_q
    _require_positive(seq_len=n, head_dim=d, seq_q=m, heads=heads, itemsize=itemsize)
    q, kv, s = heads * m * d, heads * n * d, heads * m * n  # elements
    e = itemsize
    return Cost((
        Line("scores = q @ k.T", (q + kv) * e, s * e, matmul_flops=2 * s * d),
        Line("scores = scores * scale", s * e, s * e, other_flops=s),
        Line("probabilities = softmax(scores)", s * e, s * e, other_flops=5 * s),
        Line("o = probabilities @ v", (s + kv) * e, q * e, matmul_flops=2 * s * d),
    ))  # fmt: skip


def fused_cost(seq_len: int, head_dim: int, *, seq_q: int | None = None, heads: int = 1, itemsize: int = 2) -> Cost:
    """The least that any attention must move: q, k and v read once, o written once; the FLOPs of naive_attention."""
    n, d = seq_len, head_dim
    m = n if seq_q is None else seq_q
    naive = naive_cost(n, d, seq_q=m, heads=heads, itemsize=itemsize)
    read = heads * (m + 2 * n) * d * itemsize
    line = Line("all four lines at once", read, heads * m * d * itemsize, naive.matmul_flops, naive.other_flops)
    return Cost((line,))


def naive_peak_bytes(
    seq_len: int, head_dim: int, *, seq_q: int | None = None, heads: int = 1, itemsize: int = 2
) -> int:
    """The most bytes that naive_attention's own tensors hold at once: on its last line, scores, probabilities and o."""
    n, d = seq_len, head_dim
    m = n if seq_q is None else seq_q
    _require_positive(seq_len=n, head_dim=d, seq_q=m, heads=heads, itemsize=itemsize)
    return heads * (2 * m * n + m * d) * itemsize


def flash_cost(
    M: int, N: int, HEAD_DIM: int, BLOCK_M: int = 64, BLOCK_N: int = 64, itemsize: int = 2
) -> Cost:  # fmt: skip
    """The cost of one head in tiles: Q [M, HEAD_DIM], K and V [N, HEAD_DIM], `itemsize` bytes an element.

    Q is read once and O written once (and 4 bytes of lse a row); K and V are read once for each query block.
    BLOCK_N changes the number of rescalings, never the bytes. Tests hold both counts against `Meter`.
    """
    if min(BLOCK_M, BLOCK_N) < 1:
        raise ValueError(f"a block has at least one row, and these have {BLOCK_M} and {BLOCK_N}")
    q_blocks, k_blocks = -(-M // BLOCK_M), -(-N // BLOCK_N)
    # Each score: scale, max, subtract, exp, sum. Each row and key block: the new maximum, the correction
    # (two), l_i (two), and two for each element of acc. At the end: divide acc, log l_i, add m_i.
    other = 5 * M * N + k_blocks * (5 * M + 2 * M * HEAD_DIM) + M * HEAD_DIM + 2 * M
    read = (M + q_blocks * 2 * N) * HEAD_DIM * itemsize
    written = M * HEAD_DIM * itemsize + 4 * M
    return Cost((Line("every tile", read, written, 4 * M * N * HEAD_DIM, other),))


FA1_BLOCK_N, FA2_BLOCK_M = 32, 128  # of the first two steps of the kernel series


def fa1_cost(seq_q: int, seq_k: int, head_dim: int, *, block_n: int = FA1_BLOCK_N) -> Cost:
    """FlashAttention-1's order (Dao et al. 2022, Algorithm 1), one head, float32, not causal; matrix FLOPs only.

    K and V are read once. For each of the ceil(seq_k / block_n) tiles of them, Q, O, m and l are read, and O, m and l
    written; before the first tile O, m and l are set, after the last m and l are read for the log-sum-exp.
    The bytes are those that threads ask for, as the emulator's ``global_load_bytes`` counts them.
    """
    tiles = -(-seq_k // block_n)
    row, statistics = seq_q * head_dim * 4, 2 * seq_q * 4
    read = 2 * seq_k * head_dim * 4 + tiles * (2 * row + statistics) + statistics
    written = (tiles + 1) * (row + statistics) + seq_q * 4
    return Cost((Line("K and V outside", read, written, 4 * seq_q * seq_k * head_dim),))


def fa2_cost(seq_q: int, seq_k: int, head_dim: int, *, block_m: int = FA2_BLOCK_M) -> Cost:
    """FlashAttention-2's order (Dao 2023), one head, float32, not causal; matrix FLOPs only.

    Q is read once, O and the log-sum-exp are written once; K and V are read for each of the ceil(seq_q / block_m)
    tiles of Q.
    """
    tiles = -(-seq_q // block_m)
    row = seq_q * head_dim * 4
    read, written = row + tiles * 2 * seq_k * head_dim * 4, row + seq_q * 4
    return Cost((Line("Q outside", read, written, 4 * seq_q * seq_k * head_dim),))


def attainable_tflops(intensity: float, gpu: GpuLimits) -> float:
    """The roofline: 10^12 FLOP/s that code of this intensity (FLOP per byte) can reach at most on `gpu`, in fp16.

    Raises ValueError where the GPU's speeds are not known.
    """
    if gpu.fp16_tflops is None or gpu.memory_gb_s is None:
        raise ValueError(f"the peak figures of {gpu.name} are not known")
    return min(gpu.fp16_tflops, intensity * gpu.memory_gb_s / 1000)


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be at least 1, not {number}")


# ---- counting what torch does ---------------------------------------------------------------------------------------

# What one element of an operation's result costs; a reduction costs one for each element that it consumes.
_ELEMENTWISE = {"add", "sub", "mul", "div", "exp", "log", "maximum", "neg", "exp2", "log2", "rsub"}
_REDUCTIONS = {"amax", "max", "sum", "logsumexp"}


class Op(NamedTuple):
    """One operation that torch ran: the bytes of the tensors it took and made, and what was alive when it ended."""

    name: str
    bytes_read: int
    bytes_written: int
    live_bytes: int


class Meter(TorchDispatchMode):
    """Counts, exactly and on any device, what torch code does inside `with Meter(...)`.

        with Meter(Q, K, V) as meter:
            O, lse = flash_attention_one_head_sim(Q, K, V)
        meter.peak_bytes, meter.matmul_flops, meter.bytes_read

    It sees every operation that torch dispatches, so it counts; it does not sample and it does not time. What an
    operation allocates and frees within itself is not seen.

    Args:
        hbm: the tensors that live in HBM. What is read of them is counted, each time an operation that is
            no view takes (a slice of) one of them.
    Attributes:
        peak_bytes: the most bytes that tensors created inside were holding at any one moment. Python variables
            keep their tensors alive, as in any program. What was there before does not count.
        now_bytes: the same, now.
        matmul_flops: 2 * M * N * K for each matmul.
        operations: Counter, elementwise and reduction operations by name: one for each element.
        bytes_read: of the `hbm` tensors. bytes_written: by assignments into a slice (`O[rows] = ...`), which
            is how the simulation stores a tile.
        ops: every operation that is no view, in order, as an `Op`: what eager torch moves when nothing is cached.
    """

    def __init__(self, *hbm: torch.Tensor) -> None:
        super().__init__()
        self.peak_bytes = self.now_bytes = self.matmul_flops = self.bytes_read = self.bytes_written = 0
        self.operations: Counter[str] = Counter()
        self.ops: list[Op] = []
        self._hbm = {_storage(x) for x in hbm}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import torch._dynamo at the first dispatch, three seconds in which the import's reference
        cycles keep the caller's tensors alive."""
        return False

    @property
    def other_flops(self) -> int:
        """The sum of `operations`: what `Cost.other_flops` predicts."""
        return sum(self.operations.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        outputs = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        known = {_storage(x) for x in inputs}
        made = [x for x in outputs if _storage(x) not in known]
        self._count_alive(made)
        name = func.overloadpacket.__name__
        in_place = name.endswith("_")
        if outputs and not made and not in_place:
            return out  # a view: nothing computed, nothing moved
        self.ops.append(Op(name.strip("_"), _bytes(inputs), _bytes(outputs), self.now_bytes))
        if name.startswith("new_"):
            return out  # memory without work
        self._count_work(name.rstrip("_"), inputs, outputs)
        for x in inputs[1:] if in_place else inputs:
            if _storage(x) in self._hbm:
                self.bytes_read += x.numel() * x.element_size()
        if name == "copy_":
            self.bytes_written += args[0].numel() * args[0].element_size()
        return out

    def _count_alive(self, made: list[torch.Tensor]) -> None:
        self._alive = {key: kept for key, kept in self._alive.items() if not kept[0].expired()}
        for x in made:
            storage = x.untyped_storage()
            self._alive.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.now_bytes = sum(size for _, size in self._alive.values())
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _count_work(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if name in ("mm", "bmm"):
            self.matmul_flops += 2 * outputs[0].numel() * inputs[0].shape[-1]
        elif name in ("addmm", "baddbmm", "mv", "dot"):
            self.matmul_flops += 2 * outputs[0].numel() * inputs[-1].shape[0 if inputs[-1].ndim == 1 else -2]
        elif name == "_softmax":  # max, subtract, exp, sum, divide
            self.operations[name] += 5 * inputs[0].numel()
        elif name in _ELEMENTWISE:
            self.operations[name] += outputs[0].numel()
        elif name in _REDUCTIONS:
            self.operations[name] += inputs[0].numel()


def _storage(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _bytes(tensors: list[torch.Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def trace_ops(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Op]:
    """Run fn(*args, **kwargs) and list the operations that torch ran, views left out; exact on every device."""
    with Meter() as meter:
        fn(*args, **kwargs)
    return meter.ops


def peak_bytes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """The most bytes that the tensors made by fn(*args, **kwargs) hold at once; 0 when it makes none."""
    with Meter() as meter:
        fn(*args, **kwargs)
    return meter.peak_bytes
