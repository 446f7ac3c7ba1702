"""Every row of the catalogue, as a wrong answer: it is rejected, and told by its slug and its sentence."""

from functools import partial

import pytest
import torch
from failing import failure_of

from flashlab.check import verify, verify_block, verify_one_head
from flashlab.check.mistakes.attention import READ_OFF, ROWS, build, flash_forward

pytestmark = pytest.mark.usefixtures("on_cpu")

CATALOGUE = (*ROWS, *READ_OFF)
# By default one of every second slug, without the one that takes twenty seconds: a second or two each.
FIRST = [*{row.slug: row for row in reversed(CATALOGUE) if row.slug != "l-in-low-precision"}.values()][::2]
IN_FLOAT32 = ("tf32", "weights-not-scaled")
EVERYTHING = ("causal", "mask", "wrong-kv", "l-counts", "finite")
# Sizes at which it is no other mistake.
TELLING = {"padding-in-the-maximum": 1, "m-of-this-block-only": 1, "causal-first-tile-only": 1}
SEEN = ("one-maximum",)  # in 16 bits P is 0 before it is in float32, and rows of o are: that is told
BLOCK_N = (32, 64, 16, 128)  # of the mistakes that depend on no tile: another one from row to row


def wrong(row):
    """The function with a mistake, in tiles of one of the row's sizes."""
    at = CATALOGUE.index(row)
    sizes = [size for size in row.sizes if 8 not in size]  # of so small a tile every length is a multiple
    block_m, block_n, count = sizes[TELLING.get(row.slug, at % len(sizes))]
    whole = 0 if row.slug == "q-and-k-exchanged" else BLOCK_N[at % 4]
    return partial(build(*row.edits), BLOCK_M=block_m, BLOCK_N=block_n if block_n > 1 else whole, COUNT=count)


def of_blocks(fn):
    def block(Q_block, K, V, BLOCK_N, scale=None):
        o, lse = fn(*(x[None, None] for x in (Q_block, K, V)), scale=scale, BLOCK_N=BLOCK_N)
        return o[0, 0], lse[0, 0]

    return block


def one_head(fn):
    def forward(q, k, v, *, scale=None):
        o, lse = fn(*(x[None, None] for x in (q, k, v)), scale=scale)
        return o[0, 0], lse[0, 0]

    return forward


@pytest.mark.slow
@pytest.mark.parametrize("row", [
    pytest.param(row, id=f"{row.slug}-{i}", marks=[] if row in FIRST else pytest.mark.long)
    for i, row in enumerate(CATALOGUE)
])  # fmt: skip
@pytest.mark.every(3)
def test_a_row_is_rejected_and_told(row):
    if row.slug == "keys-stepped-over":
        failed = failure_of(verify_block, of_blocks(wrong(row)))
    else:
        everything = row.slug.startswith(EVERYTHING)
        dtype = torch.float32 if row.slug in IN_FLOAT32 else torch.float16
        square = row.slug == "q-and-k-exchanged"
        failed = failure_of(verify, wrong(row), causal=everything, gqa=everything, cross=not square, dtypes=(dtype,))
    assert failed.diagnosis == row.slug or row.slug in SEEN, failed
    assert failed.case and "\n" not in str(failed) and len(str(failed)) < 250
    assert str(failed).startswith(row.sentence.partition("{")[0]) or row.slug in SEEN


def test_an_edit_that_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="occurs 0 times"):
        build(("no such text", ""))
    with pytest.raises(ValueError, match="occurs"):
        build(("l_i", "x"))


def named(slug):
    return next(row for row in ROWS if row.slug == slug)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("slug", ["o-not-rescaled", "scale-one-over-d", "tail-not-masked", "lse-in-base-2"])
@pytest.mark.every(3)
@pytest.mark.long
def test_mistakes_are_named_in_other_dtypes(slug, dtype):
    assert failure_of(verify, build(*named(slug).edits), dtypes=(dtype,)).diagnosis == slug


SIMPLER = ["o-not-rescaled", "correction-inverted", "no-max-subtraction", "normalised-in-the-loop", "tail-skipped"]


@pytest.mark.parametrize("slug", SIMPLER)
@pytest.mark.every(3)
def test_the_simpler_fronts_name_the_same_mistakes(slug):
    fn = build(*named(slug).edits)
    assert failure_of(verify_one_head, one_head(fn)).diagnosis == slug
    assert failure_of(verify_block, of_blocks(fn)).diagnosis == slug


def test_the_same_wrong_output_gets_the_same_sentence():
    unknown = build(*READ_OFF[0].edits)
    first, second = failure_of(verify, unknown, causal=True), failure_of(verify, unknown, causal=True)
    assert (str(first), first.diagnosis, first.case) == (str(second), second.diagnosis, second.case)


def test_an_unknown_mistake_is_described_honestly():
    def odd_rows(q, k, v, *, causal, scale):
        o, lse = flash_forward(q, k, v, causal=causal, scale=scale)
        o[:, :, 17::2] += 0.25
        return o, lse

    failed = failure_of(verify, odd_rows)
    assert failed.diagnosis == "wrong-value"
    assert "only cases with more than 16 queries fail" in str(failed) or "rows" in str(failed), str(failed)
    assert "o[17, 0]" in str(failed)


def test_two_mistakes_at_once_are_still_rejected():
    edits = [edit for slug in ("o-not-rescaled", "scale-one-over-d", "lse-in-base-2") for edit in named(slug).edits]
    failed = failure_of(verify, build(*edits))
    assert failed.case and str(failed)
