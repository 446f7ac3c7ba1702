"""Phase 4's kernel: layouts, values; compiled. (Sizes, drawn cases: test_triton_backward; the checker's: lecture 4.)"""

import json
import math
from functools import partial

import pytest
import torch
from drawn import DEVICE, DTYPES, qkv, within

from flashlab import runtime
from flashlab.attention import tiles, triton_backward
from flashlab.attention.reference import attention
from flashlab.attention.tiles import Tile
from flashlab.attention.triton_forward import (
    compile_arguments,
    flash_attention_forward,
    flash_attention_kernel,
    hbm_bytes,
)
from flashlab.check import verify
from flashlab.check.training import wanted
from flashlab.triton_tools.compile_report import compile_reports
from flashlab.triton_tools.watch import hbm_traffic

SMALL = Tile(16, 16, 4, 2)
SIXTEEN, FLOAT32 = torch.float16, torch.float32


def expect(q, k, v, *, run=flash_attention_forward, tile=SMALL, **options):
    o, lse = run(q, k, v, tile=tile, **options)
    assert o.dtype == q.dtype and o.shape == q.shape and lse.dtype == FLOAT32 and lse.shape == q.shape[:3]
    within(wanted(q, k, v, **options), o=o, lse=lse)
    return o, lse


@pytest.mark.slow
def test_the_checkers_longer_cases():
    forward = partial(flash_attention_forward, tile=Tile(64, 32, 4, 2))
    verify(forward, causal=True, head_dims=(16,), max_tile=128, deterministic=True)


def test_tiles_that_no_row_sees_are_never_loaded():
    """What would spread if it were: NaN above the diagonal tile, left and right of a window, behind the last key."""
    q, k, v = qkv(1, 1, 1, 16, 160, 16)
    want, _ = flash_attention_forward(q, k, v, window=(10, 5), tile=SMALL)
    k[:, :, : 160 - 16 - 10] = math.nan
    v[:, :, : 160 - 16 - 10] = math.nan
    assert torch.equal(flash_attention_forward(q, k, v, window=(10, 5), tile=SMALL)[0], want)
    q, k, v = qkv(1, 1, 1, 64, 64, 16)
    want, _ = flash_attention_forward(q, k, v, causal=True, tile=SMALL)
    k[:, :, 32:] = math.nan
    v[:, :, 32:] = math.nan
    assert torch.equal(flash_attention_forward(q, k, v, causal=True, tile=SMALL)[0][:, :, :32], want[:, :, :32])


@pytest.mark.skipif(not runtime.INTERPRETED, reason="counted where kernels are interpreted")
def test_causal_reads_the_tiles_of_the_triangle():
    q, k, v = qkv(1, 1, 1, 128, 128, 16, SIXTEEN)
    traffic = hbm_traffic(flash_attention_forward, q, k, v, causal=True, tile=SMALL)
    triangle = 8 * 9 // 2  # tiles of 16 keys: 1 for the first block of queries, 8 for the last
    assert traffic.read_from["k"] == traffic.read_from["v"] == triangle * 16 * 16 * 2
    traffic = hbm_traffic(flash_attention_forward, q, k, v, window=(16, 0), tile=SMALL)
    assert traffic.read_from["k"] == (16 + 7 * 32) * 16 * 2


@pytest.mark.parametrize("heads, kv_heads, seq_q, seq_k, head_dim", [(3, 3, 128, 96, 32), (4, 2, 70, 90, 40)])
def test_bytes_are_what_the_formula_says(heads, kv_heads, seq_q, seq_k, head_dim):
    q, k, v = qkv(2, heads, kv_heads, seq_q, seq_k, head_dim, SIXTEEN)
    traffic = hbm_traffic(flash_attention_forward, q, k, v, tile=Tile(64, 32, 4, 2))
    want = hbm_bytes(2, heads, kv_heads, seq_q, seq_k, head_dim, 2, 64)
    assert (traffic.bytes_read, traffic.bytes_written) == want


HAS_TMA = runtime.INTERPRETED or torch.cuda.get_device_capability()[0] >= 9


@pytest.mark.skipif(not HAS_TMA, reason="tensor descriptors need compute capability 9.0")
@pytest.mark.parametrize("head_dim", [16, 40, 64])
def test_tensor_descriptors(head_dim):
    for layout in ("bhnd", "bnhd"):
        inputs = qkv(1, 2, 1, 40, 70, head_dim, SIXTEEN, layout)
        for options in (dict(), dict(causal=True), dict(window=(20, 9), softcap=4.0)):
            expect(*inputs, run=partial(flash_attention_forward, tma=True), tile=Tile(32, 16, 4, 2), **options)


def test_tensor_descriptors_that_cannot_be():
    for inputs in (qkv(1, 1, 1, 20, 20, 59, SIXTEEN), qkv(1, 1, 1, 20, 24, 16, layout="bhdn")):
        with pytest.raises(ValueError, match="k has strides .* a tensor descriptor needs a last stride of 1 and rows"):
            flash_attention_forward(*inputs, tma=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("logit", [-1e4, -2.45e5, 2e5])
def test_logits_far_from_zero(dtype, logit):
    """A finite stand-in for minus infinity would win against such scores."""
    q, k, v = qkv(1, 1, 1, 20, 40, 16, dtype)
    q.zero_()
    k.zero_()
    q[..., 0], k[..., 0] = 256.0, round(logit / 256)
    o, lse = flash_attention_forward(q, k, v, causal=True, scale=1.0, tile=SMALL)
    want, _ = attention(*(x.double().cpu() for x in (torch.zeros_like(q), torch.zeros_like(k), v)), causal=True)
    torch.testing.assert_close(o.double().cpu(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)


def test_a_row_of_minus_infinity_and_a_row_of_nan():
    q, k, v = qkv(1, 1, 1, 20, 40, 16)
    k[..., 0] = -math.inf
    q[:, :, :3, 0] = 1.0
    q[:, :, 3:] = 0.0  # 0 * -inf is NaN
    o, lse = flash_attention_forward(q, k, v, tile=SMALL)
    assert (o[:, :, :3] == 0).all() and (lse[:, :, :3] == -math.inf).all()
    assert o[:, :, 3:].isnan().all() and lse[:, :, 3:].isnan().all()


def test_strides_of_zero_and_gaps():
    q, k, v = qkv(2, 2, 1, 20, 35, 16)
    wide = torch.full((2, 1, 35, 3, 16), math.nan, device=DEVICE)
    wide[:, :, :, 1] = k
    gaps = wide[:, :, :, 1]
    for options in (dict(), dict(causal=True)):
        want = flash_attention_forward(q, k, v, tile=SMALL, **options)
        got = flash_attention_forward(q, gaps.expand(2, 2, 35, 16), v.expand(2, 2, 35, 16), tile=SMALL, **options)
        torch.testing.assert_close(got, want, rtol=0, atol=5e-6)
    expect(q[:1].expand(2, 2, 20, 16), k, v)


def test_too_many_rows_for_one_launch():
    one = torch.zeros((), dtype=SIXTEEN, device=DEVICE)
    for shape, sentence in (
        ((2**16, 2**15, 1, 16), r"q has 2147483648 heads of 1 rows; a grid has 2\^31 - 1 programs"),
        ((1, 1, 2**30 + 1, 16), "q has 1073741825 rows; their numbers have to fit 32 bits"),
    ):
        with pytest.raises(ValueError, match=sentence):
            flash_attention_forward(*(one.expand(shape),) * 3)


def test_a_window_wider_than_32_bits():
    q, k, v = qkv(1, 1, 1, 20, 30, 16)
    for window in ((2**40, 3), (3, 2**40), 2**40):
        expect(q, k, v, window=window)


def test_the_output_has_the_inputs_order_in_memory_and_the_run_repeats():
    q, k, v = qkv(2, 3, 3, 33, 40, 16, SIXTEEN, "bnhd")
    before = [x.clone() for x in (q, k, v)]
    first = flash_attention_forward(q, k, v, causal=True)
    assert first[0].stride() == q.stride()
    for _ in range(1 if runtime.INTERPRETED else 250):
        again = flash_attention_forward(q, k, v, causal=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), before, strict=True))


Q = torch.zeros(1, 4, 8, 16, device=DEVICE)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="a GPU can be tuned")
def test_few_programs_take_a_tile_of_their_own(tmp_path, monkeypatch):
    path = tmp_path / "tiles.json"
    many = {tiles.name_of("dkdv", "hopper", False, True, few): [[64, tile]]
            for few, tile in ((False, [64, 64, 4, 2]), (True, [64, 16, 4, 3]))}  # fmt: skip
    path.write_text(json.dumps(many))
    monkeypatch.setattr(tiles, "MEASURED", path)
    monkeypatch.setattr(tiles, "_gpu", lambda device: ("NVIDIA Pretended", "hopper", 132))
    monkeypatch.setattr(tiles, "_tuned", dict)
    tiles._measured.cache_clear()
    tiles.recorded.cache_clear()
    found = {
        heads: tiles.choose(tiles.Work("dkdv", 64, SIXTEEN, True, 1024, 1024, heads), DEVICE).BLOCK_N
        for heads in (1, 8, 9, 64)
    }
    tiles._measured.cache_clear()
    tiles.recorded.cache_clear()
    assert found == {1: 16, 8: 16, 9: 64, 64: 64}, "8 heads of 16 blocks are 128 programs, 9 are 144"


@pytest.mark.skipif(not runtime.INTERPRETED, reason="compiled kernels can be tuned")
def test_tuning_needs_a_gpu():
    with pytest.raises(RuntimeError, match="tuning times compiled kernels on a GPU"):
        flash_attention_forward(Q, Q, Q, tune_tile=True)


@pytest.mark.skipif(runtime.INTERPRETED, reason="tuning needs a GPU")
def test_tuning_keeps_the_result_and_is_remembered(own_cache, monkeypatch):
    monkeypatch.setitem(tiles.SEARCH, "forward, small", (Tile(64, 32, 4, 2), Tile(32, 64, 4, 2), Tile(512, 512, 4, 4)))
    tiles._tuned.cache_clear()
    q, k, v = qkv(1, 4, 4, 512, 512, 64, SIXTEEN)
    o, lse = flash_attention_forward(q, k, v, tune_tile=True)
    within(wanted(q, k, v), o=o, lse=lse)
    (tile,) = tiles._tuned().values()
    assert tile in tiles.SEARCH["forward, small"][:2]
    tiles._tuned.cache_clear()
    assert tiles.choose(tiles.Work("forward", 64, SIXTEEN, False, 512, 512, 4), DEVICE) == tile
    tiles._tuned.cache_clear()


CHIPS = {"sm_80": "ampere", "sm_86": "consumer", "sm_90": "hopper", "sm_120": "consumer"}
# sm_120 has the tiles of sm_86, and as much shared memory.
KERNELS = {
    "forward": (flash_attention_kernel, compile_arguments),
    "dkdv": (triton_backward.dkdv_kernel, partial(triton_backward.compile_arguments, "dkdv")),
    "dq": (triton_backward.dq_kernel, partial(triton_backward.compile_arguments, "dq")),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", CHIPS)
@pytest.mark.long
def test_recorded_tiles_fit_and_spill_little(target, name):
    """Each head_dim at which the choice changes; a few numbers of the loop's surroundings may be spilled."""
    jobs = [
        (dtype, choice, masked)
        for dtype in (torch.bfloat16, torch.float32)
        if dtype != FLOAT32 or target == "sm_86"  # float32 takes the compiler longest
        for masked in (False, True)
        for choice in tiles.recorded(name, CHIPS[target], dtype, masked)
        if masked or choice.source == "measured"  # others are the same for both
    ]
    kernel, arguments_of = KERNELS[name]
    arguments = [arguments_of(dtype, c.head_dim, c.tile, causal=masked) for dtype, c, masked in jobs]
    reports = compile_reports(kernel, arguments, targets=[target])
    for (dtype, choice, _), asked, report in zip(jobs, arguments, reports, strict=True):
        on_tensor_cores = dtype != FLOAT32 or asked["PRECISION"] != "ieee"
        assert (report.tensor_core_instructions > 0) == on_tensor_cores, report
        most = 64 if name == "forward" else 128  # bytes a thread, of 1020 in registers
        if name != "forward" and choice.source != "compiled" and choice.head_dim >= 128:
            most = 1024  # the fastest tile of dK and dV spills what its loop does not need
        assert report.fits and report.spill_bytes <= most, report
        if target == "sm_90":
            products, waits = (report.sass.count(word) for word in ("HGMMA", "WARPGROUP.DEPBAR"))
            assert waits < products / 2, "ptxas waits for each instruction of a product (its warning C7515)"


@pytest.mark.long
def test_float32_is_three_tf32_products():
    tile = Tile(32, 32, 4, 2)
    arguments = [compile_arguments(FLOAT32, 64, tile, allow_tf32=allowed) for allowed in (True, False)]
    one, three = compile_reports(flash_attention_kernel, arguments, targets=["sm_86"])
    assert three.tensor_core_instructions == 3 * one.tensor_core_instructions > 0


def test_a_chip_that_nobody_knows_gets_what_fits_everywhere():
    known = {None: "interpreter", (8, 0): "ampere", (8, 6): "consumer", (8, 9): "consumer", (9, 0): "hopper"}
    known |= {(10, 0): "hopper", (12, 0): "consumer", (7, 5): "consumer", (13, 0): "consumer"}
    assert {capability: tiles.chip_class(capability) for capability in known} == known
