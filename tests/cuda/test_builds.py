"""What a build is made from and told: the toolchain, the source around the learner's, the binding, nvcc's own words."""

import contextlib
import ctypes
import types
from pathlib import Path

import pytest
import torch
from test_inline import BROKEN, SCALE

from flashlab.cuda import Unavailable, builds, errors, inline, load_inline, resources, sources, toolchain
from flashlab.cuda.binding import binding_source
from flashlab.kernels import SERIES, source, step
from flashlab.runtime.cache import CacheError
from flashlab.simt.source import includes

needs_nvcc = pytest.mark.skipif(toolchain.find_nvcc() is None, reason="no nvcc")


def nvcc(text, arch="sm_80", **macros):
    return builds.build(text, toolchain.nvcc_flags(arch, macros, text.folders()), "nvcc", folders=text.folders())


# ---- the toolchain -------------------------------------------------------------------------------------------------
def test_what_is_missing_is_said(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert toolchain.missing("torch") == "PyTorch sees no CUDA GPU" and toolchain.missing("emulator") is None
    with pytest.raises(Unavailable, match='backend "nvcc" cannot be used here: PyTorch sees no CUDA GPU'):
        load_inline(SCALE, backend="nvcc")
    monkeypatch.delenv("FLASHLAB_CUDA_BACKEND", raising=False)
    assert toolchain.default_backend() == "emulator"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(toolchain, "find_nvcc", lambda: None)
    assert toolchain.missing("torch").startswith("there is no nvcc") and toolchain.default_backend() == "emulator"
    monkeypatch.setenv("FLASHLAB_CUDA_BACKEND", "hip")
    with pytest.raises(ValueError, match="FLASHLAB_CUDA_BACKEND is 'hip'"):
        toolchain.default_backend()


def test_nvccs_flags(tmp_path):
    flags = toolchain.nvcc_flags("sm_90", {"TILE": 64, "ON": True, "OFF": False, "NOT": None, "A": "x"}, [tmp_path])
    assert [f for f in flags if f.startswith("-D")] == ["-DA=x", "-DON=1", "-DTILE=64"]  # in one order, for the key
    assert flags[-1] == f"-I{tmp_path}" and "-arch=sm_90" in flags and "-Xptxas=-v" in flags
    assert "-gencode=arch=compute_90a,code=sm_90a" in toolchain.nvcc_flags("sm_90a", {}, [])


def test_what_capability_9_alone_has_is_compiled_for_it():
    ours, others = (sources.read(step(name)).code for name in ("p11_2_wgmma", "p11_1_tma"))
    assert toolchain.arch_for("sm_90", ours) == "sm_90a" and toolchain.arch_for("sm_90", others) == "sm_90"
    assert toolchain.arch_for("sm_100", ours) == "sm_100"
    toolchain.check_capability("my.cu", ours, (9, 0), "H100")
    toolchain.check_capability("my.cu", others, (12, 0), "RTX 5090")
    with pytest.raises(Unavailable, match=r"RTX 5090 has compute capability 12.0, and my.cu uses wgmma, which 9.0 al"):
        toolchain.check_capability("my.cu", ours, (12, 0), "RTX 5090")
    with pytest.raises(Unavailable, match="my.cu uses TMA, which needs 9.0"):
        toolchain.check_capability("my.cu", others, (8, 0), "A100")


def test_an_old_gpu_is_told_what_it_lacks():
    code = sources.read(step("p8_4_swizzle")).code
    with pytest.raises(Unavailable, match=r"RTX 2080 has compute capability 7.5, and my.cu uses .*needs 8.0"):
        toolchain.check_capability("my.cu", code, (7, 5), "RTX 2080")
    toolchain.check_capability("my.cu", code, (8, 0), "A100")
    comment = sources.read("// cp_async in a comment\n" + SCALE)
    toolchain.check_capability("my.cu", comment.code, (7, 5), "RTX 2080")


# ---- a compiler's words --------------------------------------------------------------------------------------------
def test_nvccs_messages_are_understood():
    log = 'mine.cu(4): error: identifier "j" is undefined\n\n1 error detected in the compilation of "kernel.cu".\n'
    error = errors.compile_error("mine.cu", BROKEN, log, "nvcc 13.0.88, sm_90")
    assert str(error).splitlines() == [
        "mine.cu does not compile (nvcc 13.0.88, sm_90):",
        'mine.cu:4: identifier "j" is undefined',
        "     3 |     int i = blockIdx.x * blockDim.x + threadIdx.x;",
        ">    4 |     if (i < n) y[i] = factor * x[j];",
    ]
    assert error.messages == [errors.Message('identifier "j" is undefined', "mine.cu", 4)] and error.log == log
    unknown = str(errors.compile_error("mine.cu", BROKEN, "ld: out of luck\n", "nvcc"))
    assert unknown.endswith("ld: out of luck")
    static = "ptxas error   : Entry function '_Z1k' uses too much shared data (0x10000 bytes, 0xc000 max)"
    assert "ptxas: Entry function '_Z1k' uses too much" in str(errors.compile_error("mine.cu", "", static, "nvcc"))


def test_warnings_are_told_from_errors_and_from_ptxas():
    log = """kernel.cu(4): warning #177-D: variable "j" was declared but never referenced
          int j;
              ^
ptxas info    : Compiling entry function '_Z1k' for 'sm_90'
ptxas warning : Stack size for entry function cannot be determined
kernel.cu:2:9: warning: unused variable 'i' [-Wunused-variable]
"""
    assert errors.messages(log) == []
    assert errors.messages(log, "warning") == [
        errors.Message('variable "j" was declared but never referenced', "kernel.cu", 4),
        errors.Message("Stack size for entry function cannot be determined", "ptxas"),
        errors.Message("unused variable 'i' [-Wunused-variable]", "kernel.cu", 2),
    ]


def test_advice_for_cudas_codes():
    error = errors.launch_error("forward", 701, "cudaErrorLaunchOutOfResources")
    assert str(error).startswith("forward returned 701, cudaErrorLaunchOutOfResources: a block needs more registers")
    assert (error.code, error.name) == (701, "cudaErrorLaunchOutOfResources")
    assert "restart Python" in str(errors.launch_error("f", 700, "cudaErrorIllegalAddress"))
    assert str(errors.launch_error("f", 42, "cudaErrorNew")) == "f returned 42, cudaErrorNew"


# ---- the text that is compiled -------------------------------------------------------------------------------------
def test_a_source_by_its_text_its_path_and_its_step():
    this = step("p6_3_tiles")
    assert sources.read(this) == sources.read(this.path) == sources.read(str(this.path))
    assert sources.read(this).name == "p6_3_tiles.cu" and sources.read(this).directory == this.path.parent
    assert sources.read(SCALE).name == "kernel.cu" and sources.read(SCALE, "mine.cu").name == "mine.cu"
    assert sources.read(this).takes_problem and not sources.read(SCALE).takes_problem


@pytest.mark.parametrize("this", SERIES, ids=lambda s: s.name)
def test_a_steps_file_says_what_its_row_says(this):
    text = sources.read(this)
    assert text.head_dims == this.head_dims
    head_dim, element = text.variant({}, None, None)
    assert head_dim == 64 and element == ("float" if torch.float32 in this.dtypes else "__half")
    assert text.variant({"HEAD_DIM": 128}, None, torch.bfloat16) == (128, "__nv_bfloat16")
    with pytest.raises(ValueError, match=r"not torch.int8"):
        text.variant({}, None, torch.int8)


def test_what_is_put_around_the_source():
    text = sources.read(SCALE, "scale.cu")
    assert f'#line 1 "scale.cu"\n{SCALE}' in text.native and "torch" not in text.native
    assert text.emulated == SCALE and "forward_arrays" not in text.native
    kernel = sources.read(step("p6_1_fa1"))
    assert "forward_arrays" in kernel.native and "forward_arrays" in kernel.emulated
    assert set(kernel.every_entry) == {*kernel.entries, "forward_arrays"}


def test_the_binding_takes_tensors_and_launches_on_their_device():
    binding = binding_source(sources.read(SCALE).entries.values(), "scale.cu")
    assert 'extern "C" int scale(const void*, void*, int, float, void*);' in binding
    assert "static int bound_scale(const Tensor& x, const Tensor& y, int n, float factor) {" in binding
    assert "return scale(address(x), address(y), n, factor, c10::cuda::getCurrentCUDAStream().stream());" in binding
    assert "guard(device(x));" in binding and 'm.def("scale", &bound_scale);' in binding
    assert "static void bound_scale_void(" in binding and len(binding.splitlines()) < 40
    series = binding_source(sources.read(step("p9_flash")).entries.values())
    assert "m.def" not in series  # its functions take a struct Problem


def test_the_headers_of_a_source_are_part_of_its_build(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "b.cuh").write_text('#include "c.cuh"\n')
    for name in ("a.cuh", "unused.cuh", "deep/c.cuh"):
        (tmp_path / name).write_text("#pragma once\n")
    text = sources.Text('#include "a.cuh"\n  # include <deep/b.cuh>\n#include <vector>\n', "k.cu", tmp_path)
    found = [str(p.relative_to(tmp_path)) for p in includes(text.text, text.folders())]
    assert found == ["a.cuh", "deep/b.cuh", "deep/c.cuh"]
    own = {p.name for p in includes(source("p9_flash"), sources.read(step("p9_flash")).folders())}
    assert {"simt.h", "ptx.cuh", "problem.cuh"} <= own


@needs_nvcc
def test_pytorch_is_asked_for_the_same_build(own_cache, monkeypatch):
    from torch.utils import cpp_extension

    asked = {}

    def load_inline(*, name, build_directory, **options):
        asked.update(options)
        Path(build_directory, f"{name}.so").write_text("a library")
        Path(build_directory, "nvcc.log").write_text(
            "k.cu(4): warning #177-D: a warning\nptxas info    : Used 10 registers"
        )
        return types.ModuleType(name)

    monkeypatch.setattr(cpp_extension, "load_inline", load_inline)
    text = sources.read(SCALE, "k.cu")
    flags = toolchain.nvcc_flags("sm_90", {"SIZE": 3}, text.folders())
    first = builds.build(text, flags, "torch", folders=text.folders())
    assert asked["cuda_sources"] == [text.native] and asked["no_implicit_headers"]
    assert asked["cpp_sources"] == [binding_source(text.entries.values(), "k.cu")]
    given = [*asked["extra_cuda_cflags"], *(f"-I{folder}" for folder in asked["extra_include_paths"])]
    assert [f for f in flags if f not in given] == ["--expt-relaxed-constexpr"]  # which PyTorch adds itself
    extra = [f for f in given if f not in flags]
    assert extra[-1] == "2>nvcc.log" and all(f.startswith("-U__CUDA_NO_") for f in extra[:-1])
    assert first.library.read_text() == "a library" and "Used 10 registers" in first.log
    assert first.warnings(text).splitlines()[0] == "k.cu:4: a warning"
    again = builds.build(text, flags, "torch", folders=text.folders())
    assert again.from_cache and (again.library, again.module, again.log) == (first.library, first.module, first.log)

    def refuses(**options):
        Path(options["build_directory"], "nvcc.log").write_text('k.cu(4): error: identifier "j" is undefined\n')
        raise RuntimeError("Error building extension")

    monkeypatch.setattr(cpp_extension, "load_inline", refuses)
    with pytest.raises(errors.CompileError, match="k.cu:4: identifier"):
        builds.build(sources.read(BROKEN, "k.cu"), flags, "torch", folders=text.folders())
    assert len(list(own_cache.glob("cuda/*"))) == 1


# ---- builds by nvcc ------------------------------------------------------------------------------------------------
@needs_nvcc
@pytest.mark.long
def test_a_build_by_nvcc(own_cache):
    text = sources.read(SCALE.replace("    if (i < n)", "    int unused;\n    if (i < n)", 1), "scale.cu")
    first, again = nvcc(text), nvcc(text)
    assert not first.from_cache and again.from_cache and again.library == first.library
    assert "Used" in first.log and again.log == first.log
    assert first.warnings(text).splitlines()[0].startswith("scale.cu:4: variable")
    assert not nvcc(text, SIZE=2).from_cache and not nvcc(text, arch="sm_90").from_cache
    library = ctypes.CDLL(str(first.library))
    assert all(hasattr(library, name) for name in (*text.every_entry, "flashlab_set_device", "flashlab_error_name"))


THROWS = """#include <stdexcept>
extern "C" int refuse(const float* x, int n, void* stream) {
    if (n < 0) throw std::invalid_argument("n is negative");
    return n == 7 ? -1 : 0;
}
extern "C" void refuse_quietly(float* x) { throw 5; }
"""


@needs_nvcc
def test_an_exception_of_a_launcher_ends_no_process(own_cache, monkeypatch):
    text = sources.read(THROWS, "throws.cu")
    native = builds.Native(text, nvcc(text))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(native.dll, "flashlab_set_device", lambda device: 0)
    x = torch.zeros(1)
    with pytest.raises(errors.LaunchError, match="^refuse: n is negative$"):
        native.call(text.entries["refuse"], [x, -1, None], 0)
    assert native.call(text.entries["refuse"], [x, 1, None], 0) == 0
    with pytest.raises(errors.LaunchError, match="^refuse returned -1, its own error code"):
        native.call(text.entries["refuse"], [x, 7, None], 0)
    with pytest.raises(errors.LaunchError, match=r"^refuse_quietly: a C\+\+ exception was thrown$"):
        native.call(text.entries["refuse_quietly"], [x], 0)


def test_a_library_that_cannot_be_loaded_is_a_sentence(tmp_path):
    (tmp_path / "kernel.so").write_text("another machine's")
    for module in ("", "flashlab_build_x"):
        with pytest.raises(CacheError, match="build of k.cu cannot be loaded .*: delete .*, or set FLASHLAB_CACHE"):
            builds.Native(sources.read(SCALE, "k.cu"), builds.Build(tmp_path / "kernel.so", "", module, True))


FACTOR = SCALE.replace("factor * x[i]", "FACTOR * x[i]")


@needs_nvcc
@pytest.mark.parametrize("folder", ["$HOME and $(pwd) #", pytest.param("usr/include", marks=pytest.mark.long)])
def test_a_header_that_was_edited_is_built_again_wherever_it_is(own_cache, tmp_path, folder):
    header = tmp_path / "headers" / folder / "factor.cuh"
    header.parent.mkdir(parents=True)
    text = sources.read(FACTOR.replace('"simt.h"', '"simt.h"\n#include "factor.cuh"'))
    folders = text.folders([header.parent])
    flags, libraries = toolchain.nvcc_flags("sm_80", {}, folders), []
    for value, kept in ((2, False), (2, True), (3, False)):
        header.write_text(f"#define FACTOR {value}.0f\n")
        built = builds.build(text, flags, "nvcc", folders=folders)
        assert built.from_cache == kept
        libraries.append(built.library)
    assert libraries[0] == libraries[1] != libraries[2]


def test_what_else_goes_into_a_build_is_in_its_key(own_cache, tmp_path, monkeypatch):
    """Absolute paths (those below /usr too), folders of variables, flags of variables; a header that a macro names."""
    keys, found = [], builds.cache.Kept(tmp_path, {"log": "", "module": ""}, True)
    monkeypatch.setattr(toolchain, "nvcc_version", lambda: "13.0.88")
    monkeypatch.setattr(builds.cache, "kept", lambda part, key, make: keys.append(key) or found)

    def key(given):
        builds.build(sources.read(given), ["-arch=sm_80"], "nvcc", folders=[])
        return keys[-1]

    header = tmp_path / "a #header$" / "factor.cuh"
    header.parent.mkdir()
    for given, variables in (
        (f'#include "{header}"\n' + FACTOR, {}),
        ('#include "factor.cuh"\n' + FACTOR, {"CPATH": str(header.parent)}),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        header.write_text("#define FACTOR 2.0f\n")
        first = key(given)
        assert key(given) == first
        header.write_text("#define FACTOR 3.0f\n")
        assert key(given) != first
    first = key(FACTOR)
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-DFACTOR=4")
    assert key(FACTOR) != first
    named = '#define HEADER "factor.cuh"\n#include HEADER\n' + FACTOR
    assert key(named) != key(named)


@pytest.mark.skipif(not resources.available(), reason="no nvcc, or no cuobjdump")
@pytest.mark.long
def test_the_kernel_that_runs_and_its_registers_are_of_one_build(own_cache, monkeypatch):
    monkeypatch.setattr(inline, "missing", lambda backend: None)  # as on a machine with an H200
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    this, options = step("p8_6_store"), {"head_dim": 128, "dtype": torch.bfloat16}
    module = load_inline(this, backend="nvcc", defines={"STAGES": 3}, **options)
    assert (module.backend, module.from_cache, module.extension) == ("nvcc", False, None)
    assert load_inline(this, backend="nvcc", defines={"STAGES": 3}, **options).from_cache
    (found,) = resources.resources(this, target="sm_90", launches=False, STAGES=3, **options)
    assert 0 < found.registers <= 255 and found.instructions["HMMA"] and found.dynamic_shared_bytes is None
    assert len(list(own_cache.glob("cuda/*"))) == 1
    q = torch.zeros(1, 1, 8, 128).bfloat16()
    with pytest.raises(ValueError, match=r"q is on cpu, and the kernel runs on a GPU: pass q.cuda\(\)"):
        module.forward(q, q, q)
    assert repr(module) == "<p8_6_store.cu, nvcc: forward>"
