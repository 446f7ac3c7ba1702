"""Ranks that differ, that die, that never come: a sentence on every rank, within seconds."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from ranks import inputs

import flashlab
from flashlab.distributed import (
    RankLost,
    RanksFailed,
    all_gather_attention,
    connect,
    mesh_attention,
    ring_attention,
    run,
    start,
    ulysses_attention,
)

X = inputs(16, kv_heads=4, dtype=torch.float32)[0]


def each(world, function, *of_ranks, timeout=600):
    """The error of each rank."""
    with pytest.raises((RanksFailed, ValueError, TypeError, RankLost)) as caught:
        run(world, function, *of_ranks, timeout=timeout)
    error = caught.value
    return error.errors if isinstance(error, RanksFailed) else dict.fromkeys(range(world), error)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda link: ring_attention(X, X[:, :, :8], X[:, :, :8], group=link), "q has 16 rows and k has 8"),
        (lambda link: ring_attention(X[:, :, :3], X[:, :, :3], X[:, :, :3], group=link), "cuts it into 6 equal pieces"),
        (lambda link: ring_attention(X, X, X, group=link, documents=(40, 8)), "document 0 has 40 tokens"),
        (lambda link: ring_attention(X, X, X, group=link, window=4), "its layouts balance a causal mask or none"),
        (lambda link: ring_attention(X, X, X, group=link, is_causal=True), "say causal="),
        (lambda link: ring_attention(X, X, X, group=link, causal=1), "causal is 1"),
        (lambda link: ring_attention(X, X, X, group=link, layout="stripes"), "layout is 'stripes'"),
        (lambda link: ring_attention(X, X, X, group=link, backend="triton2"), "backend is 'triton2'"),
        (lambda link: all_gather_attention(X, X, X, group=link, layout="striped", causal=True), "no run of the"),
        (lambda link: ulysses_attention(X, X, X, group=link), "q has 4 heads, which 3 ranks do not share evenly"),
        (lambda link: link.split(2), "3 ranks form no mesh with groups of 2"),
        (lambda link: mesh_attention(X, X, X, mesh=link.split(3)), "q has 4 heads, which 3 ranks do not share evenly"),
    ],
)
def test_what_is_wrong_on_all_ranks_is_said_on_all(function, words):
    errors = each(3, function)
    assert len(errors) == 3 and all(words in str(error) for error in errors.values()), errors


def penalty(function):
    """A gradient of a gradient's square; the first has no grad_fn by itself: the loss is linear in o."""

    def rank(link):
        x = X.clone().requires_grad_()
        o = function(x, x, x, group=link)
        (first,) = torch.autograd.grad(o.sum(), x, create_graph=True)
        assert first.requires_grad
        (o.sum() + first.square().sum()).backward()

    return rank


def dual(function):
    def rank(link):
        with forward_ad.dual_level():
            function(forward_ad.make_dual(X, X), X, X, group=link)

    return rank


@pytest.mark.parametrize("function", [ring_attention, all_gather_attention, ulysses_attention])
def test_derivatives_that_there_are_not_are_refused(function):
    """Forward mode is tried with one rank: PyTorch has one level of it for all threads."""
    for world, rank, words in ((2, penalty(function), "no second deriv"), (1, dual(function), "no forward-mode deriv")):
        with pytest.raises((RanksFailed, NotImplementedError), match=words) as caught:
            run(world, rank)
        errors = caught.value.errors.values() if isinstance(caught.value, RanksFailed) else [caught.value]
        assert all(isinstance(error, NotImplementedError) for error in errors)


def test_ranks_that_differ_are_told_which_and_how():
    rows = [X, X, X[:, :, :8]]
    errors = each(3, lambda link, x: ring_attention(x, x, x, group=link), rows)
    assert len(errors) == 3
    for error in errors.values():
        assert "rank 0 has q [1, 4, 16, 8]" in str(error) and "rank 2 q [1, 4, 8, 8]" in str(error)
    layouts = ["zigzag", "zigzag", "striped"]
    errors = each(3, lambda link, layout: ring_attention(X, X, X, group=link, layout=layout), layouts)
    assert all("rank 2 q" in str(error) and "'striped'" in str(error) for error in errors.values())


def test_a_rank_that_dies_ends_all_with_a_sentence():
    def rank(link):
        ring_attention(X, X, X, group=link)
        if link.rank == 2:
            raise KeyError("the disk is full")
        for _ in range(3):
            ring_attention(X, X, X, group=link)

    errors = each(4, rank, timeout=600)
    assert isinstance(errors.pop(2), KeyError) and set(errors) == {0, 1, 3}
    assert all(isinstance(error, RankLost) and "in vain" in str(error) for error in errors.values())


def test_a_rank_that_never_comes_is_waited_for_no_longer_than_was_said():
    gone = threading.Event()

    def rank(link):
        if link.rank == 1:
            gone.wait(30)
            return
        try:
            ring_attention(X, X, X, group=link)
        finally:
            gone.set()

    errors = each(2, rank, timeout=1)
    assert isinstance(errors[0], RankLost) and "has not answered within 1 s" in str(errors[0])


def test_what_run_says_names_the_first_cause():
    def rank(link):
        if link.rank == 1:
            raise KeyError("lost")
        ring_attention(X, X, X, group=link)

    with pytest.raises(RanksFailed, match="rank 1 of 2 ended with KeyError: 'lost'; 1 more could not go on"):
        run(2, rank)
    with pytest.raises(ValueError, match="there are 3 ranks, and an argument has 2 elements"):
        run(3, rank, [1, 2])


def test_without_ranks_it_is_said_how_to_start_them(monkeypatch):
    with pytest.raises(RuntimeError, match="torchrun --nproc-per-node"):
        ring_attention(X, X, X)
    with pytest.raises(TypeError, match="group is a str"):
        connect("all")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match="RANK.* not set: start the ranks with `torchrun"):
        start()


KILLED = """
import os, signal, torch
from flashlab.distributed import RankLost, ring_attention, start
link = start(timeout=600)
x = torch.randn(1, 2, 16, 8)
ring_attention(x, x, x)
if link.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    for _ in range(3):
        ring_attention(x, x, x)
except RankLost as error:
    print(error)
"""


def processes(world, *arguments):
    """Ranks as processes, as torchrun starts them; what each printed, and its exit status."""
    root = str(Path(flashlab.__file__).parents[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world), "PYTHONPATH": root,
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # fmt: skip
    started = [
        subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                         env=os.environ | more | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in range(world)
    ]  # fmt: skip
    return [(*p.communicate(), p.returncode) for p in started]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_the_others():
    (said, err, code), (_, _, killed) = processes(2, "-c", KILLED)
    assert killed == -signal.SIGKILL and code == 0, err
    assert "rank 0 of 2 waited for rank 1" in said and "a rank has ended" in said


@pytest.mark.long
def test_the_training_program_has_the_same_losses_on_two_processes():
    arguments = ("-m", "flashlab.distributed.train", "--steps", "3", "--seq-len", "64", "--check")
    (said, err, code), (silent, _, other) = processes(2, *arguments)
    assert code == other == 0 and not silent, err
    assert said.count("step ") == 3 and "2 ranks and one: losses differ by at most" in said


@pytest.mark.long
def test_the_cases_of_the_gpus_run_here_too():
    """tests/distributed/on_gpus.py is what `pytest -m multi_gpu` starts on GPUs: here with gloo, and fewer cases."""
    (said, err, code), (_, _, other) = processes(2, str(Path(__file__).with_name("on_gpus.py")), "few")
    assert code == other == 0, err + said
    assert said.count(" ok") >= 5 and "all cases right" in said
