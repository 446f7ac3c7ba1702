"""Phase 11's last step and its exhibits, beside what is asked of every step (test_series.py)."""

import math

import pytest
import torch
from drawn import qkv
from test_series import BOUND, CASES, MORE, expect, run

from flashlab.attention import reference
from flashlab.bench import hopper_jobs
from flashlab.cuda import load_inline
from flashlab.kernels import HOPPER, HOPPER_SIDE, step

FLASH = step("p11_flash")


@pytest.mark.parametrize("head_dim", FLASH.head_dims)
@pytest.mark.parametrize("dtype", FLASH.dtypes, ids=str)
@pytest.mark.long
def test_the_last_step_takes_every_shape(head_dim, dtype):
    for sms in (2, 132):  # several consumers; one
        for case in CASES + MORE[:3]:
            run(FLASH, case, head_dim=head_dim, dtype=dtype, sms=sms)
    run(FLASH, MORE[0], head_dim=head_dim, dtype=dtype, check=True)


SIZES = [(d, dict(hopper_jobs.defines_of(f"p11_flash {x}"))) for d, tried in hopper_jobs.SIZES.items() for x in tried]


@pytest.mark.long
@pytest.mark.parametrize(("head_dim", "defines"), SIZES, ids=str)
def test_the_macros_that_are_tried_for_a_head_size(head_dim, defines):
    for causal in (True, False):
        run(FLASH, (*MORE[0][:4], causal), head_dim=head_dim, dtype=torch.bfloat16, check=True, **defines)


def test_blocks_have_one_consumer_where_parts_are_few():
    launches = [run(FLASH, CASES[0], sms=sms).launches[0] for sms in (2, 132)]
    assert [launch.block[0] for launch in launches] == [4 * 128, 2 * 128]


@pytest.mark.parametrize(
    ("case", "asked"),
    [
        ((10, 10, 70, 130, True), 10),
        ((10, 10, 70, 130, False), 10),
        ((4, 4, 70, 130, False), 0),
        ((8, 8, 192, 90, False), 0),
    ],
    ids=["causal", "rows for two consumers of three", "few parts", "equal parts"],
)
def test_blocks_ask_for_parts_that_are_unequal_and_many(case, asked):
    assert run(FLASH, case).launches[0].counters["global_atomics"] == asked


@pytest.mark.parametrize("name", ["p11_1_tma", "p11_6_overlap", "p11_flash"])
def test_layouts(name):
    """Heads between the rows, one batch of several, keys that several batches share, a row that is a part of a row."""
    module = load_inline(step(name), backend="emulator")
    q, k, _ = qkv(2, 3, 1, 70, 90, 64, torch.float16, "bnhd", device="cpu")
    _, keys, v = qkv(2, 3, 1, 70, 90, 64, torch.float16, seed=1, device="cpu")
    shared = keys[:1].expand(2, 1, 90, 64)
    wide = qkv(2, 3, 3, 70, 70, 192, torch.float16, device="cpu")[0][..., 64:128]
    for q_, k_, v_ in ((q, k, v), (q, shared, v), (wide, k, v)):
        expect(*module.forward(q_, k_, v_, causal=True), q_, k_, v_, bound=BOUND[torch.float16], causal=True)


@pytest.mark.parametrize("defines", [{}, {"POLYNOMIAL": 4}], ids=str)
def test_infinities_and_nan_stay_what_they_are(defines):
    q, k, v = qkv(1, 1, 1, 70, 70, 64, torch.float16, seed=2, device="cpu")
    q[:, :, 3] = math.nan
    v[:, :, 5, 7] = math.inf
    module = load_inline(FLASH, backend="emulator", defines=defines)
    o, lse = module.forward(q, k, v)
    assert o[:, :, 3].isnan().all() and lse[:, :, 3].isnan().all()
    others = torch.arange(70) != 3
    assert o[:, :, others, 7].isinf().all() and o[:, :, others, 8:].isfinite().all()
    assert lse[:, :, others].isfinite().all()


MACROS = [  # every value of each, by itself and with the polynomial
    (s, {"POLYNOMIAL": n} | define)
    for s in HOPPER if "TRUST" in s.defines for n in (0, 4)
    for define in ({}, *({d: v} for d, values in s.defines.items() if d != "POLYNOMIAL" for v in values[1:]))
] + [(FLASH, {"POLYNOMIAL": n, "HEAD_DIM": d, "TRUST": 1}) for n in (1, 8) for d in (64, 128, 192, 256)]  # fmt: skip
MACROS += [(FLASH, {"HEAD_DIM": 96} | slabs) for slabs in ({}, {"SLAB": 64, "TALL": 2, "BLOCK_N": 128})]
SHORT = (  # the others are for the night
    ({"POLYNOMIAL": 4}, torch.float16), ({"POLYNOMIAL": 1, "HEAD_DIM": 128, "TRUST": 1}, torch.bfloat16)
)  # fmt: skip


@pytest.mark.parametrize(
    ("step", "defines", "dtype"),
    [
        pytest.param(s, d, t, marks=[] if s is FLASH and (d, t) in SHORT else pytest.mark.long)
        for s, d in MACROS for t in FLASH.dtypes
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)  # fmt: skip
def test_scores_that_jump(step, defines, dtype):
    """In every head, two tiles after the first reached: by so many bits, in the first, a middle, the last portion."""
    defines, generator = dict(defines), torch.Generator().manual_seed(0)
    d = defines.pop("HEAD_DIM", 64)
    n = defines.get("BLOCK_N", {96: 96, 192: 96, 256: 64}.get(d, 128))
    heads = [(bits, key) for bits in (8, 40, 61, 64, 120, 200, 300) for key in (0, n // 2, n * 3 // 4)]
    q, k, v = (torch.randn(1, len(heads), rows, d, generator=generator) for rows in (64, 3 * n, 3 * n))
    q[..., 0], k[..., 0] = 16, 0
    for head, (bits, key) in enumerate(heads):  # the tile at n is met before that at 0
        k[0, head, [key, n + key], 0] = torch.tensor([2.0, 1.0]) * bits * math.log(2) * d**0.5 / 16
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    module = load_inline(step, backend="emulator", head_dim=d, dtype=dtype, defines=defines)
    expect(*module.forward(q, k, v, sms=2), q, k, v, bound=2 * BOUND[dtype], lse_bound=1e-3)


@pytest.mark.parametrize("name", ["p11_flash", pytest.param("p11_side_rounded", marks=pytest.mark.long)])
@pytest.mark.parametrize("dtype", FLASH.dtypes, ids=str)
def test_scores_so_wide_that_each_row_rises_at_its_own_tiles(name, dtype):
    q, k, v = qkv(1, 1, 1, 130, 700, 64, dtype, device="cpu")
    module = load_inline(step(name), backend="emulator", dtype=dtype)
    for scale, causal in ((10.0, False), (20.0, False), (50.0, True)):
        options = dict(scale=scale, causal=causal)
        expect(*module.forward(q, k, v, **options), q, k, v, bound=2 * BOUND[dtype], lse_bound=1e-3, **options)


@pytest.mark.parametrize("dtype", FLASH.dtypes, ids=str)
def test_a_rise_near_the_most_that_can_be_lowered(dtype):
    """The factor that lowers P must not be flushed to 0, whichever way references are rounded."""
    module, room = load_inline(FLASH, backend="emulator", dtype=dtype), 64 * (dtype == torch.bfloat16)
    q, k, v = torch.zeros(1, 1, 64, 64), torch.zeros(1, 1, 256, 64), torch.full((1, 1, 256, 64), 2.0)
    q[..., 0], k[:, :, 7, 0], v[:, :, 7] = 64, 1, 3
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    for bits in (bits + i * 1e-6 for bits in (120 - room, 126 - room) for i in range(-8, 9)):
        o, lse = module.forward(q, k, v, scale=bits * math.log(2) / 64)
        assert (o == 3).all() and (lse - bits * math.log(2)).abs().max() <= 1e-4, bits


@pytest.mark.long
def test_where_one_key_dominates_its_rounding_cancels():
    """Under an older maximum its weight is no power of two; its rounding is an error of the whole row, in o alone.

    In the first tile scores are low, and behind it one key is by 7 to 9 bits above all others.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, rows, 64, generator=generator) for rows in (128, 1024, 1024))
    q[..., 0], k[..., 0] = 8, 0
    k[0, :, 3, 0] = torch.tensor([7.3, 8.9])
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    want, want_lse = reference.attention(q, k, v)
    errors = {}
    for name in ("p11_flash", "p11_side_rounded"):
        o, lse = load_inline(step(name), backend="emulator", dtype=torch.bfloat16).forward(q, k, v, sms=2)
        errors[name] = ((o - want).square().mean().sqrt().item(), (o - want).abs().max().item())
        assert (lse - want_lse).abs().max() <= 1e-4
    (rms, worst), (rms_there, worst_there) = errors["p11_flash"], errors["p11_side_rounded"]
    assert rms_there < 0.8 * rms and worst_there < 0.8 * worst


@pytest.mark.long
@pytest.mark.parametrize("head_dim", [64, 192])
def test_the_exhibit_beside_the_last_step(head_dim):
    for case in MORE:
        run(HOPPER_SIDE[0], case, head_dim=head_dim, dtype=torch.bfloat16, sms=2, check=True)


@pytest.mark.parametrize("head_dim", [64, pytest.param(192, marks=pytest.mark.long)])
def test_the_exhibit_that_adds_gives_what_all_keys_give(head_dim):
    """In three parts, of which the second has keys for the last rows alone, in a state of another layout."""
    q, k, v = qkv(1, 2, 1, 150, 300, head_dim, torch.bfloat16, device="cpu")
    want, want_lse = reference.attention(q, k, v, causal=True)
    o = torch.full((1, 150, 2, head_dim), torch.nan).transpose(1, 2)
    lse = torch.full((1, 2, 150), -torch.inf)
    options = dict(backend="emulator", check=True, head_dim=head_dim, dtype=torch.bfloat16)
    kernel = load_inline(HOPPER_SIDE[1], defines={"DYNAMIC": 2, "WHOLE": 1}, **options)  # two tiles are cut in two
    for keys, causal in ((slice(0, 150), False), (slice(150, 300), True)):
        kernel.forward(q, k[:, :, keys], v[:, :, keys], causal=causal, sms=2, into=(o, lse))
        assert not kernel.report.findings
    assert (lse - want_lse).abs().max() < 1e-4
    rounded = want.bfloat16().double()
    assert (o - want).square().mean() < (rounded - want).square().mean()  # P was rounded, o was not
    with pytest.raises(ValueError, match="p11_side_part.cu adds: pass `into`"):
        kernel.forward(q, k, v)
    with pytest.raises(ValueError, match="p11_flash.cu adds to nothing: no `into`"):
        load_inline(FLASH, backend="emulator", dtype=torch.bfloat16).forward(
            q[..., :64], k[..., :64], v[..., :64], into=(o, lse)
        )
    with pytest.raises(TypeError, match="out is torch.bfloat16; what a kernel adds to is torch.float32"):
        kernel.forward(q, k, v, into=(o.bfloat16(), lse))
