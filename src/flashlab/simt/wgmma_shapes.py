"""Writes include/simt/wgmma_shapes.h: the inline PTX of wgmma for each of its 32 shapes.

python -m flashlab.simt.wgmma_shapes

The instruction names each of its registers, so that no template can spell it: m64n256k16 has 128 accumulators.
"""

from __future__ import annotations

from pathlib import Path

HEADER = Path(__file__).resolve().parent / "include" / "simt" / "wgmma_shapes.h"
SHAPES = range(8, 257, 8)

_HEAD = """\
// The inline PTX of ../wgmma.cuh for each N. Written by `python -m flashlab.simt.wgmma_shapes`: edit that.
//
// WGMMA_NAMES_n are the accumulators as the instruction names them, WGMMA_SUMS_n(d) the same as operands. After them
// come the operands numbered i0, i1, ...: of ss the two descriptors, scale-d, trans-a and trans-b; of rs the four
// registers of A, the descriptor of B, scale-d and trans-b.
#pragma once

"""

_FUNCTIONS = """\

#define WGMMA_FUNCTIONS(N, TYPE, i0, i1, i2, i3, i4, i5, i6)
    template <int TRANS_A, int TRANS_B>
    static __device__ __forceinline__ void ss_##TYPE(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
        asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, %" #i2 ", 0;\\n"
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE
                     " {" WGMMA_NAMES_##N "}, %" #i0 ", %" #i1 ", p, 1, 1, %" #i3 ", %" #i4 ";\\n}"
                     : WGMMA_SUMS_##N(d)
                     : "l"(a), "l"(b), "r"(add), "n"(TRANS_A), "n"(TRANS_B));
    }
    template <int TRANS_B>
    static __device__ __forceinline__ void rs_##TYPE(float (&d)[N / 2], const uint32_t* a, uint64_t b, int add) {
        asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, %" #i5 ", 0;\\n"
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." #TYPE "." #TYPE
                     " {" WGMMA_NAMES_##N "}, {%" #i0 ", %" #i1 ", %" #i2 ", %" #i3 "}, %" #i4
                     ", p, 1, 1, %" #i6 ";\\n}"
                     : WGMMA_SUMS_##N(d)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), "n"(TRANS_B));
    }
#define WGMMA_SHAPE(N, ...)
    template <>
    struct WgmmaShape<N> {
        WGMMA_FUNCTIONS(N, f16, __VA_ARGS__)
        WGMMA_FUNCTIONS(N, bf16, __VA_ARGS__)
    };

template <int N>
struct WgmmaShape;
"""


def _continued(text: str) -> str:
    """Its macros, of which each line but the last ends in a backslash."""
    lines = text.splitlines()
    for i in range(len(lines) - 1):
        inside = lines[i].startswith("#define") or lines[i].startswith(" ")
        if inside and lines[i + 1].startswith(" "):
            lines[i] = f"{lines[i]:118} \\"
    return "\n".join(lines) + "\n"


def text() -> str:
    """The header."""
    out = [_HEAD]
    for n in SHAPES:
        last = range(n // 2 - 4, n // 2)
        before = f"WGMMA_NAMES_{n - 8} " if n > 8 else ""
        names = ", ".join(f"%{i}" for i in last)
        out.append(f'#define WGMMA_NAMES_{n} {before}"{", " if before else ""}{names}"\n')
    for n in SHAPES:
        before = f"WGMMA_SUMS_{n - 8}(d), " if n > 8 else ""
        sums = ", ".join(f'"+f"(d[{i}])' for i in range(n // 2 - 4, n // 2))
        out.append(f"#define WGMMA_SUMS_{n}(d) {before}{sums}\n")
    out.append(_continued(_FUNCTIONS))
    for n in SHAPES:
        out.append(f"WGMMA_SHAPE({n}, {', '.join(str(n // 2 + i) for i in range(7))})\n")
    macros = [f"NAMES_{n}" for n in SHAPES] + [f"SUMS_{n}" for n in SHAPES] + ["FUNCTIONS", "SHAPE"]
    out.append("\n" + "".join(f"#undef WGMMA_{macro}\n" for macro in macros))
    return "".join(out)


if __name__ == "__main__":
    HEADER.write_text(text())
