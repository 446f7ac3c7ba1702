"""The last kernel with one idea at a time taken out: what each is worth, where all the others are there.

Each is an edit of ``p9_flash.cu`` with its headers, by its exact text. All of them compute the same attention; a test
runs each in the emulator, and ``flashlab bench ablation`` times them beside the whole and beside FlashAttention-2.
"""

from dataclasses import dataclass

from flashlab.kernels.series import SERIES, Step, whole

WHOLE: Step = SERIES[-1]


@dataclass(frozen=True)
class Ablation:
    """The kernel without one idea."""

    name: str  # what is taken out, in a few words
    instead: str  # what the kernel does in its place
    edits: tuple[tuple[str, str], ...]  # (old, new): each old text stands in the source once

    def text(self) -> str:
        """The source. Raises ValueError: a text to be edited is not there, or there more than once."""
        text = whole(WHOLE.name)
        for old, new in self.edits:
            if text.count(old) != 1:
                raise ValueError(f"{self.name}: {old!r} occurs {text.count(old)} times in {WHOLE.name}.cu")
            text = text.replace(old, new)
        return text


_TALL = ("using Tall = Tile<HEAD_DIM == 256 ? 1 : 2>;", "using Tall = Tile<1>;")
_LANE = "threadIdx.x % 32"
_K_ADDRESS = f"k_lane + stage + at({{n}} * 16 + {_LANE} % 8 + {_LANE} / 16 * 8, {{k}} * 16 + {_LANE} / 8 % 2 * 8)"

ABLATIONS = (
    Ablation(
        "lazy rescaling", "O is rescaled in every tile",
        (("RESCALE_ABOVE = 8.f", "RESCALE_ABOVE = -INFINITY"),),
    ),
    Ablation(
        "full tiles without a mask", "every tile is masked",
        (("tile(j, std::false_type{})", "tile(j, std::true_type{})"),),
    ),
    Ablation("32 rows per warp", "16 rows per warp, 4 warps per block", (_TALL,)),
    Ablation(
        "32 rows per warp, the block as tall", "16 rows per warp, 8 warps per block",
        (_TALL, ("WARPS = HEAD_DIM == 256 ? 8 : 4", "WARPS = 8"),
         ("BLOCKS_PER_SM = HEAD_DIM == 256 ? 1 : 2", "BLOCKS_PER_SM = 1")),
    ),
    Ablation(
        "fragments one step ahead", "a fragment of K is loaded right before its MMAs",
        (
            ("ldmatrix_x4(b[0], k_lane + stage);", ""),
            ("if (next_k < HEAD_DIM / MMA_K) ldmatrix_x4(b[(step + 1) % 2], next);", "ldmatrix_x4(b[step % 2], next);"),
            ("next_k = (step + 1) / (S_TILES / 2), next_n = (step + 1) % (S_TILES / 2)", "next_k = k, next_n = n"),
        ),
    ),
    Ablation(
        "addresses out of the loop", "every ldmatrix computes its address with the swizzle",
        (
            ("ldmatrix_x4(b[0], k_lane + stage);", f"ldmatrix_x4(b[0], {_K_ADDRESS.format(n=0, k=0)});"),
            ("(k_lane ^ (next_k * 32)) + stage + next_n * 16 * ROW_BYTES", _K_ADDRESS.format(n="next_n", k="next_k")),
            ("(v_lane ^ (n * 32)) + stage + k * MMA_K * ROW_BYTES",
             f"v_lane + stage + at(k * MMA_K + {_LANE} % 16, n * 16 + {_LANE} / 16 * 8)"),
            ("load_q, k_lane, stage", "load_q, k_smem, stage"), ("acc, s, v_lane, stage", "acc, s, v_smem, stage"),
            ("(q_lane ^ (k * 32)) + m * MMA_M * ROW_BYTES",
             "q_smem + at(warp_row + m * MMA_M + lane % 16, k * 16 + lane / 16 * 8)"),
        ),
    ),
    Ablation(
        "long blocks first", "causal blocks in their natural order",
        (
            ("CAUSAL ? group * heads_together + in_group % group_heads : block / m_blocks", "block / m_blocks"),
            ("CAUSAL ? m_blocks - 1 - in_group / group_heads : block % m_blocks", "block % m_blocks"),
        ),
    ),
    Ablation(
        "the swizzle", "rows of shared memory as they are",
        (("row * ROW_BYTES + (column / 8 ^ row % 8) * 16", "row * ROW_BYTES + column * 2"),),
    ),
    Ablation(
        "copies during the work", "the next tile is waited for before the work begins",
        (("        cp_async_commit();\n        //",
          "        cp_async_commit();\n        cp_async_wait<0>();\n        //"),),
    ),
    Ablation(
        "Q in registers", "fragments of Q are loaded again for every tile",
        (("Q_IN_REGISTERS = M_TILES * HEAD_DIM <= 128;", "Q_IN_REGISTERS = false;"),),
    ),
    Ablation(
        "16-byte stores", "O is stored 4 bytes per lane",
        (
            ("if (!SPLIT) *(uint32_t*)(shared + at(row, n * MMA_N) + t * 4) = pack<T>(x, y);",
             "if (!SPLIT && m_start + row < p.seq_q)\n"
             "                *(uint32_t*)(o_gmem + row * p.o_stride.row + n * MMA_N + t * 2) = pack<T>(x, y);"),
            ("if (SPLIT) return;", "if (true) return;"),
        ),
    ),
)  # fmt: skip
"""One for each idea that is in no other's way. At HEAD_DIM = 128, Q is not in registers anyway."""
