"""A whole FlashAttention forward kernel in the emulator: results, counts beside a GPU's, and mutants."""

from __future__ import annotations

import numpy as np
import pytest

from flashlab.simt import SimtError, compile_cuda

from .conftest import KERNELS, module

SOURCE = (KERNELS / "flash_forward.cu").read_text()


def inputs(heads: int, n: int, d: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((heads, n, d)).astype(np.float16) for _ in range(3))
    return q, k, v, np.full((heads, n, d), np.nan, np.float16), np.full((heads, n), np.nan, np.float32)


def attention(q, k, v, causal):
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    s = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    if causal:
        s = np.where(np.tril(np.ones(s.shape[1:], bool)), s, -np.inf)
    m = s.max(-1, keepdims=True)
    p = np.exp(s - m)
    return p @ v / p.sum(-1, keepdims=True), (m + np.log(p.sum(-1, keepdims=True)))[..., 0]


def run(built, heads, n, d, causal, **options):
    q, k, v, o, lse = inputs(heads, n, d)
    report = built.flash(q, k, v, o, lse, heads, n, d, d**-0.5, causal, None, **options)
    want_o, want_lse = attention(q, k, v, causal)
    return report, np.abs(o - want_o).max(), np.abs(lse - want_lse).max()


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("n, d, causal", [(64, 64, 0), (200, 64, 1), (1, 64, 0), (130, 128, 0)])
def test_results(check, n, d, causal):
    report, error, lse_error = run(module("flash_forward.cu", check), 2, n, d, causal)
    assert report.ok, report
    assert error < 2e-3 and lse_error < 1e-5


def test_counts_are_those_of_an_h200():
    """2 heads, 200 rows, head dimension 64, causal; Nsight Compute 2025.3.1 on an H200, 2026-11-20."""
    report, *_ = run(module("flash_forward.cu"), 2, 200, 64, 1)
    c = report.counters
    assert c["ldmatrix"] == 2688  # smsp__inst_executed_op_ldsm.sum
    assert c["ldmatrix_wavefronts"] == 10752  # l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum
    assert c.bank_conflicts == 0  # l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum
    assert c["mma"] == 5120  # smsp__inst_executed_pipe_tensor_op_hmma.sum
    assert c["cp_async"] == 768  # smsp__inst_executed_op_ldgsts.sum
    assert c["cp_async_sectors"] == 10944  # l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum
    assert c["global_store_sectors"] == 3250  # l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum


def test_counts_by_hand():
    heads, n, d, tiles = 1, 256, 64, 4
    report, *_ = run(module("flash_forward.cu", False), heads, n, d, 0)
    c = report.counters
    assert c["mma"] == tiles * tiles * 4 * (
        8 * 4 + 8 * 4
    )  # blocks, KV tiles, warps, (n8 tiles) x (k16 tiles) of both products
    assert c["mma_flops"] == 4 * n * n * d
    assert c["ldmatrix"] == tiles * 4 * (4 + tiles * (16 + 16))
    assert c["cp_async_bytes"] == (n * d * 2) * (1 + 2 * tiles)  # Q once, K and V once for each block of queries
    assert c["barriers"] == tiles * tiles * 2
    assert c["ldmatrix_wavefronts"] == c["ldmatrix_ideal"] == 4 * c["ldmatrix"]


def test_without_the_swizzle():
    built = module("flash_forward.cu", False, defines={"SWIZZLE": 0})
    report, error, _ = run(built, 1, 128, 64, 0)
    assert report.ok and error < 2e-3
    assert report.counters["ldmatrix_wavefronts"] == 8 * report.counters["ldmatrix_ideal"]


def test_threads_change_nothing():
    q, k, v, o, lse = inputs(1, 300, 64)
    built = module("flash_forward.cu")
    one = built.flash(q, k, v, o, lse, 1, 300, 64, 0.125, 1, None, threads=1)
    p, again = o.copy(), np.full_like(o, np.nan)
    many = built.flash(q, k, v, again, lse, 1, 300, 64, 0.125, 1, None, threads=4)
    assert (again == p).all() and many.counters == one.counters


# A wrong kernel, and what tells: the kind of a finding, or "result" where only the numbers do.
EARLY = {"read-before-wait", "race"}
BARRIER_K, BARRIER_V = (f"__syncthreads();     // for all threads; and {x}_" for x in "KV")
MUTANTS = {
    "no wait for K": ("cp_async_wait<1>();  // K_j", "// K_j", EARLY),
    "wait one group short": ("cp_async_wait<1>();  // V_j", "cp_async_wait<2>();  // V_j", EARLY),
    "no barrier before K is read": (BARRIER_K, "// K_", EARLY | {"stage-overwritten"}),
    "no barrier before V is read": (BARRIER_V, "// V_", EARLY | {"stage-overwritten"}),
    "one stage for K": (
        "load_tile<HEAD_DIM>(k_smem + next,",
        "load_tile<HEAD_DIM>(k_smem + stage,",
        {"stage-overwritten", "read-before-wait"},
    ),
    "too little shared memory": ("const int bytes = 5 *", "const int bytes = 4 *", {"shared-out-of-bounds"}),
    "rows beyond the end are copied": (
        "chunk * 8, inside ? 16 : 0)",
        "chunk * 8 + (inside ? 0 : n * HEAD_DIM), 16)",
        {"global-out-of-bounds"},
    ),
    "rows beyond the end are written": ("if (row >= n) continue;", "", {"global-out-of-bounds"}),
    "a shuffle in a branch": (
        "m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));",
        "if (lane < 16) m_new = fmaxf(m_new, __shfl_xor_sync(~0u, m_new, 1));",
        {"divergent"},
    ),
    "a barrier in a branch": (
        BARRIER_V,
        "if (warp) __syncthreads();  // ",
        {"divergent", "deadlock", "race"},
    ),
    "the copies are never waited for": (
        "cp_async_commit();\n    load_tile<HEAD_DIM>(v_smem,",
        "load_tile<HEAD_DIM>(v_smem,",
        EARLY | {"never-waited"},
    ),
    "V not transposed": ("ldmatrix_x4_trans(\n", "ldmatrix_x4(\n", {"result"}),
    "B fragments swapped": ("s[2 * nn], q[kk], b[0], b[1]);", "s[2 * nn], q[kk], b[1], b[0]);", {"result"}),
    "no mask": ("key >= n || ", "", {"result"}),
    "no correction": ("acc[i][2 * h] *= correction, acc[i][2 * h + 1] *= correction", "", {"result"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name):
    old, new, expected = MUTANTS[name]
    assert SOURCE.count(old) == 1
    built = compile_cuda(SOURCE.replace(old, new), name="flash_forward.cu", check=True)
    kinds = set()
    try:
        report, error, lse_error = run(built, 2, 200, 64, 1 if name != "no mask" else 0)
        kinds |= {f.kind for f in report.findings}
        if not (error < 2e-3 and lse_error < 1e-5):
            kinds.add("result")
    except SimtError as e:
        assert e.report is not None and e.report.findings[0].line
        kinds |= {f.kind for f in e.report.findings}
    assert kinds & expected, (kinds, expected)
