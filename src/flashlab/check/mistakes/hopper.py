"""Hopper kernels with one mistake each, and the words in which the mistake has to be found.

As in flashlab.check.mistakes.series, a mutant is a textual edit of a step of the series. Most of these mistakes a GPU
forgives nearly always: a barrier that is waited for with the wrong parity, a fence that is missing, a stage that is
released too early. Some make it wait for ever. So nearly all are the emulator's to find; what is wrong with a
descriptor, a mask or a weight is the checker's.
"""

from __future__ import annotations

from collections.abc import Sequence

from flashlab.check.mistakes.series import Mutant

_PRODUCER, _LAST = "p11_4_producer", "p11_flash"


def _mutant(name: str, file: str, *edits: tuple[str, str], found: Sequence[str], words: Sequence[str] = (), **options):
    if file == _LAST:  # few multiprocessors: blocks take several parts, and have three consumers
        options = {"sms": 1} | options
    return Mutant(name, file, edits, tuple(found), tuple(words), options)


_INIT = "mbarrier_init(full_q + 8 * i, 1);"
_LOAD = "mbarrier_arrive_expect_tx(bar, ROWS * COLUMNS * 2);"
_WAIT_K = "mbarrier_wait(full_k + 8 * stage, phase);"
_WAIT_V = "mbarrier_wait(full_v + 8 * stage, phase);"
_LOAD_V = "load_tile<BLOCK_N>(v_smem + stage * KV_BYTES, v_map, full_v + 8 * stage, j * BLOCK_N, kv_head, batch);"
_PV = "wgmma_rs<HEAD_DIM, T, true>(acc, p_rmem[k], v_operand + rows_on(k));"
_QK = "wgmma_ss<BLOCK_N, T>(s, q_operand + columns_on<BLOCK_M>(k), k_operand + columns_on<BLOCK_N>(k), k > 0);"
_BY_K = "return smem_descriptor(tile_smem, SWIZZLE_128, 16, 8 * SLAB_ROW);"
_BY_ROWS = "return smem_descriptor(tile_smem, SWIZZLE_128, ROWS * SLAB_ROW, 8 * SLAB_ROW);"
_TAKE = "named_barrier_sync(1 + consumer, 2 * GROUP);"
_PASS = "named_barrier_arrive(1 + (consumer + 1) % CONSUMERS, 2 * GROUP);"
_DEC = "if constexpr (CONSUMERS > 1) setmaxnreg_dec<Tile::PRODUCER_REGISTERS>();"
_WAIT_EMPTY_K = "mbarrier_wait(empty_k + 8 * stage, phase ^ 1);"
_SCORES_READY = "wgmma_commit();\n        wgmma_wait<0>();                                       // and ours again"
_GIVE_K = "if (lane == 0) mbarrier_arrive(empty_k + 8 * stage);"
_RELEASE_K = "if (threadIdx.x == 0) mbarrier_arrive(empty_k + 8 * stage);"
_FENCE_P = "wgmma_fence();                                         // acc and p_rmem were written by their lanes"
_O_READY = "wgmma_wait<0>();\n        if (threadIdx.x == 0) mbarrier_arrive(empty_v + 8 * stage);"
_P_FREE = "wgmma_wait<0>();\n        if (first_thread) mbarrier_arrive(empty_v + 8 * ((nth - 1) % STAGES));"
_MAXIMA = "row_maxima<MASKED>(m_new, m_i, s, j * BLOCK_N, t, last_key);"
_READ_O = "if (first_thread) bulk_wait_read<0>();                 // the O before it has been read"
_O_BARRIER = "named_barrier_sync(1 + CONSUMERS + consumer, GROUP);"
_O_STORED = (
    "fence_proxy_async();                                   // or the copy engine might not see what was stored\n"
    f"        {_O_BARRIER}"
)

MUTANTS: tuple[Mutant, ...] = (
    # ---- mbarriers: parities, bytes, arrivals
    _mutant("the producer waits for the wrong parity", _PRODUCER,
            (_WAIT_EMPTY_K, _WAIT_EMPTY_K.replace("phase ^ 1", "phase")),
            found=["deadlock"], words=["Warp 4 waits", "for parity 0 of the mbarrier", "no phase has ended yet"]),
    _mutant("the consumer waits for the wrong parity", _PRODUCER, (_WAIT_K, _WAIT_K.replace("phase", "phase ^ 1")),
            found=["read-before-wait"], words=["wgmma", "tma_load", "phase of its mbarrier"]),
    _mutant("the parity of the tile instead of the use of its stage", _PRODUCER,
            (_WAIT_K, _WAIT_K.replace("phase", "nth & 1")),
            found=["read-before-wait"], words=["wgmma", "tma_load", "phase of its mbarrier"]),
    _mutant("the answer of try_wait is not looked at", _PRODUCER,
            (_WAIT_K, "(void)" + _WAIT_K.replace("_wait(", "_try_wait(")),
            found=["read-before-wait"], words=["wgmma", "tma_load", "phase of its mbarrier"]),
    _mutant("too few bytes expected", _PRODUCER, (_LOAD, _LOAD.replace("* 2", "")),
            found=["mbarrier-bytes"], words=["bring 8192 bytes", "expects 4096"]),
    _mutant("too many bytes expected", _PRODUCER, (_LOAD, _LOAD.replace("* 2", "* 4")),
            found=["deadlock"], words=["16384 bytes expected, 8192 brought"]),
    _mutant("nobody arrives at the full barrier", _PRODUCER, (_LOAD, "mbarrier_expect_tx(bar, ROWS * COLUMNS * 2);"),
            found=["deadlock"], words=["1 of 1 arrival missing"]),
    _mutant("the empty barriers wait for two consumers", _PRODUCER,
            (_INIT, "mbarrier_init(full_q + 8 * i, full_q + 8 * i < empty_k ? 1 : 2);"),
            found=["deadlock"], words=["Warp 4 waits", "1 of 2 arrivals missing"]),
    _mutant("every thread releases the stage", _PRODUCER,
            (_RELEASE_K, _RELEASE_K.replace("if (threadIdx.x == 0) ", "")),
            found=["mbarrier-arrivals"], words=["by the same instruction", "counts 1 arrival", "one thread alone"]),
    _mutant("no fence after the mbarriers are made", _PRODUCER,
            ("fence_mbarrier_init();", ""),
            found=["mbarrier-fence"], words=["tma_load", "no fence_mbarrier_init since thread 0 made it"]),
    _mutant("no barrier after the mbarriers are made", _PRODUCER,
            ("__syncthreads();", ""),
            found=["mbarrier-too-early"], words=["no barrier since thread 0 made it"]),
    # ---- stages
    _mutant("K is waited for, V is not", _PRODUCER, (_WAIT_V, ""),
            found=["read-before-wait"], words=["wgmma", "tma_load", "wait"]),
    _mutant("K is released before the wgmma are waited for", _PRODUCER,
            (_RELEASE_K, ""), (_SCORES_READY, f"wgmma_commit(); {_RELEASE_K} wgmma_wait<0>();"),
            found=["stage-overwritten"], words=["tma_load", "wgmma", "wgmma_wait"]),
    _mutant("a tile is passed by without a look", _LAST,
            ("mbarrier_wait(full_k + 8 * stage, phase);              // or it would say so of the tile before", ""),
            (f"{_WAIT_V}\n        {_GIVE_K}", _GIVE_K),
            found=["stage-overwritten"], words=["tma_load", "wgmma", "wgmma_wait"],
            probes=((1, 1, 1, 640, 640, True),)),
    _mutant("K is never released", _PRODUCER, (_RELEASE_K, ""),
            found=["deadlock"], words=["Warp 4 waits", "nobody has arrived at it (1 arrival missing)"],
            probes=((1, 1, 1, 64, 400, False),)),
    _mutant("a stage is refilled with no wait for its release", _PRODUCER, (_WAIT_EMPTY_K, ""),
            found=["stage-overwritten"], words=["tma_load", "wgmma"], probes=((1, 1, 1, 64, 400, False),)),
    _mutant("all tiles of V in one stage", _PRODUCER,
            (_LOAD_V, _LOAD_V.replace("v_smem + stage * KV_BYTES", "v_smem")),
            ("descriptor_of_rows<BLOCK_N>(v_smem + stage * KV_BYTES)", "descriptor_of_rows<BLOCK_N>(v_smem)"),
            found=["stage-overwritten"], words=["that a tma_load of thread 128", "without having waited"]),
    # ---- wgmma: fences, waits, what must not be touched
    _mutant("no wgmma_fence after P is written", _PRODUCER, (_FENCE_P, ""),
            found=["wgmma-fence"], words=["wgmma_fence", "registers of A"]),
    _mutant("the scores are read before the wait", _PRODUCER, (_SCORES_READY, "wgmma_commit(); wgmma_wait<1>();"),
            found=["wgmma-registers"], words=["reads", "an accumulator of the wgmma", "after wgmma_wait"]),
    _mutant("the products are not committed", _PRODUCER, (_SCORES_READY, "wgmma_wait<0>();"),
            found=["wgmma-registers"], words=["after wgmma_commit and wgmma_wait"]),
    _mutant("wait<1> where O is needed", _PRODUCER, (_O_READY, _O_READY.replace("<0>", "<1>")),
            found=["wgmma-registers"], words=["reads", "an accumulator of the wgmma", "after wgmma_wait"]),
    _mutant("P is overwritten while O += P V reads it", _LAST,
            (_P_FREE, _P_FREE.replace("<0>", "<1>")),
            found=["wgmma-registers"], words=["writes", "p_rmem", "A of the wgmma"]),
    _mutant("only three of the four warps multiply", _PRODUCER,
            (_PV, f"if (warp < 3) {_PV}"),
            found=["wgmma-warps"], words=["warps 0, 1 and 2"]),
    # ---- registers, named barriers, tiles handed on
    _mutant("registers that do not fit", _LAST,
            ("setmaxnreg_inc<Tile::CONSUMER_REGISTERS>();", "setmaxnreg_inc<168>();"),
            found=["registers-missing"], words=["setmaxnreg_inc<168>", "gave the block 65536 registers"]),
    _mutant("one warp gives its registers back", _LAST,
            (_DEC, f"if (warp == WARPS) {{ {_DEC} }}"),
            found=["registers-missing"], words=["setmaxnreg_inc<160>", "the other warps hold 61440"]),
    _mutant("nobody begins the turns", _LAST,
            ("if (consumer == CONSUMERS - 1) pass_turn();", ""),
            found=["deadlock"], words=["named_barrier_sync", "Barrier 1 has 128 of the 256 threads", "warps 0-3"]),
    _mutant("a turn of one warpgroup instead of two", _LAST,
            (_TAKE, _TAKE.replace("2 * ", "")),
            found=["barrier-threads"], words=["as one of 128 threads", "as one of 256"]),
    _mutant("the turn is passed to oneself", _LAST,
            (_PASS, "named_barrier_arrive(1 + consumer, 2 * GROUP);"),
            found=["deadlock"], words=["Barrier 1 has 128 of the 256 threads", "warps 0-3"]),
    _mutant("the next part is read with no wait for it", _LAST,
            ("mbarrier_wait(full_part + 8 * (n % 2), n / 2 & 1);", ""),
            found=["deadlock"], words=["mbarrier_wait(empty_k", "nobody has arrived at it"]),
    _mutant("the next part is overwritten with no wait for its readers", _LAST,
            ("mbarrier_wait(empty_part + 8 * (n % 2), n / 2 & 1 ^ 1);", ""),
            found=["deadlock"], words=["phase 2 is under way", "phase 1, of parity 1, has ended"],
            probes=((1, 2, 1, 500, 24, True),)),
    _mutant("the counter of parts is a volatile", _LAST,
            ("atomicAdd((int*)p.workspace, 1)", "(*(volatile int*)p.workspace)++"),
            found=["global-race"], words=["updates through a volatile", "Use atomicAdd"], sms=2),
    # ---- the store of O
    _mutant("no proxy fence before O is stored", _LAST, (_O_STORED, _O_BARRIER),
            found=["proxy-fence"], words=["tma_store", "stmatrix", "fence_proxy_async"]),
    _mutant("O is stored before all warps have written it", _LAST, (_O_STORED, "fence_proxy_async();"),
            found=["race"], words=["tma_store", "stmatrix", "no barrier between"]),
    _mutant("the O before is still being read", _LAST, (_READ_O, ""),
            found=["stage-overwritten"], words=["stmatrix", "tma_store", "bulk_wait_read"]),
    # ---- descriptors: only the numbers tell
    _mutant("the stride of 8 rows is that of 4", _PRODUCER,
            (_BY_K, _BY_K.replace("8 *", "4 *")),
            found=["wrong-value"], words=["every row is wrong"], max_seq=70),
    _mutant("no swizzle in K's descriptor", _PRODUCER,
            ("descriptor(k_smem + stage * KV_BYTES)",
             "smem_descriptor(k_smem + stage * KV_BYTES, SWIZZLE_NONE, 16, 8 * SLAB_ROW)"),
            found=["wrong-scores"], words=["Which rows of Q and of K"], max_seq=70),
    _mutant("V as a K-major operand", _PRODUCER, (_PV, _PV.replace("true", "false")),
            found=["read-before-wait"], words=["wgmma", "descriptor"]),
    _mutant("the next 16 rows of V are 8 rows on", _PRODUCER,
            (_PV, _PV.replace("rows_on(k)", "rows_on(k) / 2")),
            found=["values-exchanged"], words=["on key 16 gets the value of key 8"], max_seq=70),
    _mutant("the next 16 columns are 32 on", _PRODUCER,
            (_QK, _QK.replace("columns_on<BLOCK_N>(k)", "2 * columns_on<BLOCK_N>(k)")),
            found=["read-before-wait"], words=["wgmma", "descriptor"]),
    _mutant("the leading offset of one slab in 128 columns", _PRODUCER,
            (_BY_ROWS, _BY_ROWS.replace("ROWS * SLAB_ROW, 8", "16, 8")),
            found=["values-moved"], head_dim=128, max_seq=70,
            words=["V[0, 64] belongs (key, column), V[0, 8] is multiplied", "8 x 8 matrices of V"]),
    _mutant("every consumer multiplies the first one's rows of Q", _LAST,
            ("q_stage * Q_BYTES + consumer * 64 * SLAB_ROW)", "q_stage * Q_BYTES)"),
            found=["o-rows-repeated"], words=["row 64 of o holds what belongs in row 0", "for 64 of 128"]),
    # ---- masks and weights
    _mutant("the tail is not masked", _PRODUCER, (_MAXIMA, _MAXIMA.replace("MASKED", "MASKED && CAUSAL")),
            found=["tail-not-masked"]),
    _mutant("causal off by one", _PRODUCER,
            ("min(p.seq_k - 1, row + diagonal)", "min(p.seq_k - 1, row + diagonal - 1)"),
            found=["causal-without-diagonal"]),
    _mutant("a first tile without a key gives NaN", _PRODUCER,
            ("(m_i[r] == -INFINITY ? 0.f : m_i[r])", "m_i[r]"),
            found=["masked-rows-nan"], words=["-inf - (-inf)"]),
    _mutant("the lazy rescaling leaves l as it is", _LAST,
            ("m_i[r] = m_new[r], l_i[r] *= correction[r];", "m_i[r] = m_new[r];"),
            found=["l-not-rescaled"], words=["acc is rescaled and l is not"]),
)  # fmt: skip
