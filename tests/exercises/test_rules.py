"""Exercises that are one right function: what is told comes from its changes, and so do these tests."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import math
import re

import pytest
import torch
from test_house import load

from flashlab import runtime
from flashlab.attention.online_softmax import merge
from flashlab.check import CheckFailed, mend
from flashlab.check.changes import EndlessError, Text, changes
from flashlab.check.expect import allowed_error
from flashlab.check.lookup import Index, in_units, where_right
from flashlab.exercises import check, exercises
from flashlab.exercises.kernel_rule import KernelRule
from flashlab.exercises.phase_04 import whose
from flashlab.exercises.rule import RULES, Rule, answers
from flashlab.exercises.tensor_rule import TensorRule, copied

exercises()  # imports every phase


def there(fn):
    """What the text of a rule makes by itself, places or tables, a learner makes where kernels run."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        with torch.device(runtime.device()):
            return fn(*args, **kwargs)

    return call


def judge(id, fn):
    """Of tensors the values alone: what is handed in may be a kernel, or several functions."""
    it = RULES[id]
    if id in ("5.8", "10.8 layer"):
        fn = there(fn)
    return it.compare(fn) if isinstance(it, TensorRule) else check(it.id, *answers(it, fn))


def told(id, fn):
    with pytest.raises(CheckFailed) as caught:
        judge(id, fn)
    return caught.value


# Hundreds of changes of a kernel each: minutes in all. Their solutions are checked with the notebooks.
LARGE = ("4.9", "4.10", "4.11", "4.12", "4.13", "5.4", "5.10", "5.11", "5.12", "5.13", "12.9")
WIDE = ("4.7", "5.6", "10.6")  # kernels too, of five seconds each: 3.3, 4.4, 4.8, 5.5 and 12.10 stand for them
ONCE = [pytest.param(id, marks=pytest.mark.long) if id.split()[0] in (*LARGE, *WIDE) else id for id in RULES]
# Not every change of these kernels is told yet; the others of an empty page have been looked through.
UNTOLD = ("4.9", "4.10", "4.11", "4.12", "4.13", "5.4", "5.12", "5.13", "10.6", "12.9")
TOLD = [
    pytest.param(id, marks=(pytest.mark.long, pytest.mark.xfail(strict=False))) if id in UNTOLD else one
    for id, one in zip(RULES, ONCE, strict=True)
]
# By default on a part of what is drawn, or of the changes: the rest is for the night.
FEW = pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.long)], ids=["few", "all"])


def needs_digits(id):
    if id == "10.8 layer" and not runtime.INTERPRETED:
        pytest.skip("what a GPU's kernels are allowed hides angles of some hundredths")


@FEW
@pytest.mark.parametrize("id", ONCE)
@pytest.mark.every(4)
def test_the_right_rule_passes_and_no_change_of_it_is_accepted(id, few):
    """What the check accepts is the same on thousands of drawn inputs too: another way to write the rule."""
    needs_digits(id)
    judge(id, RULES[id].right)
    drawn = RULES[id].drawn()
    survivors = RULES[id].index.survivors(drawn[: 2 + len(drawn) // 10] if few else drawn)
    holes = [f"{change.said}, on {RULES[id].case(given)}" for change, given in survivors if given is not None]
    assert not holes, f"{id} accepts: {holes}"


def as_others_return_it(it):
    """The right function, whose results come in lists and as tensors, numbers not in the last digits the same."""

    def other(x):
        if isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
            return [other(y) for y in x]
        if isinstance(x, torch.Tensor):
            return x + 0.25 * allowed_error(x, it.tol) if x.is_floating_point() else x
        if isinstance(x, (int, float)) and not it.each:
            near = x * (1 + it.tol / 4) if isinstance(x, float) and not it.strict else x
            return torch.tensor(near, dtype=torch.float64 if isinstance(near, float) else None)
        return x

    return lambda *given: other(it.fn(*given))


@pytest.mark.parametrize("id", [id for id, it in RULES.items() if not isinstance(it, KernelRule)])
def test_a_right_answer_passes_in_other_words_and_with_results_of_other_kinds(id):
    it = RULES[id]
    others = [Text(it.fn, other=other).compiled() if not callable(other) else other for other in it.also]
    for fn in (*others, *[as_others_return_it(it)] * (it.judged is None)):
        judge(id, fn)


@pytest.mark.parametrize(("id", "row"), [
    # The kernels of an empty page are changes of one another, as below.
    pytest.param(id, row, marks=pytest.mark.long if id in LARGE and id not in ("4.13", "5.13", "12.9") else ())
    for id, rule in RULES.items() for row in rule.rows
])  # fmt: skip
@pytest.mark.every(6)
def test_a_row_is_told_by_its_sentence(id, row, monkeypatch):
    monkeypatch.setattr(mend, "loud", False)  # a row is no `def` of its own either
    needs_digits(id)
    failed = told(id, RULES[id].with_row(row))
    first = failed.diagnosis == row.slug and str(failed).startswith(RULES[id].prefix + row.sentence)
    assert first or f". Or: {row.sentence}" in str(failed)  # of two rows that give the same


@FEW
@pytest.mark.parametrize("id", TOLD)
@pytest.mark.every(6)
def test_changes_are_told_in_one_short_sentence_with_the_numbers_below(id, few, monkeypatch):
    monkeypatch.setattr(mend, "loud", False)  # a change is no `def` of its own, whose text could be mended
    rule = RULES[id]
    wrong = [
        (text, c, got) for text, c, got in rule.index.outcomes
        if text and not rule.index.same_outcome(got, rule.index.right)
    ]  # fmt: skip
    step = max(149 if isinstance(rule, KernelRule) else 23, len(wrong) // (8 if few else 24))
    for i in range(0, len(wrong), step):
        sense = (x for x in wrong[i : i + step] if not isinstance(rule, KernelRule) or not rule.makes_no_sense(x[2]))
        text, change, _ = next(sense, (None, None, None))
        if text is None:
            continue
        fn = text.compiled(change)
        with contextlib.suppress(Exception):
            if rule.judged and rule.judged(fn):
                continue  # another right answer
        try:
            failed = told(id, fn)
        except (EndlessError, NameError, TypeError, AttributeError, NotImplementedError):
            continue  # what Python says of it is the cause
        conclusion = str(failed).partition("\n")[0]
        assert len(conclusion) <= 200 and failed.diagnosis != "wrong-value", (change.said, failed)


@pytest.mark.skipif(not runtime.INTERPRETED, reason="addresses are watched where kernels are interpreted")
@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.long)], ids=["shown", "everywhere"])
@pytest.mark.parametrize("id", [
    # 4.10 has the kernel of 4.13; the others differ from that, or from 5.13, by some lines: ten seconds each.
    pytest.param(id, marks=pytest.mark.long if id in ("4.9", "4.10", "4.11", "4.12", "5.11", "5.12") else ())
    for id, it in RULES.items() if isinstance(it, KernelRule)
])  # fmt: skip
@pytest.mark.every(3)
def test_an_interpreted_kernel_gives_what_its_model_gives(id, everywhere, tmp_path):
    """The changes run on the model alone: what a learner's kernel gives has to be the same, stray addresses too.

    By default two dozen of them, on the first input where a change shows, and on another one in turn.
    """
    it = RULES[id]
    text, right = it.index.texts[0], it.index.right
    mine = [(c, got) for t, c, got in it.index.outcomes if t is text]
    for i, (change, predicted) in enumerate(mine[:: 101 if everywhere else max(101, len(mine) // 24)]):
        shown = [n for n, x in enumerate(predicted) if not it.index.same_outcome([x], [right[n]])]
        if not shown:
            continue
        with text.changed(change):
            source = re.sub(r"\b_tick\(\)", "pass", ast.unparse(text.tree))
        for name in inspect.signature(it.fn).parameters.values():
            if name.annotation != inspect.Parameter.empty:
                source = re.sub(rf"(\(.*?\b{name.name})\b", r"\1: tl.constexpr", source, count=1)
        path = tmp_path / f"changed_{i}.py"
        path.write_text(f"import triton\nimport triton.language as tl\n\n@triton.jit\n{source}\n")
        launched = dataclasses.replace(it, call=None).launched(getattr(load(path), it.fn.__name__))
        got = it.index.run(lambda *given, launched=launched: launched(*map(copied, given)))
        for n in range(len(got)) if everywhere else {shown[0], i % len(got)}:
            overflow = any(isinstance(x, torch.Tensor) and x.isinf().any() for x in got[n])  # the model is in float64
            if not it.makes_no_sense([got[n], predicted[n]]) and not overflow:
                assert it.index.same_outcome([got[n]], [predicted[n]]), change.said


# ---- what is told of answers in other styles ------------------------------------------------------------------------


def by_steps(xs, old, start=-math.inf):
    m, l = start, 0.0  # noqa: E741
    for x in xs:
        m_new = max(m, x)
        if m_new > -math.inf:
            l = eval(old, {"exp": math.exp, "l": l, "m": m, "m_new": m_new}) + math.exp(x - m_new)  # noqa: E741
            m = m_new
    return m, l


with_sink = RULES["5.1"].fn
TOLD = [
    ("0.1", lambda t, n: math.log(65504 / n), "`dtype` is taken for float16, whatever it is"),
    ("0.2", lambda x: torch.softmax(x, 0).nan_to_num(), "`softmax` runs along dim=0: it is dim=-1"),
    ("0.3", lambda xs: by_steps(xs, "l * exp(m - m_new) ** 2"), "l: `math.exp(m - m_new)` counts twice, as its square"),
    ("0.3", lambda xs: (lambda m, l: (m, l + (l > 3)))(*RULES["0.3"].fn(xs)), "m is right in every case"),
    ("0.4", lambda a, b: merge(a, b)._replace(m=a.m), "whichever of `a.m` and `b.m` is the maximum"),
    ("1.1", lambda n, d, e: (e * (4 * n * n + 3 * n * d), e * (4 * n * n + n * d), n * n * (4 * d + 7)),
     "bytes_read counts 4 matrices of N × N and 3 of N × D"),
    ("2.2", lambda s, v: (s.amax(1), torch.exp(s - s.amax(1)[:, None]).mean(1), torch.exp(s - s.amax(1)[:, None]) @ v),
     "l: `mean` stands where `sum` belongs"),
    ("2.7", lambda M, N, D, B, e: ((M + (M // B + 1) * 2 * N) * D * e, M * D * e + 4 * M), "rounded down, plus 1"),
    ("3.7", lambda M, N, D, B, e: 2 * (N + M * -(-N // B)) * D * e + 4 * N, "`M` and `N` are exchanged, everywhere"),
    ("8.1", lambda width: 2 - width // 16 % 2, "2 stands where 8 belongs, both times: there are"),
    ("8.2", lambda row, chunk: chunk ^ 3 * row // 8, "`//` stands where `%` belongs"),
    ("11.1", lambda script, n: RULES["11.1"].fn([x for x in script if x[0] != "copy"], n), "elements for 3 operations"),
    ("4.1", lambda *x: (whose(*x)[3], *whose(*x)[:3]), "come as (block, batch"),
    ("4.5", lambda a, z, m, n, lo, hi: (a - n + m - hi, min(m, z - n + m + lo)), "begin: nothing keeps it from going"),
    ("5.1", lambda p, dp: (p * (dp - (p * dp).sum()), with_sink(p, dp)[1]), "one `sum` is taken for all rows"),
    ("5.1", lambda p, dp: (p * (dp - (p * p * dp).sum(1, keepdim=True)), with_sink(p, dp)[1]), "`p` is there twice"),
    ("5.1", lambda p, dp: (p * (dp - (p * dp).sum(1)), with_sink(p, dp)[1]), "`keepdim=True` is missing"),
    ("12.2", lambda t, n, j, h, p, kv, d: (((t[j // p] * p + j % p) * kv + h) * d, -n % p), "`kv_head` changes faster"),
    ("12.3", lambda os, ls: (os.nan_to_num().sum(0) / (~ls.isinf()).sum(0).clamp(1)[:, None], ls.logsumexp(0)), "mean"),
    ("12.3", lambda os, ls: ((os.nan_to_num() * (ls / ls.sum(0)).nan_to_num()[..., None]).sum(0), ls.logsumexp(0)),
     "o: the parts are weighted by lse; each"),
    ("12.3", lambda os, ls: RULES["12.3"].fn(os, ls.masked_fill(ls.isinf().any(1)[:, None], -math.inf)), "each row by"),
]  # fmt: skip


@pytest.mark.parametrize(("id", "wrong", "words"), TOLD)
@pytest.mark.every(3)
def test_a_slip_is_told_however_it_is_written(id, wrong, words):
    assert words in str(told(id, wrong))


def test_no_function_is_named_that_the_learner_has_not_written():
    index = dataclasses.replace(RULES["0.1"]).index
    index.written = frozenset({"log", "-"})
    assert not [change.said for _, change, _ in index._said_of_it() if "log10` stands" in change.said]


@pytest.mark.parametrize(
    ("id", "wrong", "slug"),
    [
        ("4.1", lambda p, m, h, kv: (p // m // h, p // m % h, p // m % h / (h // kv), p % m), "float"),
        ("4.1", lambda p, m, h, kv: (p // m // h, p // m % h, p % m), "wrong-type"),
        ("4.1", lambda p, m, h, kv: (p // m // h, p // m % h, p // m % h // (kv // h), p % m), "exception"),
        ("4.1", lambda p, m, h, kv: {"batch": p}, "wrong-type"),
        ("4.2", lambda a, z, m, n, p, t: None, "returned-none"),
    ],
)
def test_results_of_another_kind(id, wrong, slug):
    assert told(id, wrong).diagnosis == slug


# ---- the engine itself ----------------------------------------------------------------------------------------------


def area(width, height, rounds):
    total = 0
    for _ in range(rounds):
        total += (width + 1) * height
    return total, math.ceil(width / height)


@pytest.fixture(scope="module")
def areas():
    inputs = [(w, h, r) for w in (1, 4, 7) for h in (2, 3, 5) for r in (1, 3)]
    draw = lambda r: tuple(r.randint(1, 9) for _ in range(3))  # noqa: E731
    return Rule(area, ("total", "tiles"), tuple(inputs), draw)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda w, h, r: (r * w * h, -(-w // h)), "total: the term `1` is missing"),
        (lambda w, h, r: (r * (w - 1) * (h + 1), -(-w // h)), "two slips at once would give this"),
        (lambda w, h, r: (r * (w + 1) * h, w // h), "tiles: `width / height` is rounded down: it should be rounded up"),
        (lambda w, h, r: ((w + 1) * h, w // h), "; and tiles: "),
        (lambda w, h, r: ((r - 1) * (w + 1) * h, -(-w // h)), "total: `rounds` is one too small"),
        (lambda w, h, r: (r * (w + 1) * h * 3, -(-w // h)), "total is 3 times what it should be, in every case"),
        (lambda w, h, r: (r * (w + 1) * h + (w > h) * 17 * w**5, -(-w // h)), "right just where height >= width"),
    ],
)  # fmt: skip
def test_the_change_that_gives_all_values_is_told(areas, wrong, said):
    with pytest.raises(CheckFailed) as caught:
        areas.check(wrong)
    assert said in str(caught.value)


def test_a_change_that_makes_a_loop_endless_ends():
    def halvings(n):
        count = 0
        while n > 1:
            n = n // 2
            count += 1
        return count

    index = Index([Text(halvings)], [(9,), (30,)], ["count"], lambda x: (x,), 1e-9)
    assert any(list(outcome) == ["EndlessError"] * 2 for _, _, outcome in index.outcomes)


@pytest.mark.parametrize("id", ["5.6", pytest.param("5.12", marks=pytest.mark.long)])
def test_an_answer_of_which_no_cause_is_known_costs_a_bounded_number_of_runs(id, monkeypatch):
    index, runs = dataclasses.replace(RULES[id]).index, []
    one = Index._one
    monkeypatch.setattr(Index, "_one", lambda self, fn, given: runs.append(id_of[given]) or one(self, fn, given))
    id_of = {given: i for i, given in enumerate(index.inputs)}
    waves = lambda x: x * (1 + 0.05 * torch.arange(x.numel()).reshape(x.shape).sin())  # noqa: E731
    got = [tuple(map(waves, right)) for right in index.right]
    told = index.explain(got), index.explain_as_two(got), index.explain(got, some=True)
    assert told == (None, None, None)
    beyond = max(index.work) * (2 + len(index.rows))  # the last run of each search, and the rows
    assert sum(index.work[i] for i in runs) <= 2 * index.most + beyond
    assert runs.count(index.order[0]) > 0.8 * len(runs), "the smallest input tells most of them apart"


def test_what_is_missing_behind_brackets_is_named_without_them():
    def slot(key, PAGE):
        return (key % PAGE).to(torch.int64)

    said = [x.said for x in changes(Text(slot), None)]
    assert "`.to(torch.int64)` is missing behind `key % PAGE`" in said and not any(".(" in x for x in said)


def test_all_changes_in_one_function_give_what_each_gives_alone():
    text = Text(area)
    index = Index([text], [(7, 3, 2), (4, 5, 1)], ["total", "tiles"], lambda x: x, 1e-9)
    for _, change, got in index.outcomes:
        assert [*got] == [*index.run(text.compiled(change))], change.said


def test_a_sum_is_read_back_in_its_units():
    inputs = [(n, d) for n in (2, 5, 9) for d in (3, 4)]
    got = [4 * n * n + 2.5 * n * d for n, d in inputs]
    assert in_units(got, inputs, ["n", "d"], {"squares": "n * n", "tall": "n * d"}, {}) == [4, 2.5]
    assert in_units([x + 1 for x in got], inputs, ["n", "d"], {"squares": "n * n", "tall": "n * d"}, {}) is None


def test_where_it_is_right_is_said_only_where_it_always_is():
    inputs = [(n, m) for n in range(1, 5) for m in range(1, 5)]
    assert where_right(["n", "m"], inputs, [n == m for n, m in inputs]) == "n = m"
    assert where_right(["n", "m"], inputs, [n == m or n == 3 and m == 1 for n, m in inputs]) is None


def test_two_changes_that_would_stand_in_each_other_are_no_pair():
    def position(row, rank, n, world):
        half = n // 2
        piece = rank if row < half else 2 * world - 1 - rank
        return piece * half + row % half, rank * n + row

    assert str(told("13.1", position)).startswith("striped: these are whole shards, one behind the other")
