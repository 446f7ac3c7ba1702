"""Phase 6: the scalar float32 kernels, and the bytes of global memory that each loop order moves.

The byte counts are formulas, to be set beside what the emulator counts: ``report.counters["global_load_bytes"]`` and so
on. They count what the threads ask for; a warp whose lanes ask for pieces of many sectors makes the memory move more.
"""

from __future__ import annotations

from dataclasses import dataclass

from flashlab.cuda.problem import Step

SCALAR = (
    Step("p6_1_fa1", "FlashAttention-1's loops: K and V outside, O and its statistics in global memory"),
    Step("p6_2_loop_order", "the loops swapped: a row's state stays in registers"),
    Step("p6_3_tiles", "every tile in shared memory, 4 x 4 scores a thread"),
    Step("p6_4_registers", "S in registers, 8 x 8 scores a thread, maxima by shuffles"),
    Step("p6_5_overlap", "cp.async: the next tile is on its way"),
    Step("p6_6_shapes", "the tile's shape follows the grid and the device"),
)

BLOCK_M, BLOCK_N = 128, 32  # of the first two steps
_FLOAT = 4


@dataclass(frozen=True)
class Bytes:
    """Bytes of global memory that one head's forward pass asks for."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def fa1_bytes(seq_q: int, seq_k: int, head_dim: int, *, block_n: int = BLOCK_N) -> Bytes:
    """FlashAttention-1's order (Dao et al. 2022, Algorithm 1), one head, float32, not causal.

    K and V are read once. For each of the ceil(seq_k / block_n) tiles of them, Q, O, m and l are read, and O, m and l
    written; before the first tile O, m and l are set, after the last m and l are read for the log-sum-exp.
    """
    tiles = -(-seq_k // block_n)
    row, statistics = seq_q * head_dim * _FLOAT, 2 * seq_q * _FLOAT
    read = 2 * seq_k * head_dim * _FLOAT + tiles * (2 * row + statistics) + statistics
    written = (tiles + 1) * (row + statistics) + seq_q * _FLOAT
    return Bytes(read, written)


def fa2_bytes(seq_q: int, seq_k: int, head_dim: int, *, block_m: int = BLOCK_M) -> Bytes:
    """FlashAttention-2's order (Dao 2023), one head, float32, not causal.

    Q is read once, O and the log-sum-exp are written once; K and V are read for each of the ceil(seq_q / block_m)
    tiles of Q.
    """
    tiles = -(-seq_q // block_m)
    row = seq_q * head_dim * _FLOAT
    return Bytes(row + tiles * 2 * seq_k * head_dim * _FLOAT, row + seq_q * _FLOAT)


__all__ = ["BLOCK_M", "BLOCK_N", "SCALAR", "Bytes", "fa1_bytes", "fa2_bytes"]
