"""How a lecture reads: what is counted of its cells, and how much it shows of its last kernel.

    python src/lessons/pacing.py            the table of all lectures; * marks what is beyond its limit
    python src/lessons/pacing.py 08 -v      with the cells that are beyond it, and the kernel's lines that are not seen

`RULES` are the limits; tests/test_pacing.py holds every lecture to them.
"""

import argparse
import ast
import itertools
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import nbformat
from lesson_source import Lesson, Quote, find_lessons, make_notebook, read_lesson, read_quotes, symbol_source

from flashlab.table import Table

ROOT = Path(__file__).resolve().parents[2]

RULES: dict[str, tuple[float, float, str]] = {
    "text": (1.2, 2.5, "text cells per code cell"),
    "in a row": (0, 2, "code cells in a row"),
    "code": (0, 10, "lines of a code cell, the median"),
    "longest": (0, 60, "lines of the longest code cell that the build does not fill"),
    "filled": (0, 90, "lines of the longest code cell that the build fills"),
    "width": (0, 110, "characters of the longest line of code"),
    "words": (0, 60, "words of a text cell, the median; folds and references left out"),
    "most words": (0, 110, "words of the longest text cell"),
    "output": (0, 15, "lines of the longest text output of a cell; regions and diffs left out"),
    "plotting": (0, 8, "lines of plotting in a cell"),
    "unseen": (0, 0, "code lines of the phase's last kernel that its lecture does not show"),
}

# The last kernels of a phase that ends with Python; the CUDA phases end with the last step of their series.
PYTHON_KERNELS: dict[int | str, tuple[str, ...]] = {
    2: ("flashlab.attention.simulation", "flash_attention_forward_sim"),
    3: ("flashlab.attention.triton_minimal", "flash_attention_forward_kernel"),
    4: ("flashlab.attention.triton_forward", "flash_attention_kernel"),
    5: ("flashlab.attention.triton_backward", "delta_kernel", "load_statistics", "dkdv_kernel", "dq_kernel"),
    10: ("flashlab.models.rope", "rotate_heads", "rope_kernel"),
}

# A phase whose series is spread over two lectures: the last step of each.
LAST_STEPS: dict[int | str, str] = {11: "p11_10_epilogue", "11c": "p11_flash"}

# ---------------------------------------------------------------- counting


@dataclass(frozen=True)
class Pace:
    """What was counted of a lecture, under the names of RULES: a number, and the cells (or lines) beyond the limit."""

    number: str
    counted: dict[str, tuple[float, list[str]]]
    kernel: str
    shown: float

    def beyond(self) -> dict[str, tuple[float, list[str]]]:
        """What is beyond its limit."""
        return {name: x for name, x in self.counted.items() if not RULES[name][0] <= x[0] <= RULES[name][1]}


def pace(path: Path, root: Path = ROOT) -> Pace:
    """Count a lecture: its inputs from src/lessons, its outputs from the notebook as built."""
    lesson = read_lesson(path)
    notebook, _ = make_notebook(lesson, "notebooks")
    built = root / "notebooks" / f"{lesson.name}.ipynb"
    outputs = nbformat.read(built, as_version=4).cells if built.is_file() else []
    pairs = list(zip(lesson.cells, notebook.cells, strict=True))
    code = [made for _, made in pairs if made.cell_type == "code"]
    filled = [made for cell, made in pairs if read_quotes(lesson, cell)[0]]
    text = [made for made in notebook.cells if made.cell_type == "markdown" and not is_references(made.source)]
    runs = [list(run) for kind, run in itertools.groupby(notebook.cells, lambda c: c.cell_type) if kind == "code"]
    ratio = round(len([c for c in notebook.cells if c.cell_type == "markdown"]) / max(1, len(code)), 2)
    kernel, lines, seen = kernel_lines(lesson, root, [*code, *outputs])
    unseen = [line for line in lines if squeezed(line) not in seen]

    def longest(name, cells, measure):
        """The largest measure, and the cells beyond the limit."""
        beyond = [f"{measure(cell)}: {head(cell)}" for cell in cells if measure(cell) > RULES[name][1]]
        return max(map(measure, cells), default=0), beyond

    counted = {
        "text": (ratio, []),
        "in a row": longest("in a row", [run[0] | {"run": len(run)} for run in runs], lambda cell: cell["run"]),
        "code": (statistics.median([line_count(c) for c in code] or [0]), []),
        "longest": longest("longest", [c for c in code if c not in filled], line_count),
        "filled": longest("filled", filled, line_count),
        "width": longest("width", code, lambda cell: max(map(len, cell.source.split("\n")))),
        "words": (statistics.median([words(c.source) for c in text] or [0]), []),
        "most words": longest("most words", text, lambda cell: words(cell.source)),
        "output": longest("output", [c for c in outputs if c.cell_type == "code"], output_lines),
        "plotting": longest("plotting", code, lambda cell: plotting_lines(cell.source)),
        "unseen": (len(unseen), unseen),
    }
    return Pace(lesson.name.partition("_")[0], counted, kernel, 1 - len(unseen) / max(1, len(lines)))


WORDS_A_MINUTE, MINUTES_A_CELL = 80, 1  # technical prose; a code cell with its output, run and looked at


def reading_minutes(cells) -> int:
    """How long a lecture takes, to a quarter of an hour: its words and its code cells at the stated rates."""
    text = sum(words(c.source) for c in cells if c.cell_type == "markdown" and not is_references(c.source))
    code = sum(c.cell_type == "code" for c in cells)
    return 15 * round((text / WORDS_A_MINUTE + code * MINUTES_A_CELL) / 15)


def head(cell) -> str:
    return next((line for line in cell["source"].split("\n") if line.strip()), "")[:90]


def line_count(cell) -> int:
    return cell.source.count("\n") + 1


def is_references(text: str) -> bool:
    return text.startswith("## References")


def words(text: str) -> int:
    """Words that are read at once: no folds, a formula is one word, a fence and the rule of a table are none."""
    for pattern in (r"<details>.*?</details>", r"^```.*?^```", r"^\|[ :|-]+\|$"):
        text = re.sub(pattern, " ", text, flags=re.S | re.M)
    text = re.sub(r"\$\$.*?\$\$|\$[^$\n]+\$", " x ", text, flags=re.S)
    return sum(bool(re.search(r"\w", word)) for word in text.replace("|", " ").split())


def output_lines(cell) -> int:
    """Lines of text that a notebook shows for a cell: not the text that stands for a figure, table or region."""
    return sum(shown_lines(output) for output in cell.get("outputs", []))


def shown_lines(output) -> int:
    if output.output_type == "stream":
        return len(output.text.rstrip("\n").split("\n"))
    rich = [mime for mime in output.data if mime != "text/plain"]
    return 0 if rich else output.data.get("text/plain", "").count("\n") + 1


def plotting_lines(source: str) -> int:
    """Lines of a cell that draw with matplotlib: of statements, and of the heads of loops, that name figures, axes or
    what is assigned from them. A call into flashlab.figures is one such line, however much it draws."""
    drawing, found = {"plt", "ax", "axes", "fig", "figure", "Rectangle"}, 0
    pending = ast.parse(source).body[::-1]
    while pending:
        node = pending.pop()
        inner = [x for name in ("body", "orelse", "finalbody") for x in getattr(node, name, [])]
        pending += inner[::-1]
        heads = [x for x in ast.iter_child_nodes(node) if x not in inner]
        names = {x.id for head in heads for x in ast.walk(head) if isinstance(x, ast.Name)}
        if names & drawing and not isinstance(node, (ast.Import, ast.ImportFrom)):
            found += 1 if inner else (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, ast.Assign):
                drawing |= {x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name)}
    return found


# ---------------------------------------------------------------- what is seen of the last kernel


def kernel_lines(lesson: Lesson, root: Path, cells) -> tuple[str, list[str], set[str]]:
    """The name of the phase's last kernel, its code lines, and (squeezed) the lines of code that these cells show."""
    from flashlab.figures import show
    from flashlab.kernels import series

    if lesson.number in PYTHON_KERNELS:
        module, *names = PYTHON_KERNELS[lesson.number]
        quote = Quote(None, "FROM", module, names, bare=True)
        name, text = ", ".join(names), "\n".join(symbol_source(lesson, quote, one) for one in names)
    elif last := LAST_STEPS.get(lesson.number) or next((s.name for s in series.steps(lesson.number)[::-1]), ""):
        name, text = f"{last}.cu", series.whole(last)
    else:
        return "", [], set()
    seen: set[str] = set()
    for cell in cells:
        seen |= {squeezed(line) for line in cell.source.split("\n")} if cell.cell_type == "code" else set()
        for output in cell.get("outputs", []):
            seen |= {squeezed(line) for line in show.shown(output.get("data", {}).get("text/markdown", ""))}
    lines = [line.strip() for line in text.split("\n") if re.search(r"\w", squeezed(line))]
    return name, lines, seen


def squeezed(line: str) -> str:
    """A line of C++ or Python without comment and white space."""
    line = re.sub(r"//.*|(^|\s)#(?!\s*(?:pragma|include|define|if|el|endif)).*", "", line)
    return re.sub(r"\s", "", line)


# ---------------------------------------------------------------- the table


def table(paces: list[Pace]) -> Table:
    limits = [f"{low:g}-{high:g}" if low else f"{high:g}" for low, high, _ in RULES.values()]
    rows = [["limit", *limits, "100 %"]]
    for p in paces:
        beyond = p.beyond()
        share = f"{p.shown:.0%} of {p.kernel}" if p.kernel else "-"
        rows.append([p.number, *(f"{v:g}{'*' if n in beyond else ''}" for n, (v, _) in p.counted.items()), share])
    return Table.of(rows, ["", *RULES, "shown"], align="l" + "r" * len(RULES) + "l")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pacing.py", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="lectures, by number, slug or file name; all of them by default")
    parser.add_argument("-v", "--verbose", action="store_true", help="name the cells and lines beyond a limit")
    options = parser.parse_args(argv)
    paces = [pace(p) for p in find_lessons(ROOT, options.only) if not p.stem.endswith("_exercises")]
    print(table(paces))
    print("\n".join(["", *(f"{name:12}{what}" for name, (*_, what) in RULES.items())]))
    for p in paces if options.verbose else []:
        for name, (value, cells) in p.beyond().items():
            print("\n".join([f"\n{p.number}, {name}: {value:g}", *(f"    {cell}" for cell in cells)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
