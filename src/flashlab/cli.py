"""The `flashlab` command: `doctor`, `progress`, `check`, `bench`. Each imports what it needs when it is called."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from flashlab import doctor as _doctor
from flashlab.bench import records

ROOT = _doctor.ROOT
console = Console(highlight=False)
app = typer.Typer(no_args_is_help=True, add_completion=False, help="FlashAttention, wall by wall.")
bench = typer.Typer(no_args_is_help=True, help="Measure, and keep the figures as JSON.")
app.add_typer(bench, name="bench")


@app.callback()
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand in ("progress", "bench") and "flashlab.runtime" not in sys.modules:
        console.print(Text("torch does not load here: `flashlab doctor` says why.", style="red"))
        raise typer.Exit(1)


@bench.callback()
def _bench() -> None:
    """Measure, and keep the figures as JSON."""


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False) -> None:
    """What this machine has, and which phase runs how on it."""
    _doctor.main(["--json"] if as_json else [])


@app.command()
def progress(phase: Annotated[int | None, typer.Argument(help="Only this phase.")] = None) -> None:
    """Which exercises you have solved."""
    from flashlab.exercises import progress

    console.print(progress(phase))


# ------------------------------------------------------------------------------------------------------------- check


def _packages() -> str:
    import numpy
    import torch
    import triton

    return f"torch {torch.__version__}, triton {triton.__version__}, numpy {numpy.__version__}"


def _kernel() -> str:
    from flashlab import runtime
    from flashlab.attention.triton_minimal import flash_attention_forward
    from flashlab.check import verify_one_head

    return f"{runtime.describe()}; {verify_one_head(flash_attention_forward, max_seq=128).verdict}"


def _compiler() -> str:
    import torch

    from flashlab.attention.triton_minimal import flash_attention_forward_kernel
    from flashlab.triton_tools.compile_report import compile_report

    pointers = {"Q_ptr": torch.float16, "K_ptr": torch.float16, "V_ptr": torch.float16, "O_ptr": torch.float16}
    strides = {f"stride_{name}": 64 for name in ("qm", "kn", "vn", "om")}
    strides |= {f"stride_{name}": 1 for name in ("qd", "kd", "vd", "od")}
    sizes = {"scale_log2": 0.18, "M": 1024, "N": 1024, "HEAD_DIM": 64, "BLOCK_M": 64, "BLOCK_N": 64}
    report = compile_report(
        flash_attention_forward_kernel, {**pointers, "LSE_ptr": torch.float32, **strides, **sizes}, target="sm_90"
    )
    if not report.ok:
        raise RuntimeError(report.error)
    return f"for {report.target}: {report.shared_bytes} bytes of shared memory, {report.registers} registers a thread"


def _jupyter() -> str:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", stderr=subprocess.DEVNULL)
    try:
        said: list[str] = []
        reply = client.execute_interactive(
            "import flashlab; print(flashlab.__version__)", timeout=30,
            output_hook=lambda message: said.append(message["content"].get("text", "")),
        )  # fmt: skip
        if reply["content"]["status"] != "ok":
            raise RuntimeError(f"the notebook kernel cannot import flashlab: {reply['content'].get('evalue')}")
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return f"a notebook's kernel runs, with flashlab {''.join(said).strip()}"


CHECKS: tuple[tuple[str, Callable[[], str]], ...] = (
    ("packages load", _packages),
    ("Triton kernel", _kernel),
    ("compile report", _compiler),
    ("Jupyter", _jupyter),
)


@app.command()
def check() -> None:
    """Whether the course works on this machine, in a few seconds; exit status 1 if it does not."""
    failed = 0
    for name, step in CHECKS:
        start = time.perf_counter()
        try:
            said, mark, style = step(), "✓", "green"
        except Exception as error:
            failed += 1
            said, mark, style = f"{type(error).__name__}: {error}", "✗", "red"
        console.print(Text(f"{mark} ", style=style) + Text(f"{name:<15}", style="bold"), end="")
        console.print(Text(f"{said}  ({time.perf_counter() - start:.1f} s)"))
    if failed:
        console.print(Text("→ `flashlab doctor` says what this machine lacks.", style="yellow"))
        raise typer.Exit(1)


# ------------------------------------------------------------------------------------------------------------- bench


def time_checks(notebook: Path) -> list[dict[str, Any]]:
    """Run a solution notebook's code cells in this process and time each `check(id, ...)` in them.

    Returns [{"id": "2.3", "seconds": 1.2, "cpu_seconds": 1.9, "passed": True}, ...] in the notebook's order: elapsed
    time, and processor time of all threads, which a busy machine does not lengthen. A cell that raises ends it, with
    the exception; `flashlab bench check` runs this in a process of its own.
    """
    import nbformat

    from flashlab import exercises as checker

    os.environ["FLASHLAB_PROGRESS"] = "off"
    found: list[dict[str, Any]] = []
    original = checker.check

    def timed(id: str, *answers: Any) -> Any:
        start, cpu_start = time.perf_counter(), time.process_time()
        passed = False
        try:
            result = original(id, *answers)
            passed = True
            return result
        finally:
            seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
            times = {"seconds": round(seconds, 3), "cpu_seconds": round(cpu_seconds, 3)}
            found.append({"id": id, **times, "passed": passed})

    # Kernels are looked up by their source: each cell is a file, as in Jupyter.
    namespace: dict[str, Any] = {"__name__": "__main__"}
    checker.check = timed
    try:
        with tempfile.TemporaryDirectory() as folder:
            for number, cell in enumerate(nbformat.read(notebook, as_version=4).cells):
                if cell.cell_type == "code":
                    file = Path(folder, f"cell_{number}.py")
                    file.write_text(cell.source, encoding="utf-8")
                    exec(compile(cell.source, str(file), "exec"), namespace)
    finally:
        checker.check = original
    return found


# What each bench module measures; its own options are passed on to it (`flashlab bench mma -- --help`).
NATIVE = {
    "walls": ("walls", "Phase 1: naive attention, scheme A to its refusal, the escape hatches."),
    "triton": ("triton", "Phase 3: the minimal Triton kernel against its peers."),
    "scalar": ("scalar", "Phase 6: the float32 CUDA kernels against unfused PyTorch and SDPA."),
    "mma": ("mma", "Phases 7 and 8: the tensor-core ladder against FlashAttention-2, cuDNN, unfused PyTorch."),
    "validation": ("validation", "The emulator against the hardware: results, counters, compute-sanitizer."),
}


def _native(module: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        try:
            importlib.import_module(f"flashlab.bench.{module}").main(context.args)
        except records.NoGpu as missing:
            console.print(Text(str(missing), style="red"))
            raise typer.Exit(1) from None

    return command


for _name, (_module, _help) in NATIVE.items():
    _options = {"allow_extra_args": True, "ignore_unknown_options": True}
    bench.command(_name, help=f"{_help} Needs a GPU.", context_settings=_options)(_native(_module))


@bench.command("check")
def bench_check(
    out: Annotated[Path | None, typer.Option(help="The JSON file; default .flashlab/bench/check.json.")] = None,
) -> None:
    """How long the check of every solved exercise takes on this machine."""
    notebooks = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        console.print(Text("There are no solutions beside this package: run it in a clone of the course.", style="red"))
        raise typer.Exit(1)
    result: dict[str, Any] = {"machine": _machine(), "checks": [], "errors": {}}
    table = Table(title="Seconds a check of the solved exercise", title_justify="left", box=None, padding=(0, 2))
    for column in ("Exercise", "Elapsed", "Processor", ""):
        table.add_column(column, justify="right" if column in ("Elapsed", "Processor") else "left")
    for notebook in notebooks:
        found, error = _in_child(notebook)
        result["checks"] += found
        if error:
            result["errors"][notebook.name] = error
        for row in found:
            times = (f"{row[name]:.2f}" for name in ("seconds", "cpu_seconds"))
            table.add_row(row["id"], *times, "" if row["passed"] else "failed")
    console.print(table)
    target = out or ROOT / ".flashlab" / "bench" / "check.json"
    records.write_json(target, result)
    slowest = max((row["seconds"] for row in result["checks"]), default=0.0)
    console.print(Text(f"{len(result['checks'])} checks, the slowest {slowest:.1f} s, kept in {target}"))
    for name, error in result["errors"].items():
        console.print(Text(f"✗ {name}: {error}", style="red"))
    if result["errors"] or not all(row["passed"] for row in result["checks"]):
        raise typer.Exit(1)


def _in_child(notebook: Path) -> tuple[list[dict[str, Any]], str | None]:
    """`time_checks` in a fresh process: a notebook starts from nothing, and one that crashes spoils no other."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        code = (
            "import json, sys; from pathlib import Path; from flashlab import cli; "
            "Path(sys.argv[2]).write_text(json.dumps(cli.time_checks(Path(sys.argv[1]))))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(notebook), str(answer)],
            cwd=notebook.parent, env={**os.environ, "MPLBACKEND": "Agg"}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            return [], (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return json.loads(answer.read_text()), None


def _machine() -> dict[str, Any]:
    """What a figure needs beside it to mean something."""
    import platform

    import numpy
    import torch
    import triton

    from flashlab import runtime

    return {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "numpy": numpy.__version__,
        "cores": _doctor.cores(),
        "triton_kernels": "interpreted" if runtime.INTERPRETED else "compiled",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def main() -> None:
    """The entry point of the `flashlab` command."""
    app()


if __name__ == "__main__":
    main()
