"""Stage the course's committed notebooks and pages as the sources of its website, which Sphinx then builds.

    python site/stage.py [TARGET]         TARGET is build/site-source

Executes nothing, and needs nothing but the standard library: the outputs are those stored in notebooks/ and solutions/,
the hints are read from the text of `flashlab.exercises`, the map from `flashlab.course`. A page of exercises is the
notebook of exercises/ in which hints and the solution, folded, follow each blank.
"""

from __future__ import annotations

import ast
import hashlib
import html
import json
import os
import posixpath
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "site"
WORDS = re.compile("[A-Z][A-Za-z]+(-[A-Z]\\w+)?|[a-z]+[- ][A-Za-z]+")  # the glossary's that mean the same in any text
FOLD = 3000  # characters: a longer fold of an output becomes a page of its own, loaded when it is opened

# The README's sections that have a page of their own; a file of docs/ with the page's name comes first.
SECTIONS = {
    "What the kernels reach": "results",
    "Glossary": "glossary",
    "When something does not work": "troubleshooting",
    "For teachers": "teachers",
}
NOT_SHOWN = {"The phases", "Licence"}  # the map on the left has them; the footer


def load_phases() -> tuple[Callable[[float], str], tuple[Any, ...]]:
    """`flashlab.course`'s `hours` and PHASES, without the package, which imports torch."""
    course = runpy.run_path(str(ROOT / "src" / "flashlab" / "course.py"), run_name="course")
    return course["hours"], tuple(p for p in course["PHASES"] if (ROOT / "notebooks" / f"{p.name}.ipynb").exists())


def repository() -> str:
    """OWNER/NAME on GitHub, where there is one: of the workflow, or of the remote; else ""."""
    remote = subprocess.run(["git", "remote", "get-url", "origin"], cwd=ROOT, capture_output=True, text=True).stdout
    found = re.search(r"github\.com[:/](.+?)(?:\.git)?$", remote.strip())
    return os.environ.get("GITHUB_REPOSITORY") or (found[1] if found else "")


def hints() -> dict[str, tuple[int, list[str]]]:
    """Of each exercise its minutes and hints, from the text of `flashlab.exercises.phase_NN`."""
    found = {}
    for path in sorted((ROOT / "src" / "flashlab" / "exercises").glob("phase_[0-9]*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            told = {k.arg: k.value for k in node.keywords} if isinstance(node, ast.Call) else {}
            if {"minutes", "hints"} <= told.keys():  # a further function of one exercise has no minutes
                id, *values = map(ast.literal_eval, (node.args[0], told["minutes"], told["hints"]))
                found[id] = tuple(values)
    return found


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def sections(text: str) -> dict[str, str]:
    """A page by its second headings; what stands before the first is under ""."""
    parts = re.split(r"^## (.+)\n", text, flags=re.M)
    return {"": parts[0], **dict(zip(parts[1::2], parts[2::2], strict=True))}


def outside_code(text: str, change: Callable[[str], str]) -> str:
    """`change` of every part of a Markdown text that is no code, formula, link, heading, tag or row of a table."""
    kept = r"(```.*?```|^    .*?$|^[#|<].*?$|\$\$.*?\$\$|\$[^$\n]+\$|`+[^`]+`+|!?\[[^\]]*\](?:\([^)]*\))?|<[^>]+>)"
    parts = re.split(kept, text, flags=re.S | re.M)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))


class Site:
    """The staged pages, under `target`."""

    def __init__(self, target: Path):
        self.target = target
        self.repository = repository()
        self.hours, self.phases = load_phases()
        self.names = {str(p.number): p.name for p in self.phases}
        self.hints = hints()
        self.readme = sections((ROOT / "README.md").read_text(encoding="utf-8"))
        self.pages = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
        self.pages |= {f"notes/{p.name}": f"notes/{p.name}" for p in sorted((ROOT / "notes").glob("*.md"))}
        self.pages |= {f"docs/{p.name}": p.name for p in sorted((ROOT / "docs").glob("*.md"))}
        for name in self.names.values():
            self.pages[f"notebooks/{name}.ipynb"] = f"lectures/{name}.ipynb"
            self.pages |= {f"{kind}/{name}.ipynb": f"exercises/{name}.ipynb" for kind in ("exercises", "solutions")}
        self.anchors = {slug(title): f"{SECTIONS.get(title, 'setup')}.md" for title in self.readme}
        self.anchors |= {slug(title): "index.md" for title in ("The phases",)}
        self.terms: dict[str, str] = {}

    # ---- files and links

    def write(self, page: str, text: str) -> None:
        path = self.target / page
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def link(self, target: str, source: str, page: str) -> str | None:
        """Where a link of the repository's file `source` leads from `page`; None where the site has nothing."""
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            return target
        if not path and source != "README.md":
            return target
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path)) if path else source
        found = self.anchors.get(anchor) if path == "README.md" and anchor else self.pages.get(path)
        if found:
            there = posixpath.relpath(found, posixpath.dirname(page) or ".")
            has_anchor = anchor and not (found == "index.md" and anchor == "the-phases")
            return f"{there}#{anchor}" if has_anchor and slug(anchor) not in map(slug, SECTIONS) else there
        if (ROOT / path).is_file() and path.startswith("docs/") and path.endswith((".png", ".svg")):
            (self.target / "docs").mkdir(exist_ok=True)
            shutil.copy(ROOT / path, self.target / path)
            return posixpath.relpath(path, posixpath.dirname(page) or ".")
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"https://github.com/{self.repository}/{kind}/main/{path}" if self.repository else None

    def linked(self, text: str, source: str, page: str) -> str:
        """A Markdown text of the repository, with its links as the site has them."""

        def exchanged(match: re.Match[str]) -> str:
            there = self.link(match[2], source, page)
            return f"[{match[1]}]({there})" if there else match[1]

        return re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)", exchanged, text)

    def crossed(self, text: str, own: int | str, seen: set[str]) -> str:
        """A notebook's text: "phase 7" and the course's files as links, and the glossary's terms where first used."""

        def phase(match: re.Match[str]) -> str:
            number = match[2]
            here = number != str(own) and number in self.names and match[0].lower() not in seen
            seen.add(match[0].lower())
            return f"[{match[0]}](../lectures/{self.names[number]}.ipynb)" if here else match[0]

        def code(match: re.Match[str]) -> str:
            name = match[1]
            if page := self.pages.get(name):
                return f"[`{name}`](../{page})"
            return term(name, f'<code class="literal">{name}</code>') if name in self.terms else match[0]

        def term(name: str, shown: str) -> str:
            first = name not in seen
            seen.add(name)
            return f'<a class="term" href="../glossary.html#{self.terms[name]}">{shown}</a>' if first else shown

        notebook = r"(?<=\]\()\.\./((?:notebooks|exercises|solutions)/\w+\.ipynb)(?=\))"
        text = re.sub(notebook, lambda match: f"../{self.pages[match[1]]}", text)
        text = outside_code(text, lambda part: re.sub(r"\b([Pp]hase) (\d+[a-z]?)\b", phase, part))
        words = r"\b(" + "|".join(w for w in self.terms if WORDS.fullmatch(w)) + r")\b"
        text = outside_code(text, lambda part: re.sub(words, lambda match: term(match[0], match[0]), part))
        fenced = re.split(r"(```.*?```|^[#|<].*?$|\$[^$]+\$|\[[^\]]*\]\([^)]*\))", text, flags=re.S | re.M)
        return "".join(
            part if i % 2 else re.sub(r"(?<!`)`([^`\n]+)`(?!`)", code, part) for i, part in enumerate(fenced)
        )

    # ---- pages

    def glossary(self, text: str) -> str:
        """The glossary with an anchor at each row; fills `terms`, what the course calls it -> its anchor."""

        def row(match: re.Match[str]) -> str:
            words = [word for word in re.split("[,;] ", match[1].strip()) if WORDS.fullmatch(word)]
            names = [*re.findall(r"`([^`]+)`", match[2]), *words]
            if not names:
                return match[0]
            anchor = f"term-{slug(names[0])}"
            self.terms |= {name: anchor for name in names}
            return f'|{match[1]}|<span id="{anchor}"></span>{match[2]}|{match[3]}|'

        return re.sub(r"^\|([^|\n]+)\|([^|\n]+)\|([^|\n]+)\|$", row, text, flags=re.M)

    def plain_pages(self) -> None:
        for source, page in self.pages.items():
            if source.endswith(".md") and source != "README.md":
                text = (ROOT / source).read_text(encoding="utf-8")
                self.write(page, self.linked(self.glossary(text) if page == "glossary.md" else text, source, page))
        for title, name in SECTIONS.items():
            if title in self.readme and not (self.target / f"{name}.md").exists():
                text = f"# {title}\n{self.readme[title].replace(chr(10) + '###', chr(10) + '##')}"
                self.write(f"{name}.md", self.linked(text, "README.md", f"{name}.md"))
        rest = [t for t in self.readme if t and t not in SECTIONS and t not in NOT_SHOWN]
        setup = "".join(f"\n## {title}\n{self.readme[title]}" for title in rest)
        self.write("setup.md", self.linked(f"# Setting up, and what runs where\n{setup}", "README.md", "setup.md"))
        self.write("drawings.md", self.drawings())
        self.write("index.md", self.index())
        missing = (SITE / "404.md").read_text(encoding="utf-8")  # it is shown at any address
        self.write(
            "404.md", missing.replace("search.html", urlparse(os.environ.get("SITE_URL", "")).path + "/search.html")
        )

    def index(self) -> str:
        """The first page: what the README begins with, the paths, and the map that Sphinx puts on the left."""
        begin = self.linked(self.readme[""], "README.md", "index.md")
        whole = str.maketrans(" ", "\N{NO-BREAK SPACE}")  # a time is not broken across two lines
        course = "\n".join(
            f"{p.number} · {p.title} {f'· {self.hours(p.reading)}'.translate(whole)} <lectures/{p.name}>"
            for p in self.phases
        )
        table = "\n".join(
            f"| [{p.number}](lectures/{p.name}.ipynb) | {p.title} | {p.summary} | {self.hours(p.reading)} |"
            for p in self.phases
        )
        text = (SITE / "index.md").read_text(encoding="utf-8")
        notes = "\n".join(page for page in self.pages.values() if page.startswith("notes/"))
        others = {page for source, page in self.pages.items() if source.startswith("docs/")} - {"install.md"}
        beside = "\n".join(
            [*SECTIONS.values(), *sorted(page[:-3] for page in others if page[:-3] not in SECTIONS.values())]
        )
        found = {"begin": begin, "course": course, "phases": table, "notes": notes, "beside": beside}
        for name, value in found.items():
            text = text.replace(f"@{name}@", value.rstrip())
        return re.sub(r"\[phase (\w+)\]", lambda m: f"[phase {m[1]}](lectures/{self.names[m[1]]}.ipynb)", text)

    def drawings(self) -> str:
        """A page of all that is drawn by JavaScript: outputs of the lectures' cells."""
        text = "# Drawings to play with\n\nEach stands in its lecture too.\n"
        for phase in self.phases:
            notebook = json.loads((ROOT / "notebooks" / f"{phase.name}.ipynb").read_text(encoding="utf-8"))
            for output in (o for cell in notebook["cells"] for o in cell.get("outputs", [])):
                drawn = "".join(output.get("data", {}).get("text/html", ""))
                if named := re.search(r'data-drawing="\w+".*aria-label="(.+)\."', drawn):
                    of = f"Of [phase {phase.number}](lectures/{phase.name}.ipynb)."
                    text += f"\n## {named[1]}\n\n```{{raw}} html\n{drawn}\n```\n\n{of}\n"
        return text

    # ---- notebooks

    def bar(self, phase: Any, kind: str) -> str:
        """The line of links below a notebook's title."""
        other, word = ("exercises", "Exercises") if kind == "notebooks" else ("lectures", "Lecture")
        path = f"{kind}/{phase.name}.ipynb"
        links = [f"[{word}](../{other}/{phase.name}.ipynb)"]
        if self.repository:
            colab = f"https://colab.research.google.com/github/{self.repository}/blob/main"
            links.append(f"[Open in Colab]({colab}/{path}), below the [cell that installs]({colab}/docs/colab.ipynb)")
        links.append(f"{{download}}`The notebook <../{kind}/{phase.name}.ipynb>`")
        links.append(f"in your own Jupyter: `make lab PHASE={phase.number}`")
        (self.target / kind).mkdir(exist_ok=True)
        if kind == "notebooks":
            shutil.copy(ROOT / path, self.target / path)
        else:  # the staged page has this path itself
            links[-2] = f"{{download}}`The notebook <../blanks/{phase.name}.ipynb>`"
            (self.target / "blanks").mkdir(exist_ok=True)
            shutil.copy(ROOT / path, self.target / "blanks" / f"{phase.name}.ipynb")
        return " · ".join(links)

    def fold(self, output: str) -> str:
        """An output, its long folds replaced by links to pages of their own, which the page loads when opened."""

        def page(match: re.Match[str]) -> str:
            summary, body = match[1], match[2]
            if len(body) < FOLD:
                return match[0]
            name = hashlib.sha256(body.encode()).hexdigest()[:12]
            title = f"{output.partition(':')[0]}: {summary}" if output.startswith("`") else summary
            front = "---\norphan: true\nnosearch: true\n---\n"
            self.write(f"folds/{name}.md", f"{front}# {title}\n\n{body}\n")
            link = f'<a href="../folds/{name}.html">{html.escape(re.sub("`", "", title))}</a>'
            return f'<details class="later">\n<summary>{summary}</summary>\n{link}\n</details>'

        return re.sub(r"<details>\s*<summary>(.*?)</summary>\n\n(.*?)\n\n</details>", page, output, flags=re.S)

    def finish(self, cells: list[dict[str, Any]], phase: Any) -> list[dict[str, Any]]:
        """Cross-links, alternative texts, and folds of a notebook's cells."""
        seen: set[str] = set()
        heading = ""
        for cell in cells:
            source = "".join(cell["source"])
            if cell["cell_type"] == "markdown":
                heads = re.findall(r"^#+ (.+)$", source, re.M)
                heading = heads[-1] if heads else heading
                if not cell["id"].startswith("site-"):
                    source = self.crossed(source, phase.number, seen)
            else:
                for output in cell["outputs"]:
                    if told := output.get("data", {}).get("text/markdown"):
                        output["data"]["text/markdown"] = self.fold("".join(told))
                if pictures := [o for o in cell["outputs"] if "image/png" in o.get("data", {})]:
                    told = plain(pictures[0]["metadata"].get("image/png", {}).get("alt", ""))  # by the figure itself
                    alt = ". ".join(filter(None, (plain(heading), told)))
                    cell["metadata"].setdefault("mystnb", {})["image"] = {"alt": alt}
            cell["source"] = source
        return cells

    def lecture(self, phase: Any, toc: str) -> None:
        path = f"notebooks/{phase.name}.ipynb"
        notebook = json.loads((ROOT / path).read_text(encoding="utf-8"))
        cells = self.finish(titled(notebook["cells"], self.bar(phase, "notebooks")), phase)
        cells.append(markdown(f"```{{toctree}}\n:hidden:\n\n{toc} <../exercises/{phase.name}>\n```"))
        self.write(f"lectures/{phase.name}.ipynb", json.dumps(notebook | {"cells": cells}, indent=1))

    def exercises(self, phase: Any) -> None:
        blank, solved = (
            json.loads((ROOT / kind / f"{phase.name}.ipynb").read_text(encoding="utf-8"))
            for kind in ("exercises", "solutions")
        )
        cells = []
        checks = ("".join(cell["source"]) for cell in blank["cells"] if "check" in cell["metadata"].get("tags", []))
        named = (id for text in checks for id in re.findall(r'^check\("([^"]+)"', text, re.MULTILINE))
        in_order = list(dict.fromkeys(named))
        own = {id for id in self.hints if id.split(".")[0] == str(phase.number)}
        assert own == set(in_order), f"{phase.name}: not the exercises that flashlab.exercises has"
        ids = iter(in_order)
        for cell, answer in zip(blank["cells"], solved["cells"], strict=True):
            tags = cell["metadata"].get("tags", [])
            cells.append(answer if "check" in tags else cell)  # a check says what it says to the solution
            if "exercise" in tags:
                told = self.hints[next(ids)][1]
                folds = [f"<details class=\"hint\">\n<summary>Hint {n} of {len(told)}</summary>\n\n{text}\n\n</details>"
                         for n, text in enumerate(told, 1)]  # fmt: skip
                cells.append(markdown("\n\n".join(folds)))
                shows = {"code_prompt_show": "Show the solution", "code_prompt_hide": "Hide the solution"}
                cells.append(answer | {"id": f"site-{answer['id']}", "outputs": [],
                                       "metadata": {"tags": ["hide-input"], "mystnb": shows}})  # fmt: skip
        assert next(ids, None) is None, f"{phase.name}: fewer exercises than flashlab.exercises has"
        cells = self.finish(titled(cells, self.bar(phase, "exercises")), phase)
        self.write(f"exercises/{phase.name}.ipynb", json.dumps(blank | {"cells": cells}, indent=1))

    def stage(self) -> None:
        shutil.rmtree(self.target, ignore_errors=True)
        self.target.mkdir(parents=True)
        self.plain_pages()
        names = {f"lectures/{phase.name}": found_by(phase) for phase in self.phases}
        scorer = (SITE / "scorer.js").read_text(encoding="utf-8")
        (self.target / "scorer.js").write_text(scorer.replace("NAMES", json.dumps(names)), encoding="utf-8")
        for phase in self.phases:
            minutes = sum(self.hints[i][0] for i in self.hints if i.split(".")[0] == str(phase.number))
            self.lecture(phase, f"Exercises · {self.hours(minutes)}")
            self.exercises(phase)


def markdown(text: str) -> dict[str, Any]:
    key = hashlib.sha256(text.encode()).hexdigest()[:12]
    return {"cell_type": "markdown", "id": f"site-{key}", "metadata": {}, "source": text}


def titled(cells: list[dict[str, Any]], line: str) -> list[dict[str, Any]]:
    """The cells with a line below the first one, which has the title, and below the build's line with the hours.

    The build's links lead to files that the site does not have: the line has its own, and the words stay.
    """
    cells = [c for c in cells if not c["id"].endswith("-next")]
    own = "".join(cells[1]["source"]) if cells[1]["id"].endswith("-links") else ""
    told = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", own)
    return [cells[0], markdown("\n\n".join(filter(None, (told, line)))), *cells[1 + bool(told) :]]


def found_by(phase: Any) -> list[str]:
    """What a search finds the lecture by, first of all: its title's parts, and the files of its kernels."""
    kernels = sorted(p.stem for p in (ROOT / "src" / "flashlab" / "kernels").glob(f"p{phase.number:0>2}_*/*.cu"))
    return [*(w.strip().lower() for w in re.split(r"[:,]| and ", phase.title)), *kernels]


def plain(text: str) -> str:
    """A Markdown text as words for an alternative text."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"<[^>]+>", "", text))
    text = re.sub(r"\\(?:text|mathrm|tilde|mathbf|mathit)\b|[*`$\\{}]", "", text)
    return re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    Site(Path(sys.argv[1]).resolve() if sys.argv[1:] else ROOT / "build" / "site-source").stage()
