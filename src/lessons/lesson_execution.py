"""Runs a notebook of the course in a kernel of this interpreter, and makes its outputs the same on every run."""

import ast
import contextlib
import functools
import hashlib
import os
import re
import signal
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from kernel_environment import kernel_environment
from lesson_source import Lesson, module_file
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

FORMAT = 1  # part of every digest: raise it when this file changes what an execution writes
CELL_TIMEOUT = 300  # seconds
# A PNG does not say which matplotlib has drawn it.
FIGURES = 'c.InlineBackend.print_figure_kwargs = {"bbox_inches": "tight", "metadata": {"Software": None}}\n'
ANSI = re.compile(r"\x1b\[[0-9;]*m")
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")
# A path below a directory that only this machine has; not the path part of a URL, nor base64.
PATH = re.compile(
    r"(?<![\w.:/+~<-])/(?:home|root|tmp|usr|opt|work|mnt|media|data|srv|var|etc|private|Users|Volumes)/[\w.]"
)

# ---------------------------------------------------------------- when to execute


def execution_digest(notebook: nbformat.NotebookNode, lesson: Lesson) -> str:
    """Changes when the code cells change, or a file of flashlab that they import."""
    code = [(c.source, list(c.metadata.get("tags", []))) for c in notebook.cells if c.cell_type == "code"]
    digest = hashlib.sha256(repr((FORMAT, code)).encode())
    for path in imported_files([source for source, _ in code], lesson.number, lesson.root):
        digest.update(path.relative_to(lesson.root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def imported_files(sources: list[str], phase: int, root: Path) -> list[Path]:
    """The files of flashlab that these cells import, directly or not, found without importing anything.

    An import inside of a function counts as any other: what a checker imports late, it says in a lesson's output. With
    a package come the files below it that are no modules: data and CUDA sources. flashlab.exercises finds its phases
    by itself: the phase of this lesson counts. What flashlab gives by its __getattr__ counts where it is asked for.
    """
    package = root / "src" / "flashlab"
    found: set[Path] = set()
    given: set[str] = set()  # by flashlab's __getattr__
    pending = [name for source in sources for name in imported_names(source, "")]
    while pending:
        name = pending.pop()
        path = module_file(root, name)
        if path is None and name.count(".") == 1 and name not in given:
            given.add(name)
            pending += imported_names((package / "__init__.py").read_text(encoding="utf-8"), "flashlab")
        if path is None or path in found:
            continue
        files = {path}
        if path.name == "__init__.py" and path.parent != package:
            below = (p for p in path.parent.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
            files |= {p for p in below if p.suffix != ".py" or p == package / "exercises" / f"phase_{phase:0>2}.py"}
        found |= files
        if "." in name:
            pending.append(name.rpartition(".")[0])
        for file in files:
            if file.suffix == ".py":
                parts = file.relative_to(root / "src").with_suffix("").parts
                anchor = ".".join(parts[:-1])  # the package the file is in
                late = file != package / "__init__.py"
                pending += imported_names(file.read_text(encoding="utf-8"), anchor, late=late)
    return sorted(found)


@functools.cache  # most lessons import the same files
def imported_names(source: str, package: str, late: bool = True) -> list[str]:
    """Names of flashlab that a source imports anywhere in it, or takes as flashlab.name.

    Args:
        package: what relative imports are relative to.
        late: functions, and what stands under an `if`, for type checkers, count too.
    """
    tree = ast.parse(source)
    if not late:
        tree.body = [node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.If)]
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names += [module] + [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flashlab":
            names.append(f"flashlab.{node.attr}")
    return [name for name in names if name.split(".")[0] == "flashlab"]


# ---------------------------------------------------------------- execution


@contextlib.contextmanager
def kernel_for(notebook, folder: Path, root: Path) -> Iterator[tuple[NotebookClient, Callable[[], str]]]:
    """Start a kernel for the notebook, working directory `folder`; shut it down at the end, and kill it at Ctrl-C.

    Yields the client, whose `execute_cell(cell, index)` runs a cell, and a function that returns what the kernel
    process itself has said (not the cells): of use when it died.
    """
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flashlab-")))
        (scratch / "profile_default").mkdir()
        (scratch / "profile_default" / "ipython_kernel_config.py").write_text(FIGURES)
        log = stack.enter_context(open(scratch / "kernel.log", "w+", encoding="utf-8", errors="replace"))
        kernel = AsyncKernelManager(
            kernel_name="python3",
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),  # this interpreter, whatever kernels are installed
            transport="ipc",
            connection_file=str(scratch / "kernel.json"),  # sockets nobody else can reach
        )
        client = NotebookClient(
            notebook,
            km=kernel,
            timeout=CELL_TIMEOUT,
            record_timing=False,
            resources={"metadata": {"path": str(folder)}},
        )
        environment = {**os.environ, **kernel_environment(root, scratch)}

        def said() -> str:
            log.seek(0)
            return textwrap.shorten(log.read()[-2000:], 600)

        with client.setup_kernel(env=environment, stdout=log, stderr=log, cleanup_kc=True):
            try:
                yield client, said
            except KeyboardInterrupt:  # no kernel goes on, nor what it started
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(kernel.provisioner.pgid, signal.SIGKILL)
                raise


def execute(notebook, lesson: Lesson, numbers, folder: Path, on_cell: Callable[[], None]) -> None:
    """Execute a notebook in place and normalise its outputs; the working directory is `folder`.

    Raises LessonError naming the line of the cell that raised, timed out, wrote to stderr, or printed something
    that is different on each machine.
    """
    with kernel_for(notebook, folder, lesson.root) as (client, said):
        for i, (cell, lines) in enumerate(zip(notebook.cells, numbers, strict=True)):
            start = lesson.cells[i].line
            if cell.cell_type == "code":
                try:
                    client.execute_cell(cell, i)
                except CellExecutionError as error:
                    traceback, said_last = (ANSI.sub("", text) for text in (error.traceback, error.evalue))
                    found = re.search(rf"Cell In\[{cell.execution_count}\], line (\d+)", traceback)
                    line = dict(enumerate(lines, 1)).get(int(found[1])) if found else None
                    raise lesson.error(line or start, f"{error.ename}: {said_last}") from None
                except CellTimeoutError:
                    raise lesson.error(start, f"the cell ran for more than {CELL_TIMEOUT} s") from None
                except DeadKernelError:
                    raise lesson.error(start, f"the kernel died while it ran this cell {said()}".rstrip()) from None
                merge_streams(cell)
                if problem := output_problem(cell):
                    raise lesson.error(start, problem)
            on_cell()


def merge_streams(cell) -> None:
    """One output for adjacent chunks of a stream."""
    merged = []
    for output in cell.outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    cell.outputs = merged


def output_texts(cell) -> Iterator[str]:
    """The textual outputs of a cell."""
    for output in cell.outputs:
        if output.output_type == "stream":
            yield output.text
        else:
            for mime, data in output.data.items():
                if mime.startswith("text/") or mime == "image/svg+xml":
                    yield data


def output_problem(cell) -> str | None:
    """One sentence when an output would not be the same elsewhere, or None."""
    tags = cell.metadata.get("tags", [])
    if text := "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stderr"):
        return f"the cell writes to stderr: {text.strip().splitlines()[0] if text.strip() else text!r}"
    for text in output_texts(cell):
        if match := PATH.search(text):
            shown = text[match.start() :].split("\n")[0][:80]
            return f"an output holds an absolute path: {shown}"
        if "nbval-ignore-output" not in tags and (match := ADDRESS.search(text)):
            return f"an output holds a memory address, another one on each run: {match[0]}"
    return None
