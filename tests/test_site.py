"""The website's staging, and the rules of its drawings beside the package's. Neither Sphinx nor a browser is needed:
`make site` and `make site-check` have those."""

import itertools
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from test_house import ROOT, load

from flashlab import runtime
from flashlab.attention import online_softmax
from flashlab.attention.options import band
from flashlab.attention.triton_forward import tile_edges
from flashlab.exercises import exercises
from flashlab.figures import drawings, fragments, traces

import triton  # isort: skip
import triton.language as tl  # isort: skip

stage = load(ROOT / "site" / "stage.py")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    made = stage.Site(tmp_path_factory.mktemp("site") / "source")
    made.stage()
    return made


def cells(site, page):
    return json.loads((site.target / page).read_text())["cells"]


def test_every_page_is_staged_and_in_the_map(site):
    begin = (site.target / "index.md").read_text()
    for phase in site.phases:
        assert f"lectures/{phase.name}>" in begin
        assert f"../exercises/{phase.name}>" in cells(site, f"lectures/{phase.name}.ipynb")[-1]["source"]
    for path in site.target.rglob("*.md"):
        page = str(path.relative_to(site.target).with_suffix(""))
        assert (
            page == "index" or path.read_text().startswith("---\norphan") or re.search(rf"^{page}(\.md)?$", begin, re.M)
        )
    assert {"results.md", "glossary.md", "troubleshooting.md", "teachers.md", "contributing.md", "setup.md"} <= {
        path.name for path in site.target.iterdir()
    }


def test_links_lead_to_staged_pages(site):
    for pattern in ("*.md", "notes/*.md", "lectures/*.ipynb", "exercises/*.ipynb"):
        for path in site.target.glob(pattern):
            text = path.read_text()
            if path.suffix == ".ipynb":
                told = [c["source"] for c in json.loads(text)["cells"] if c["cell_type"] == "markdown"]
                text = "\n".join(map("".join, told))
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.S)):
                file = target.partition("#")[0]
                assert "://" in target or not file or (path.parent / file).exists(), f"{path.name}: {target}"


def test_hints_are_read_as_the_package_has_them(site):
    assert site.hints == {id: (e.minutes, list(e.hints)) for id, e in exercises().items()}


def test_a_page_of_exercises_has_hints_and_the_solution_behind_each_blank(site):
    for phase in site.phases:
        page = cells(site, f"exercises/{phase.name}.ipynb")
        blanks = [i for i, c in enumerate(page) if "exercise" in c["metadata"].get("tags", [])]
        assert len(blanks) == sum(e.phase == phase.number for e in exercises().values())
        for i in blanks:
            assert page[i + 1]["source"].count("<details class=") >= 1
            assert page[i + 2]["metadata"]["tags"] == ["hide-input"] and page[i + 2]["source"] != page[i]["source"]
        assert len({c["id"] for c in page}) == len(page)


def test_every_figure_has_a_text_of_its_own(site):
    for phase in site.phases:
        texts = [
            c["metadata"]["mystnb"]["image"]["alt"]
            for c in cells(site, f"lectures/{phase.name}.ipynb")
            if any("image/png" in o.get("data", {}) for o in c.get("outputs", []))
        ]
        assert all(len(text) > 35 and "$" not in text for text in texts)
        assert len(set(texts)) == len(texts), phase.name


def test_long_folds_are_pages_of_their_own(site):
    for phase in site.phases:
        for cell in cells(site, f"lectures/{phase.name}.ipynb"):
            for output in cell.get("outputs", []):
                text = output.get("data", {}).get("text/markdown", "")
                for link in re.findall(r'href="\.\./(folds/\w+)\.html"', text):
                    assert (site.target / f"{link}.md").exists()
                assert all(len(fold) < 2 * stage.FOLD for fold in re.findall(r"<details>.*?</details>", text, re.S))


def test_links_of_the_repository_become_those_of_the_site(site):
    assert site.link("notes/checker.md", "README.md", "index.md") == "notes/checker.md"
    assert site.link("../exercises/03_minimal_triton_kernel.ipynb", "notes/a.md", "notes/a.md") == (
        "../exercises/03_minimal_triton_kernel.ipynb"
    )
    assert site.terms["lse"] == "term-lse" and 'id="term-lse"' in (site.target / "glossary.md").read_text()
    lecture = "".join("".join(c["source"]) for c in cells(site, f"lectures/{site.names['3']}.ipynb"))
    assert lecture.count('glossary.html#term-lse"><code class="literal">lse') == 1
    model = "".join("".join(c["source"]) for c in cells(site, f"lectures/{site.names['10']}.ipynb"))
    assert model.count('glossary.html#term-mha">GQA<') == 1 and ">generation</a>" not in model


def test_with_a_repository_lectures_open_in_colab_and_sources_are_linked(tmp_path, monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/course")
    made = stage.Site(tmp_path)
    colab = "https://colab.research.google.com/github/someone/course/blob/main/"
    for phase in made.phases:
        for kind in ("notebooks", "exercises"):
            paths = re.findall(re.escape(f"({colab}") + r"(.+?)\)", made.bar(phase, kind))
            assert paths == [f"{kind}/{phase.name}.ipynb", "docs/colab.ipynb"]
            assert all((ROOT / path).is_file() for path in paths)
    assert made.link("src/flashlab/cli.py", "README.md", "index.md") == (
        "https://github.com/someone/course/blob/main/src/flashlab/cli.py"
    )
    monkeypatch.delenv("GITHUB_REPOSITORY")
    made.repository = ""
    assert made.linked("see [the code](../src/flashlab/cli.py).", "notes/a.md", "notes/a.md") == "see the code."


def test_text_is_linked_once_and_never_in_code_or_formulas(site):
    seen = set()
    text = "Phase 3 and phase 3, `phase 4`, $phase 4$.\n\n```\nphase 4\n```\n"
    said = site.crossed(text, 7, seen)
    assert said.count("](../lectures/03") == 1 and "04_" not in said
    assert site.crossed("see phase 7", 7, set()) == "see phase 7"
    assert "](../lectures/11b_" in site.crossed("see phase 11b", 11, set())
    assert site.crossed("`exercises/03_minimal_triton_kernel.ipynb`", 7, set()).endswith(
        "](../exercises/03_minimal_triton_kernel.ipynb)"
    )


def test_each_drawing_stands_behind_a_picture_of_its_lecture(site):
    found = []
    for phase in site.phases:
        outputs = [o for c in cells(site, f"lectures/{phase.name}.ipynb") for o in c.get("outputs", [])]
        for before, data in itertools.pairwise(o["data"] for o in outputs if "data" in o):
            if named := re.search(r'data-drawing="(\w+)"', "".join(data.get("text/html", ""))):
                found.append(named[1])
                assert "image/png" in before, f"{named[1]} has no static picture above it"
                assert "".join(data["text/html"]) == drawings.play(named[1]).data, f"build phase {phase.number} again"
    assert sorted(found) == sorted(drawings.WORDS)
    assert (site.target / "drawings.md").read_text().count('class="drawing"') == len(found)
    with pytest.raises(ValueError, match="no drawing 'rings'; there are softmax"):
        drawings.play("rings")


# ---- the drawings compute what the package computes


@pytest.fixture(scope="module")
def drawn():
    """What an expression over the drawings' modules gives."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("the drawings run in a browser, and here in node, which is not installed")
    folder = Path(drawings.__file__).parent.as_uri()

    def evaluate(module, expression):
        script = f'import * as d from "{folder}/{module}.js"; console.log(JSON.stringify({expression}))'
        command = [node, "--input-type=module", "--eval", script]
        return json.loads(subprocess.check_output(command))

    return evaluate


def test_the_drawings_rules_hold(drawn):
    subprocess.run(["node", "--test", ROOT / "site" / "tests" / "drawings.test.js"], check=True)


@pytest.mark.parametrize("block", [1, 3, 8])
def test_the_drawn_softmax_is_the_packages(drawn, block):
    x, v = [1.0, 2, 0.5, 4, 3, 9, 5, 2], [1.0, 0, 2, 1, 3, 0, 1, 2]
    state = online_softmax.identity(head_dim=1, dtype=torch.float64)
    for step, j in zip(drawn("softmax", f"d.steps({x}, {v}, {block})"), range(0, 8, block), strict=True):
        scores, values = torch.tensor(x[j : j + block]).double(), torch.tensor(v[j : j + block]).double()[:, None]
        before, state = state, online_softmax.merge(state, online_softmax.block_state(scores, values))
        assert step["correction"] == pytest.approx(math.exp(before.m - state.m), rel=1e-12)
        assert [step[n] for n in "mlo"] == pytest.approx([float(state.m), float(state.l), float(state.o[0])], rel=1e-12)


@pytest.mark.parametrize("operand", ["A", "B", "C"])
def test_the_drawn_fragment_is_the_packages(drawn, operand):
    held = drawn("fragments", f'd.holders("{operand}")')
    rows, columns = getattr(fragments, f"{operand}_SHAPE")
    position = getattr(fragments, f"{operand.lower()}_position")
    for row in range(rows):
        for column in range(columns):
            found = held[row][column]
            halves = () if operand == "C" else (found["half"],)
            assert position(found["lane"], found["register"], *halves) == (row, column)


@pytest.mark.slow
def test_the_drawn_banks_are_those_that_the_kernels_ask_for(drawn):
    for name, swizzled in (("p8_3_stages", "false"), ("p8_4_swizzle", "true")):
        addresses = drawn("banks", f"[0, 1, 2, 3, 4, 5, 6, 7].map((row) => d.address(row, 0, 128, {swizzled}))")
        assert tuple(addresses) == traces.addresses(name)
        assert drawn("banks", f"d.wavefronts({addresses})") == (1 if swizzled == "true" else 8)


@triton.jit
def edges_kernel(out_ptr, start, stop, last, N, BLOCK: tl.constexpr):
    edges = tile_edges(start, stop, 0, last, N, BLOCK, False, True, True)
    for i in tl.static_range(4):
        tl.store(out_ptr + i, edges[i])


def test_the_drawn_tiles_are_those_that_the_kernel_visits(drawn):
    for M, N, BLOCK_M, BLOCK_N in ((40, 40, 8, 8), (26, 40, 8, 16), (40, 26, 16, 8), (5, 64, 64, 16)):
        last = band(M, N, causal=True).last
        for block, walk in enumerate(drawn("causal", f"d.walks({M}, {N}, {BLOCK_M}, {BLOCK_N})")):
            start, stop = block * BLOCK_M, min((block + 1) * BLOCK_M, M)
            out = torch.zeros(4, dtype=torch.int32, device=runtime.device())
            edges_kernel[(1,)](out, start, stop, last, N, BLOCK_N)
            edges = out.tolist()
            want = [
                [key, min(key + BLOCK_N, edges[3]), part == 2]
                for part in (1, 2)
                for key in range(edges[part], edges[part + 1], BLOCK_N)
            ]
            assert walk == want
