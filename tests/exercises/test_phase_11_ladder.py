"""11.9 to 11.14: right answers of several styles pass, and the mistakes that learners make are named."""

from __future__ import annotations

import pytest
from lesson_answers import answers_of

from flashlab.check import CheckFailed
from flashlab.exercises import check
from flashlab.kernels import step
from flashlab.simt import SimtError, find_compiler

try:
    find_compiler()
except SimtError as error:
    pytest.skip(str(error), allow_module_level=True)

IDS = [f"11.{i}" for i in range(9, 15)]
GIVE_K = "        if (first_thread) mbarrier_arrive(empty + 8 * slot);\n\n"
WAIT_S = "wgmma_wait<0>();                                       // and to us"


def failure(id, *changes):
    (text,) = answers_of(id, "solutions")
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
        text = text.replace(old, new)
    with pytest.raises(CheckFailed) as caught:
        check(id, text)
    return caught.value


@pytest.mark.parametrize("id", IDS)
def test_a_blank_is_not_solved_yet(id):
    with pytest.raises(CheckFailed) as caught:
        check(id, *answers_of(id, "exercises"))
    assert caught.value.diagnosis == "not-solved-yet"


@pytest.mark.parametrize(
    "changes, said",
    [
        ([("qkv + heads * HEAD_DIM", "qkv")], "element [0, 0] of the box is Q, batch 0, head 0, row 0, column 0"),
        ([("3ull * heads", "1ull * heads")], "element [1, 0] of the box is V, batch 0, head 0, row 0, column 0"),
        ([("(uint64_t)seq, (uint64_t)heads", "(uint64_t)heads, (uint64_t)seq")], "element [3, 0] of the box is zeros"),
        ([("SWIZZLE_128B", "SWIZZLE_NONE")], "is K, batch 0, head 0, row 1, column 8"),
        ([("{row_bytes, HEAD", "{2, row_bytes, HEAD")], "of your code, `return tensor_map("),
        ([("seq * row_bytes}", "row_bytes}")], "should be K, batch 1, head 0, row 0"),
    ],
)
def test_a_wrong_map(changes, said):
    assert said in str(failure("11.9", *changes))


@pytest.mark.parametrize(
    "changes, slug, said",
    [
        ([("if (consumer == 0) pass_turn(consumer);", "")], "deadlock", "nobody has had a turn"),
        ([("sync(4 + consumer, 2 *", "sync(4 + consumer, CONSUMERS *"),
          ("CONSUMERS, 2 * GROUP", "CONSUMERS, CONSUMERS * GROUP")],
         "deadlock", "how many threads does it count"),
        ([("if (consumer == CONSUMERS - 1) take_turn(consumer);", "")], "turn-left-over", "arrived at barrier"),
        ([("if (consumer == CONSUMERS - 1) take", "take")], "deadlock", "all turns went right"),
        ([("consumer + CONSUMERS - 1)", "consumer + 1)")], None, "they should go"),
        ([("named_barrier_arrive(", "named_barrier_sync(")], "waits-to-pass", "goes on"),
        ([("sync(4 + consumer", "sync(4"), ("arrive(4 + (consumer + CONSUMERS - 1) % CONSUMERS", "arrive(4")],
         "race", "at the same time"),
        ([("sync(4 + consumer", "sync(consumer"), ("arrive(4 + ", "arrive(")], "barrier-zero", "__syncthreads"),
    ],
)  # fmt: skip
def test_wrong_turns(changes, slug, said):
    failed = failure("11.10", *changes)
    assert said in str(failed) and slug in (None, failed.diagnosis)


@pytest.mark.parametrize(
    "changes, slug, said",
    [
        ([("(n / PLACES + 1) % 2", "n / PLACES % 2")], "deadlock", "`empty` of place 0"),
        ([("    mbarrier_wait(h.full + 8 * at, n / PLACES % 2);\n", "")], "uninitialised-shared", "h.place[at]"),
        ([("    h.place[at] = part;\n    mbarrier_arrive(h.full + 8 * at);",
           "    mbarrier_arrive(h.full + 8 * at);\n    h.place[at] = part;")], "race", "h.place[at] = part"),
        ([("    const int part = h.place[at];\n    mbarrier_arrive(h.empty + 8 * at);\n    return part;",
           "    mbarrier_arrive(h.empty + 8 * at);\n    return h.place[at];")], "race", "return h.place[at]"),
        ([("atomicAdd(h.counter, 1)", "n")], "wrong-count", "the counter ends at 0"),
        ([("    mbarrier_wait(h.empty + 8 * at, (n / PLACES + 1) % 2);     // all threads have read what was there\n",
           "")], "wrong-parts", "filled again only when"),
    ],
)  # fmt: skip
def test_a_part_that_is_handed_on_wrongly(changes, slug, said):
    failed = failure("11.11", *changes)
    assert failed.diagnosis == slug and said in str(failed)


@pytest.mark.long
@pytest.mark.parametrize(
    "change, slug, said",
    [
        (("p->batch * p->heads * ceil", "p->heads * ceil"), "wrong-grid", "should be 16"),
        (("__align__(1024) ", ""), "bulk-misaligned", "aligned to 1 byte"),
        (("    cudaFuncSetAttribute(attend, cudaFuncAttributeMaxDynamicSharedMemorySize, SHARED_BYTES);\n", ""),
         "launch-configuration", "cudaFuncSetAttribute"),
    ],
)  # fmt: skip
def test_a_wrong_launch(change, slug, said):
    failed = failure("11.12", change)
    assert failed.diagnosis == slug and said in str(failed)


@pytest.mark.long
@pytest.mark.parametrize(
    "changes, slug, said",
    [
        ([(GIVE_K, "\n"), (WAIT_S, f"if (first_thread) mbarrier_arrive(empty + 8 * slot);\n        {WAIT_S}")],
         "stage-overwritten", "still reading"),
        ([(WAIT_S, "// and to us")], "wgmma-registers", "accumulator"),
        ([(GIVE_K, "\n")], "deadlock", "gives back, in this order, slots 1"),
        ([(GIVE_K, GIVE_K.replace("first_thread", "lane == 0"))], "stage-overwritten",
         "arrives 5 times at `empty` of slot 0"),
        ([("        mbarrier_wait(full + 8 * slot, 2 * j / SLOTS % 2);", "")], "read-before-wait",
         "Item 0 of the ring, K of tile 0, is in slot 0"),
        ([("2 * j / SLOTS % 2", "j / SLOTS % 2")], None, "Item 4 of the ring, K of tile 2"),
        ([("descriptor_of_rows<BLOCK_N>(ring", "descriptor(ring")], None, ""),
        ([("acc[4 * n + 2 * r + e] *= correction;", ";")], "o-not-rescaled", "rescaled"),
        ([("x == -INFINITY ? 0.f : x", "x")], "masked-rows-nan", "NaN"),
        ([(GIVE_K, "\n"),
          ("        wgmma_wait<0>();\n        if (first_thread) mbarrier_arrive(empty + 8 * slot);\n    }",
           "        wgmma_wait<0>();\n        if (first_thread) mbarrier_arrive(empty + 8 * slot), "
           "mbarrier_arrive(empty + 8 * (2 * j % SLOTS));\n    }")],
         "released-late", "could bring the next tile"),
    ],
)  # fmt: skip
def test_a_wrong_consumer(changes, slug, said):
    failed = failure("11.13", *changes)
    assert said in str(failed) and slug in (None, failed.diagnosis)


@pytest.mark.long
def test_what_a_whole_kernel_is_refused_for():
    for changes, slug in (
        ([("mbarrier_init(empty_k(i), CONSUMERS), mbarrier_init(empty_v(i), CONSUMERS)",
           "mbarrier_init(empty_k(i), 1), mbarrier_init(empty_v(i), 1)")], "stage-overwritten"),
        ([("STAGES = 2", "STAGES = 1")], "one-stage"),
        ([("        setmaxnreg_dec<24>();\n", ""), ("    setmaxnreg_inc<240>();\n", "")], "registers-kept"),
        ([("            load_tile<BLOCK_M>(q_smem", "            if (tiles) load_tile<BLOCK_M>(q_smem")], "deadlock"),
    ):  # fmt: skip
        assert failure("11.14", *changes).diagnosis == slug
    for name, slug in (("p11_4_producer", "too-few-rows-per-tile"), ("p9_flash", "no-wgmma")):
        with pytest.raises(CheckFailed) as caught:
            check("11.14", step(name).path.read_text())
        assert caught.value.diagnosis == slug


@pytest.mark.long
@pytest.mark.parametrize("name", ["p11_5_consumers", "p11_7_ping_pong", "p11_10_epilogue"])
def test_the_ladders_own_kernels_pass(name):
    assert check("11.14", step(name).path.read_text())
