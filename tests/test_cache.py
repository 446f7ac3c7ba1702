"""The cache of builds: whole or not at all, one key a build, the user's own."""

import errno
import multiprocessing
import os
import signal

import pytest

from flashlab.runtime import cache


def write(text):
    def make(work):
        (work / "parts").mkdir()
        for file in ("kernel.so", "parts/kernel.o"):
            (work / file).write_text(text)
        return {"text": text}

    return make


def test_a_build_is_made_once(own_cache):
    first = cache.kept("cuda", "key", write("first"))
    again = cache.kept("cuda", "key", write("second"))
    assert not first.from_cache and again.from_cache and first.notes == again.notes == {"text": "first"}
    assert first.folder == again.folder == own_cache / "cuda" / "key"
    assert (again.folder / "kernel.so").read_text() == "first"
    assert [p.name for p in (own_cache / "cuda").iterdir()] == ["key"]


def test_the_build_that_was_first_stays(own_cache):
    def meanwhile(work):
        cache.kept("cuda", "key", write("the other process's"))
        return write("mine")(work)

    found = cache.kept("cuda", "key", meanwhile)
    assert found.notes == {"text": "the other process's"} and len(list((own_cache / "cuda").iterdir())) == 1
    assert (found.folder / "kernel.so").read_text() == "the other process's"


DAMAGE = {
    "cut": lambda data: data[: len(data) // 2],
    "noisy": lambda data: data[:2] + bytes([data[2] ^ 1]) + data[3:],
    "empty": lambda data: b"",
    "longer": lambda data: data + b"\n",
}


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["kernel.so", "parts/kernel.o"])
def test_what_is_not_as_it_was_built_is_built_again(own_cache, name, how):
    file = cache.kept("cuda", "key", write("a library")).folder / name
    file.write_bytes(DAMAGE[how](file.read_bytes()))
    again = cache.kept("cuda", "key", write("another library"))
    assert not again.from_cache and file.read_text() == "another library"
    assert cache.kept("cuda", "key", write("a third")).from_cache
    assert [p.name for p in (own_cache / "cuda").iterdir()] == ["key"]


def test_old_builds_are_removed(own_cache):
    for i in range(6):
        done = cache.kept("cuda", str(i), write("")).folder
        os.utime(done / "manifest.json", (i, i) if i < 4 else None)
    cache.prune(own_cache / "cuda", keep=3)
    assert sorted(p.name for p in (own_cache / "cuda").iterdir()) == ["3", "4", "5"]


def test_what_a_killed_process_left_half_built_is_swept_at_the_next_start(own_cache):
    """And not what is still being built."""
    builds, fork = cache.folder("cuda"), multiprocessing.get_context("fork")
    begun = fork.Barrier(2)

    def make(work):
        (work / "half").touch()
        begun.wait()
        signal.pause()

    children = [
        fork.Process(target=cache.kept, args=("cuda", name, make), daemon=True) for name in ("killed", "at work")
    ]
    for child in children:
        child.start()
        begun.wait(60)
    half = sorted(builds.iterdir())
    assert len(half) == 2
    for child, left in zip(children, (1, 0), strict=True):
        child.kill()
        child.join()
        cache._begin.cache_clear()  # another process
        cache.kept("cuda", "another", write(""))
        assert len([path for path in half if path.exists()]) == left


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"FLASHLAB_CACHE": "builds"}, "FLASHLAB_CACHE is 'builds', another folder wherever Python starts: give"),
        ({"FLASHLAB_CACHE": "./builds"}, "give an absolute path"),
        ({"FLASHLAB_CACHE": "~no-such-user/builds"}, "the cache ~no-such-user/builds cannot be used"),
        ({"FLASHLAB_CACHE": "~/builds", "HOME": ""}, "cannot be used (HOME is '', which is no absolute path)"),
        ({"FLASHLAB_CACHE": "", "HOME": "here"}, "cannot be used (HOME is 'here', which is no absolute path)"),
        ({"FLASHLAB_CACHE": "/proc/flashlab"}, "the cache /proc/flashlab/cuda cannot be used"),
        ({"FLASHLAB_CACHE": "/dev/null"}, "the cache /dev/null/cuda cannot be used"),
    ],
)  # fmt: skip
def test_a_place_that_is_no_place_is_a_sentence(own_cache, monkeypatch, variables, sentence):
    monkeypatch.chdir(own_cache)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(cache.CacheError) as caught:
        cache.folder("cuda")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)
    assert not list(own_cache.iterdir())


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
@pytest.mark.parametrize("place", ["", "cuda"])
def test_a_cache_that_others_can_write_is_refused(own_cache, place, mode):
    cache.folder("cuda")
    (own_cache / place).chmod(mode)
    with pytest.raises(cache.CacheError, match=r"other users can write to .*: chmod go-w .*, or set FLASHLAB_CACHE"):
        cache.kept("cuda", "key", write(""))
    (own_cache / place).chmod(0o700)
    cache.kept("cuda", "key", write(""))


def test_a_disk_from_which_no_code_is_loaded(own_cache, monkeypatch):
    real = os.statvfs(own_cache)
    monkeypatch.setattr(os, "statvfs", lambda path: os.statvfs_result((*real[:8], real.f_flag | os.ST_NOEXEC, real[9])))
    with pytest.raises(cache.CacheError, match="its disk is mounted noexec: set FLASHLAB_CACHE to a folder of another"):
        cache.kept("cuda", "key", write(""))


def test_a_full_disk(own_cache):
    def full(work):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(cache.CacheError, match=r"cannot be used \(No space left on device\): set FLASHLAB_CACHE"):
        cache.kept("cuda", "key", full)
    assert not list((own_cache / "cuda").iterdir())
