"""Every Triton kernel of the package goes through the real compiler, for every target: the interpreter accepts more."""

import contextlib
import importlib
import inspect
import pkgutil
import re
from unittest import mock

import pytest
import torch
from drawn import draw, drawn
from sequences import Sequences

import flashlab
from flashlab.attention import (
    decode,
    gluon_forward,
    schemes,
    triton_backward,
    triton_forward,
    triton_minimal,
    triton_plain,
)
from flashlab.attention.tiles import Tile
from flashlab.distributed import parts
from flashlab.models import rope
from flashlab.triton_tools.compile_report import TARGETS, compile_reports
from flashlab.triton_tools.portable import is_gluon, jit_function

_WALLS = schemes.kernel_arguments(128, 64)
_BANDS = dict(causal=True, window=(128, 128), softcap=30.0)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


class Recorder:
    """In the place of a kernel: `kept` has the arguments of each launch by name, and none is run."""

    def __init__(self, kernel):
        self.names, self.kept = list(inspect.signature(jit_function(kernel).fn).parameters), []

    def __getitem__(self, grid):
        return lambda *given, **named: self.kept.append(dict(zip(self.names, given, strict=False)) | named)


def launches(call, *modules):
    """By a kernel's whole name: the arguments of all launches of the modules' kernels in a call."""
    kept = {}
    with contextlib.ExitStack() as stack:
        for module in modules:
            found = {n: Recorder(x) for n, x in vars(module).items() if n.endswith("_kernel") and jit_function(x)}
            stack.enter_context(mock.patch.multiple(module, **found))
            kept |= {f"{module.__name__}.{name}": recorder.kept for name, recorder in found.items()}
        call()
    return {name: found for name, found in kept.items() if found}


def decoded(head_dim, dtype, page=16, splits=4, **options):
    x = Sequences([239], kv_heads=8, group=4, head_dim=head_dim, dtype=dtype, page=page)
    decode.decode(*x.given, new=1, splits=splits, **options)
    decode.append(*x.given[1:3], x.q[:, :8], x.q[:, :8], *x.given[3:])


def each():
    decoded(128, BF16)
    decoded(64, BF16, 128, fused=True, left=100, softcap=30.0)
    decoded(128, F32, None, splits=1)
    tiles = triton_backward.Tiles(Tile(32, 32, 4, 1), Tile(32, 32, 4, 1))
    for head_dim, options in ((32, {}), (40, _BANDS)):
        q, k, v, grad_o = drawn(1, 4, 2, 200, 200, head_dim, F16)
        triton_backward.flash_attention_backward(grad_o, q, k, v, q, q[..., 0].float(), tiles=tiles, **options)
        triton_plain.plain_attention(q, k, v, causal=bool(options))
    for head_dim, dtype, back in ((128, BF16, False), (16, F32, True)):
        q, k, *_ = drawn(1, 4, 2, 100, 100, head_dim, dtype)
        torch.ops.flashlab.fused_rope(q, k, *rope.rope_table(100, head_dim, device=q.device), 0, back)
        part = (o := draw(1, 4, 96, 128, dtype=dtype)), o[..., 0].float()
        parts.merged(part, slice(0, 96), part, last=True, by_kernel=True)


# kernel -> the arguments of some launches. A kernel whose name is missing here fails the test below.
LAUNCHES = {
    "flashlab.attention.triton_minimal.flash_attention_forward_kernel": [triton_minimal.compile_arguments(F16, 64)],
    "flashlab.attention.triton_forward.flash_attention_kernel": [
        triton_forward.compile_arguments(F16, 32, Tile(32, 32, 4, 1)),
        triton_forward.compile_arguments(F32, 64, Tile(32, 32, 4, 2), allow_tf32=True),
        *(
            triton_forward.compile_arguments(F16, 40, Tile(64, 32, 4, 2), **options)
            for options in (_BANDS, dict(window=(128, 128)), dict(softcap=30.0), dict(scale=-0.1))
        ),
    ],
    **{
        f"flashlab.attention.gluon_forward.{step}_kernel": [gluon_forward.compile_arguments(step, F16, 64)]
        for step in gluon_forward.KERNELS
    },
    "flashlab.attention.schemes.scheme_a_kernel": [_WALLS | {"BLOCK_N": 128, "num_stages": 1}],
    "flashlab.attention.schemes.scheme_a_variant_kernel": [
        _WALLS | {"BLOCK_N": 128, "K_BY_ROWS": flag, "V_LATE": flag, "P_FLOAT32": False, "num_stages": 1}
        for flag in (False, True)
    ],
    "flashlab.attention.schemes.scheme_b_kernel": [
        _WALLS | {"BLOCK_N": 64, "HALVINGS": 1, "HOW": how, "num_stages": 1} for how in schemes.ESCAPE_HATCHES
    ],
    "flashlab.attention.schemes.two_pass_kernel": [_WALLS | {"BLOCK_N": 64, "num_stages": 1}],
    **launches(each, decode, triton_backward, triton_plain, rope, parts),
}
WITHOUT_TENSOR_CORES = {
    f"flashlab.attention.{x}_kernel" for x in ("triton_backward.delta", "decode.decode_merge", "decode.append")
}
WIDE = {"flashlab.models.rope.rope_kernel", "flashlab.distributed.parts.merge_kernel"}  # 16 bytes per thread at once


def kernels():
    found = {}
    for module in pkgutil.walk_packages(flashlab.__path__, "flashlab."):
        if module.name.startswith("flashlab.exercises."):
            continue  # what answers are judged by: the tests of the exercises run them
        members = vars(importlib.import_module(module.name))
        found |= {f"{module.name}.{name}": value for name, value in members.items() if jit_function(value)}
    # Under the name of the module that defines it, not of those that import it.
    return {name: value for name, value in found.items() if name.startswith(f"{jit_function(value).fn.__module__}.")}


def test_every_kernel_has_a_launch_to_compile():
    """The others are called by them, and compiled with them."""
    launched = {name for name in kernels() if name.endswith("_kernel")}
    assert launched == set(LAUNCHES)
    texts = {name: inspect.getsource(jit_function(kernel).fn) for name, kernel in kernels().items()}
    for name in texts.keys() - launched:
        called = re.compile(rf"\b{name.rpartition('.')[2]}\b")
        assert any(called.search(text) for other, text in texts.items() if other != name), name


@pytest.mark.parametrize("targets", [["sm_90"], pytest.param(TARGETS, marks=pytest.mark.long)], ids=["one", "all"])
@pytest.mark.parametrize("name", LAUNCHES)
@pytest.mark.every(4)
def test_it_compiles_for_every_target(name, targets):
    if is_gluon(kernels()[name]):  # written for one chip
        targets = ["sm_90"]
    for report in compile_reports(kernels()[name], LAUNCHES[name], targets=targets):
        assert report.ok, report.error
        assert report.fits or "scheme" in name, report
        assert (report.tensor_core_instructions > 0) == (name not in WITHOUT_TENSOR_CORES | WIDE)
        assert report.tensor_core_instructions or report.spill_bytes == 0
        assert name not in WIDE or "LDG.E.128" in report.sass and "STG.E.128" in report.sass


# ---- decoding: what the compiler makes of it


def of_decoding(call):
    found = launches(call, decode)["flashlab.attention.decode.decode_kernel"]
    return compile_reports(decode.decode_kernel, found, targets=["sm_90"])


@pytest.mark.long
def test_pages_do_not_cost_the_second_tile_in_flight():
    """Triton keeps one tile in flight where addresses are loaded in the same turn: the table is read a turn ahead."""
    whole, *paged = of_decoding(lambda: [decoded(128, BF16, page) for page in (None, 16, 64)])
    for report in paged:
        assert report.ok and report.spill_bytes == 0 and report.shared_bytes >= whole.shared_bytes >= 2**16


def test_the_last_to_arrive_sees_what_the_others_stored():
    """Every thread's part is stored before the barrier, one thread counts behind it with release and acquire, and all
    wait for what it found before any reads a part."""
    (report,) = of_decoding(lambda: decoded(128, BF16, fused=True))
    found = re.findall(r"st\.global|bar\.sync|atom\.global\.gpu\.acq_rel|ld\.global", report.ptx)
    count = next(i for i, word in enumerate(found) if word.startswith("atom"))
    before = found[:count][::-1]
    assert before.index("bar.sync") < before.index("st.global")
    after = found[count:]
    assert after.index("bar.sync") < after.index("ld.global")
