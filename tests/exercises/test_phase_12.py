"""Phase 12's exercises: answers in other styles, wrong and right, and what is told of a fence that is missing."""

import pytest
from lesson_answers import diagnosis, failure
from test_rules import judge

from flashlab.exercises import check

# The count is one lane's; CUDA's own release and acquire are fences, and barriers of the warp.
RIGHT = """
    __syncwarp();
    unsigned count = 0;
    if (lane == 0) {
        __threadfence();
        count = atomicInc((unsigned*)counter, splits - 1) + 1;
        __threadfence();
    }
    last = __shfl_sync(0xffffffff, (int)count, 0) == splits;
    __syncwarp();
"""
FENCE = "        __threadfence();\n"
BARRIER = "    __syncwarp();\n    unsigned"
WRONG = {
    "no fence": (RIGHT.replace(FENCE, ""), "global-race"),
    "one lane's own, before the barrier": (
        "if (lane == 0) __threadfence();\n" + RIGHT.replace(FENCE, "", 1), "global-race"),
    "counted before all have stored": (
        RIGHT.replace(BARRIER, "    unsigned"), "global-race|merged-too-early"),  # whichever is met first
    "never 0 again": (RIGHT.replace("atomicInc((unsigned*)counter, splits - 1)", "atomicAdd(counter, 1)"),
                      "counter-not-reset"),
    "not acquired": (RIGHT[: RIGHT.rindex(FENCE)] + RIGHT[RIGHT.rindex(FENCE) + len(FENCE) :], "acquire-missing"),
    "not shown to the others": ("".join(RIGHT.rsplit("    __syncwarp();\n", 1)), "global-race"),
    "acquired behind the barrier, by one": (
        RIGHT[: RIGHT.rindex(FENCE)] + RIGHT[RIGHT.rindex(FENCE) + len(FENCE) :] + f"if (lane == 0) {FENCE}",
        "acquire-missing"),
    "a barrier of the block": (RIGHT.replace("__syncwarp", "__syncthreads"), "barrier-of-the-block"),
    "one too late": (RIGHT.replace("== splits;", "== splits + 1;"), "nobody-is-last"),
}  # fmt: skip


# Each lane its own: `__threadfence()` is membar.gl, PTX's fence.sc, and these are in one order for all.
FENCES_OF_ALL = "__threadfence();\n" + RIGHT.replace(FENCE, "") + "__threadfence();\n"
# The other lanes come to their second fence before lane 0 has counted.
TWO_OF_EACH_LANE = """
    __threadfence();
    __syncwarp();
    unsigned before = 0;
    if (lane == 0) before = atomicInc((unsigned*)counter, splits - 1);
    __threadfence();
    __syncwarp();
    last = __any_sync(~0u, lane == 0 && before + 1 == splits);
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", [RIGHT, FENCES_OF_ALL, TWO_OF_EACH_LANE])
def test_the_last_warp_to_arrive_in_another_style(text):
    check("12.6", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
@pytest.mark.every(2)
def test_an_arrival_that_is_wrong_is_told(name):
    text, slug = WRONG[name]
    assert diagnosis("12.6", text) in slug.split("|")


def by_tokens(script, page_size):
    """The pager with a list of owners per page, and pages as sets of tokens' numbers."""
    sequences, owners, results = [], [], []
    for what, s in script:
        copied = False
        if what == "new":
            sequences.append([[], 0])
        elif what == "fork":
            pages, n = sequences[s]
            for page in pages:
                owners[page] += 1
            sequences.append([pages[:], n])
        elif what == "free":
            for page in sequences[s][0]:
                owners[page] -= 1
        else:
            pages, n = sequences[s]
            copied = n % page_size > 0 and owners[pages[-1]] > 1
            if copied:
                owners[pages.pop()] -= 1
            if copied or n % page_size == 0:
                owners.append(1)
                pages.append(len(owners) - 1)
            sequences[s][1] = n + 1
        results.append([sum(map(bool, owners)), copied])
    return results


def tile_by_tile(lengths, block_n, programs, p):
    tiles = [(s, at, min(at + block_n, n)) for s, n in enumerate(lengths) for at in range(0, n, block_n)]
    share = -(-len(tiles) // programs)
    pieces = []
    for s, first, end in tiles[p * share : (p + 1) * share]:
        if pieces and pieces[-1][0] == s:
            pieces[-1] = (s, pieces[-1][1], end)
        else:
            pieces.append((s, first, end))
    return pieces


STYLES = [
    ("12.7", by_tokens),
    ("12.8", tile_by_tile),
]


@pytest.mark.parametrize(("id", "fn"), STYLES)
def test_another_style_is_right(id, fn):
    judge(id, fn)


def test_the_shortest_script_that_goes_wrong_is_told():
    late = failure("12.7", lambda script, page_size: by_tokens(script[:-1], page_size) + [(1, 0)]).sentence
    assert "page_size 2: new gives (1, 0), and should give (0, 0): a new sequence has no page yet" in late
