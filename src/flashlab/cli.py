"""The `flashlab` command: `start`, `update`, `doctor`, `progress`, `next`, `check`, `bench`.

Each imports what it needs when it is called.
"""

import importlib
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from flashlab import doctor as _doctor
from flashlab.bench import BENCHES, module_of

console = Console(highlight=False)
app = typer.Typer(no_args_is_help=True, add_completion=False, help="FlashAttention, wall by wall.")
bench = typer.Typer(no_args_is_help=True, help="Measure, and keep the figures as JSON.")
app.add_typer(bench, name="bench")


@app.callback()
def _start(context: typer.Context) -> None:
    if context.invoked_subcommand in ("progress", "next", "bench") and "flashlab.runtime" not in sys.modules:
        console.print(Text("torch does not load here: `flashlab doctor` says why.", style="red"))
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False) -> None:
    """What this machine has, and which phase runs how on it."""
    _doctor.main(["--json"] if as_json else [])


@app.command()
def progress(phase: Annotated[str | None, typer.Argument(help="Only this phase.")] = None) -> None:
    """Which exercises you have solved."""
    from flashlab.course import number_of
    from flashlab.exercises import progress

    console.print(progress(number_of(phase) if phase else None))


@app.command("next")
def next_() -> None:
    """The next exercise, its page, and how long it takes."""
    from flashlab.exercises.front import following

    console.print(Text(following()), soft_wrap=True)


# ----------------------------------------------------------------------------------------------------- start, update


def _write(how: str, directory: Path) -> None:
    from flashlab.exercises import folder

    try:
        said = getattr(folder, how)(directory, folder.shipped())
    except OSError as error:
        console.print(Text(str(error), style="red"), soft_wrap=True)
        raise typer.Exit(1) from None
    for line in said:
        console.print(Text(line), soft_wrap=True)


@app.command()
def start(
    directory: Annotated[Path, typer.Argument(help="A new folder, or one without notebooks of the course.")],
) -> None:
    """Write the lectures, exercises and solutions to a folder: the course without a clone."""
    _write("start", directory)


@app.command()
def update(directory: Annotated[Path, typer.Argument(help="The folder that `start` wrote.")] = Path(".")) -> None:
    """Renew the notebooks of that folder; what you have changed, your answers above all, is left as it is."""
    _write("update", directory)


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


def _bench_command(name: str) -> Callable[[typer.Context], None]:
    def command(context: typer.Context) -> None:
        chosen = module_of(name)
        importlib.import_module("flashlab.bench.records").entry(lambda: chosen.main(context.args))

    return command


# Their options are their own; --out and --quick are among them.
for _name, (_what, _needs) in BENCHES.items():
    _options = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    bench.command(_name, help=f"{_what} Needs {_needs}.", context_settings=_options)(_bench_command(_name))


def main() -> None:
    """The entry point of the `flashlab` command."""
    app()


if __name__ == "__main__":
    main()
