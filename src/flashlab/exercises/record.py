"""The learner's record: which exercises were tried, solved, and with how many hints, in one file of JSON lines.

Each event is one line that is appended in one write, so that kernels that write at once lose nothing:

    {"id": "2.3", "event": "tried", "when": "2026-11-20T10:00:00+01:00"}       also "solved"
    {"id": "2.3", "event": "hint", "level": 1, "when": "2026-11-20T10:01:00+01:00"}

The file is `.flashlab/progress.jsonl` under the course's folder. The environment variable FLASHLAB_PROGRESS names
another file, or says "off": then nothing is read or written, which is how notebooks are built and tested. Nothing is
recorded either while pytest runs, or from a notebook in solutions/. A file that cannot be read or written never stops
a check.
"""

from __future__ import annotations

import datetime
import errno
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path

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
    try:
        if wanted:
            return Path(wanted).expanduser()
        if "PYTEST_VERSION" in os.environ or _in_a_solution():
            return None
        return _course_root() / ".flashlab" / "progress.jsonl"
    except (OSError, RuntimeError) as error:  # no home folder, no current folder
        _say(f"There is no place for your progress ({error}); going on without it. FLASHLAB_PROGRESS names one.")
        return None


def load() -> dict[str, Entry]:
    """Every entry by exercise id; empty when there is no record, or none can be read."""
    file = path()
    if file is None:
        return {}
    try:
        _expect_file(file)
        text = file.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return {}
    except OSError as error:
        _say(f"Your progress file {file} cannot be read ({error.strerror or error}); going on without it.")
        return {}
    entries: dict[str, Entry] = {}
    damaged = 0
    for line in text.splitlines():
        if line.strip():
            try:
                _apply(entries, json.loads(line))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                damaged += 1
    if damaged:
        lines = "1 line" if damaged == 1 else f"{damaged} lines"
        _say(f"Your progress file {file} is damaged: {lines} of it cannot be understood; going on with the rest.")
    return entries


def failed_try(id: str) -> None:
    _append(id, "tried")


def solved(id: str) -> None:
    """Record a try that passed; the first one's date is what counts."""
    _append(id, "solved")


def saw_hints(id: str, level: int) -> None:
    _append(id, "hint", level)


def _append(id: str, event: str, level: int | None = None) -> None:
    file = path()
    if file is None:
        return
    when = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    line = json.dumps({"id": id, "event": event, **({} if level is None else {"level": level}), "when": when}) + "\n"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _expect_file(file)
        handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            size = os.fstat(handle).st_size
            if size and os.pread(handle, 1, size - 1) != b"\n":  # the last line was cut short: leave it to itself
                line = "\n" + line
            data = line.encode()
            if os.write(handle, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(handle)
    except OSError as error:
        _say(f"Your progress could not be saved in {file} ({error.strerror or error}); going on without it.")


def _apply(entries: dict[str, Entry], line: dict[str, object]) -> None:
    """Add one event to its entry; raises ValueError, KeyError, TypeError or OverflowError for what is none."""
    id, event, when = line["id"], line["event"], line["when"]
    datetime.datetime.fromisoformat(when)  # type: ignore[arg-type]
    level = int(line["level"]) if event == "hint" else 0  # type: ignore[call-overload]
    if not isinstance(id, str) or event not in ("tried", "solved", "hint") or not 0 <= level < 10**6:
        raise ValueError(line)
    entry = entries.setdefault(id, Entry())
    if event == "hint":
        entry.hints = max(entry.hints, level)
    elif event == "tried":
        entry.tries += 1
    elif entry.solved is None:
        entry.tries, entry.solved = entry.tries + 1, str(when)


def _expect_file(file: Path) -> None:
    """OSError where it is there and no regular file. A link is followed."""
    try:
        mode = file.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise OSError(errno.EINVAL, f"it is {kind}, and a file is needed; FLASHLAB_PROGRESS=off records nothing")


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
