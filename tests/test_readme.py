"""README and docs/results.md say what the records say: tables, sentences, figure; a changed record is noticed."""

import json
import math
import random
import re
import shutil

import matplotlib
import pytest

from flashlab.bench import hopper_results, readme, records
from flashlab.bench.rows import of
from flashlab.figures import implementations, show


@pytest.fixture
def copies(tmp_path):
    """A checkout with the README and its figure, and a folder of records, both to be changed."""
    folder = tmp_path / "records"
    folder.mkdir()
    for path in records.RECORDED.glob("*_h200*.json"):
        shutil.copy(path, folder)
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    shutil.copy(readme.ROOT / "README.md", root)
    for name in ("results.svg", "results.md"):
        shutil.copy(readme.ROOT / "docs" / name, root / "docs")
    return root, folder


def change(folder, name, how):
    path = folder / f"{name}_h200.json"
    data = json.loads(path.read_text())
    path.write_text(json.dumps(how(data)))


def faster(value):
    """A record whose kernels took half the time; of what has no time, a pair of counters that differ."""
    if isinstance(value, list):
        return [faster(x) for x in value]
    if isinstance(value, dict):
        found = {k: faster(v) for k, v in value.items()}
        found |= {k: v / 2 for k, v in found.items() if k == "ms" and v and value.get("name") != "eager"}
        found |= {k: 2 * v for k, v in found.items() if k in ("tflops", "vs_whole", "geomean_vs_fa2")}
        return found | ({"counters": {"mma": [1, 2]}} if "counters" in found and "kernel" in found else {})
    return value


def test_the_readme_says_what_is_recorded():
    assert not readme.stale(), "\n".join(readme.stale())


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in ("industrial", "mma", "hopper") else pytest.mark.long) for n in readme.RECORDS],
)
@pytest.mark.every(3)
def test_a_changed_record_is_noticed_and_the_command_named(name, copies):
    root, folder = copies
    assert readme.stale(root, folder) == []
    change(folder, name, faster)
    said = {line.split()[0]: line for line in readme.stale(root, folder)}
    assert all("run `flashlab bench readme`" in line for line in said.values())
    assert said["docs/results.md"].startswith("docs/results.md is not what the records say, from the line")
    assert ("docs/results.svg" in said) == (name not in ("ablation", "validation", "layer", "lm", "decode"))
    assert "README.md" in said or name not in ("industrial", "hopper")


def test_the_command_mends_all_and_a_failure_leaves_them_alone(copies, monkeypatch, capsys):
    root, folder = copies
    change(folder, "industrial", faster)
    with pytest.raises(SystemExit, match="run `flashlab bench readme`"):
        readme.main(["--check"], root, folder)
    before = {path: path.read_bytes() for path in root.rglob("*.*")}
    with monkeypatch.context() as patch:
        patch.setattr(readme, "draw", lambda data: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            readme.main([], root, folder)
    assert {path: path.read_bytes() for path in root.rglob("*.*")} == before
    readme.main([], root, folder)
    assert capsys.readouterr().out == "written: README.md\nwritten: docs/results.md\nwritten: docs/results.svg\n"
    with pytest.raises(SystemExit) as end:
        readme.main(["--check"], root, folder)
    assert not end.value.code
    text = (root / "README.md").read_text()
    outside = [
        re.sub(f"{readme.BEGIN}.*{readme.END}", "", t, flags=re.DOTALL)
        for t in (text, before[root / "README.md"].decode())
    ]
    assert outside[0] == outside[1]


def test_every_number_of_the_tables_is_that_of_its_row_and_the_fastest_is_bold():
    found = readme.load()
    speeds = readme.speeds(found)
    for which in readme.PASSES:
        lines = [[c.strip() for c in line.strip("|").split("|")] for line in readme.table(found, which).splitlines()]
        names = [next(name for name, words in readme.COLUMNS.items() if words == column) for column in lines[0][3:]]
        assert {"triton", "FlashAttention-2", "cuDNN", "FlexAttention", "eager"} <= set(names) and len(lines) == 14
        for d, mask, n, *cells in lines[2:]:
            rows = speeds[which, int(d), mask == "causal", int(n)]
            tflops = {name: rows[name]["tflops"] for name in names if "tflops" in rows.get(name, {})}
            for name, cell in zip(names, cells, strict=True):
                assert cell.startswith("**") == (tflops.get(name) == max(tflops.values()))
                assert cell.strip("*") == (f"{tflops[name]:.0f}" if name in tflops else "–"), (which, d, mask, n, name)


def test_what_is_out_of_memory_or_not_measured_says_so():
    assert readme.cell({"unavailable": "out of memory: 64 GiB"}) == "out of memory"
    assert readme.cell({"unavailable": "not measured beyond N = 4096"}) == readme.cell(None) == "–"


@pytest.mark.long
def test_with_no_record_and_with_half_of_one(tmp_path):
    nothing = readme.laid("results.md", readme.load(tmp_path))
    assert nothing.count("Not measured yet.") == 3 and "Nothing is recorded yet." in nothing
    assert "**Backward pass, ag" not in nothing
    assert readme.draw(readme.drawn(readme.load(tmp_path)))
    whole = json.loads((records.RECORDED / "industrial_h200.json").read_text())
    for share in (0.1, 0.5, 1.0):
        rows = [row for row in whole["rows"] if random.Random(str(row)).random() < share]
        (tmp_path / "industrial_h200.json").write_text(json.dumps(whole | {"rows": rows}))
        text = readme.laid("readme.md", readme.load(tmp_path)) + readme.laid("results.md", readme.load(tmp_path))
        assert "NVIDIA H200" in text and not re.search(r"\bnan\b|None", text)
    assert readme.draw(readme.drawn(readme.load(tmp_path)))


MACHINE = {"gpu": "NVIDIA Stand-in", "torch": "2.11", "date": "2000-01-02", "commit": "bbb", "cudnn": 91900}


def only(**data):
    """Records of which only these are there."""
    return {name: data.get(name, {}) | {"rows": of(data.get(name, {}))} for name in readme.RECORDS}


def stand_in(**of_triton):
    """A record with two shapes: cuDNN always 500, eager 100, FlashAttention-2 300."""
    speeds = {"cuDNN": 500.0, "eager": 100.0, "FlashAttention-2": 300.0}
    rows = [
        {"part": "shapes", "causal": False, "shape": [16, 2048 // d, 1024, d], "pass": which, "name": name,
         "ms": 1000 / speed, "tflops": speed}
        for which in readme.PASSES for d in (64, 128)
        for name, speed in (speeds | {"triton": of_triton[which][d == 128]}).items()
    ]  # fmt: skip
    return only(industrial={"machine": MACHINE, "rows": rows})


def told(found):
    """The page, each paragraph and each line of a list in one line."""
    return re.sub(r"\n +|(?<=\S)\n(?=[^\n|-])", " ", readme.laid("results.md", found))


def test_the_sentences_tell_what_is_lost_and_what_is_won():
    said = told(stand_in(forward=(250.0, 550.0), backward=(450.0, 50.0)))
    assert "our Triton kernels reach 0.10 to 0.90 times its speed (median 0.50), slower at all 2 shapes" in said
    assert "faster than ours at 1 of 2 shapes, up to 2.0 times as fast, all of them at D = 128" in said
    assert "0.83 to 1.83 times its speed (median 1.33), faster at 1 of 2 shapes; backward" in said
    assert "forward it is 0.80 times that of cuDNN (slower at 1 of 2 shapes) and 1.33 times" in said
    said = told(stand_in(forward=(600.0, 600.0), backward=(600.0, 600.0)))
    assert "slower at none of 2 shapes" in said and "against eager" not in said


def test_the_machine_line_names_every_session_of_a_record():
    found = {name: {"machine": MACHINE} for name in ("mma", "walls")}
    found["industrial"] = {"left": 3, "machine": MACHINE | {"earlier": [{"date": "2000-01-01", "commit": "aaa"}]}}
    said = readme.machine_words({name: {} for name in readme.RECORDS} | found)
    assert said == (
        "Measured on one NVIDIA Stand-in, torch 2.11, cuDNN 9.19.0. Records: walls and mma of 2000-01-02, commit `bbb`"
        "; industrial of 2000-01-01 and 2000-01-02, commits `aaa` and `bbb`. Measurements that are still to be made: "
        "3 of industrial."
    )


def test_the_ladder_goes_from_slow_to_fast_and_names_each_shape():
    rungs = readme.ladder(readme.load())
    speeds = [r.tflops or 0.0 for r in rungs]
    assert speeds == sorted(speeds) and {r.phase for r in rungs} == {0, 1, 3, 4, 6, 7, 8, 9, 11}
    assert all(re.search(r"\d+ × \d+ × \d+ × \d+, b?float\d\d|KiB|not measured", r.how) for r in rungs)
    for r in rungs:
        implementations.look(r.look)


def test_the_figure_draws_its_data_in_the_colours_of_the_implementations():
    from flashlab.figures.panels import results

    data = readme.drawn(readme.load())
    figure = results(data["bars"], data["plots"], data["names"], data["title"])
    bars, *panels = figure.axes
    for patch, (_, who, speed) in zip(bars.patches, data["bars"], strict=True):
        assert math.isclose(patch.get_width(), speed)
        assert patch.get_facecolor() == matplotlib.colors.to_rgba(show.COLORS[implementations.look(who).color])
    for ax, lines in zip(panels, data["plots"].values(), strict=True):
        assert [line.get_label() for line in ax.lines] == list(lines)
        assert [list(map(list, line.get_xydata())) for line in ax.lines] == list(lines.values())
    matplotlib.pyplot.close(figure)


def test_without_a_checkout_it_says_so(tmp_path):
    with pytest.raises(SystemExit, match="belongs to a checkout"):
        readme.main([], tmp_path)


def test_the_goals_are_those_of_the_record_itself():
    """Its rows in one schema say of each what inputs it had; goals are asked of jobs that do not."""
    raw = json.loads((records.RECORDED / "hopper_h200.json").read_text())
    said = [verdict.said.startswith("met") for verdict in hopper_results.verdicts(raw)]
    assert readme.Questions(readme.load()).hopper_goals() == said
