"""What the pages and the hints tell a learner to type: its names exist where it is told, and it does what is said."""

import ast
import contextlib
import pkgutil
import re

import pytest
from lesson_answers import PATHS, ROOT, cell_of, namespace, run
from lesson_source import find_lessons, make_notebook, read_lesson

from flashlab.course import number_of
from flashlab.exercises import registry

ROOTS = ("flashlab", "show", "tl", "torch", "triton", "F", "kernels", "lecture", "runtime")
DOTTED = re.compile(rf"(?<![\w./'-])({'|'.join(ROOTS)})((?:\.[A-Za-z_]\w*)+)(\()?")
OF_LESSONS = {"tl": "triton.language", "F": "torch.nn.functional", "show": "flashlab.figures.show"}
FENCE = re.compile(r"```python\n(.*?)```", re.DOTALL)


def resolves(name):
    """Whether a dotted name is a module, or something in one."""
    with contextlib.suppress(ImportError, AttributeError):
        pkgutil.resolve_name(name)
        return True
    return False


def bound(cells):
    """What the code cells of a page import, define or assign, and of what: {name: a module or ""}."""
    names = {}
    for node in (node for cell in cells for node in ast.walk(ast.parse(re.sub(r"(?m)^[%!].*$", "", cell)))):
        if isinstance(node, ast.Import):
            names |= {a.asname or a.name.partition(".")[0]: a.name if a.asname else a.name.partition(".")[0]
                      for a in node.names}  # fmt: skip
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.setdefault(node.id, "")
    return names


def told(path):
    """The code cells of a page, and (where, text) of its prose and of its exercises' hints."""
    notebook, _ = make_notebook(read_lesson(path), "exercises" if path in PATHS.values() else "notebooks")
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    texts = [(f"cell {i}", cell.source) for i, cell in enumerate(notebook.cells) if cell.cell_type == "markdown"]
    if path in PATHS.values():
        here = [e for e in registry.exercises().values() if e.phase == number_of(path.stem)]
        texts += [(f"hint {i} of {e.id}", hint) for e in here for i, hint in enumerate(e.hints, 1)]
    return code, texts


@pytest.mark.parametrize("path", find_lessons(ROOT), ids=lambda path: path.stem)
def test_every_name_that_a_page_or_a_hint_tells_exists_on_that_page(path):
    code, texts = told(path)
    names, wrong = bound([*code, *(fence for _, text in texts for fence in FENCE.findall(text))]), []
    for where, text in texts:
        for root, rest, called in DOTTED.findall(text):
            module = names.get(root) or OF_LESSONS.get(root, root)
            if not resolves(module + rest):
                wrong.append(f"{where}: {root}{rest} does not exist")
            elif called and root not in names and (path in PATHS.values() or root == "show"):
                wrong.append(f"{where}: {root} is not imported on this page")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("phase", [6, 7])
def test_the_fragments_that_a_page_offers_run_there(phase, capsys):
    """With the solution in the place of the reader's own text."""
    names, _ = namespace(phase, "solutions")
    fences = [fence for _, text in told(PATHS[phase])[1] for fence in FENCE.findall(text)]
    assert fences
    for i, fence in enumerate(fences):
        run(fence, f"<fence {phase} {i}>", dict(names))
    assert "nan" not in capsys.readouterr().out


SAID = [  # exercise, hint, a line of the solution, the words of the hint that say it
    ("2.2", 2, "m = s.amax(dim=1)", "m = s.amax(dim=1)"),
    ("4.9", 3, "l_i = tl.full([BLOCK_M], 1.0, tl.float32)", "l_i = tl.full([BLOCK_M], 1.0, tl.float32)"),
    ("5.1", 3, "delta = (p * dp).sum(dim=1, keepdim=True)", "delta = (p * dp).sum(dim=1, keepdim=True)"),
    ("5.4", 3, "start_m + N - M - start_n", "start_m + N - M - start_n"),
    ("5.4", 4, "ds = p * (do @ v.T - delta[rows, None])", "ds = p * (do @ v.T - delta[rows, None])"),
    ("5.6", 3, "tl.where(in_range[None, :], p * (dp - delta[:, None]), 0.0)",
     "tl.where(in_range[None, :], ds, 0.0)"),
    ("5.7", 3, "return p * (do @ v.T - delta[:, None] + dlse[:, None])",
     "return p * (do @ v.T - delta[:, None] + dlse[:, None])"),
    ("8.2", 3, "return chunk // 8 * 8 + (chunk + 3 * row) % 8", "return chunk // 8 * 8 + (chunk + 3 * row) % 8"),
]  # fmt: skip
SHORT = {" ds,": " p * (dp - delta[:, None]),"}
"""What a hint has called by a name before."""


@pytest.mark.parametrize(("id", "number", "line", "words"), SAID, ids=[row[0] for row in SAID])
@pytest.mark.every(2)
def test_a_hint_that_is_typed_as_it_stands_solves_the_exercise(id, number, line, words):
    assert words in registry.find(id).hints[number - 1]
    source = cell_of(id, "solutions")
    assert source.count(line) == 1
    for short, long in SHORT.items():
        words = words.replace(short, long)
    names, answers = namespace(int(id.split(".")[0]), "solutions")
    names = dict(names)
    run(source.replace(line, words), f"<hint {number} of {id}>", names)
    registry.find(id).run(*(names[name] for name in answers[id]))
