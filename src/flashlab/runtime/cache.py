"""The one folder in which builds and compile reports are kept, and how a build gets there. All of it is safe to delete.

A build is kept under a key made from everything that goes into it. It is made in a folder of its own, which moves to
its name in one step: whoever shares the cache gets a whole build or none, and a failed one leaves nothing behind. What
was built is kept with its digest, and looked at before it is used: a build that is not as it was made is made again.
The folder of a build under way is locked by who makes it, so that what a killed one left can be told, and removed.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import stat
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

    FLASHLAB_CACHE is an absolute path, or begins with ``~``. It defaults to ``flashlab`` in the user's cache directory
    (``$XDG_CACHE_HOME``, else ``~/.cache``).

    Raises:
        CacheError: it cannot be made or written, or somebody else can write to it, whose code would be loaded.
    """
    base = _base()
    path = base / part
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.mkdir(exist_ok=True, mode=0o700)
        known = {place: place.stat() for place in (base, path)}
    except OSError as error:
        raise _unusable(path, error) from error
    if known[path].st_uid != os.getuid() or known[base].st_uid not in (os.getuid(), 0):
        raise CacheError(f"the build cache {path} belongs to another user: set FLASHLAB_CACHE to a folder of yours")
    for place, found in known.items():
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if others and not (place == base and found.st_mode & stat.S_ISVTX):  # in /tmp nobody can rename what is yours
            raise CacheError(
                f"other users can write to the build cache {place}, and so have their code run by you: "
                f"chmod go-w {place}, or set FLASHLAB_CACHE to a folder of yours"
            )
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unusable(path, OSError(errno.EACCES, "it cannot be written"))
    return path


def _base() -> Path:
    given = os.environ.get("FLASHLAB_CACHE", "").strip()
    shared = os.environ.get("XDG_CACHE_HOME", "").strip()
    base = given or os.path.join(shared if os.path.isabs(shared) else "~/.cache", "flashlab")
    home = os.environ.get("HOME")  # where it is not set, the user's entry in the system's list counts
    try:
        if base.split("/")[0] == "~" and home is not None and not os.path.isabs(home):
            raise RuntimeError(f"HOME is {home!r}, which is no absolute path")
        path = Path(base).expanduser()
    except RuntimeError as error:
        raise _unusable(base, error) from error
    if not path.is_absolute():
        raise CacheError(f"FLASHLAB_CACHE is {given!r}, another folder wherever Python starts: give an absolute path")
    return path


def _unusable(path: str | Path, error: Exception) -> CacheError:
    why = getattr(error, "strerror", None) or error
    return CacheError(f"the cache {path} cannot be used ({why}): set FLASHLAB_CACHE to a folder of yours")


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
    """The build of this key, made if it is not there, or not as it was made.

    Args:
        part: the kind of build, as in ``folder``.
        key: made from everything that goes into the build.
        make: fills an empty folder with the build and returns its notes, as JSON has them; what it raises passes.

    Raises:
        CacheError: the cache cannot be used, its disk is full, or no code can be loaded from it (noexec).
    """
    builds = folder(part)
    if os.statvfs(builds).f_flag & os.ST_NOEXEC:
        raise CacheError(
            f"no code can be loaded from the build cache {builds}, as its disk is mounted noexec: set FLASHLAB_CACHE "
            "to a folder of another disk"
        )
    _begin(builds)
    done = builds / key
    notes = _whole(done)
    if notes is not None:
        with contextlib.suppress(OSError):  # another process may have pruned it
            os.utime(done / _MANIFEST)
        return Kept(done, notes, True)
    try:
        with workspace(builds) as work:
            notes = _moved(work, done, make(work))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise _unusable(builds, error) from error
        raise
    with contextlib.suppress(OSError):  # another process may be pruning too
        prune(builds)
    return Kept(done, notes, False)


def _moved(work: Path, done: Path, notes: dict[str, Any]) -> dict[str, Any]:
    """Writes the manifest of a build and gives it its name; returns its notes, or those of one who was first."""
    files = {str(p.relative_to(work)): file_digest(p) for p in sorted(work.rglob("*")) if p.is_file()}
    built = json.loads(json.dumps({"files": files, "notes": notes}))
    (work / _MANIFEST).write_text(json.dumps({"built": built, "digest": _digest(built)}), encoding="utf-8")
    for last in (False, False, True):
        try:
            os.rename(work, done)
            break
        except OSError:
            first = _whole(done)
            if first is not None:  # another process's: its build is this one, but for the notes
                return first
            if last:
                raise
        with workspace(done.parent) as damaged, contextlib.suppress(OSError):
            os.rename(done, damaged / "build")
    return notes


def _digest(built: dict[str, Any]) -> str:
    return key(json.dumps(built, sort_keys=True))


def _whole(done: Path) -> dict[str, Any] | None:
    """The notes of a build; None where there is none, and where it is not what was made."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        manifest = json.loads((done / _MANIFEST).read_text(encoding="utf-8"))
        built = manifest["built"]
        if manifest["digest"] == _digest(built) and all(file_digest(done / f) == d for f, d in built["files"].items()):
            return built["notes"]
    return None


@contextlib.contextmanager
def workspace(builds: Path) -> Iterator[Path]:
    """A directory for one build, on the cache's file system, that nobody else sees; locked as long as it is in use."""
    while True:
        path = Path(tempfile.mkdtemp(prefix="build-of-", dir=builds))
        lock = _lock(path)
        if path.exists():  # not swept before it was locked
            break
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _lock(path: Path, options: int = 0) -> int | None:
    """Lock a directory until its descriptor is closed, or the process ends; None where that cannot be done."""
    descriptor = None
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | options)
    except OSError:
        if descriptor is not None:
            os.close(descriptor)
        return None
    return descriptor


@functools.cache
def _begin(builds: Path) -> None:
    """Once in a process: remove what killed ones left half built, whose locks are free again, and other leftovers."""
    sweep(builds)
    for path in builds.glob("build-of-*"):
        if (lock := _lock(path, fcntl.LOCK_NB)) is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: to a temporary file beside it, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def prune(builds: Path, keep: int = 1000, days: float = 1.0) -> None:
    """Removes what was not used for days, once there are many builds: an edited cell leaves one for each edit."""
    if len(os.listdir(builds)) <= keep:
        return
    manifests = sorted(builds.glob(f"*/{_MANIFEST}"), key=lambda p: p.stat().st_mtime)
    for path in manifests[:-keep]:
        if path.stat().st_mtime < time.time() - days * 86400:
            shutil.rmtree(path.parent, ignore_errors=True)


def sweep(folder: Path) -> None:
    """Removes workspaces and unfinished files that have not changed for hours: who made them was killed."""
    for path in (*folder.glob("build-*"), *folder.glob("*.part")):
        with contextlib.suppress(OSError):  # another process may be sweeping too
            if path.lstat().st_mtime < time.time() - 3 * 3600:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
