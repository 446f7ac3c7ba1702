"""The checks of phase 0: right answers pass, and each typical wrong answer is told what is wrong with it."""
# ruff: noqa: E741 (l is the name that the papers and every kernel give to the row sum)

import ast
import math
from functools import reduce
from pathlib import Path

import pytest
import torch
from lesson_answers import cell_of, namespace

from flashlab.attention import online_softmax
from flashlab.attention.online_softmax import (
    State,
    finish,
    identity,
    merge,
    merge_finished,
    shifted_exp,
    softmax_safe,
)
from flashlab.check import CheckFailed
from flashlab.exercises.registry import find
from flashlab.exercises.rule import RULES

INF = math.inf
LESSON = Path(__file__).parents[2] / "src/lessons/00_attention_and_online_softmax_exercises.py"


def run(id, answer):
    return find(id).run(answer, *([shifted_exp] if id == "0.2" else []))


def rejected(id, answer):
    with pytest.raises(CheckFailed) as caught:
        run(id, answer)
    sentence = str(caught.value)
    assert sentence and "\n" not in sentence and len(sentence) < 200
    return caught.value.diagnosis


def solution(name, part="SOLUTION"):
    """The function `name` as the solution (or, with STARTER, the buggy starter) of the exercise lesson defines it."""
    other = "STARTER" if part == "SOLUTION" else "SOLUTION"
    cell = next(c for c in LESSON.read_text().split("# %%") if f"def {name}(" in c)
    keep, lines = True, []
    for line in cell.splitlines()[1:]:
        if f"# BEGIN {other}" in line:
            keep = False
        if keep:
            lines.append(line)
        if f"# END {other}" in line:
            keep = True
    scope = {"math": math, "torch": torch}
    exec(compile(ast.parse("\n".join(lines)), name, "exec"), scope)
    return scope[name]


# ---- the right answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("id", "answer"),
    [
        ("0.2", softmax_safe),
        ("0.2", online_softmax.online_softmax),
        ("0.3", solution("online_max_and_sum")),
        ("0.4", merge),
        ("0.5", solution("attention_in_blocks")),
        ("0.6", merge_finished),
        ("0.7", solution("merge_as_tree")),
        ("0.8", solution("lazy_attention")),
    ],
)
def test_the_right_answers_pass(id, answer):
    assert isinstance(run(id, answer), str)


def test_every_exercise_has_hints_and_is_in_the_lesson():
    text = LESSON.read_text()
    for i in range(1, 9):
        e = find(f"0.{i}")
        assert 2 <= len(e.hints) <= 3
        assert f"# ## {e.id} {e.title}\n# *{e.difficulty} · {e.minutes} min*" in text or e.id in RULES


def test_other_right_ways_pass():
    def merge_by_finite_maximum(a, b):
        m = torch.maximum(a.m, b.m)
        r = torch.where(m == -INF, torch.zeros_like(m), m)
        ca, cb = (a.m - r).exp().unsqueeze(-1), (b.m - r).exp().unsqueeze(-1)
        return State(m, a.l * ca[..., 0] + b.l * cb[..., 0], a.o * ca + b.o * cb)

    def from_scratch(o1, lse1, o2, lse2):
        lse = torch.logaddexp(lse1, lse2)
        w1, w2 = shifted_exp(lse1, lse), shifted_exp(lse2, lse)
        return w1[..., None] * o1 + w2[..., None] * o2, lse

    def recursive(states, merge, nothing):
        if len(states) <= 1:
            return states[0] if states else nothing
        half = len(states) // 2
        return merge(recursive(states[:half], merge, nothing), recursive(states[half:], merge, nothing))

    def scalar(xs):
        m, l = -INF, 0.0
        for x in xs:
            if x > m:
                m, l = x, l * math.exp(m - x) + 1
            elif x > -INF:
                l += math.exp(x - m)
        return [m, l]

    run("0.1", lambda dtype, n: torch.log(torch.tensor(torch.finfo(dtype).max / n, dtype=torch.float64)))
    run("0.3", scalar)
    run("0.4", merge_by_finite_maximum)
    run("0.5", lambda x, v, n: torch.softmax(x, 0) @ v)
    run("0.6", from_scratch)
    run("0.7", recursive)


# ---- typical wrong answers, and what is said about them -------------------------------------------------------------


def sentinel_softmax(x):
    x = x.masked_fill(x == -INF, -1e30)
    return torch.softmax(x, -1)


def in_place_softmax(x):
    x -= x.amax(-1, keepdim=True)
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


def global_max_softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum(-1, keepdim=True)


wrong_02 = {
    "no-max-subtraction": online_softmax.softmax_naive,
    "minus-infinity": lambda x: torch.softmax(x, -1),
    "global-max": global_max_softmax,
    "wrong-axis": lambda x: torch.softmax(x, 0),
    "flattened": lambda x: torch.exp(x - x.max()) / torch.exp(x - x.max()).sum(),
    "not-normalised": lambda x: torch.exp(x - x.amax(-1, keepdim=True)),
    "wrong-value": lambda x: softmax_safe(x / 2),
    "finite-sentinel": sentinel_softmax,
    "inputs-changed": in_place_softmax,
    "wrong-dtype": lambda x: softmax_safe(x.double()),
    "wrong-shape": lambda x: softmax_safe(x).sum(-1),
    "returned-none": lambda x: None,
}


def one_pass(step, start=(-INF, 0.0)):
    def fn(xs):
        m, l = start
        for x in xs:
            m, l = step(m, l, x)
        return m, l

    return fn


def exp(x):
    return 0.0 if math.isnan(x) else math.exp(min(x, 700))


def overwritten_too_early(m, l, x):
    m = max(m, x)
    return m, l * exp(m - m) + exp(x - m)


def kept_row(xs):
    xs = list(xs)
    m = max(xs, default=-INF)
    return m, sum(exp(x - m) for x in xs)


def read_twice(xs):
    m = max(xs, default=-INF)
    return m, sum(exp(x - m) for x in xs)


right_step = lambda m, l, x: (max(m, x), l * exp(m - max(m, x)) + (exp(x - max(m, x)) if x > -INF else 0))  # noqa: E731

wrong_03 = [
    ("not-rescaled", one_pass(lambda m, l, x: (max(m, x), l + exp(x - max(m, x))))),
    ("not-rescaled", one_pass(overwritten_too_early)),
    ("correction-inverted", one_pass(lambda m, l, x: (max(m, x), l * math.exp(max(m, x) - m) + exp(x - max(m, x))))),
    (
        "correction-inverted",
        one_pass(lambda m, l, x: (max(m, x), (l * exp(max(m, x) - m) if l else 0.0) + exp(x - max(m, x)))),
    ),
    ("no-max-subtraction", one_pass(lambda m, l, x: (max(m, x), l + math.exp(x)))),
    (
        "new-term-rescaled",
        one_pass(lambda m, l, x: (max(m, x), (l + exp(x - max(m, x))) * (exp(m - max(m, x)) if l else 1.0))),
    ),
    (
        "new-term-lost",
        one_pass(lambda m, l, x: (x, l * exp(m - x) if l else 1.0) if x > m else (m, l + exp(x - m))),
    ),
    ("minus-infinity", one_pass(lambda m, l, x: (max(m, x), l * math.exp(m - max(m, x)) + math.exp(x - max(m, x))))),
    ("finite-start", one_pass(right_step, start=(0.0, 0.0))),
    ("finite-start", one_pass(right_step, start=(-1e4, 0.0))),
    ("row-kept", kept_row),
    ("two-passes", read_twice),
    ("swapped", lambda xs: one_pass(right_step)(xs)[::-1]),
    ("wrong-type", lambda xs: one_pass(right_step)(xs)[1]),
    ("returned-none", lambda xs: None),
]


def merge_with(ca=None, cb=None, la=None, lb=None, o_axis=True, finish_early=False):
    """A merge whose corrections of o (ca, cb) and of l (la, lb) may be replaced by functions of (m_side, m)."""

    def fn(a, b):
        m = torch.maximum(a.m, b.m)
        w = [f(s.m, m) for f, s in ((ca or shifted_exp, a), (cb or shifted_exp, b))]
        u = [f(s.m, m) for f, s in ((la or ca or shifted_exp, a), (lb or cb or shifted_exp, b))]
        l = a.l * u[0] + b.l * u[1]
        o = a.o * w[0][..., None] + b.o * w[1][..., None] if o_axis or not m.ndim else a.o * w[0] + b.o * w[1]
        return State(m, l, o / l[..., None] if finish_early else o)

    return fn


def one(s, m):
    return torch.ones_like(m)


def inverted(s, m):
    return torch.exp(m - s)


def unguarded(s, m):
    return torch.exp(s - m)


def in_place(a, b):
    got = merge(a, b)
    a.l.copy_(got.l)
    return got


def swapped(a, b):
    m = torch.maximum(a.m, b.m)
    ca, cb = shifted_exp(b.m, m), shifted_exp(a.m, m)
    return State(m, a.l * ca + b.l * cb, a.o * ca[..., None] + b.o * cb[..., None])


wrong_04 = [
    ("not-rescaled", merge_with(one, one)),
    ("not-rescaled", merge_with(la=one, lb=one)),
    ("not-rescaled", merge_with(one, one, shifted_exp, shifted_exp)),
    ("only-the-first-rescaled", merge_with(cb=one)),
    ("correction-inverted", merge_with(inverted, inverted)),
    ("corrections-swapped", swapped),
    ("minus-infinity", merge_with(unguarded, unguarded)),
    ("normalised-early", merge_with(finish_early=True)),
    ("inputs-changed", in_place),
    ("m-added", lambda a, b: merge(a, b)._replace(m=a.m + b.m)),
    ("m-of-a", lambda a, b: merge(a, b)._replace(m=a.m)),
    ("guard-in-m", lambda a, b: merge(a, b)._replace(m=torch.nan_to_num(merge(a, b).m, neginf=0.0))),
    ("wrong-maximum", lambda a, b: merge(a, b)._replace(m=a.m * 3 + 1)),
    ("wrong-type", lambda a, b: merge(a, b).o),
    ("returned-none", lambda a, b: None),
]


def test_a_correction_broadcast_along_the_wrong_axis_is_named():
    def fn(a, b):
        try:
            return merge_with(o_axis=False)(a, b)
        except RuntimeError:
            return merge(a, b)

    assert rejected("0.4", fn) == "broadcast-along-the-wrong-axis"


def test_an_exception_of_the_learners_own_passes_through_with_the_case():
    with pytest.raises(RuntimeError) as caught:
        run("0.4", merge_with(o_axis=False))
    assert "six rows" in str(getattr(caught.value, "__notes__", "six rows"))


def blocks(rescale_l=True, rescale_o=True, divide_each=False, divide=True, tail=True, shift=True):
    def fn(x, v, n):
        m, l, o = x.new_tensor(-INF), 0.0, torch.zeros_like(v[0])
        for j in range(0, len(x) if tail else len(x) // n * n, n):
            m_new = torch.maximum(m, x[j : j + n].max()) if shift else torch.zeros_like(m)
            c, p = torch.exp(m - m_new), torch.exp(x[j : j + n] - m_new)
            l = l * (c if rescale_l and shift else 1) + p.sum()
            o = o * (c if rescale_o and shift else 1) + p @ v[j : j + n]
            o = o / l if divide_each else o
            m = m_new
        return o / l if divide and not divide_each else o

    return fn


wrong_05 = [
    ("not-rescaled", blocks(False, False)),
    ("l-not-rescaled", blocks(rescale_l=False)),
    ("o-not-rescaled", blocks(rescale_o=False)),
    ("normalised-early", blocks(divide_each=True)),
    ("not-normalised", blocks(divide=False)),
    ("tail-lost", blocks(tail=False)),
    ("no-max-subtraction", blocks(shift=False)),
    ("returned-none", lambda x, v, n: None),
]


def merged_with(weight, o_of=None, lse_of=None, divide=True):
    def fn(o1, s1, o2, s2):
        w1, w2 = weight(s1, s2), weight(s2, s1)
        o = o_of(o1, s1, o2, s2) if o_of else (w1[..., None] * o1 + w2[..., None] * o2)
        o = o / (w1 + w2)[..., None] if divide and not o_of else o
        return o, lse_of(s1, s2) if lse_of else torch.logaddexp(s1, s2)

    return fn


def against_the_maximum(s, other):
    return shifted_exp(s, torch.maximum(s, other))


def quiet(o1, s1, o2, s2):
    """The right output, whatever the lse."""
    return merge_finished(o1, s1, o2, s2)[0]


wrong_06 = [
    ("averaged", merged_with(against_the_maximum, lambda o1, s1, o2, s2: (o1 + o2) / 2)),
    ("added", merged_with(against_the_maximum, lambda o1, s1, o2, s2: o1 + o2)),
    ("weighted-by-lse", merged_with(lambda s, other: s)),
    ("weights-swapped", merged_with(lambda s, other: against_the_maximum(other, s))),
    ("not-normalised", merged_with(against_the_maximum, divide=False)),
    ("no-max-subtraction", merged_with(lambda s, other: torch.exp(s))),
    ("minus-infinity", merged_with(lambda s, other: torch.exp(s - torch.maximum(s, other)))),
    ("lse-added", merged_with(against_the_maximum, quiet, lambda a, b: a + b)),
    ("lse-is-the-maximum", merged_with(against_the_maximum, quiet, torch.maximum)),
    (
        "lse-without-the-maximum",
        merged_with(against_the_maximum, quiet, lambda a, b: torch.logaddexp(a, b) - torch.maximum(a, b)),
    ),
    ("wrong-type", lambda o1, s1, o2, s2: o1),
]


def tree_dropping_the_odd_one(states, merge, nothing):
    while len(states) > 1:
        states = [merge(states[i], states[i + 1]) for i in range(0, len(states) - 1, 2)]
    return states[0] if states else nothing


def tree_from_both_ends(states, merge, nothing):
    while len(states) > 1:
        n = len(states)
        middle = [states[n // 2]] if n % 2 else []
        states = [merge(states[i], states[n - 1 - i]) for i in range(n // 2)] + middle
    return states[0] if states else nothing


def tree_padded(states, merge, nothing):
    states = states + [nothing] * (2 ** math.ceil(math.log2(max(1, len(states)))) - len(states))
    while len(states) > 1:
        states = [merge(states[i], states[i + 1]) for i in range(0, len(states), 2)]
    return states[0]


def tree_in_place(states, merge, nothing):
    while len(states) > 1:
        for i in range(len(states) // 2):
            states[i : i + 2] = [merge(*states[i : i + 2])]
    return states[0] if states else nothing


def tree_with_overlap(states, merge, nothing):
    while len(states) > 1:
        states = [merge(states[i], states[min(i + 1, len(states) - 1)]) for i in range(0, len(states), 2)]
    return states[0] if states else nothing


wrong_07 = [
    ("not-a-tree", lambda states, merge, nothing: reduce(merge, states) if states else nothing),
    ("not-a-tree", lambda states, merge, nothing: reduce(merge, states, nothing)),
    ("state-lost", tree_dropping_the_odd_one),
    ("reordered", tree_from_both_ends),
    ("merged-twice", tree_with_overlap),
    ("extra-merges", tree_padded),
    ("empty-list", lambda states, merge, nothing: solution("merge_as_tree")(states, merge, None)),
    ("inputs-changed", tree_in_place),
    ("returned-none", lambda states, merge, nothing: None),
]


def test_a_wrong_correction_is_not_called_none():
    """Both are the same at a threshold of 0, so that case alone is no proof."""
    text = cell_of("0.8", "solutions").replace("torch.exp(m - top)", "torch.exp(m.new_tensor(-threshold))")
    names = dict(namespace(0, "solutions")[0])
    exec(text, names)
    assert rejected("0.8", names["lazy_attention"]) == "wrong-value"


def lazy(compare_with_last=False, no_threshold=False, correct=True, invert=False, count_start=False, true_lse=False,
         never=False, guard=True):  # fmt: skip
    def fn(x, v, n, threshold):
        m = last = torch.tensor(-INF, dtype=x.dtype)
        l, o, count = torch.zeros_like(m), torch.zeros_like(v[0]), 0
        for j in range(0, len(x), n):
            b = x[j : j + n]
            top = b.max()
            if guard and torch.maximum(m, top) == -INF:
                continue
            if m == -INF:
                m, count = top, count + count_start
            elif not never and top > (last if compare_with_last else m) + (0 if no_threshold else threshold):
                c = torch.exp(top - m) if invert else torch.exp(m - top) if correct else 1.0
                l, o, m, count = l * c, o * c, top, count + 1
            last = torch.maximum(last, top)
            p = torch.exp(b - m)
            l, o = l + p.sum(), o + p @ v[j : j + n]
        o = o / l if l != 0 else o
        return o, (last if true_lse else m) + torch.log(l), count

    return fn


wrong_08 = [
    ("drift", lazy(compare_with_last=True)),
    ("threshold-ignored", lazy(no_threshold=True)),
    ("not-rescaled", lazy(correct=False)),
    ("correction-inverted", lazy(invert=True)),
    ("start-counted", lazy(count_start=True)),
    ("lse-from-the-maximum", lazy(true_lse=True)),
    ("never", lazy(never=True)),
    ("minus-infinity", lazy(guard=False)),
    ("wrong-type", lambda x, v, n, threshold: lazy()(x, v, n, threshold)[:2]),
]


def test_lazy_without_a_mistake_is_right():
    run("0.8", lazy())


ALL = [("0.2", slug, fn) for slug, fn in wrong_02.items()] + [
    (f"0.{i}", slug, fn)
    for i, wrong in enumerate((wrong_03, wrong_04, wrong_05, wrong_06, wrong_07, wrong_08), start=3)
    for slug, fn in wrong
]


@pytest.mark.parametrize(("id", "slug", "answer"), ALL, ids=[f"{id}-{slug}" for id, slug, _ in ALL])
def test_wrong_answers_are_told_what_is_wrong(id, slug, answer):
    assert rejected(id, answer) == slug


@pytest.mark.parametrize("id", [f"0.{i}" for i in range(1, 9)])
def test_an_unsolved_blank_is_passed_on_as_unsolved(id):
    def blank(*args, **kwargs):
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        run(id, blank)


def test_the_identity_of_the_wrong_dtype_does_not_slip_through():
    with pytest.raises(TypeError):
        finish(merge(identity(head_dim=2), identity(head_dim=2, dtype=torch.float64)))


# ---- what the checks once accepted -----------------------------------------------------------------------------------


def guarded_for_all_rows_at_once(a, b):
    if b.l.sum() == 0:
        return a
    return b if a.l.sum() == 0 else merge_with(unguarded, unguarded)(a, b)


@pytest.mark.parametrize(
    ("answer", "diagnosis"),
    [
        (guarded_for_all_rows_at_once, "minus-infinity"),
        (lambda a, b: State(*(x.float() for x in merge(a, b))), "wrong-dtype"),
        (lambda a, b: tuple(merge(a, b)), "wrong-type"),
        (lambda a, b: list(merge(a, b)), "wrong-type"),
    ],
)
def test_a_merge_of_mixed_rows_in_its_own_dtype_and_type(answer, diagnosis):
    assert rejected("0.4", answer) == diagnosis


def test_shifted_exp_is_checked_too():
    with pytest.raises(CheckFailed, match="shifted_exp"):
        find("0.2").run(softmax_safe, lambda x, m: torch.exp(x - m))


def recurrence(*, correction="exp(m - m_new)", old="l * c", new="exp(x - m_new)", keep="m_new"):
    """online_max_and_sum with parts of its loop replaced."""

    def fn(xs):
        m, l = -INF, 0.0
        for x in xs:
            m_new = max(m, x)
            if m_new == -INF:
                continue
            names = dict(m=m, m_new=m_new, x=x, l=l, exp=lambda y: math.exp(min(y, 700.0)), INF=INF)
            names["c"] = eval(correction, names)
            l = eval(old, names) + eval(new, names)
            m = eval(keep, names)
        return m, l

    return fn


@pytest.mark.parametrize(
    ("changes", "diagnosis"),
    [
        ({"old": "l * c * c"}, "corrected-twice"),
        ({"new": "exp(x - (m if m > -INF else m_new))"}, "old-maximum-used"),
        ({"new": "exp(x - m_new) * c"}, "first-term-lost"),
        ({"old": "0"}, "overwritten"),
        ({"keep": "m if m > -INF else m_new"}, "m-not-updated"),
        ({"correction": "2 ** (m - m_new)", "new": "2 ** (x - m_new)"}, "base-2"),
        ({"new": "exp(x - m_new) * (x != m)"}, "equal-scores-once"),
    ],
)
def test_each_part_of_the_recurrence_is_named(changes, diagnosis):
    assert rejected("0.3", recurrence(**changes)) == diagnosis


def test_a_finished_result_with_a_sum_of_0_is_told_by_its_lse():
    def fn(o1, lse1, o2, lse2):
        zero = torch.zeros_like(lse1)
        return finish(merge(State(lse1, zero, o1), State(lse2, zero, o2)))

    assert rejected("0.6", fn) == "empty-sum"


@pytest.mark.parametrize(
    ("change", "diagnosis"),
    [
        (("o * correction, top", "o, top"), "o-not-rescaled"),
        (("(o / l if l > 0 else o)", "o"), "not-normalised"),
        (("top > m + threshold", "top > m + threshold * math.log(2)"), "threshold-in-base-2"),
        (("top > m + threshold", "abs(top - m) > threshold"), "below-too"),
    ],
)
def test_a_count_of_corrections_is_told_by_all_counts(change, diagnosis):
    cell = next(c for c in LESSON.read_text().split("# %%") if "def lazy_attention(" in c)
    text = "\n".join(cell.splitlines()[1:])
    assert text.count(change[0]) == 1
    scope = {"math": math, "torch": torch}
    exec(compile(text.replace(*change), "lazy", "exec"), scope)
    assert rejected("0.8", scope["lazy_attention"]) == diagnosis
