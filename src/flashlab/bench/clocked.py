"""A kernel that says when it was where: phase 11's last steps with stamps of the multiprocessor's clock.

    module = load_inline(clocked(step("p11_flash")), head_dim=64, dtype=torch.bfloat16)
    module.forward(q, k, v)
    cycles(module)                  # once more, as the first launch finds nothing in the caches
    module.forward(q, k, v)
    cycles(module)          # {"the last product > O is there": 481.0, ...}

Of a block's consumers one thread each writes the clock and the number of a mark into a table of its own. That costs
some 40 cycles on an H200. Stamps of one block can be compared, as they are of one clock.
"""

from collections import defaultdict
from itertools import pairwise
from statistics import median

import torch

from flashlab.cuda import CudaModule
from flashlab.kernels.series import Step, whole

BLOCKS, CONSUMERS, STAMPS = 8, 3, 1024  # what is kept: of the first blocks, and of each consumer the first stamps
_HEAD = f"""
__device__ long long stamps[{BLOCKS * CONSUMERS * STAMPS}];        // clock << 8 | mark
__global__ void copy_stamps(long long* to) {{
    for (int i = threadIdx.x; i < {BLOCKS * CONSUMERS * STAMPS}; i += blockDim.x) to[i] = stamps[i], stamps[i] = 0;
}}
extern "C" void read_stamps(long long* to) {{ copy_stamps<<<1, 256>>>(to); }}
"""
_STAMP = f"""
    int stamped = 0;
    auto stamp = [&](int mark) {{
        if (!first_thread || blockIdx.x >= {BLOCKS} || stamped == {STAMPS}) return;
        stamps[(blockIdx.x * {CONSUMERS} + consumer) * {STAMPS} + stamped++] = clock64() << 8 | mark;
    }};
"""
MARKS = (  # (name, the line that it stands before, or behind)
    ("the next part", "        mbarrier_wait(full_part + ", "before"),
    ("its Q", "        mbarrier_wait(full_q + ", "before"),
    ("Q is there", "        mbarrier_wait(full_q + ", "behind"),
    ("a tile", "        take_turn();\n        issue_scores", "before"),
    ("its scores are there", "        wgmma_wait<FIRST ? 0 : 1>();", "behind"),
    ("a tile's end", "        // endregion\n        nth++;", "before"),
    ("the last product", "            add_output();\n            output_is_there();", "before"),
    ("O is there", "            output_is_there();\n        }\n        // endregion", "behind"),
    ("O's store", "        store_output<", "before"),
    ("O is on its way", "first_row, at.head, at.batch);", "behind"),
)
"""What a consumer passes in a part, in order; all tiles pass the same three marks."""


def clocked(step: Step) -> str:
    """The source of `step`, p11_16_learns or p11_flash, with stamps. Raises ValueError: a mark has no place in it."""
    text = whole(step.name)
    marks = [(line, f"        stamp({i});\n", where) for i, (_, line, where) in enumerate(MARKS)]
    marks += [
        ("\n// region: shared memory", _HEAD, "before"),
        ("    const bool first_thread = threadIdx.x % GROUP == 0;", _STAMP, "behind"),
    ]
    for line, stamp, where in marks:
        if text.count(line) != 1:
            raise ValueError(f"{step.name}: {line!r} occurs {text.count(line)} times")
        at = text.index(line)
        at = at if where == "before" else text.index("\n", at + len(line)) + 1
        text = text[:at] + stamp + text[at:]
    return text


def cycles(module: CudaModule, consumer: int = 0) -> dict[str, float]:
    """Of each pair of marks that follow one another the median of the cycles between, over the parts of the first
    blocks but their first ones, as "a mark > the next"; and how long "a part" takes. It clears the table.

    Raises ValueError: no block has stamped three beginnings of a part; there were too few, or their tiles too many.
    """
    on_gpu = module.backend != "emulator"
    table = torch.zeros(BLOCKS, CONSUMERS, STAMPS, dtype=torch.int64, device="cuda" if on_gpu else "cpu")
    wait = torch.cuda.synchronize if on_gpu else lambda: None
    wait()  # the copy may go into another stream than the launch
    module.read_stamps(table)
    wait()
    found = defaultdict(list)
    for stamps in table[:, consumer].tolist():
        passed = [(mark & 255, mark >> 8) for mark in stamps if mark]
        begins = [i for i, (mark, _) in enumerate(passed) if mark == 0]
        for part, end in pairwise(begins[1:]):
            for (a, before), (b, after) in pairwise(passed[part : end + 1]):
                found[f"{MARKS[a][0]} > {MARKS[b][0]}"].append(after - before)
            found["a part"].append(passed[end][1] - passed[part][1])
    if not found:
        raise ValueError(
            f"no whole part is among the first {STAMPS} stamps of a consumer: take fewer tiles, or more parts"
        )
    return {pair: median(times) for pair, times in found.items()}
