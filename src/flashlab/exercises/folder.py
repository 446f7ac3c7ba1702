"""A learner's folder of the course, for who has the package and no clone: `flashlab start DIR` and `flashlab update`.

The wheel carries the notebooks. What was written last is remembered as a digest beside the progress, so that an update
replaces what the learner has left as it was, and nothing else.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping
from pathlib import Path

from flashlab.runtime.cache import write_whole

KINDS = ("notebooks", "exercises", "solutions")
_WRITTEN = Path(".flashlab") / "written.json"


def shipped() -> dict[str, Path]:
    """The notebooks that came with the installed package: `exercises/03_….ipynb` -> the file.

    Raises:
        FileNotFoundError: this is a clone, or an editable installation of one: its notebooks are there already.
    """
    root = Path(__file__).resolve().parents[3]
    if (root / "src" / "lessons").is_dir():
        raise FileNotFoundError(
            f"this flashlab belongs to a clone: its notebooks are in {root}, and `make lab` opens them"
        )
    found = {}
    for file in importlib.metadata.files("flashlab") or ():
        if file.suffix == ".ipynb" and file.parent.name in KINDS:
            found[f"{file.parent.name}/{file.name}"] = Path(str(file.locate()))
    if not found:
        raise FileNotFoundError("no notebooks came with this flashlab: install it again with pip")
    return found


def start(folder: Path, source: Mapping[str, Path]) -> list[str]:
    """Write the notebooks to a folder that has none. Returns what to say.

    Raises:
        FileExistsError: there are notebooks of the course in it.
    """
    if any((folder / name).exists() for name in source):
        raise FileExistsError(f"{folder} has notebooks of the course already: `flashlab update {folder}` renews them")
    update(folder, source)
    return [
        f"{len(source)} notebooks are in {folder}",
        f"begin with: cd {folder} && jupyter lab {min(source, key=_order)}",
    ]


def update(folder: Path, source: Mapping[str, Path]) -> list[str]:
    """Write the notebooks that are new or have changed; one that the learner has changed is left alone, and named."""
    record = folder / _WRITTEN
    try:
        written = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        written = {}
    said, count = [], 0
    for name in sorted(source, key=_order):
        new, path = source[name].read_text(encoding="utf-8"), folder / name
        digest = _digest(new)
        if path.exists():
            has = _digest(path.read_text(encoding="utf-8"))
            if has not in (digest, written.get(name)):
                said.append(
                    f"{name}: yours, left as it is" + ("" if digest == written.get(name) else "; there is a newer one")
                )
                continue
            if has == digest:  # its outputs may be the learner's
                written[name] = digest
                continue
        write_whole(path, new.encode())
        written[name] = digest
        count += 1
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return [*said, f"{count} written, {len(source) - count - len(said)} up to date, {len(said)} yours"]


def _digest(text: str) -> str | None:
    """Of what a learner can edit, without outputs, counts and an empty last cell, which JupyterLab changes on its own.
    None for what is no notebook any more: it may hold answers all the same."""
    try:
        sources = [(c["cell_type"], "".join(c["source"]).strip()) for c in json.loads(text)["cells"]]
    except (ValueError, KeyError, TypeError):
        return None
    return hashlib.sha256(repr([cell for cell in sources if cell[1]]).encode()).hexdigest()[:16]


def _order(name: str) -> tuple[int, str]:
    return KINDS.index(name.partition("/")[0]), name
