"""A sentence that the learner's text contradicts is not told."""

import pytest

from flashlab.check.claims import Claims, tokens, tokens_of

RIGHT = """next_k = (step + 2) // per_k
x = b[(step + 2) % 3]
if n < tiles and moved > above: total += -(-blocks // places)
next_k.roll(1)"""


@pytest.mark.parametrize(
    ("said", "old", "new"),
    [
        ("the term `2` is missing, in `step + 2`", "(step + 2) // per_k", "step // per_k"),
        ("the remainder by `3` is missing: it is `step + 2` as it stands", "b[(step + 2) % 3]", "b[step + 2]"),
        ("`places` stands where `per_k` belongs", "// per_k", "// places"),
        ("the comparison is `n > tiles`: it is `<`", "n < tiles", "n > tiles"),
        ("the comparison is `moved < above`: it is `>`", "moved > above", "above > moved"),
        ("the factor `-(-blocks // places)` is there twice", "-(-b", "-(-blocks // places) * -(-b"),
        ("`moved` has the wrong sign", "moved >", "-moved >"),
        ("`blocks` is 1000 times what it should be", "-blocks", "-1000 * blocks"),
        ("`n < tiles` is not asked", "n < tiles and ", ""),
        ("`.roll` is missing: `next_k` is taken as it stands", "next_k.roll(1)", "next_k"),
        ("the arguments of `roll` are exchanged", "next_k.roll(1)", "next_k.roll(0)"),
    ],
)
def test_what_is_said_is_true_of_the_changed_text_alone(said, old, new):
    assert RIGHT.count(old) == 1
    assert Claims(tokens_of(RIGHT), tokens_of(RIGHT)).untrue(said)
    assert not Claims(tokens_of(RIGHT.replace(old, new)), tokens_of(RIGHT)).untrue(said)


def test_of_one_result_alone_a_piece_may_be_missing_that_is_there():
    claims = Claims(tokens("a = x * y; b = x"), tokens("a = x * y; b = x * y"))
    assert not claims.untrue("the factor `y` is missing, in `x * y`")
    same = Claims(tokens("a = x * y"), tokens("a = x * y"))
    assert same.untrue("the factor `y` is missing") and not same.untrue("the factor `y` is missing", of_one=True)


def test_what_a_name_of_the_right_text_stands_for():
    claims = Claims(
        tokens("if flops / moved >= ridge: f()"), tokens("if f / m >= ridge: g()"), {"f": "FLOPs", "m": "bytes"}
    )
    assert claims.untrue("`FLOPs / bytes >= ridge` is not asked")


def test_a_product_is_no_part_of_a_longer_one():
    claims = Claims(tokens("2 * width * width"), tokens("2 * width * width + 2 * width"))
    assert not claims.untrue("the term `2 * width` is missing")


@pytest.mark.parametrize(
    ("learners", "told"),
    [
        ("a = 2 * x\nb = max(a, y, 3)", True),  # max is there: the limit is not what is missing
        ("a = 2 * x\nb = a", False),
        ("b = max(2 * x, y) if y < 3 else 0", True),
    ],
)
def test_a_row_fits_where_its_edits_can_be_seen(learners, told):
    claims = Claims(tokens_of(learners), tokens_of("a = 2 * x\nb = max(a, y)"), own=["a", "b"])
    assert claims.unlike([("max(a, y)", "a")]) is told


def test_what_is_seen_in_the_text_is_sure():
    right = tokens_of("t = flops / (rate * 1e12) + moved / (speed * 1e9)")
    binary = tokens_of("2**30 / speed * flops / (rate * 1e12) + moved")
    assert Claims(binary, right).seen(tokens_of("t = flops / (rate * 1e12) + moved / (speed * 2**30)"))
    assert not Claims(right, right).seen(tokens_of("t = flops / (rate * 1e9) + moved / (speed * 1e9)"))
    assert Claims(binary, right).no_number("16 stands where 8 belongs")
