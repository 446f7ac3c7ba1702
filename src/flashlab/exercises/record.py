"""The learner's record: which exercises were tried, solved, and with how many hints, in one small JSON file.

The file is `.flashlab/progress.json` under the course's folder. The environment variable FLASHLAB_PROGRESS names
another file, or says "off": then nothing is read or written, which is how notebooks are built and tested. Nothing is
recorded either while pytest runs, or from a notebook in solutions/. A file that cannot be read or written never stops
a check.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

try:
    import fcntl
except ImportError:  # not a POSIX system: two kernels writing at the same instant are then not kept apart
    fcntl = None

_LOCK_SECONDS = 2.0
_said: set[str] = set()


@dataclass
class Entry:
    """What is known about one exercise. `solved` is the ISO time of the first check that passed, or None."""

    tries: int = 0
    hints: int = 0
    solved: str | None = None


def path() -> Path | None:
    """Where the record is kept, or None when nothing is to be recorded in this process."""
    wanted = os.environ.get("FLASHLAB_PROGRESS", "").strip()
    if wanted.lower() in ("off", "0", "no", "false"):
        return None
    if wanted:
        return Path(wanted).expanduser()
    if "PYTEST_VERSION" in os.environ or _in_a_solution():
        return None
    return _course_root() / ".flashlab" / "progress.json"


def load() -> dict[str, Entry]:
    """Every entry by exercise id; empty when there is no record, or none can be read."""
    file = path()
    if file is None:
        return {}
    try:
        return _read(file)
    except OSError as error:
        _say(f"Your progress file {file} cannot be read ({error.strerror or error}); going on without it.")
        return {}


def update(id: str, change: Callable[[Entry], None]) -> None:
    """Apply `change` to the entry of exercise `id`: read, change and replace the file while holding its lock."""
    file = path()
    if file is None:
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            entries = _read(file)
            change(entries.setdefault(id, Entry()))
            _write(file, entries)
    except OSError as error:
        _say(f"Your progress could not be saved in {file} ({error.strerror or error}); going on without it.")


def failed_try(id: str) -> None:
    def change(entry: Entry) -> None:
        entry.tries += 1

    update(id, change)


def solved(id: str) -> None:
    """Count a try; keep the date of the first time it was solved."""

    def change(entry: Entry) -> None:
        if entry.solved is None:
            entry.tries += 1
            entry.solved = datetime.datetime.now().astimezone().isoformat(timespec="seconds")

    update(id, change)


def saw_hints(id: str, level: int) -> None:
    def change(entry: Entry) -> None:
        entry.hints = max(entry.hints, level)

    update(id, change)


def _read(file: Path) -> dict[str, Entry]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    except UnicodeDecodeError:
        text = ""
    entries, whole = _parse(text)
    if not whole:
        copy = _keep_copy(file)
        kept = f", keeping the {len(entries)} entries that can be read" if entries else ""
        saved = f"a copy is in {copy.name}" if copy else "it could not be copied"
        _say(f"Your progress file {file} is damaged; {saved}, and a new one is begun{kept}.")
    return entries


def _parse(text: str) -> tuple[dict[str, Entry], bool]:
    """The entries that can be understood, and whether that was all of the text."""
    try:
        raw = json.loads(text)["exercises"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, False
    entries, whole = {}, True
    for id, fields in raw:
        try:
            entry = Entry(int(fields["tries"]), int(fields["hints"]), fields["solved"])
            if entry.solved is not None:
                datetime.datetime.fromisoformat(entry.solved)
            entries[id] = entry
        except (ValueError, KeyError, TypeError, OverflowError):
            whole = False
    return entries, whole


def _write(file: Path, entries: dict[str, Entry]) -> None:
    """Write beside the file, then rename: another kernel sees the old record or the new one, never a half."""
    text = json.dumps({"version": 1, "exercises": {id: asdict(e) for id, e in sorted(entries.items())}}, indent=1)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=file.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text + "\n")
        os.replace(temporary, file)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _keep_copy(file: Path) -> Path | None:
    """Copy a damaged file aside, once for each content; None when that is not possible."""
    try:
        damaged = file.read_bytes()
        for number in range(1, 100):
            copy = file.with_name(f"{file.name}.damaged-{number}")
            if not copy.exists():
                shutil.copyfile(file, copy)
                return copy
            if copy.read_bytes() == damaged:
                return copy
    except OSError:
        pass
    return None


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    with open(file.with_name(file.name + ".lock"), "a") as lock:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise OSError("another process holds its lock") from None
                time.sleep(0.01)
            except OSError:  # a file system without locks: the rename still keeps the file whole
                break
        yield


def _course_root() -> Path:
    """The folder of the course the learner is in, else the one this package belongs to, else their home folder."""
    here = Path.cwd()
    for folder in (here, *here.parents, Path(__file__).resolve().parents[3]):
        if (folder / "exercises").is_dir() and (folder / "notebooks").is_dir():
            return folder
    return Path.home()


def _in_a_solution() -> bool:
    """A solution notebook that is run must not mark its exercises as solved by the learner."""
    notebook = os.environ.get("JPY_SESSION_NAME", "")
    return Path.cwd().name == "solutions" or Path(notebook).parent.name == "solutions"


def _say(sentence: str) -> None:
    """Say it once in a process: the learner came for an exercise, not for this."""
    if sentence not in _said:
        _said.add(sentence)
        print(sentence)
