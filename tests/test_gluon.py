"""Phase 11b's Gluon kernels: their logic on a CPU, what the compiler makes of them, and on Hopper their results."""

import re
from functools import partial

import pytest
import torch
from drawn import qkv, within
from gluon_stand_in import on_cpu

from flashlab import runtime
from flashlab.attention import gluon_forward
from flashlab.attention.gluon_forward import TILES, boxes, compile_arguments, flash_attention_gluon
from flashlab.bench import industrial
from flashlab.check import verify
from flashlab.check.training import wanted
from flashlab.triton_tools.compile_report import compile_reports

STEPS = list(gluon_forward.KERNELS)
SIXTEEN = (torch.float16, torch.bfloat16)
HOPPER = gluon_forward.why_not(runtime.device()) is None  # where they run, compiled
DEVICE = runtime.device() if HOPPER else "cpu"


def make(*sizes, layout="bhnd", device=DEVICE):
    return qkv(*sizes, torch.bfloat16, layout, sum(sizes[3:5]), device)


def expect(run, q, k, v, **options):
    o, lse = run(q, k, v, **options)
    assert o.dtype == q.dtype and o.shape == q.shape and lse.dtype == torch.float32 and lse.shape == q.shape[:3]
    asked = {name: options[name] for name in ("causal", "scale") if name in options}
    within(wanted(q, k, v, **asked), o=o, lse=lse)


# Lengths of one tile, of several, and beside them; more queries than keys: rows and whole blocks that see no key.
LENGTHS = [(1, 1), (64, 64), (70, 33), (128, 128), (129, 257), (33, 300), (300, 33), (200, 520)]


# ---- their results: on Hopper, elsewhere over the stand-ins ---------------------------------------------------------
@pytest.fixture
def cpu():
    with on_cpu() as copy:
        yield copy


@pytest.fixture
def gluon(request):
    """A kernel that waits for ever would take all the tests with it: on Hopper each is first tried in a process."""
    if not HOPPER:
        return request.getfixturevalue("cpu")
    reason = industrial.trial(request.node.callspec.params.get("step", "specialised"))
    assert reason is None, reason
    return gluon_forward


@pytest.mark.skipif(not runtime.INTERPRETED and not HOPPER, reason="the checker's inputs are on the GPU")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.every(3)
def test_the_checkers_cases(gluon, step):
    forward = partial(gluon.flash_attention_gluon, step=step)
    longest = None if HOPPER else 600
    verify(forward, causal=True, gqa=True, dtypes=SIXTEEN, head_dims=(64, 128, 256, 40), max_seq=longest)


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 256] if HOPPER else [40])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.every(2)
def test_many_lengths(gluon, step, head_dim, causal):
    small = (gluon.GluonTile(2, 32, 2), gluon.GluonTile(3 if step == "specialised" else 1, 64, 3))
    more = [(1023, 1024), (1024, 1023), (640, 128), (3, 799), (2048, 2048)] if HOPPER else []
    for seq_q, seq_k in LENGTHS + more:
        for tile in (None,) if HOPPER else small:
            q, k, v = make(1, 4, 2, seq_q, seq_k, head_dim, layout="bnhd" if seq_q % 2 else "bhnd")
            expect(gluon.flash_attention_gluon, q, k, v, causal=causal, step=step, tile=tile)


@pytest.mark.parametrize("causal", [False, True], ids=["whole", "causal"])
@pytest.mark.every(2)
def test_other_tiles_and_programs_that_take_one_block_after_the_other(gluon, causal):
    sizes = (2, 32, 8, 1111, 1333, 64) if HOPPER else (1, 3, 1, 300, 290, 64)
    for tile in ((2, 64, 4), (3, 128, 2), (3, 64, 3)) if HOPPER else ((2, 32, stages) for stages in (1, 2, 3, 4)):
        for persistent in (True, False):
            options = dict(tile=gluon.GluonTile(*tile), persistent=persistent, scale=-0.2)
            expect(gluon.flash_attention_gluon, *make(*sizes), causal=causal, **options)


@pytest.mark.skipif(not HOPPER, reason="Gluon's kernels run on Hopper, compiled")
@pytest.mark.parametrize("step", STEPS)
def test_the_same_bits_each_time(gluon, step):
    q, k, v = make(2, 16, 16, 1000, 1000, 128)
    first = flash_attention_gluon(q, k, v, causal=True, step=step)
    for _ in range(50):
        again = flash_attention_gluon(q, k, v, causal=True, step=step)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# What a kernel like this can get wrong, as a change of its text.
MISTAKES = {
    "K is loaded into a place that is being read": ("mbarrier.wait(k_free.index(slot), at // STAGES & 1 ^ 1)", "pass"),
    "V is loaded into a place that is being read": ("mbarrier.wait(v_free.index(slot), at // STAGES & 1 ^ 1)", "pass"),
    "Q is loaded while o is in its place": ("mbarrier.wait(q_free.index(number), turn & 1 ^ 1)", "pass"),
    "Q is used before it is there": ("mbarrier.wait(ready[0].index(NUMBER), turn & 1)", "pass"),
    "V is used before it is there": ("mbarrier.wait(ready[2].index(before), (at - 1) // STAGES & 1)", "pass"),
    "a place is free before all warpgroups have read it": ("barriers(STAGES, GROUPS), barriers(STAGES, GROUPS))",
                                                           "barriers(STAGES, 1), barriers(STAGES, 1))"),
    "the count of tiles starts anew with each block": (
        "        done += tiles\n        turn += 1\n\n\n@gluon.jit(do_not_spec",
        "        turn += 1\n\n\n@gluon.jit(do_not_spec",
    ),
    "the wait for the scores covers nothing": ("warpgroup_mma_wait(1, deps=(scores,))\n    give_back",
                                               "warpgroup_mma_wait(2, deps=(scores,))\n    give_back"),
    "the last tile of keys is not masked": ("columns[None, :] < N", "columns[None, :] >= 0"),
    "one tile too few is masked": ("tiles - whole // BLOCK_N, 0)", "tiles - whole // BLOCK_N - 1, 0)"),
    "rows without a score": ("gl.where(m_new == float(\"-inf\"), 0.0, m_new)", "m_new"),
    "o is sent before it is waited for": ("    tma.store_wait(0)\n", ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_stand_in_finds(mistake):
    with pytest.raises((AssertionError, TimeoutError)), on_cpu(*MISTAKES[mistake]) as cpu:
        for seq_q, seq_k, causal in ((300, 290, True), (300, 290, False), (290, 130, True)):
            q, k, v = make(1, 3, 1, seq_q, seq_k, 64, device="cpu")
            expect(cpu.flash_attention_gluon, q, k, v, causal=causal, tile=cpu.GluonTile(2, 32, 2), persistent=True)


def test_bad_inputs_are_refused_with_a_sentence(cpu):
    (odd, *_), (wide, *_), (q, k, v) = (make(1, 1, 1, 10, 10, d, device="cpu") for d in (36, 264, 64))
    for inputs, options, error, sentence in (
        ((odd,) * 3, {}, ValueError, "a head_dim that is a multiple of 8"),
        ((wide,) * 3, {}, ValueError, "head_dim is 264"),
        ((q, k, v), dict(step="fast"), ValueError, "step is 'fast'"),
        ((q, k, v), dict(tile=cpu.GluonTile(4, 64, 2)), ValueError, "4 warpgroups"),
        ((q.mT.contiguous().mT, k, v), {}, ValueError, "last stride of 1"),
        ((q.float(), k.float(), v.float()), {}, TypeError, "float32"),
    ):
        with pytest.raises(error, match=sentence):
            cpu.flash_attention_gluon(*inputs, **options)
    with pytest.raises(ValueError, match=r"k\.contiguous\(\)"):
        boxes("k", k.expand(1, 2, 10, 64), 64, 64)


def test_empty_inputs(cpu):
    q, k, v = make(1, 1, 1, 10, 0, 64, device="cpu")
    o, lse = cpu.flash_attention_gluon(q, k, v)
    assert (o == 0).all() and (lse == float("-inf")).all() and o.shape == q.shape
    q, k, v = make(0, 1, 1, 10, 10, 64, device="cpu")
    assert cpu.flash_attention_gluon(q, k, v)[0].shape == q.shape


@pytest.mark.skipif(HOPPER, reason="this is a Hopper GPU")
def test_elsewhere_it_says_what_is_missing():
    with pytest.raises(RuntimeError, match="compute capability 9.0"):
        flash_attention_gluon(*make(1, 1, 1, 10, 10, 64))


@pytest.mark.parametrize("dtype", SIXTEEN, ids=str)
@pytest.mark.parametrize("head_dim", TILES)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.long
def test_compiled_for_hopper(step, head_dim, dtype):
    asked = [(head_dim, dtype, causal) for causal in (False, True)]
    arguments = [compile_arguments(step, dtype, d, causal=causal) for d, dtype, causal in asked]
    for report in compile_reports(gluon_forward.KERNELS[step], arguments, targets=["sm_90"]):
        assert report.ok, report.error
        assert report.fits and report.spill_bytes == 0, report
        assert {"wgmma.mma_async", "cp.async.bulk.tensor.4d", "mbarrier.try_wait"} <= set(
            re.findall(r"wgmma\.mma_async|cp\.async\.bulk\.tensor\.4d|mbarrier\.try_wait", report.ptx)
        )
        assert report.instructions["HGMMA"] and report.instructions["UTMALDG"]
        assert ("setmaxnreg" in report.ptx) == (step == "specialised")


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS[1:])
@pytest.mark.every(2)
def test_exponentials_stand_between_the_two_waits(step):
    """Where ptxas moves the softmax behind the wait for P V, the two are computed one after the other."""
    arguments = compile_arguments(step, torch.bfloat16, 128)
    (report,) = compile_reports(gluon_forward.KERNELS[step], [arguments], targets=["sm_90"])
    between = re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x1(.*?)WARPGROUP\.DEPBAR\.LE gsb0, 0x0", report.sass, re.DOTALL)
    assert between and all(part.count("MUFU.EX2") >= (60 if step == "specialised" else 32) for part in between)
