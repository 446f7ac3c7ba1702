"""The kernel series: every step and exhibit is right, clean under the checks, and one idea away from the last."""

import difflib
import itertools
import re

import pytest
import torch
from drawn import qkv

from flashlab.attention import reference
from flashlab.cuda import load_inline
from flashlab.kernels import ALL, FOLDER, HOPPER, HOPPER_SIDE, SERIES, SIDE, Step, path, step, steps, whole
from flashlab.kernels.regions import regions

HALVES = steps(7, 8, 9)
KERNELS = steps(6) + HALVES + SIDE + HOPPER
STEPS = pytest.mark.parametrize("step", KERNELS, ids=lambda s: s.name)
# The check build computes the same numbers: the fast ones of the steps between are tried where `-m long` asks for them.
SOME = ("p7_naive", "p8_6_store", "p9_flash", "p11_1_tma", "p11_6_overlap", "p11_flash")
SOME_STEPS = pytest.mark.parametrize(
    "step", [pytest.param(s, id=s.name, marks=[] if s.name in SOME else pytest.mark.long) for s in KERNELS]
)
# heads, kv_heads, seq_q, seq_k, causal: ragged, both ways unequal, rows that see no key, several tiles
CASES = ((2, 1, 100, 130, True), (2, 2, 70, 33, True), (1, 1, 1, 147, False), (1, 1, 130, 300, False))
# Of phase 11 more: more parts than blocks; several tiles and parts, whose first tile some consumers may not see at all;
# no row sees a key; a sequence that ends where a tile does
MORE = ((4, 2, 300, 450, True), (3, 1, 200, 200, True), (1, 1, 64, 8, True), (2, 2, 192, 256, False))
BOUND = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
LSE_BOUND = {"p8_side_fp16_acc": 2e-3}  # its scores are rounded to fp16


def expect(o, lse, q, k, v, *, bound, lse_bound=1e-4, **options):
    """Asserts that these are what attention gives; rows that see no key are 0, and their lse is minus infinity."""
    want, want_lse = reference.attention(q, k, v, **options)
    assert (o - want).abs().max() <= bound
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    assert torch.where(want_lse.isneginf(), 0.0, lse - want_lse).abs().max() <= lse_bound


def run(step, case, *, head_dim=64, dtype=None, check=False, sms=None, shared_limit=227 << 10, **defines):
    """sms: by default so few in phase 11 that blocks take several parts."""
    heads, kv_heads, seq_q, seq_k, causal = case
    dtype = dtype or getattr(step, "dtypes", [torch.float16])[0]
    q, k, v = qkv(1, heads, kv_heads, seq_q, seq_k, head_dim, dtype, seed=seq_q, device="cpu")
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # [B, N, H, D] strides
    module = load_inline(step, backend="emulator", head_dim=head_dim, dtype=dtype, check=check, defines=defines)
    name, sms = getattr(step, "name", ""), sms or (2 if step in HOPPER else 132)
    o, lse = module.forward(q, k, v, causal=causal, sms=sms, shared_limit=shared_limit)
    bound = BOUND[dtype] * (2 if name == "p8_side_fp16_acc" else 1)
    expect(o, lse, q, k, v, bound=bound, lse_bound=LSE_BOUND.get(name, 1e-4), causal=causal)
    assert not module.report.findings, module.report.findings[0]
    return module.report


@SOME_STEPS
def test_right_in_the_fast_build(step):
    for case in CASES + MORE * (step in HOPPER):
        run(step, case)


@pytest.mark.long
@STEPS
def test_right_for_the_other_dtype_and_head_dim(step):
    run(step, CASES[0], dtype=step.dtypes[-1])
    for case in (CASES[0], *MORE[: step in HOPPER]):
        run(step, case, head_dim=128)


@STEPS
@pytest.mark.every(4)
def test_clean_in_the_check_build(step):
    for case in (*CASES[:2], *MORE[: step in HOPPER]):
        run(step, case, check=True)
    run(step, CASES[0], check=True, sms=1)  # the last steps have other tiles where blocks are many


@pytest.mark.parametrize(
    ("step", "define", "value"),
    [  # by default of the first step that has stages, and of the last one that can be told how many
        pytest.param(s, d, v, marks=[] if s.name in ("p8_3_stages", "p8_6_store") else pytest.mark.long)
        for s in KERNELS for d, values in s.defines.items() for v in values[1:]
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)  # fmt: skip
def test_every_define(step, define, value):
    run(step, (MORE if step in HOPPER else CASES)[0], check=True, **{define: value})


@pytest.mark.parametrize("sms", [1, 132], ids=["large grid", "small grid"])
def test_the_last_step_chooses_its_blocks(sms):
    report = run(SERIES[-1], (1, 1, 100, 700, True), sms=sms)
    assert any("merge" in launch.kernel for launch in report.launches) == (sms == 132)


@pytest.mark.parametrize("limit", [99, 163, 227], ids=["GeForce", "A100", "H100"])
@pytest.mark.parametrize("head_dim", [64, *(pytest.param(d, marks=pytest.mark.long) for d in (128, 256))])
def test_the_tiles_fit_the_device(head_dim, limit):
    """As many blocks per SM as registers have room for: two, or one at HEAD_DIM = 256. 1 KB of each is the system's."""
    for sms in (1, 132):  # a large grid, whose blocks are tall; a small one, whose keys are split
        report = run(step("p9_flash"), (1, 1, 70, 600, True), head_dim=head_dim, sms=sms, shared_limit=limit << 10)
        shared = report.launches[0].shared_bytes
        assert (1 if head_dim == 256 else 2) * (shared + 1024) <= (limit << 10) + 1024
    assert limit < 227 or shared == {64: 40, 128: 80, 256: 192}[head_dim] << 10


def test_large_scores_and_a_late_maximum():
    q, k, v = qkv(1, 1, 1, 64, 300, 64, torch.float16, device="cpu")
    q *= 20
    k[:, :, 0] *= 4  # the last steps walk backwards: it is their last tile
    k[:, :, -1] *= 4
    for name in ("p7_naive", "p8_side_split_kv", "p9_3_rescale", "p9_flash", "p11_1_tma", "p11_6_overlap", "p11_flash"):
        o, lse = load_inline(step(name), backend="emulator").forward(q, k, v)
        expect(o, lse, q, k, v, bound=BOUND[torch.float16], lse_bound=1e-3)


# ---- the text of the series ------------------------------------------------------------------------------------------
def code(text: str) -> list[str]:
    """The lines without comments and indentation."""
    return [line for line in (re.sub(r"//.*", "", line).strip() for line in text.splitlines()) if line]


def new_lines(before: Step, after: Step) -> list[str]:
    """What a diff marks as added: no line is excused for standing elsewhere in the old file."""
    old, new = (code(s.path.read_text(encoding="utf-8")) for s in (before, after))
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [line for tag, _, _, first, last in changes if tag in ("insert", "replace") for line in new[first:last]]


def together(names: tuple[Step, ...]) -> list[tuple[Step, Step]]:
    """Neighbours on the ladder. Phase 7 begins anew: from scalars to tensor cores there is no small step."""
    return [(a, b) for a, b in itertools.pairwise(names) if b.name != "p7_naive"]


NEIGHBOURS = [
    *together(SERIES), *together((step("p9_1_masks"), *HOPPER)), *((step(s.beside), s) for s in SIDE + HOPPER_SIDE)
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), NEIGHBOURS, ids=lambda s: s.name)
def test_a_step_is_small_and_marked(before, after):
    added = new_lines(before, after)
    assert 0 < len(added) <= 60, f"{len(added)} lines are new in {after.name}"
    assert "// New" in after.path.read_text(), f"nothing is marked in {after.name}"


SOURCES = [path(p.stem) for p in sorted(FOLDER.rglob("*.cu"))]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: p.stem)
def test_what_every_source_keeps(source):
    text = source.read_text(encoding="utf-8")
    assert max(map(len, text.splitlines())) <= 120
    assert "LAUNCH" not in text
    found = regions(text)
    assert {"constants", "launch"} <= set(found)
    leaves = {n: r for n, r in found.items() if not any(a is not r and r.first <= a.first and a.last <= r.last
                                                        for a in found.values())}  # fmt: skip
    long = {n: r.last - r.first + 1 for n, r in leaves.items() if r.last - r.first >= 45}
    assert not long, f"{source.name}: {long}"


def test_the_same_part_has_the_same_name():
    for phase, wanted in {
        6: {"constants", "arithmetic", "copy a tile", "shared memory", "which rows", "state", "main loop", "scores",
            "probabilities", "output", "store", "launch"},
        7: {"constants", "swizzle", "copy a tile", "shared memory", "which rows", "which keys", "state", "main loop",
            "load K and V", "one tile", "scores", "row maxima", "rescale", "probabilities", "output", "store",
            "launch"},
        11: {"constants", "shared memory", "which rows", "state", "main loop", "load K and V", "one tile", "scores",
             "row maxima", "rescale", "probabilities", "output", "store", "launch"},
    }.items():  # fmt: skip
        for s in HALVES if phase == 7 else steps(phase):
            assert wanted <= set(regions(whole(s.name))), s.name


def test_names_and_paths_agree():
    folders = {6: "p06_scalar", 7: "p07_tensor_cores", 8: "p08_pipelines", 9: "p09_past_flash_attention_2",
               11: "p11_hopper", 12: "p12_decoding"}  # fmt: skip
    for s in ALL:
        assert s.path.exists() and (FOLDER / folders[s.phase] / s.path.name).exists()
    for phase in (6, 8, 9, 11):
        numbers = [s.name.split("_")[1] for s in steps(phase)]
        expected = [str(i) for i in range(1, len(numbers) + 1)]
        assert numbers == expected or numbers == [*expected[:-1], "flash"]
    others = {"p7_one_mma", "p11_backward", "p11_pieces"}
    assert {p.stem for p in SOURCES} == {s.name for s in ALL} | others
    assert all(s.name.startswith(f"p{s.phase}_side_") and step(s.name) is s for s in SIDE + HOPPER_SIDE)
    assert not any(s in steps(8, 11) for s in SIDE + HOPPER_SIDE)
    with pytest.raises(KeyError, match="no step 'p8_side_magic' in the series; there are p6_1_fa1, .*fp16_acc, p11_1"):
        step("p8_side_magic")


def test_no_rows_is_no_work():
    q, k = torch.zeros(1, 1, 0, 64).half(), torch.zeros(1, 1, 8, 64).half()
    for s in (HALVES[0], HALVES[-1]):
        o, lse = load_inline(s, backend="emulator").forward(q, k, k)
        assert o.shape == q.shape and lse.shape == (1, 1, 0)
