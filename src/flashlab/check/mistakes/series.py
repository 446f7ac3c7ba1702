"""Kernels of the series with one mistake each, and the words in which the mistake has to be found.

A mutant is a textual edit of one of the files p8_*.cu and p9_*.cu, named after what a person would have done wrong.
``found`` holds the diagnoses that name it: the emulator's slugs where the mistake is in how threads share memory, the
checker's where it is in the arithmetic. A newly met bug is first added here.

The mistakes come from this project's own history, from public kernels, and from the issue trackers that the checker's
attention (flashlab.check.mistakes.attention) names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flashlab.check.changes import edited
from flashlab.check.cuda_answer import PROBES, Source, Verdict, examine
from flashlab.kernels.series import whole


@dataclass(frozen=True)
class Mutant:
    """One wrong kernel.

    Attributes:
        name: what is wrong, in a few words.
        file: the step that is edited.
        edits: (old, new) pairs; each old text occurs exactly once.
        found: diagnoses any of which names the mistake.
        words: pieces of the sentence that the learner is told.
        options: for ``examine``: macros, max_seq, probes.
    """

    name: str
    file: str
    edits: tuple[tuple[str, str], ...]
    found: tuple[str, ...]
    words: tuple[str, ...] = ()
    options: dict = field(default_factory=dict)

    def source(self) -> Source:
        """The edited text. Raises ValueError where the series has changed and an edit no longer fits."""
        return Source(edited(whole(self.file), self.edits, f"{self.file}.cu, {self.name}"), self.file)

    def examine(self) -> Verdict:
        """Raises CheckFailed: with a diagnosis of ``found``, if the tools are as good as they should be."""
        return examine(self.source(), fast=False, **{"max_seq": 150} | self.options)


def mutant(name: str, file: str, *edits: tuple[str, str], found: Sequence[str], words: Sequence[str] = (), **options):
    if file == "p11_flash":  # few multiprocessors: blocks take several parts, and have three consumers
        options = {"sms": 1} | options
    return Mutant(name, file, edits, tuple(found), tuple(words), options)


def _barrier(why: str, indent: int = 8) -> str:
    """The barrier at this indent whose comment begins like this; such comments begin in column 64."""
    return "__syncthreads();".ljust(63 - indent) + f"// {why}"


_WAIT = "cp_async_wait<STAGES == 1 ? 0 : STAGES - 2>();"
_BARRIER = _barrier("or others' parts would be missing, tile")
_MASK = "if (n_start + n * MMA_N + t * 2 + e > last_key) c = -INFINITY;"
_SHUFFLE = "m_new[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));"
_COPY = "cp_async<16>(smem_u32(tile_smem + at(row, column)), from, exists ? 16 : 0);"
_PLAIN = (
    "// Copies a tile",
    "__device__ int plain(int row, int column) { return (row * HEAD_DIM + column) * 2; }\n// Copies a tile",
)
_FIRST = PROBES[:1]

MUTANTS: tuple[Mutant, ...] = (
    # ---- copies, barriers, stages: the emulator sees them
    mutant("the copies are not waited for", "p8_3_stages", (_WAIT, ""),
            found=["read-before-wait", "stage-overwritten"], words=["cp_async_commit, cp_async_wait", "cp_async<16>"]),
    mutant("no barrier before a tile is overwritten, one stage", "p8_3_stages",
            (_barrier("or one would overwrite tile", 12), "//"),
            found=["stage-overwritten"], words=["the stage is still in use"], STAGES=1),
    mutant("no barrier before K and V are overwritten", "p8_1_split_q",
            (_barrier("or one would overwrite tile j - 1"), "//"),
            found=["race"], words=["no barrier between"]),
    mutant("a barrier that some warps skip", "p8_3_stages", (_BARRIER, "if (warp != 3) __syncthreads();  //"),
            found=["race", "divergent", "deadlock"], words=["barrier"]),
    mutant("a shuffle in a branch", "p8_3_stages",
            (_SHUFFLE, "m_new[r] = x; if (t < 2) m_new[r] = fmaxf(x, __shfl_xor_sync(~0u, x, 2));"),
            found=["divergent", "exited-lanes"], words=["shuffle"]),
    # ---- shared and global memory
    mutant("shared memory for one stage too few", "p8_3_stages",
            ("SHARED = Q_BYTES + 2 * STAGES * KV_BYTES;", "SHARED = Q_BYTES + (2 * STAGES - 1) * KV_BYTES;"),
            found=["shared-out-of-bounds"], words=["the launch asked for"]),
    mutant("the tail is not zero-filled", "p8_3_stages", (_COPY, f"if (exists) {_COPY}"),
            found=["uninitialised-shared"], words=["nobody has written"]),
    mutant("rows beyond the end are copied", "p8_3_stages",
            ("(exists ? row : 0) * row_stride", "row * row_stride"), (_COPY, _COPY.replace("exists ? 16 : 0", "16")),
            found=["global-out-of-bounds"], words=["past its end"]),
    # ---- fragments and swizzle: only the numbers tell
    mutant("the swizzle on the store only", "p8_4_swizzle",
            _PLAIN,
            ("k_smem + stage + at(", "k_smem + stage + plain("),
            found=["swizzle-one-side"], words=["swizzle"]),
    mutant("V is not transposed", "p8_4_swizzle", ("ldmatrix_x2_trans(b,", "ldmatrix_x2(b,"),
            found=["v-not-transposed"], words=["trans"]),
    mutant("c2 and c3 swapped in P", "p8_4_swizzle", ("pack<T>(c[2], c[3])", "pack<T>(c[3], c[2])"),
            found=["fragment-swapped"]),
    mutant("c2 and c3 swapped in O", "p8_4_swizzle",
            ("pack<T>(acc[n][2 * r] * inverse, acc[n][2 * r + 1] * inverse);",
             "pack<T>(acc[n][2 * r + r] * inverse, acc[n][2 * r + 1 - r] * inverse);"),
            found=["fragment-swapped"]),
    mutant("a1 and a2 swapped in P", "p8_4_swizzle",
            ("pack<T>(c[2], c[3]), pack<T>(d[0], d[1])", "pack<T>(d[0], d[1]), pack<T>(c[2], c[3])"),
            found=["fragment-swapped"]),
    mutant("b0 and b1 swapped in V", "p8_4_swizzle",
            ("mma_m16n8k16<T>(acc[n], a, b[0], b[1]);", "mma_m16n8k16<T>(acc[n], a, b[1], b[0]);"),
            found=["fragment-swapped"], words=["b0 of V with b1"]),
    mutant("shuffle mask 0x10 for 0b10 in the maximum", "p8_4_swizzle",
            (_SHUFFLE, _SHUFFLE.replace(", 2)", ", 0x10)")),
            found=["quad-not-reduced"]),
    mutant("shuffle mask 0x10 for 0b10 in the sum", "p8_4_swizzle",
            ("sum += __shfl_xor_sync(~0u, sum, 2);", "sum += __shfl_xor_sync(~0u, sum, 0x10);"),
            found=["quad-not-reduced"]),
    # ---- the softmax and the mask
    mutant("the tail is not masked", "p8_4_swizzle", (_MASK, "if (p.causal) " + _MASK), found=["tail-not-masked"]),
    mutant("the diagonal's tile counts as full", "p9_1_masks",
            ("full = max(0, min(full, (m_start + 1 + diagonal) / BLOCK_N));", ""),
            found=["diagonal-not-masked", "causal-by-block"]),
    mutant("the parts are merged with equal weights", "p9_flash",
            ("exp2_approx((part_lse[s * rows + row] - base) * LOG2E)", "1.f"), found=["split-not-weighted"],
            probes=_FIRST, max_seq=1100),
)  # fmt: skip
