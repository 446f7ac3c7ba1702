"""Every broken kernel of the zoo is found, and in words that name its mistake."""

import pytest
import torch

from flashlab.check import CheckFailed
from flashlab.check import cuda_answer as trial
from flashlab.check.mistakes import hopper, series
from flashlab.check.mistakes.kernels import _blocks_transposed, _quadrants, _swizzled, explain
from flashlab.check.mistakes.series import Mutant
from flashlab.kernels.series import step

MUTANTS = (*series.MUTANTS, *hopper.MUTANTS)
FIRST = {(m in series.MUTANTS, m.found[0]): m for m in reversed(MUTANTS) if "max_seq" not in m.options}
"""Of each diagnosis one: every mutant is a build of its own, and the others are tried where `-m long` asks for them."""


@pytest.mark.parametrize(
    "mutant",
    [
        pytest.param(m, id=m.name.replace(" ", "-"), marks=[] if m in FIRST.values() else pytest.mark.long)
        for m in MUTANTS
    ],
)
@pytest.mark.every(4)
def test_a_broken_kernel_is_told_its_mistake(mutant):
    with pytest.raises(CheckFailed) as caught:
        mutant.examine()
    assert caught.value.diagnosis in mutant.found, str(caught.value)
    for words in mutant.words:
        assert words in str(caught.value)


def test_a_mutant_that_no_longer_fits_is_told():
    with pytest.raises(ValueError, match="'no such line' occurs 0 times in p11_4_producer.cu, gone"):
        Mutant("gone", "p11_4_producer", (("no such line", ""),), ()).source()


def test_a_finding_quotes_the_learners_lines():
    own = trial.region(step("p8_3_stages"), "load K and V").replace("STAGES - 2>", "STAGES - 1>")
    source = trial.replaced(step("p8_3_stages"), "load K and V", own)
    assert source.text.count("\n") == step("p8_3_stages").path.read_text().count("\n")
    assert source.place(source.first + 5) == "line 6 of your code, `cp_async_wait<STAGES == 1 ? 0 : STAGES - 1>();`,"
    with pytest.raises(CheckFailed, match=r"line \d+ of p8_3_stages\.cu, `ldmatrix_x4\(a") as caught:
        trial.examine(source)
    assert caught.value.diagnosis == "read-before-wait"


def test_the_models_of_fragments():
    x = torch.arange(64 * 64).reshape(64, 64)
    assert _swizzled(_swizzled(x)).equal(x) and _swizzled(x)[9, 8:16].equal(x[9, :8])
    assert _blocks_transposed(x)[9, 18] == x[10, 17]
    assert _quadrants(x, (0, 1, 2, 3)).equal(x)
    assert _quadrants(x, (0, 2, 1, 3))[8:16, :8].equal(x[:8, 8:16])  # a1 now holds what a2 should


def test_a_right_function_has_no_mistake_to_explain():
    def right(q, k, v, *, causal, scale):
        s = q.double() @ k.double().mT * q.shape[-1] ** -0.5
        if causal:
            seen = torch.ones(s.shape[-2:], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
            s = s.masked_fill(~seen, -torch.inf)
        return s.softmax(-1).nan_to_num() @ v.double(), s.logsumexp(-1)

    assert explain(right, 64, lambda: None) is None
