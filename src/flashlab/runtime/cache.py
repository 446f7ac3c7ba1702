"""The one folder in which builds and compile reports are kept. Everything in it is safe to delete."""

from __future__ import annotations

import os
from pathlib import Path


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
