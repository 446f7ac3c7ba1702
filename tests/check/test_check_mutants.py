"""The zoo: every mutant is rejected, and where the mistake is one the checker knows, it is named."""

import pytest
import torch

from flashlab.check import CheckFailed, verify, verify_block, verify_one_head
from flashlab.check.zoo.attention import MUTANTS, build, tf32_forward

pytestmark = pytest.mark.usefixtures("on_cpu")

# Every mutant once, with a tile size that differs from its neighbours'; all sizes were tried when the zoo was written.
SIZES = (32, 64, 16, 128)


def failure(front, fn, **options) -> CheckFailed:
    with pytest.raises(CheckFailed) as caught:
        front(fn, **options)
    return caught.value


@pytest.mark.parametrize(
    "mutant, size",
    [(mutant, SIZES[i % len(SIZES)]) for i, mutant in enumerate(MUTANTS)],
    ids=[mutant.name for mutant in MUTANTS],
)
def test_a_mutant_is_rejected_and_named(mutant, size):
    everything = size == 64 or (mutant.diagnosis or "").startswith(("causal", "mask", "wrong-kv"))
    failed = failure(verify, mutant.build(BLOCK_M=size, BLOCK_N=size), causal=everything, gqa=everything)
    assert mutant.diagnosis is None or failed.diagnosis == mutant.diagnosis, str(failed)
    assert failed.case and "\n" not in str(failed) and len(str(failed)) < 250


def test_the_zoo_is_large_and_its_mutants_differ():
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names) >= 30
    known = {mutant.diagnosis for mutant in MUTANTS} - {None}
    assert len(known) >= 40
    assert len({mutant.changes for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutation_that_does_not_apply_is_an_error():
    with pytest.raises(ValueError, match="occurs 0 times"):
        build(("no such text", ""))
    with pytest.raises(ValueError, match="occurs"):
        build(("l_i", "x"))


@pytest.mark.parametrize("half", [0x1000, 0], ids=["rounded", "cut"])
def test_tf32_is_told_from_float32(half):
    def forward(q, k, v, *, causal, scale):
        return tf32_forward(q, k, v, causal=causal, scale=scale, half=half)

    assert failure(verify, forward, dtypes=(torch.float32,)).diagnosis == "tf32"


def named(name: str):
    return next(mutant for mutant in MUTANTS if mutant.name == name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "name", ["O is not rescaled", "scale 1/d", "the zero-padded tail is not masked", "lse in base 2"]
)
def test_mistakes_are_named_in_other_dtypes(name, dtype):
    mutant = named(name)
    assert failure(verify, mutant.build(), dtypes=(dtype,)).diagnosis == mutant.diagnosis


def one_head(forward):
    def fn(q, k, v, *, scale=None):
        o, lse = forward(q[None, None], k[None, None], v[None, None], scale=scale)
        return o[0, 0], lse[0, 0]

    return fn


def block(mutant):
    def fn(Q_block, K, V, BLOCK_N):
        return one_head(mutant.build(BLOCK_M=16, BLOCK_N=BLOCK_N))(Q_block, K, V)

    return fn


@pytest.mark.parametrize(
    "name",
    [
        "O is not rescaled",
        "correction inverted",
        "no maximum is subtracted",
        "normalised in the loop",
        "the tail block is skipped",
    ],
)
def test_the_simpler_fronts_name_the_same_mistakes(name):
    mutant = named(name)
    assert failure(verify_one_head, one_head(mutant.build())).diagnosis == mutant.diagnosis
    assert failure(verify_block, block(mutant)).diagnosis == mutant.diagnosis


def test_the_same_wrong_output_gets_the_same_sentence():
    wrong = named("the minimum for the maximum").build()
    first, second = failure(verify, wrong, causal=True), failure(verify, wrong, causal=True)
    assert (str(first), first.diagnosis, first.case) == (str(second), second.diagnosis, second.case)


def test_an_unknown_mistake_is_described_honestly():
    def odd_rows(q, k, v, *, causal, scale):
        o, lse = build()(q, k, v, causal=causal, scale=scale)
        o[:, :, 17::2] += 0.25
        return o, lse

    failed = failure(verify, odd_rows)
    assert failed.diagnosis == "wrong-value"
    assert "only cases with more than 16 queries fail" in str(failed) or "rows" in str(failed), str(failed)
    assert "o[17, 0]" in str(failed)


def test_two_mistakes_at_once_are_still_rejected():
    both = build(
        *named("O is not rescaled").changes, *named("scale 1/d").changes, *named("lse in base 2").changes, name="both"
    )
    failed = failure(verify, both)
    assert failed.case and str(failed)
