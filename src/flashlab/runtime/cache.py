"""The one folder in which builds and compile reports are kept, and how a build gets there. All of it is safe to delete.

A build is kept under a key made from everything that goes into it. It is made in a folder of its own, which moves to
its name in one step: whoever shares the cache gets a whole build or none, and a failed one leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"


class CacheError(RuntimeError):
    """The cache folder cannot be used; the message says why, and what to set."""


def folder(part: str) -> Path:
    """The folder of one kind of build, made if it is not there: ``$FLASHLAB_CACHE/<part>``.

    FLASHLAB_CACHE defaults to ``flashlab`` in the user's cache directory (``$XDG_CACHE_HOME``, else ``~/.cache``).

    Raises:
        CacheError: it cannot be made, or it belongs to another user, whose code would be loaded.
    """
    base = os.environ.get("FLASHLAB_CACHE", "").strip()
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache", "flashlab")
    path = Path(base).expanduser().absolute() / part
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        owner = path.stat().st_uid
    except (OSError, RuntimeError) as error:
        raise CacheError(
            f"the cache {path} cannot be used ({error}): set FLASHLAB_CACHE to a folder of yours"
        ) from error
    if owner != os.getuid():
        raise CacheError(f"the build cache {path} belongs to another user: set FLASHLAB_CACHE to a folder of yours")
    return path


def key(*parts: object) -> str:
    """A name made from everything that goes into a build."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def file_digest(path: str | Path) -> str:
    """Of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:32]


@dataclass(frozen=True)
class Kept:
    """A build: its folder, what was noted when it was made, and whether that was before this call."""

    folder: Path
    notes: dict[str, Any]
    from_cache: bool


def kept(part: str, key: str, make: Callable[[Path], dict[str, Any]]) -> Kept:
    """The build of this key, made if it is not there.

    Args:
        part: the kind of build, as in ``folder``.
        key: made from everything that goes into the build.
        make: fills an empty folder with the build and returns its notes, as JSON has them; what it raises passes.
    """
    builds = folder(part)
    done = builds / key
    notes = _whole(done)
    if notes is not None:
        return Kept(done, notes, True)
    with workspace(builds) as work:
        notes = make(work)
        files = sorted(p.name for p in work.iterdir())
        (work / _MANIFEST).write_text(json.dumps({"files": files, "notes": notes}), encoding="utf-8")
        try:
            os.rename(work, done)
        except OSError:  # another process was first: its build is this one, but for the notes
            notes = _whole(done)
            if notes is None:
                raise
    with contextlib.suppress(OSError):  # another process may be pruning too
        prune(builds)
    return Kept(done, notes, False)


def _whole(done: Path) -> dict[str, Any] | None:
    """The notes of a build; None where there is none. What somebody has taken files from is removed."""
    try:
        manifest = json.loads((done / _MANIFEST).read_text(encoding="utf-8"))
        if all((done / name).exists() for name in manifest["files"]):
            return manifest["notes"]
    except (OSError, ValueError, KeyError):
        pass
    shutil.rmtree(done, ignore_errors=True)
    return None


@contextlib.contextmanager
def workspace(builds: Path) -> Iterator[Path]:
    """A directory for one build, on the cache's file system, that nobody else sees."""
    path = Path(tempfile.mkdtemp(prefix="build-", dir=builds))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def prune(builds: Path, keep: int = 500, days: float = 1.0) -> None:
    """Removes the oldest builds, once there are many: an edited cell leaves one for each edit."""
    manifests = sorted(builds.glob(f"*/{_MANIFEST}"), key=lambda p: p.stat().st_mtime)
    for path in manifests[:-keep]:
        if path.stat().st_mtime < time.time() - days * 86400:
            shutil.rmtree(path.parent, ignore_errors=True)
