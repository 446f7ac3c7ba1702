"""A learner's first minutes in a real browser: JupyterLab, a lecture, its exercises, "Run All", an answer, "Run All".

    make lab-browser-check            or: python tests/lab/browser_check.py --phase 00 --screenshots /tmp/shots

By default one phase of each engine. Needs `pip install -e '.[browser]'` and a chromium (`apt-get install chromium`, or
the environment variable CHROMIUM); without them it stops, which is a failure where CI is set. Works on fresh copies in
a temporary folder, so no answer of a learner is touched. What has to hold is asserted in `reader` and `learner`.
"""

import argparse
import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "src" / "lessons"))

import nbformat  # noqa: E402
from build import is_untouched, text_of  # noqa: E402
from lesson_execution import ANSI  # noqa: E402
from lesson_source import find_lessons, make_notebook, read_lesson  # noqa: E402

from flashlab.exercises import registry  # noqa: E402

PHASES = ("02", "03", "06")  # plain PyTorch, Triton, CUDA
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
KERNEL_READY = """async () => {
    const app = window.jupyterapp;
    await app.restored;
    const panel = app.shell.currentWidget;
    await panel.context.ready;
    await panel.sessionContext.ready;
    await panel.sessionContext.session.kernel.info;
}"""
ALL_RAN = """() => {
    const panel = window.jupyterapp.shell.currentWidget;
    const cells = panel.content.widgets.filter(cell => cell.model.type === 'code');
    return panel.sessionContext.session?.kernel?.status === 'idle'
        && cells.every(cell => cell.prompt !== '*' && cell.model.executionCount);
}"""
CLEAR = """() => {
    const panel = window.jupyterapp.shell.currentWidget;
    panel.content.widgets.filter(cell => cell.model.type === 'code').forEach(cell => cell.model.clearExecution());
}"""
NOTEBOOK = "() => window.jupyterapp.shell.currentWidget.context.model.toJSON()"
SHOW_CELL = """async (index) => {
    const content = window.jupyterapp.shell.currentWidget.content;
    content.activeCellIndex = index;
    await content.scrollToItem(index, 'center');
}"""
SAVE = "() => window.jupyterapp.shell.currentWidget.context.save()"
SHOWN_LINES = """(index) => [...window.jupyterapp.shell.currentWidget.content.widgets[index]
    .node.querySelectorAll('.jp-OutputArea-output')].map(output => output.innerText.trim())"""


def skipped(sentence: str) -> None:
    print(f"skipped: {sentence}")
    sys.exit(1 if os.environ.get("CI") else 0)


def make_course(folder: Path, **lessons) -> list[Path]:
    """A folder that looks like the course, with only these notebooks in it, not executed. Returns their paths."""
    for name in ("docs", "src"):
        (folder / name).symlink_to(ROOT / name)
    paths = []
    for kind, lesson in lessons.items():
        paths.append(folder / kind / f"{lesson.name}.ipynb")
        paths[-1].parent.mkdir()
        paths[-1].write_text(text_of(make_notebook(lesson, kind)[0]), encoding="utf-8")
    return paths


@contextlib.contextmanager
def jupyterlab(folder: Path):
    """A JupyterLab server of our own, with settings of its own, on a free port: its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory(prefix="flashlab-lab-", ignore_cleanup_errors=True) as settings:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "FLASHLAB_PROGRESS": "off"}
        environment |= {f"JUPYTER_{kind}_DIR": settings for kind in ("CONFIG", "DATA", "RUNTIME")}
        options = "--no-browser --ip=127.0.0.1 --allow-root --port-retries=0 --IdentityProvider.token="
        places = [f"--ServerApp.root_dir={folder}", f"--LabApp.app_settings_dir={ROOT / 'tools' / 'jupyterlab'}"]
        command = [sys.executable, "-m", "jupyterlab", *options.split(), *places]
        command += ["--LabApp.expose_app_in_browser=True", f"--port={port}"]
        log = Path(settings) / "lab.log"
        process = subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, env=environment)
        try:
            for _ in range(200):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/api/status")
                    break
                time.sleep(0.3 if process.poll() is None else 0)
            else:
                raise SystemExit(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")
            yield url
        finally:
            process.terminate()
            process.wait(30)


class Notebook:
    """The notebook in the browser's page. Cells are read from JupyterLab's model: it draws only what is seen."""

    def __init__(self, page, url: str, path: str):
        self.page = page
        page.goto(f"{url}/lab/workspaces/{path.partition('/')[0]}/tree/{path}")  # one notebook in each
        page.wait_for_selector(".jp-NotebookPanel .jp-Cell", timeout=90_000)
        page.wait_for_function("path => window.jupyterapp?.shell?.currentWidget?.context?.path === path", arg=path)
        page.evaluate(KERNEL_READY)

    def run_all(self) -> list[tuple[int, list[str], nbformat.NotebookNode | None]]:
        """Run > Run All Cells. Returns (index, tags, error output or None) for each code cell."""
        self.page.evaluate(CLEAR)
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells").first.click()
        self.page.wait_for_function(ALL_RAN, timeout=1_200_000)
        cells = nbformat.from_dict(self.page.evaluate(NOTEBOOK)).cells
        return [
            (i, c.metadata.get("tags", []), next((o for o in c.outputs if o.output_type == "error"), None))
            for i, c in enumerate(cells)
            if c.cell_type == "code"
        ]

    def show(self, index: int) -> None:
        self.page.evaluate(SHOW_CELL, index)
        self.page.wait_for_timeout(500)

    def type_into(self, index: int, text: str) -> None:
        self.show(index)
        self.page.locator(".jp-Cell.jp-mod-active .cm-content").click()
        self.page.keyboard.press("Control+A")
        self.page.keyboard.insert_text(text)
        self.page.keyboard.press("Escape")

    def shown(self, index: int) -> list[str]:
        """The text of the cell's outputs as drawn."""
        self.show(index)
        return self.page.evaluate(SHOWN_LINES, index)

    def saved(self, path: Path) -> nbformat.NotebookNode:
        self.page.evaluate(SAVE)
        return nbformat.read(path, as_version=4)


def reader(page, url: str, path: Path) -> None:
    """A lecture is run from its first cell to its last."""
    ran = Notebook(page, url, f"notebooks/{path.name}").run_all()
    for index, tags, error in ran:
        assert error is None or "raises-exception" in tags, f"cell {index} raises {error.ename}: {error.evalue}"
    print(f"{path.name}: all {len(ran)} cells of the lecture ran", flush=True)


def learner(page, url: str, lesson, path: Path, screenshots: Path) -> None:
    """The exercises go on past each unsolved check; a typed answer passes its own check and no other."""
    notebook = Notebook(page, url, f"exercises/{path.name}")
    ran = notebook.run_all()
    checks = [i for i, tags, _ in ran if "check" in tags]
    for index, tags, error in ran:
        if "check" not in tags:
            assert error is None, f"cell {index} raises {error.ename}: {error.evalue}"
            continue
        assert error is not None and error.ename == "CheckFailed", f"the check in cell {index} should fail"
        shown = notebook.shown(index)
        print(f"  unsolved: {shown[0].partition(chr(10))[0]}", flush=True)
        exercise = registry.find(re.match(r"✗ (\d+\.\d+) ", shown[0])[1])
        symptoms = bool(exercise.untouched)  # a bug hunt's own code
        assert len(shown) == 1 and ("\n" in shown[0]) == symptoms, f"cell {index} shows other than one line: {shown}"
        assert shown[0].endswith("(symptoms)" if symptoms else "not solved yet (not-solved-yet)")
        assert shown[0] == ANSI.sub("", "\n".join(error.traceback)).strip()
    notebook.show(checks[0])
    page.screenshot(path=screenshots / "unsolved.png")
    assert is_untouched(notebook.saved(path)), "a notebook that was only run should not count as filled in"

    exercise = next(i for i, cell in enumerate(lesson.cells) if "exercise" in cell.tags)
    notebook.type_into(exercise, make_notebook(lesson, "solutions")[0].cells[exercise].source)
    ran = notebook.run_all()
    failed = [i for i, tags, error in ran if "check" in tags and error is not None]
    assert failed == checks[1:], f"with the first exercise solved, the checks in cells {failed} fail"
    passed = notebook.shown(checks[0])
    print(f"  solved:   {' | '.join(passed)}")
    page.screenshot(path=screenshots / "solved.png")
    assert passed and passed[0].startswith("✓")
    assert not is_untouched(notebook.saved(path)), "an answer should count as filled in"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phase", action="append", help=f"number of a phase; repeatable ({', '.join(PHASES)})")
    parser.add_argument("--screenshots", type=Path, default=ROOT / ".flashlab" / "screenshots", metavar="DIR")
    options = parser.parse_args()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        skipped("playwright is not installed here; .venv/bin/pip install -e '.[browser]'")
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        skipped("no chromium here; install one (apt-get install chromium), or name it in CHROMIUM.")
    options.screenshots.mkdir(parents=True, exist_ok=True)
    for phase in options.phase or PHASES:
        lessons = {p.stem.endswith("_exercises"): read_lesson(p) for p in find_lessons(ROOT, [phase])}
        if set(lessons) != {False, True}:
            raise SystemExit(f"there is no phase {phase} with a lecture and exercises")
        with tempfile.TemporaryDirectory(prefix="flashlab-course-") as folder, sync_playwright() as playwright:
            paths = make_course(Path(folder), notebooks=lessons[False], exercises=lessons[True])
            with jupyterlab(Path(folder)) as url:
                chromium = playwright.chromium.launch(executable_path=browser, args=FLAGS)
                page = chromium.new_page(viewport={"width": 1300, "height": 1000})
                problems: list[str] = []
                page.on("pageerror", lambda error, problems=problems: problems.append(str(error)))
                try:
                    reader(page, url, paths[0])
                    learner(page, url, lessons[True], paths[1], options.screenshots)
                except BaseException:
                    page.screenshot(path=options.screenshots / "failed.png")
                    raise
                finally:
                    chromium.close()
                assert not problems, f"errors in the page: {problems}"
    print(f"ok; screenshots in {options.screenshots}")


if __name__ == "__main__":
    main()
