"""A later room may import an earlier one, never the reverse: read from the imports themselves."""

import functools
from pathlib import Path

from lesson_execution import imported_names

import flashlab

PACKAGE = Path(flashlab.__file__).parent
ROOMS = (
    "course", "table", "runtime", "triton_tools", "attention", "kernels", "simt", "cuda", "check", "figures",
    "models", "distributed", "exercises", "bench", "doctor", "cli",
)  # fmt: skip


@functools.cache
def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below flashlab; the package's own face is left out."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        if parts:
            found[".".join(parts)] = path
    return found


@functools.cache
def imports(name: str, path: Path) -> set[str]:
    """The modules of the package that a module imports, anywhere in it, as dotted names below flashlab."""
    package = f"flashlab.{name}" if path.name == "__init__.py" else f"flashlab.{name}".rpartition(".")[0]
    found = {full.removeprefix("flashlab.") for full in imported_names(path.read_text(encoding="utf-8"), package)}
    return found & modules().keys() - {name}


def room(module: str) -> str:
    return module.split(".")[0]


def test_every_module_is_in_a_room_and_the_package_lists_them_in_order():
    assert {room(m) for m in modules()} == set(ROOMS)
    said = [line.split()[0].rstrip(",") for line in flashlab.__doc__.splitlines() if line.startswith("    ")]
    assert said == [r for r in ROOMS if r not in ("table", "cli")]


def test_no_arrow_runs_back_up():
    wrong = [
        f"{module} imports {other}"
        for module, path in modules().items()
        for other in imports(module, path)
        if ROOMS.index(room(other)) > ROOMS.index(room(module))
    ]
    assert wrong == []


def test_there_is_no_circle():
    arrows = {m: imports(m, p) for m, p in modules().items() if p.name != "__init__.py"}
    arrows = {m: {o for o in others if o in arrows} for m, others in arrows.items()}
    while arrows:
        leaves = {m for m, others in arrows.items() if not others & arrows.keys()}
        assert leaves, f"a circle among {sorted(arrows)}"
        arrows = {m: others for m, others in arrows.items() if m not in leaves}


def test_nothing_is_found_by_a_path_into_a_later_room():
    for name, path in modules().items():
        for later in ROOMS[ROOMS.index(room(name)) + 1 :]:
            assert f'/ "{later}"' not in path.read_text(encoding="utf-8"), f"{name} reaches into {later}"
