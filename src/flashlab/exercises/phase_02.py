"""The checks of phase 2: the online-softmax simulation."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from flashlab import runtime
from flashlab.attention import reference
from flashlab.attention.cost import Meter
from flashlab.attention.simulation import check_inputs, flash_attention_causal_sim, flash_attention_one_head_sim
from flashlab.attention.simulation import flash_attention_forward_sim as worker
from flashlab.check import (
    CheckFailed,
    Report,
    expect,
    expect_close,
    running,
    verification,
    verify_block,
    verify_one_head,
)
from flashlab.check.cases import LOWEST_SCALE, Case, case_list
from flashlab.check.lookup import Row
from flashlab.check.mistakes import weights
from flashlab.exercises.registry import exercise
from flashlab.exercises.rule import RULES, rule
from flashlab.exercises.tensor_rule import TensorRule, made, normal, part, tensor_rule


def _oracle(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    o, lse = reference.attention(Q[None, None], K[None, None], V[None, None], **options)
    return o[0, 0], lse[0, 0]


def random_tensors(*shapes: tuple[int, int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=generator).to(runtime.device(), dtype) for shape in shapes]


def _run(fn: Callable[..., Any], *args: Any, case: str, **options: Any) -> Any:
    """Call a learner's function, whose results `verification` has looked at, or will."""
    with running(case):
        return fn(*args, **options)


def _products(fn: Callable[..., Any], *given: Any, case: str) -> int:
    with Meter() as meter:
        _run(fn, *given, case=case)
    return sum(op.name in ("mm", "addmm", "matmul", "bmm") for op in meter.ops)


def peak_bytes(fn: Callable[..., Any], given: Sequence[Any]) -> int:
    """How many bytes a call holds at once."""
    with Meter() as meter:
        fn(*(x.to(runtime.device()) if isinstance(x, torch.Tensor) else x for x in given))
    return meter.peak_bytes


def expect_flat_memory(
    fn: Callable[..., Any], small: Sequence[Any], large: Sequence[Any], matrix: int, advice: str = ""
) -> None:
    """CheckFailed where four times the keys take more bytes at once than half of what a row of each would."""
    peaks = [peak_bytes(fn, given) for given in (small, large)]
    said = f"the values are right, the memory is not: with four times the keys your function held {peaks[1]} bytes at "
    said += f"once instead of {peaks[0]}, so some tensor in it is [BLOCK_M, N]{advice}"
    expect(peaks[1] - peaks[0] < matrix // 2, said, diagnosis="memory-grows-with-n")


# ---- 2.1 ---------------------------------------------------------------------------------------------------


def _by_formulas():
    m_i, old_l, old_acc = math.log(2), 1.5, 5.5
    s_8, s_4 = math.log(8), math.log(4)
    m_new = max(m_i, s_8)
    correction = math.exp(m_i - m_new)
    p_8, p_4 = math.exp(s_8 - m_new), math.exp(s_4 - m_new)
    l_i = old_l * correction + (p_8 + p_4)
    acc = old_acc * correction + (p_8 * 1 + p_4 * 6)
    return {"m_new": m_new, "correction": correction, "l_i": l_i, "acc": acc, "O": acc / l_i}


_RELATIVE = "p of the second block is relative to m_new: 8/8 and 4/8, not 8 and 4"
_LARGEST = "m_new is the largest score seen so far, in both blocks: ln 8, a natural logarithm"


@tensor_rule(
    "2.1",
    title="One step by hand", minutes=10, difficulty="Warm-up",
    hints=[
        "Work relative to the maximum. What is the largest score of all four keys? Everything is `exp(score - that)`.",
        "The correction is `exp(m_i - m_new)` = exp(ln 2 - ln 8) = 2 / 8. Multiply the old `l_i` and the "
        "old `acc` by it.",
        "`p` of the second block is (8/8, 4/8). Add 1 + 1/2 to the corrected `l_i`, and 1 * 1 + 1/2 * 6 to "
        "the corrected `acc`.",
    ],
    returns="m_new, correction, l_i, acc, O",
    inputs={"the two blocks": ()},
    draw=lambda r: (),
    beside=0,
    also=[_by_formulas],
    words={"old_l": "the old l_i", "old_acc": "the old acc", "s_8": "ln 8", "s_4": "ln 4", "p_8": "exp(ln 8 - m_new)",
           "p_4": "exp(ln 4 - m_new)"},
    notes={
        "correction": "the old sums are relative to the old maximum: correct it before you add",
        "m_i - m_new": "a larger maximum must shrink the old sums", "8": _LARGEST, "max(m_i, s_8)": _LARGEST,
        "math.log": _LARGEST, "math.log(8)": _LARGEST, "m_new": _RELATIVE, "l_i": "O is acc divided by l_i, at the end",
        "math.exp": "the exponential of the difference, 2/8", "old_l": "both blocks are in it",
        "old_l * correction": "both blocks are in it", "old_acc * correction": "both blocks are in it",
    },
    rows=[
        Row("p-not-relative", f"l_i and acc: {_RELATIVE}", [
            ("(1 + 1 / 2)", "(8 + 4)"), ("(1 * 1 + 1 / 2 * 6)", "(8 * 1 + 4 * 6)")]),
        Row("block-maximum", "m_new is ln 12, the log-sum-exp of the block: it is the largest score, ln 8", [
            ("math.log(8)", "math.log(12)")]),
        Row("outputs-added", "O: that is the sum of the two blocks' outputs: it is acc divided by l_i, of both", [
            ("acc / l_i", "5.5 / 1.5 + 4 / 1.5")]),
        Row("outputs-averaged", "O: that is the mean of the two blocks' outputs; their acc and their l_i are added", [
            ("acc / l_i", "(5.5 / 1.5 + 4 / 1.5) / 2")]),
        Row("normalised-early", "acc: the old one was divided by l_i first; it stays unnormalised until the end", [
            ("5.5 *", "5.5 / 1.5 *")]),
        Row("old-acc", "acc: the old acc is 3 + 5 there; it is 1 · 3 + 1/2 · 5 = 5.5", [("5.5 *", "8 *")]),
        Row("old-l", "l_i: the old l_i is a term of 1 for each key there; it is 1 + 1/2", [("1.5 *", "2 *")]),
    ],
    tol=1e-3,
    tries=0,
    without=("wrong-number", "off-by-one", "half", "twice", "twice-as-much", "taken-as-positive", "brackets-too-wide",
             "wrong-name", "rounded", "root", "squared", "sum-for-one"),
)  # fmt: skip
def one_step():
    # BEGIN SOLUTION
    m_new = math.log(8)
    correction = 2 / 8  # exp(ln 2 - ln 8)
    l_i = 1.5 * correction + (1 + 1 / 2)
    acc = 5.5 * correction + (1 * 1 + 1 / 2 * 6)
    return {"m_new": m_new, "correction": correction, "l_i": l_i, "acc": acc, "O": acc / l_i}
    # END SOLUTION


# ---- 2.2 ---------------------------------------------------------------------------------------------------

_TILE, _TILE_V = torch.tensor([[1.0, 3, 2], [0, -1, -2]]), torch.tensor([[1.0, 10], [2, 20], [4, 40]])


@tensor_rule(
    "2.2",
    title="The state of one block", minutes=10, difficulty="Warm-up",
    hints=[
        "Three lines. Each row of `s` is on its own: the maximum and the sum run along `dim=1`.",
        "`m = s.amax(dim=1)` has shape [BLOCK_M]; to subtract it from every column write `m[:, None]`.",
        "`p = torch.exp(s - m[:, None])`, then `l = p.sum(dim=1)` and `acc = p @ v`. No division.",
    ],
    returns="m, l, acc",
    inputs={"a 2 x 3 tile": (_TILE, _TILE_V), "scores near 300": (_TILE + 300, _TILE_V),
            "scores near -300": (_TILE - 300, _TILE_V)},
    draw=lambda r: (lambda M, N, D: (3 * normal(r, M, N, dtype=torch.float32), normal(r, N, D, dtype=torch.float32)))(
        r.randint(2, 5), r.randint(2, 6), r.randint(1, 4)),
    nan={"300": "subtract the row's own maximum before the exponential; without it scores of 300 overflow"},
    notes={
        "m[:, None]": "subtract the row's maximum before the exponential",
        "torch.exp": "the exponential is e^x", "p.sum": "l is the sum itself", "p": "the weights are exponentials",
    },
    rows=[
        Row("softmax", "l and acc: p is normalised already, so that l is 1: the division comes once, at the very end", [
            ("torch.exp(s - m[:, None])", "torch.softmax(s, 1)")]),
        Row("lse-for-l", "l is m + ln(l), the log-sum-exp: return the sum itself", [
            ("p.sum(dim=1)", "torch.logsumexp(s, 1)")]),
        Row("log-for-l", "l is ln(l): return the sum itself", [("p.sum(dim=1)", "p.sum(dim=1).log()")]),
    ],
    on_device=True,
)  # fmt: skip
def block_state(s, v):
    """Return (m, l, acc) of one block of keys."""
    # BEGIN SOLUTION
    m = s.amax(dim=1)
    p = torch.exp(s - m[:, None])
    return m, p.sum(dim=1), p @ v
    # END SOLUTION


# ---- 2.3, 2.4: the milestones ------------------------------------------------------------------------------


def _block(
    r: random.Random, M: Any, N: Any, BLOCK_N: Any, shift: float = 0.0, fall: float = 0.0, apart: float = 0.0
) -> tuple[Any, ...]:  # fmt: skip
    """Scores that rise from block to block, or fall. apart: of a row's scores and the next one's."""
    Q, K, V = (normal(r, rows, 16, dtype=torch.float32) for rows in (M, N, N))
    Q[:, 0] = 4.0
    K[:, 0] = torch.arange(N) / 4 + shift - torch.arange(N) // BLOCK_N * fall
    Q[:, 1] += apart * torch.arange(M)
    K[:, 1] += float(apart > 0)
    return Q, K, V, BLOCK_N, r.choice((None, 0.3)), None


part(
    "2.3",
    returns="O, lse",
    inputs={"5 rows, 4 keys, 2 a block": _block(random.Random(1), 5, 4, 2), "3 rows, 11 keys, 4 a block": _block(
        random.Random(2), 3, 11, 4), "scores near 300": _block(random.Random(3), 3, 8, 4, 300.0),
        "scores that fall far": _block(random.Random(4), 3, 8, 4, fall=100.0),
        "rows of very different scores": _block(random.Random(5), 3, 8, 4, apart=260.0)},
    draw=lambda r: _block(r, r.randint(1, 4), r.randint(1, 12), r.randint(1, 5)),
    notes={
        "correction": "where the row maximum rises, l_i and acc are multiplied by exp(m_i - m_new)",
        "m_i - m_new": "the correction is exp(m_i - m_new), old minus new", "m_i": "l_i is relative to m_i",
    },
    through=lambda fn: lambda *given: fn(*given[:-1]),  # a learner's has no `trace`
    on_device=True,
    tol=1e-4,
)(worker)  # fmt: skip


@exercise(
    "2.3",
    title="flash_attention_forward_sim",
    minutes=30,
    hints=[
        "The state first: `m_i` all -inf, `l_i` all 0, `acc` all 0, in float32 (`q.new_full`, "
        "`q.new_zeros` put them on the right device). Then a loop `for start_n in range(0, N, BLOCK_N)`.",
        "In the loop, in this order: load k, scores s, m_new, p, correction, l_i, acc, and last m_i = "
        "m_new. `m_new = torch.maximum(m_i, s.amax(dim=1))`.",
        "`l_i = l_i * correction + p.sum(dim=1)` and `acc = acc * correction[:, None] + p.to(V.dtype).float() @ v`. "
        "After the loop: O = acc / l_i[:, None] in V's dtype, and lse = m_i + log(l_i).",
    ],
)
def one_block(flash_attention_forward_sim: Callable[..., Any]) -> Any:
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    report = _verify_block(flash_attention_forward_sim, dtypes=dtypes, head_dims=(64, 20))
    # Many rows, few features: a copy of K is small beside a row of tiles.
    small, large = ((*random_tensors((256, 8), (N, 8), (N, 8)), 16) for N in (256, 1024))
    advice = "; keep only m_i, l_i and acc between blocks"
    expect_flat_memory(flash_attention_forward_sim, small, large, 256 * 768 * 4, advice)
    return report


def _verify_block(fn: Callable[..., Any], **options: Any) -> Any:
    """`verify_block`; where it cannot name the cause, a change of the right text may be it."""
    it: Any = RULES["2.3 flash_attention_forward_sim"]
    try:
        with it.mending(fn):
            report = verify_block(fn, **options)
            _expect_value_columns(lambda q, k, v: fn(q, k, v, 4))
            return report
    except CheckFailed as failed:
        if failed.diagnosis in ("wrong-value", *weights.SLUGS):
            try:
                it.compare(it.through(fn))
            except CheckFailed as small:
                if small.diagnosis != "wrong-value":
                    raise
        raise


def _expect_value_columns(fn: Callable[..., Any], **options: Any) -> None:
    """V may have another number of columns than Q and K."""
    Q, K, V = random_tensors((6, 16), (10, 16), (10, 24))
    case = "Q [6, 16], K [10, 16], V [10, 24]"
    want, _ = _oracle(Q, K, V, **options)
    told = "the number of columns of O is V's, which need not be HEAD_DIM; your function "
    try:
        O, _ = _run(fn, Q, K, V, case=case)
    except (RuntimeError, ValueError, IndexError) as error:
        raise CheckFailed(f"{told}raises {type(error).__name__}", diagnosis="v-dim-ignored", case=case) from error
    same = O.shape == want.shape
    expect(same, f"{told}gives O the shape {list(O.shape)}", diagnosis="v-dim-ignored", case=case)
    expect_close(O, want, what="O", case=case, tol=1e-4, diagnosis="v-dim-ignored")


def _head(r: random.Random, M: Any, N: Any, BLOCK_M: Any, BLOCK_N: Any, shift: float = 0.0) -> tuple[Any, ...]:
    Q, K, V, _, scale, _ = _block(r, M, N, BLOCK_N, shift)
    return Q, K, V[:, :9].contiguous(), BLOCK_M, BLOCK_N, scale


def _some_head(r: random.Random) -> tuple[Any, ...]:
    return _head(r, r.randint(1, 9), r.randint(1, 9), r.randint(1, 4), r.randint(1, 4))


def _of_a_head(fn: Callable[..., Any], **data: Any) -> TensorRule:
    """What an answer of a whole head is mended to."""
    # M, N, BLOCK_M, BLOCK_N, by how much scores are higher
    sizes = (5, 4, 2, 2), (4, 11, 2, 4), (6, 8, 4, 2, 300.0), (23, 3, 2, 2), (7, 9, 5, 2, -3e4), (40, 44, 16, 8)
    inputs = {str(x): _head(random.Random(i), *x) for i, x in enumerate(sizes)}
    return made(fn, ("O", "lse"), inputs=inputs, draw=_some_head, on_device=True, tol=1e-4, **data)


@exercise(
    "2.4",
    title="The whole matrix",
    minutes=10,
    hints=[
        "Allocate O [M, V_DIM] in Q's dtype and lse [M] in float32, then fill them BLOCK_M rows at a time.",
        "`for start_m in range(0, M, BLOCK_M)`: slice Q, call the simulation, assign to the same slice of "
        "O and of lse. The slice of the last block may be shorter; Python does the same to both sides.",
    ],
)
def whole_matrix(flash_attention_one_head_sim: Callable[..., Any]) -> Any:
    report = None
    for BLOCK_M, BLOCK_N in [(16, 32), (48, 16), (64, 64)]:

        def one_head(q, k, v, *, scale=None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N):
            return flash_attention_one_head_sim(q, k, v, BLOCK_M, BLOCK_N, scale)

        with _WHOLE.mending(flash_attention_one_head_sim):
            report = verify_one_head(one_head, dtypes=(torch.float16, torch.float32), head_dims=(64, 20), max_tile=128)
    with _WHOLE.mending(flash_attention_one_head_sim):
        _expect_value_columns(lambda q, k, v: flash_attention_one_head_sim(q, k, v, 4, 4))
    Q, K, V = random_tensors((300, 32), (256, 32), (256, 32), dtype=torch.float16)
    with Meter(Q, K, V) as meter:
        _run(flash_attention_one_head_sim, Q, K, V, 64, 32, case="M=300, N=256, BLOCK_M=64, BLOCK_N=32")
    said = f"the values are right, but your function held {meter.peak_bytes} bytes at once: as much as the whole "
    said += "score matrix; compute one block of BLOCK_M rows at a time"
    expect(meter.peak_bytes < 300 * 256 * 2, said, diagnosis="not-tiled")
    _expect_blocks(flash_attention_one_head_sim)
    return report


def _expect_blocks(fn: Callable[..., Any]) -> None:
    """Products of BLOCK_M rows and BLOCK_N keys: told by how many there are."""
    for M, N, BLOCK_M, BLOCK_N, most in ((16, 128, 16, 64, 4), (64, 64, 64, 16, 8)):
        Q, K, V = random_tensors((M, 32), (N, 32), (N, 32))
        case = f"{M=}, {N=}, {BLOCK_M=}, {BLOCK_N=}"
        products = _products(fn, Q, K, V, BLOCK_M, BLOCK_N, case=case)
        said = f"the values are right, but {products} products were computed where one block of rows and {most // 2} "
        said += f"blocks of keys need {most}: rows go by BLOCK_M, keys by BLOCK_N, whatever these are"
        expect(products == most, said, diagnosis="blocks-exchanged", case=case)


_WHOLE = _of_a_head(flash_attention_one_head_sim, then=_expect_blocks)


# ---- 2.5, 2.6: bug hunts -----------------------------------------------------------------------------------


def _repaired(Q, K, V, BLOCK_N, scale=None):
    scale = check_inputs(Q, K, V, BLOCK_N, scale)
    M, N, q = Q.shape[0], K.shape[0], Q.float()
    m_i, l_i, acc = q.new_full([M], -math.inf), q.new_zeros([M]), q.new_zeros([M, V.shape[1]])
    row = torch.arange(M, device=Q.device)
    for start_n in range(0, N, BLOCK_N):
        k, v = K[start_n : start_n + BLOCK_N].float(), V[start_n : start_n + BLOCK_N].float()
        key = torch.arange(start_n, start_n + len(k), device=Q.device)
        s = (scale * (q @ k.T)).masked_fill(key[None, :] > row[:, None] + N - M, -math.inf)
        m_new = torch.maximum(m_i, s.amax(dim=1))
        m_safe = torch.where(m_new == -math.inf, 0.0, m_new)
        p = torch.exp(s - m_safe[:, None])
        correction = torch.exp(m_i - m_safe)
        l_i = l_i * correction + p.sum(dim=1)
        acc = acc * correction[:, None] + p.to(V.dtype).float() @ v
        m_i = m_new
    l_safe = torch.where(l_i == 0, 1.0, l_i)
    return (acc / l_safe[:, None]).to(V.dtype), m_i + torch.log(l_i)


_HUNTED = made(
    _repaired, ("O", "lse"), draw=lambda r: _block(r, r.randint(1, 9), r.randint(1, 9), r.randint(1, 4))[:5],
    inputs={str(x): _block(random.Random(i), *x)[:5] for i, x in enumerate(
        ((5, 5, 2), (7, 3, 2), (3, 8, 3), (4, 4, 2, 300.0), (6, 4, 2, -300.0)))}, on_device=True, tol=1e-4,
)  # fmt: skip


def _verify_causal(hunted: Callable[..., Any]) -> Report:
    """Every causal case of the checker, in tiles of 16 keys."""

    def call(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return verification.as_batch(_run(hunted, q[0, 0], k[0, 0], v[0, 0], 16, case.softmax_scale, case=str(case)))

    cases = [case for case in case_list(causal=True, batched=False, strided=False, max_seq=200) if case.causal]
    # Below -1e30 too, so that no finite number passes for minus infinity.
    lowest = "every score near the lowest number of float32"
    huge = [replace(case, name=lowest, scale=LOWEST_SCALE) if case.content == "huge" else case for case in cases]
    return verification.run(call, [replace(case, block_n=16) for case in huge], one_head=True)


@exercise(
    "2.5",
    title="Right without a past",
    minutes=15,
    difficulty="Bug hunt",
    bug=[("row[:, None] + N - M", "row[:, None]")],
    untouched="10cf5f0cbfe8",
    history="Dao-AILab/flash-attention, issue 282 (2023); its version 2.1 changed the alignment",
    hints=[
        "It is right wherever there are as many queries as keys. Take 2 queries and 5 keys: write down the mask that "
        "the code makes, as a 2 x 5 table of 0 and 1.",
        "The last query should see all 5 keys, and the one before it all but one. Which keys does the code let it see?",
        "Query i is at position i + N - M of the keys: mask where key > row + N - M.",
    ],
)
def hunt_without_a_past(hunted: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
    with _HUNTED.mending(hunted, hunt=True):
        return _verify_causal(hunted)


@exercise(
    "2.6",
    title="The walk from the other end",
    minutes=20,
    difficulty="Bug hunt",
    bug=[
        ("        m_safe = torch.where(m_new == -math.inf, 0.0, m_new)\n", ""),
        ("s - m_safe", "s - m_new"),
        ("m_i - m_safe", "m_i - m_new"),
    ],
    untouched="3b7a9eee7ed5",
    history="flashinfer-ai/flashinfer, pull request 4401 (2026), and many before it",
    hints=[
        "With 32 queries, 32 keys and tiles of 16: which rows see a key of the tile 16 to 31, which the walk meets "
        "first? Which rows are NaN?",
        "Print s, m_new and p of row 0 in the first round. Every score of it is masked. What is m_new, and what is "
        "s - m_new?",
        "-inf - (-inf) is NaN. Where m_new is still -inf, subtract 0 instead, in p and in the correction: exp(-inf) is "
        "0, which is what a row without a key should add.",
    ],
)
def hunt_from_the_end(hunted: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> Any:
    try:
        return _verify_causal(hunted)
    except CheckFailed as failed:
        if failed.diagnosis not in _OF_THE_FORM:
            _expect_guarded(hunted)
        with _HUNTED.mending(hunted, hunt=True):
            raise


_OF_THE_FORM = ("returned-none", "wrong-type", "wrong-shape", "wrong-dtype", "wrong-device", "input-modified")


def _expect_guarded(hunted: Callable[..., Any]) -> None:
    """CheckFailed where just rows that see no key of the tile in which the walk begins are NaN, or 0."""
    for keys, queries in ((32, 32), (40, 24)):
        case = f"{queries} queries, {keys} keys, tiles of 16, causal"
        Q, K, V = random_tensors((queries, 16), (keys, 16), (keys, 16))
        O, lse = _run(hunted, Q, K, V, 16, case=case)
        late = torch.arange(queries, device=Q.device) + keys - queries < (keys - 1) // 16 * 16
        nan = O.isnan().any(1)
        said = f"{int(nan.sum())} rows are NaN, and none of them sees a key of the tile in which the walk begins: "
        said += "m_new is still -inf there, and -inf - (-inf) is NaN. Guard both exponents"
        expect(not (nan.any() and (nan <= late).all()), said, diagnosis="first-tile-masked", case=case)
        low = f"{case}, all scores -1600"
        zero = (_run(hunted, torch.full_like(Q, 20.0), torch.full_like(K, -20.0), V, 16, case=low)[0] == 0).all(1)
        kept = zero.any() and (zero <= late).all() and not (O == 0).all(1).any()
        right = _oracle(Q, K, V, causal=True)[1].to(lse)  # ordinary scores: a reference of 0 does no harm
        kept = kept and torch.allclose(lse, right, atol=1e-3)
        said = f"where all scores are far below 0, {int(zero.sum())} rows are 0, and none of them sees a key of the "
        said += "tile in which the walk begins: the 0 that stands in for -inf there is kept as the maximum. m_i has to "
        said += "stay -inf; the 0 is for the subtraction only"
        expect(not kept, said, diagnosis="guard-kept", case=low)


# ---- 2.7 ---------------------------------------------------------------------------------------------------


@rule(
    "2.7",
    title="Count the bytes", minutes=10,
    hints=[
        "Who reads what how often? Q: each row belongs to one query block. K and V: each query block walks "
        "over all of them.",
        "The number of query blocks is M / BLOCK_M rounded *up*: `-(-M // BLOCK_M)`.",
        "read = (M + blocks * 2 * N) * HEAD_DIM * itemsize; written = M * HEAD_DIM * itemsize for O, and 4 "
        "* M for lse.",
    ],
    returns="bytes read, bytes written",
    inputs=[(192, 128, 64, 64, 2), (1024, 1024, 128, 64, 2), (1000, 1500, 64, 128, 2), (5, 7, 8, 64, 4)],
    draw=lambda r: (
        r.randint(1, 400), r.randint(1, 400), r.choice((8, 16, 64, 80)), r.choice((16, 32, 64, 128)), r.choice((2, 4))
    ),
    notes={
        "2": "K and V are two matrices", "q_blocks": "every block of queries reads K and V again",
        "itemsize": "an element has itemsize bytes", "bytes read: M": "each block reads its own rows of Q once",
        "HEAD_DIM": "a row has HEAD_DIM elements",
        "M * 4": "lse has a float32 for each row, 4 bytes", "4": "lse is float32, 4 bytes",
    }
    | dict.fromkeys(("-(-M // BLOCK_M)", "-M // BLOCK_M"), "there is no fraction of a block, and the last one counts"),
    units={
        "bytes read": {
            "times Q": "M * HEAD_DIM * itemsize", "times K or V": "N * HEAD_DIM * itemsize",
            "times K or V for each block of queries": "-(-M // BLOCK_M) * N * HEAD_DIM * itemsize",
            "times the scores, which never leave the chip": "M * N * itemsize", "times lse": "4 * M",
        },
        "bytes written": {
            "times O": "M * HEAD_DIM * itemsize", "times the scores, which never leave the chip": "M * N * itemsize",
            "times lse, a float32 for each row": "4 * M",
        },
    },
)  # fmt: skip
def hbm_bytes(M, N, HEAD_DIM, BLOCK_M, itemsize):
    """Return (bytes read, bytes written)."""
    # BEGIN SOLUTION
    q_blocks = -(-M // BLOCK_M)
    read = (M + q_blocks * 2 * N) * HEAD_DIM * itemsize
    written = M * HEAD_DIM * itemsize + M * 4
    return read, written
    # END SOLUTION


# ---- 2.8 ---------------------------------------------------------------------------------------------------


def _parts(r: random.Random, N: int, splits: int, scale: float | None = None, dtype: torch.dtype = torch.float32,
           shift: float = 0.0) -> tuple[Any, ...]:  # fmt: skip
    Q, K, V = (normal(r, rows, 16, dtype=dtype) for rows in (6, N, N))
    if shift:  # of every score, through one feature
        Q[:, 0], K[:, 0] = 20.0, shift / 20 * 4
    return Q, K, V, 4, splits, scale


def _apart(N: int, splits: int, step: float) -> tuple[Any, ...]:
    """Parts, and the last rows of Q, whose scores lie far from those of the others."""
    Q, K, V, block_n, splits, scale = _parts(random.Random(N), N, splits, shift=1.0)
    K[:, 0] = torch.arange(N).div(N // splits, rounding_mode="floor") * step / 5
    Q[3:, 0] = 10.0
    return Q, K, V, block_n, splits, scale


def _expect_split(fn: Callable[..., Any]) -> None:
    """As many parts as asked for, and a merge in float32."""
    Q_block, K, V = random_tensors((6, 16), (50, 16), (50, 16))
    case = "50 keys, BLOCK_N=64, 5 splits"
    products = _products(fn, Q_block, K, V, 64, 5, case=case)
    said = f"the values are right, but {products} products were computed: 5 parts need two each. Is `splits` used, "
    said += "and as the number of parts, not as their length?"
    expect(10 <= products < 20, said, diagnosis="parts-too-short" if products >= 20 else "not-split", case=case)
    Q_block, K, V = random_tensors((64, 16), (256, 16), (256, 16), dtype=torch.float16)
    case = "256 keys in float16, 4 splits, V = ±1024"
    V = V.new_tensor([1024.0, -1024.0, 1024.0, -1024.0]).repeat_interleave(64)[:, None].expand(V.shape)
    want, _ = _oracle(Q_block, K, V)  # parts are exact, and cancel: what rounds their weights is seen
    O, _ = _run(fn, Q_block, K, V, 16, 4, case=case)
    error, allowed = (O.double() - want).square().mean().sqrt().item(), 2.0**-11 * want.abs().mean().item()
    said = f"O errs by {error:.1e} on average, where {allowed:.1e} is allowed: are the weights, or the sum, in V's "
    said += "dtype? Merge in float32, and round once at the end"
    expect(error <= allowed, said, diagnosis="merged-in-low-precision", case=case)


_UNLIKE = "a part weighs exp(its lse - the whole lse), and these weights sum to 1 over the parts"


@tensor_rule(
    "2.8",
    title="Cut the keys among workers", minutes=25, difficulty="Stretch",
    hints=[
        "Cut K and V alike into `splits` parts (`torch.chunk` may give fewer: that is fine), run the "
        "simulation on each, and collect the O and lse of every part.",
        "A part's sum of exponentials is exp(lse_part), so in the whole softmax it has the weight "
        "exp(lse_part) / sum of exp(lse_part). Subtract a maximum before you take those exponentials.",
        "`lse = torch.logsumexp(lses, dim=0)`, weights `torch.exp(lses - lse)`, and O the weighted sum of "
        "the parts' O in float32.",
    ],
    returns="O, lse",
    inputs={
        **{f"50 keys, {splits} splits": _parts(random.Random(splits), 50, splits) for splits in (3, 2, 7, 50, 64, 1)},
        "12 keys, 3 splits, scores near +120": _parts(random.Random(1), 12, 3, shift=120.0),
        "12 keys, 3 splits, scores near -120": _parts(random.Random(1), 12, 3, shift=-120.0),
        "12 keys, 3 splits, scores that rise by 120 from part to part": _apart(12, 3, 120.0),
        "12 keys, 3 splits, scores that fall by 120 from part to part": _apart(12, 3, -120.0),
        "50 keys, 5 splits, scale=0.7": _parts(random.Random(2), 50, 5, 0.7),
        "50 keys in float16, 4 splits": _parts(random.Random(3), 50, 4, dtype=torch.float16),
    },
    draw=lambda r: _parts(r, r.randint(1, 40), r.randint(1, 9), r.choice((None, 0.5))),
    nan={"120": "exp(lse) left the range of float32 in the merge: subtract the largest lse first"},
    notes={
        "torch.exp": "lse is natural", "lses - lse": "a part with a larger lse weighs more", "lse": _UNLIKE,
        "torch.logsumexp": "it is the log of the sum of exp(lse): exponentials add up, logarithms do not",
        "torch.exp(lses - lse)": _UNLIKE, "w[:, None]": _UNLIKE,
        "scale": "the scale is ignored: hand it on to the simulation",
        "dtype": "merge in float32, and round O to V's dtype at the end", "dim=0": "the sum runs over the parts",
    },
    rows=[
        Row("plain-average", "O: the parts are averaged as if they weighed the same; a part weighs exp(its lse)",
            [("torch.exp(lses - lse)", "torch.full_like(lses, 1 / len(parts))")]),
        Row("weighted-by-lse", "O: the parts are weighted by their lse; the weight is exp(lse)",
            [("torch.exp(lses - lse)", "lses / lses.sum(dim=0)")]),
        Row("softmax-over-rows", "O: the weights are normalised over the rows; they sum to 1 over the parts",
            [("torch.exp(lses - lse)", "torch.softmax(lses, 1)")]),
        Row("keys-dropped", "O and lse: keys left over by the division are lost: N need not be a multiple of splits",
            [("K.chunk(splits), V.chunk(splits)", "*(x[: max(1, len(K) // splits) * splits].split(max(1, len(K) // "
              "splits)) for x in (K, V))")]),
        Row("last-part-only", "lse is that of the last part alone: the others have keys too",
            [("torch.logsumexp(lses, dim=0)\n    weights = torch.exp(lses - lse)",
              "lses[-1]\n    weights = torch.softmax(lses, 0)")]),
    ],
    on_device=True,
    then=_expect_split,
)  # fmt: skip
def split_kv_sim(Q_block, K, V, BLOCK_N, splits, scale=None):
    """Attention of one query block, K and V cut into `splits` parts. Returns (O_block, lse)."""
    # BEGIN SOLUTION
    pairs = zip(K.chunk(splits), V.chunk(splits), strict=True)
    parts = [worker(Q_block, k, v, BLOCK_N, scale) for k, v in pairs]
    lses = torch.stack([lse for _, lse in parts])  # [parts, BLOCK_M]
    lse = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - lse)  # they sum to 1 over the parts
    O_block = sum(w[:, None] * o.float() for w, (o, _) in zip(weights, parts, strict=True))
    return O_block.to(V.dtype), lse
    # END SOLUTION


# ---- 2.9 ---------------------------------------------------------------------------------------------------


@exercise(
    "2.9",
    title="Causal, and skipping tiles",
    minutes=35,
    difficulty="Stretch",
    hints=[
        "Query i sees key j if j <= i + N - M. With the rows' numbers `start_m + arange` and the keys' numbers "
        "`start_n + arange` that is one comparison of a column with a row: it gives the mask of the tile.",
        "A tile can be skipped when even the block's last row sees none of its keys: its first key is "
        "beyond `last row + N - M`. So the inner loop may simply end earlier.",
        "A row whose keys so far are all masked has m_new = -inf, and -inf - (-inf) is NaN. Subtract 0 "
        "instead of m_new in such a row. At the end, a row with l_i = 0 gets O = 0 and lse = -inf.",
    ],
)
def causal(flash_attention_causal_sim: Callable[..., Any]) -> Any:
    report = None
    for BLOCK_M, BLOCK_N in [(16, 32), (64, 16)]:

        def one_head(q, k, v, *, scale=None, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N):
            return flash_attention_causal_sim(q, k, v, BLOCK_M, BLOCK_N, scale)

        dtypes = (torch.float16, torch.float32)
        with _CAUSAL.mending(flash_attention_causal_sim):
            report = verify_one_head(one_head, always_causal=True, dtypes=dtypes, head_dims=(64, 20), max_tile=128)
    with _CAUSAL.mending(flash_attention_causal_sim):
        _expect_value_columns(lambda q, k, v: flash_attention_causal_sim(q, k, v, 4, 4), causal=True)
    _expect_tiles_skipped(flash_attention_causal_sim)
    return report


def _expect_tiles_skipped(flash_attention_causal_sim: Callable[..., Any]) -> None:
    M = N = 256
    D, BLOCK = 32, 32
    Q, K, V = random_tensors((M, D), (N, D), (N, D))
    case = f"M=N={N}, tiles {BLOCK} x {BLOCK}"
    with Meter() as meter:
        _run(flash_attention_causal_sim, Q, K, V, BLOCK, BLOCK, case=case)
    blocks = N // BLOCK
    needed, all_of_them = blocks * (blocks + 1) // 2, blocks * blocks
    tiles = meter.matmul_flops / (4 * BLOCK * BLOCK * D)
    said = f"the values are right, but {tiles:.0f} tiles of scores were computed where {needed} of the {all_of_them} "
    said += "hold a visible key: skip the tiles that lie in every row's future"
    expect(tiles < needed + 0.5, said, diagnosis="tiles-not-skipped", case=case)


_CAUSAL = _of_a_head(flash_attention_causal_sim, then=_expect_tiles_skipped)
