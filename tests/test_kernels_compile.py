"""Every Triton kernel of the package goes through the real compiler, for every target: the interpreter accepts more."""

import importlib
import inspect
import pkgutil
import re

import pytest
import torch

import flashlab
from flashlab.attention import decode, gluon_forward, schemes, triton_backward, triton_forward, triton_minimal
from flashlab.attention.tiles import Tile
from flashlab.models import rope
from flashlab.triton_tools.compile_report import TARGETS, compile_reports
from flashlab.triton_tools.portable import is_gluon, jit_function

_WALLS = schemes.kernel_arguments(128, 64)
_STRIDES = {"b": 4 * 100 * 40, "h": 100 * 40, "m": 40, "n": 40, "d": 1}
_PLAIN = (
    {f"{x}_ptr": torch.float16 for x in "QKVO"} | {"LSE_ptr": torch.float32, "scale_log2": 0.2, "M": 100, "N": 100}
    | {f"stride_{x}{axis}": _STRIDES[axis] for x, row in zip("qkvo", "mnnm", strict=True) for axis in f"bh{row}d"}
    | {"heads": 4, "group": 2, "HEAD_DIM": 40, "BLOCK_D": 64, "BLOCK_M": 64, "BLOCK_N": 64}
)  # fmt: skip

_BANDS = dict(causal=True, window=(128, 128), softcap=30.0)

# kernel -> the arguments of some launches. A kernel whose name is missing here fails the test below.
LAUNCHES = {
    "flashlab.attention.triton_minimal.flash_attention_forward_kernel": [
        triton_minimal.compile_arguments(torch.float16, 64)
    ],
    "flashlab.attention.triton_plain.plain_attention_kernel": [_PLAIN | {"CAUSAL": causal} for causal in (False, True)],
    "flashlab.attention.triton_forward.flash_attention_kernel": [
        triton_forward.compile_arguments(torch.float16, 32, Tile(32, 32, 4, 1)),
        triton_forward.compile_arguments(torch.float32, 64, Tile(32, 32, 4, 2), allow_tf32=True),
        *(
            triton_forward.compile_arguments(torch.float16, 40, Tile(64, 32, 4, 2), **options)
            for options in (_BANDS, dict(window=(128, 128)), dict(softcap=30.0), dict(scale=-0.1))
        ),
    ],
    **{
        f"flashlab.attention.triton_backward.{name}_kernel": [
            triton_backward.compile_arguments(name, torch.float16, 32, Tile(32, 32, 4, 1)),
            triton_backward.compile_arguments(name, torch.float16, 40, Tile(32, 32, 4, 1), **_BANDS),
        ]
        for name in ("dkdv", "dq")
    },
    "flashlab.attention.decode.decode_kernel": [
        decode.compile_arguments("decode", torch.bfloat16, 128),
        decode.compile_arguments("decode", torch.bfloat16, 64, page=128, fused=True, left=100, softcap=30.0),
        decode.compile_arguments("decode", torch.float32, 128, page=None, splits=1),
    ],
    **{
        f"flashlab.attention.gluon_forward.{step}_kernel": [gluon_forward.compile_arguments(step, torch.float16, 64)]
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
}
WITHOUT_TENSOR_CORES = {
    "flashlab.attention.triton_backward.delta_kernel": [
        triton_backward.compile_arguments("delta", torch.bfloat16, 128, Tile(64, 16, 4, 1))
    ],
    "flashlab.attention.decode.decode_merge_kernel": [decode.compile_arguments("merge", torch.bfloat16, 128)],
    "flashlab.attention.decode.append_kernel": [decode.compile_arguments("append", torch.bfloat16, 128)],
}
_MERGED = {"heads": 16, "n": 4096, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_M": 16, "LSE_ptr": torch.float32}
_MERGED |= {"PLSE_ptr": torch.float32}
_MERGED |= {f"stride_{x}{y}": 4096 for x, axes in zip("olpq", ("bhn", "bh", "bhn", "bh"), strict=True) for y in axes}
WIDE = {  # 16 bytes per thread at once
    "flashlab.models.rope.rope_kernel": [
        rope.compile_arguments(torch.bfloat16, 128), rope.compile_arguments(torch.float32, 16, back=True),
    ],
    "flashlab.distributed.parts.merge_kernel": [
        _MERGED | {"O_ptr": dtype, "P_ptr": dtype} for dtype in (torch.float32, torch.bfloat16)
    ],
}  # fmt: skip
LAUNCHES |= WITHOUT_TENSOR_CORES | WIDE


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
