"""Phase 7: the fragments are the instruction's; right answers in other styles pass. Wrong ones: `test_told_cuda.py`."""

import itertools

import pytest
import torch
from lesson_answers import answers_of, failure
from test_phase_06 import ONE_WARP

from flashlab.cuda import load_inline
from flashlab.exercises import check, phase_07
from flashlab.figures import fragments
from flashlab.kernels import path


@pytest.mark.parametrize("operand, shape", [("a", (16, 16)), ("b", (16, 8)), ("c", (16, 8))])
def test_a_fragment_is_a_permutation_of_its_matrix(operand, shape):
    matrix = torch.arange(shape[0] * shape[1]).reshape(shape)
    held = fragments.fragment(matrix, operand)
    assert held.numel() == matrix.numel() and len(held.unique()) == matrix.numel()
    assert torch.equal(fragments.matrix(held, operand).long(), matrix)


def test_the_formulas_are_those_of_the_instruction():
    A, B, C = (torch.randint(-8, 9, shape) for shape in (fragments.A_SHAPE, fragments.B_SHAPE, fragments.C_SHAPE))
    module = load_inline(path("p7_one_mma"), backend="emulator")
    c = fragments.fragment(C.float(), "c")
    module.mma(fragments.fragment(A.half(), "a"), fragments.fragment(B.half(), "b"), c)
    assert torch.equal(fragments.matrix(c, "c").long(), A @ B + C)


def test_the_holders_are_those_of_the_fragments():
    for lane, register in itertools.product(range(32), range(4)):
        assert phase_07.holder_of_c(*fragments.c_position(lane, register)) == (lane, register)
    for slot in itertools.product(range(32), range(2), range(2)):
        assert phase_07.holder_of_b(*fragments.b_position(*slot)) == slot


@pytest.mark.parametrize("address, trans", [(phase_07.k_address, 0), (phase_07.v_address, 1)])
def test_ldmatrix_loads_both_fragments_from_these_addresses(address, trans):
    module = load_inline(path("p7_one_mma"), backend="emulator")
    tile, out = torch.arange(256, dtype=torch.int16).reshape(16, 16), torch.zeros(32, 4, 2, dtype=torch.int16)
    rows, columns = torch.tensor([address(lane) for lane in range(32)], dtype=torch.int32).T.contiguous()
    module.launch("ldmatrix", tile, rows, columns, out, 16, 16, 4, trans)
    halves = (tile[:, :8], tile[:, 8:]) if trans else (tile[:8].T, tile[8:].T)
    assert torch.equal(out, torch.cat([fragments.fragment(x, "b") for x in halves], dim=1))


def test_fragments_may_be_loaded_by_hand_where_no_ldmatrix_is_asked_for():
    old = answers_of("7.9", "solutions")[0]
    begin, end = old.index("        uint32_t a[2], b[1];"), old.index("        mma_m16n8k8")
    by_hand = (
        "        const T *q = q_smem + g * D + D - 8 + 2 * t, *k = k_smem + g * D + D - 8 + 2 * t;\n"
        "        uint32_t a[2] = {*(const uint32_t*)q, *(const uint32_t*)(q + 8 * D)}, b[1] = {*(const uint32_t*)k};\n"
    )
    assert check("7.9", old[:begin] + by_hand + old[end:])


@pytest.mark.long  # a minute of scalar products
def test_the_tensor_cores_have_to_be_used():
    failed = failure("7.10", ONE_WARP)
    assert failed.diagnosis == "wrong-count" and "no MMA" in str(failed)
