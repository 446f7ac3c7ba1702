"""load_inline: builds, calls, errors and the cache; in the emulator, and natively where there is a GPU."""

from functools import partial

import drawn
import pytest
import torch

from flashlab import cuda
from flashlab.attention import reference
from flashlab.cuda import CompileError, LaunchError, load_inline
from flashlab.kernels import source
from flashlab.simt import SimtError

BACKENDS = [b for b in cuda.BACKENDS if cuda.missing(b) is None]
needs_gpu = pytest.mark.skipif(len(BACKENDS) == 1, reason="no GPU with nvcc")

SCALE = """#include "simt.h"
__global__ void scale_kernel(const float* x, float* y, int n, float factor) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = factor * x[i];
}
extern "C" int scale(const float* x, float* y, int n, float factor, void* stream) {
    scale_kernel<<<(n + 127) / 128, 128, 0, (cudaStream_t)stream>>>(x, y, n, factor);
    return (int)cudaGetLastError();
}
extern "C" void scale_void(const float* x, float* y, int n) { scale_kernel<<<(n + 127) / 128, 128>>>(x, y, n, 2.f); }
"""
BROKEN = SCALE.replace("factor * x[i]", "factor * x[j]")


def device(backend):
    return "cpu" if backend == "emulator" else "cuda"


# ---- calls ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_source_for_every_backend(backend):
    module = load_inline(SCALE, backend=backend)
    x = torch.randn(300, device=device(backend))
    y = torch.zeros_like(x)
    assert module.scale(x, y, 300, 1.5) == 0  # the stream is PyTorch's
    assert torch.equal(y, 1.5 * x)
    assert module.launch("scale", x, y, 200, -1.0, None) == 0  # or given
    assert torch.equal(y[:200], -x[:200]) and torch.equal(y[200:], 1.5 * x[200:])
    module.scale_void(x, y, 300)
    assert torch.equal(y, 2 * x)
    if backend == "torch":  # the module that PyTorch made of the same build
        assert module.extension.scale(x, y, 300, 2.5) == 0 and torch.equal(y, 2.5 * x)
        assert module.extension.scale_void(x, y, 300) is None and torch.equal(y, 2 * x)
    else:
        assert module.extension is None
    assert "scale" in repr(module) and backend in repr(module)


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_do_not_fit(backend):
    module, x = load_inline(SCALE, backend=backend), torch.zeros(8, device=device(backend))
    with pytest.raises(TypeError, match="x points to float, and got a tensor of torch.float64"):
        module.scale(x.double(), x, 8, 1.0)
    with pytest.raises(ValueError, match=r"y has strides \(2,\): pass y.contiguous\(\)"):
        module.scale(x, torch.zeros(16, device=x.device)[::2], 8, 1.0)
    with pytest.raises(TypeError, match=r"scale takes 4 arguments \(x, y, n, factor\), not 3"):
        module.scale(x, x, 8)
    with pytest.raises(TypeError, match="n is declared int, and got 1.5"):
        module.scale(x, x, 1.5, 1.0)
    with pytest.raises(ValueError, match="n is 4294967297, and its type, int, goes from"):
        module.scale(x, x, torch.tensor(2**32 + 1), 1.0)
    with pytest.raises(TypeError, match="y is a pointer: pass a tensor or None"):
        module.scale(x, [1.0], 8, 1.0)
    with pytest.raises(TypeError, match="no extern \"C\" function 'scales'; it has scale, scale_void"):
        module.launch("scales", x)
    with pytest.raises(AttributeError, match="it has scale, scale_void"):
        module.scales  # noqa: B018


def test_views_that_pytorch_negates():
    module, x, y = load_inline(SCALE, backend="emulator"), torch.randn(8), torch.zeros(8)
    module.scale(torch._neg_view(x), y, 8, 2.0)
    assert torch.equal(y, -2 * x)
    with pytest.raises(ValueError, match=r"y is a view that PyTorch negates .* y.resolve_conj\(\).resolve_neg\(\)"):
        module.scale(x, torch._neg_view(y), 8, 2.0)


@needs_gpu
def test_a_cpu_tensor_for_a_native_kernel():
    module = load_inline(SCALE, backend="nvcc")
    with pytest.raises(ValueError, match=r"x is on cpu, and the kernel runs on a GPU: pass x.cuda\(\)"):
        module.scale(torch.zeros(4), torch.zeros(4), 4, 1.0)
    with pytest.raises(ValueError, match="y is on cpu, and x is on cuda:0"):
        module.scale(torch.zeros(4, device="cuda"), torch.zeros(4), 4, 1.0)


@needs_gpu
@pytest.mark.parametrize("backend", ["torch", "nvcc"])
def test_launches_go_to_the_current_stream(backend):
    # A stream that is kept busy: a launch on another stream would overtake the copy that it depends on.
    module, x = load_inline(SCALE, backend=backend), torch.zeros(1 << 20, device="cuda")
    y, stream = torch.empty_like(x), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        x.fill_(2.0)
        module.scale(x, y, x.numel(), 4.0)
    stream.synchronize()
    assert torch.equal(y, torch.full_like(y, 8.0))


def test_a_source_without_a_function_to_call():
    with pytest.raises(ValueError, match='no extern "C" function at all'):
        load_inline("__global__ void k() {}\n", backend="emulator")


# ---- compile errors ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compile_error_shows_the_learners_line_and_leaves_the_next_build_clean(backend):
    for _ in range(2):  # the second time it is an error again, not a stale build
        with pytest.raises(CompileError) as caught:
            load_inline(BROKEN, backend=backend)
        text = str(caught.value)
        assert ">    4 |     if (i < n) y[i] = factor * x[j];" in text and "kernel.cu:4: " in text
        assert "j" in text.splitlines()[1] and len(text.splitlines()) < 10
    module = load_inline(SCALE, backend=backend)
    x = torch.ones(4, device=device(backend))
    y = torch.zeros_like(x)
    module.scale(x, y, 4, 5.0)
    assert y.tolist() == [5, 5, 5, 5]


def test_a_compile_error_in_a_notebook_is_its_message():
    with pytest.raises(CompileError) as caught:
        load_inline(BROKEN, backend="emulator")
    rendered = caught.value._render_traceback_()
    assert len(rendered) == 1 and rendered[0].startswith("CompileError: kernel.cu does not compile")
    assert caught.value.log.count("\n") >= rendered[0].count("not declared")


@pytest.mark.parametrize("backend", BACKENDS)
def test_warnings_show_the_learners_line(backend):
    noisy = SCALE.replace("factor * x[i]", "factor * x[j]").replace("int i =", "int j, i =")
    module = load_inline(noisy, backend=backend, name="noisy.cu")
    lines = module.warnings.splitlines()
    assert lines[0].startswith("noisy.cu:4: ") and "j" in lines[0]
    assert ">    4 |     if (i < n) y[i] = factor * x[j];" in lines
    again = load_inline(noisy, backend=backend, name="noisy.cu")
    assert again.from_cache and again.warnings == module.warnings
    assert load_inline(SCALE, backend=backend).warnings == ""


# ---- errors of a launch --------------------------------------------------------------------------------------------
GREEDY = """#include "simt.h"
__global__ void greedy_kernel(float* x) { extern __shared__ float s[]; s[threadIdx.x] = 1.f; x[0] = s[0]; }
extern "C" int greedy(float* x, int bytes, int threads, void* stream) {
    const auto most = cudaFuncAttributeMaxDynamicSharedMemorySize;
    if (int error = (int)cudaFuncSetAttribute(greedy_kernel, most, bytes)) return error;
    greedy_kernel<<<1, threads, bytes, (cudaStream_t)stream>>>(x);
    return (int)cudaGetLastError();
}
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_too_much_shared_memory_and_too_many_threads(backend):
    module, x = load_inline(GREEDY, backend=backend), torch.zeros(1, device=device(backend))
    module.greedy(x, 65536, 32)
    assert x.item() == 1
    with pytest.raises((LaunchError, SimtError), match="shared memory") as caught:
        module.greedy(x, 300_000, 32)
    if backend != "emulator":
        assert "the kernel wants 300000 bytes of shared memory per block, and this GPU has" in str(caught.value)
    with pytest.raises((LaunchError, SimtError)) as caught:
        module.greedy(x, 1024, 2048)
    assert "1024" in str(caught.value)
    module.greedy(x, 65536, 32)  # the next launch is fine


# ---- forward -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module", params=BACKENDS)
def flash(request):
    return load_inline(source("p6_2_loop_order"), name="p6_2_loop_order.cu", backend=request.param)


def compare(module, q, k, v, **options):
    q, k, v = (x.to(device(module.backend)) for x in (q, k, v))
    o, lse = module.forward(q, k, v, **options)
    want, want_lse = reference.attention(q, k, v, **options)
    assert o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32 and o.dtype == q.dtype
    torch.testing.assert_close(o.double(), want, atol=2e-5, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-5, rtol=1e-6)
    return o


qkv = partial(drawn.qkv, batch=1, heads=2, kv_heads=1, seq_q=33, seq_k=47, head_dim=64, device="cpu")


@pytest.mark.parametrize("causal", [False, True])
def test_forward(flash, causal):
    compare(flash, *qkv(), causal=causal)
    compare(flash, *qkv(seq_q=60, seq_k=20), causal=causal)  # causal: 40 rows that see nothing
    compare(flash, *qkv(head_dim=128, seq_q=10, seq_k=12), causal=causal)  # another variant, built when asked for


@pytest.mark.parametrize("scale", [0.3, 0.0, -0.2, 1e-46, -1e-300])
def test_forward_with_a_scale(flash, scale):
    compare(flash, *qkv(), scale=scale)


def test_forward_keeps_the_layout_and_copies_what_it_cannot_read(flash):
    q, k, v = qkv(heads=2, kv_heads=2, seq_q=20, seq_k=20)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]  # [B, N, H, D] in memory
    assert compare(flash, *apart).stride() == apart[0].stride()
    compare(flash, q, k.transpose(2, 3).contiguous().transpose(2, 3), v)  # columns contiguous, not rows
    wide = torch.randn(1, 2, 20, 66)
    compare(flash, wide[..., 1:65], k, v)  # rows that start between two 16-byte boundaries
    compare(flash, q[:, :1].expand(1, 2, 20, 64), k, v)


def test_forward_says_what_is_wrong_before_a_launch(flash):
    """Beside what the one validator says (test_inputs)."""
    q, k, v = (x.to(device(flash.backend)) for x in qkv())
    with pytest.raises(ValueError, match="head_dim is 32; this kernel is compiled for 64 or 128"):
        flash.forward(q[..., :32], k[..., :32], v[..., :32])
    with pytest.raises(ValueError, match="v requires a gradient, and this kernel's result has none"):
        flash.forward(q, k, v.clone().requires_grad_())
    for sms in (0, -1, 2**32 + 132, 1.5):
        with pytest.raises(ValueError, match="sms is .*; it is a number of multiprocessors"):
            flash.forward(q, k, v, sms=sms)
    with pytest.raises(TypeError, match="q is torch.float64; .* is taken: convert with"):
        flash.forward(*(x.double() for x in (q, k, v)))
    with pytest.raises(TypeError, match="does not define forward"):
        load_inline(SCALE, backend="emulator").forward(q, k, v)


def test_a_check_build_reports_on_any_machine():
    racy = source("p6_2_loop_order").replace(
        "__syncthreads();                                   // or a thread would read", "// or a thread would read"
    )
    module = load_inline(racy, name="racy.cu", check=True)
    assert module.backend == "emulator" and module.report is None
    module.forward(*qkv(seq_q=64, seq_k=64))
    assert {f.kind for f in module.report.findings} & {"race", "uninitialised-shared"}, module.report
    module = load_inline(source("p6_2_loop_order"), check=True)
    module.forward(*qkv(seq_q=64, seq_k=64))
    assert module.report.ok and module.report.counters["global_load_bytes"] > 0
