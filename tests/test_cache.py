"""The cache of builds: whole or not at all, one key a build, the user's own."""

import os

import pytest

from flashlab.runtime import cache


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHLAB_CACHE", str(tmp_path))
    return tmp_path


def write(text):
    def make(work):
        (work / "kernel.so").write_text(text)
        return {"text": text}

    return make


def test_a_build_is_made_once(own):
    first = cache.kept("cuda", "key", write("first"))
    again = cache.kept("cuda", "key", write("second"))
    assert not first.from_cache and again.from_cache and first.notes == again.notes == {"text": "first"}
    assert first.folder == again.folder == own / "cuda" / "key"
    assert (again.folder / "kernel.so").read_text() == "first"
    assert [p.name for p in (own / "cuda").iterdir()] == ["key"]


def test_a_build_that_fails_leaves_nothing(own):
    def fails(work):
        (work / "kernel.o").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cache.kept("cuda", "key", fails)
    assert not list((own / "cuda").iterdir())
    assert not cache.kept("cuda", "key", write("next")).from_cache


def test_the_build_that_was_first_stays(own):
    def meanwhile(work):
        cache.kept("cuda", "key", write("the other process's"))
        return write("mine")(work)

    found = cache.kept("cuda", "key", meanwhile)
    assert found.notes == {"text": "the other process's"} and len(list((own / "cuda").iterdir())) == 1
    assert (found.folder / "kernel.so").read_text() == "the other process's"


@pytest.mark.parametrize("lost", ["kernel.so", "manifest.json"])
def test_a_build_that_lost_a_file_is_made_again(own, lost):
    done = cache.kept("cuda", "key", write("first")).folder
    (done / lost).unlink()
    assert not cache.kept("cuda", "key", write("second")).from_cache
    assert (done / "kernel.so").read_text() == "second"


def test_old_builds_are_removed(own):
    for i in range(6):
        done = cache.kept("cuda", str(i), write("")).folder
        os.utime(done / "manifest.json", (i, i) if i < 4 else None)
    cache.prune(own / "cuda", keep=3)
    assert sorted(p.name for p in (own / "cuda").iterdir()) == ["3", "4", "5"]


def test_keys_differ():
    assert cache.key("a", 1) == cache.key("a", 1) != cache.key("a", 2)


def test_the_cache_is_the_users_own(own, monkeypatch):
    assert cache.folder("cuda") == own / "cuda" and cache.folder("cuda").stat().st_mode & 0o077 == 0
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(cache.CacheError, match="belongs to another user: set FLASHLAB_CACHE"):
        cache.folder("cuda")


def test_a_cache_that_cannot_be_made(own, monkeypatch):
    (own / "file").touch()
    monkeypatch.setenv("FLASHLAB_CACHE", str(own / "file"))
    with pytest.raises(cache.CacheError, match="cannot be used .*: set FLASHLAB_CACHE to a folder of yours"):
        cache.folder("cuda")
