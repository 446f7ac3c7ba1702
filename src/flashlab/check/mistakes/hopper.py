"""Hopper kernels with one mistake each, and the words in which the mistake has to be found.

As in flashlab.check.mistakes.series, a mutant is a textual edit of a step of the series. Most of these mistakes a GPU
forgives nearly always: a barrier that is waited for with the wrong parity, a fence that is missing, a stage that is
released too early. Some make it wait for ever. So nearly all are the emulator's to find; what is wrong with a
descriptor, a mask or a weight is the checker's.
"""

from __future__ import annotations

from flashlab.check.mistakes.series import Mutant, mutant

_PRODUCER, _LAST = "p11_4_producer", "p11_flash"
_WAIT_K = "mbarrier_wait(full_k + 8 * stage, phase);"
_WAIT_V = "mbarrier_wait(full_v + 8 * stage, phase);"
_PV = "wgmma_rs<HEAD_DIM, T, true>(acc, p_rmem[k], v_operand + rows_on(k));"
_BY_ROWS = "return smem_descriptor(tile_smem, SWIZZLE_128, ROWS * SLAB_ROW, 8 * SLAB_ROW);"
_TAKE = "named_barrier_sync(1 + consumer, 2 * GROUP);"
_DEC = "if constexpr (CONSUMERS > 1) setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();"
_SCORES_READY = "wgmma_commit();\n        wgmma_wait<0>();                                       // and ours again"
_GIVE_K = "if (lane == 0) mbarrier_arrive(empty_k + 8 * stage);"
_RELEASE_K = "if (threadIdx.x == 0) mbarrier_arrive(empty_k + 8 * stage);"
_FENCE_P = "wgmma_fence();                                         // acc and p_rmem were written by their lanes"
_O_BARRIER = "named_barrier_sync(1 + CONSUMERS + consumer, GROUP);"
_O_STORED = (
    "fence_proxy_async();                                   // or the copy engine might not see what was stored\n"
    f"        {_O_BARRIER}"
)

MUTANTS: tuple[Mutant, ...] = (
    # ---- mbarriers and stages
    mutant("the consumer waits for the wrong parity", _PRODUCER, (_WAIT_K, _WAIT_K.replace("phase", "phase ^ 1")),
            found=["read-before-wait"], words=["wgmma", "tma_load", "phase of its mbarrier"]),
    mutant("K is waited for, V is not", _PRODUCER, (_WAIT_V, ""),
            found=["read-before-wait"], words=["wgmma", "tma_load", "wait"]),
    mutant("K is released before the wgmma are waited for", _PRODUCER,
            (_RELEASE_K, ""), (_SCORES_READY, f"wgmma_commit(); {_RELEASE_K} wgmma_wait<0>();"),
            found=["stage-overwritten"], words=["tma_load", "wgmma", "wgmma_wait"]),
    mutant("a tile is passed by without a look", _LAST,
            ("mbarrier_wait(full_k + 8 * stage, phase);              // or it would say so of the tile before", ""),
            (f"{_WAIT_V}\n        {_GIVE_K}", _GIVE_K),
            found=["stage-overwritten"], words=["tma_load", "wgmma", "wgmma_wait"],
            probes=((1, 1, 1, 640, 640, True),)),
    # ---- wgmma, registers, named barriers, the store of O
    mutant("no wgmma_fence after P is written", _PRODUCER, (_FENCE_P, ""),
            found=["wgmma-fence"], words=["wgmma_fence", "registers of A"]),
    mutant("one warp gives its registers back", _LAST,
            (_DEC, f"if (warp == WARPS) {{ {_DEC} }}"),
            found=["registers-missing"], words=["setmaxnreg_inc<160>", "the other warps hold 61440"]),
    mutant("a turn of one warpgroup instead of two", _LAST,
            (_TAKE, _TAKE.replace("2 * ", "")),
            found=["barrier-threads"], words=["as one of 128 threads", "as one of 256"]),
    mutant("no proxy fence before O is stored", _LAST, (_O_STORED, _O_BARRIER),
            found=["proxy-fence"], words=["tma_store", "stmatrix", "fence_proxy_async"]),
    # ---- descriptors: only the numbers tell
    mutant("no swizzle in K's descriptor", _PRODUCER,
            ("descriptor(k_smem + stage * KV_BYTES)",
             "smem_descriptor(k_smem + stage * KV_BYTES, SWIZZLE_NONE, 16, 8 * SLAB_ROW)"),
            found=["wrong-scores"], words=["Which rows of Q and of K"], max_seq=70),
    mutant("V as a K-major operand", _PRODUCER, (_PV, _PV.replace("true", "false")),
            found=["read-before-wait"], words=["wgmma", "descriptor"]),
    mutant("the next 16 rows of V are 8 rows on", _PRODUCER,
            (_PV, _PV.replace("rows_on(k)", "rows_on(k) / 2")),
            found=["values-exchanged"], words=["on key 16 gets the value of key 8"], max_seq=70),
    mutant("the leading offset of one slab in 128 columns", _PRODUCER,
            (_BY_ROWS, _BY_ROWS.replace("ROWS * SLAB_ROW, 8", "16, 8")),
            found=["values-moved"], head_dim=128, max_seq=70,
            words=["V[0, 64] belongs (key, column), V[0, 8] is multiplied", "8 x 8 matrices of V"]),
    mutant("every consumer multiplies the first one's rows of Q", _LAST,
            ("q_stage * Q_BYTES + consumer * 64 * SLAB_ROW)", "q_stage * Q_BYTES)"),
            found=["o-rows-repeated"], words=["row 64 of o holds what belongs in row 0", "for 64 of 128"]),
    # ---- masks and weights
    mutant("a first tile without a key gives NaN", _PRODUCER,
            ("(m_i[r] == -INFINITY ? 0.f : m_i[r])", "m_i[r]"),
            found=["masked-rows-nan"], words=["-inf - (-inf)"]),
    mutant("the lazy rescaling leaves l as it is", _LAST,
            ("m_i[r] = m_new[r], l_i[r] *= correction[r];", "m_i[r] = m_new[r];"),
            found=["l-not-rescaled"], words=["acc is rescaled and l is not"]),
)  # fmt: skip
