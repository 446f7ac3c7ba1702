"""A rank of the test on several GPUs: every way and backend against the formula, in 16 bits and float32.

torchrun --nproc-per-node 2 tests/distributed/on_gpus.py          NCCL on GPUs, gloo where there are none
... on_gpus.py few                                                 small sizes
"""

import sys
import time
from functools import partial

import torch
from ranks import both_passes, formula

import flashlab
from flashlab.distributed import (
    LAYOUTS,
    all_gather_attention,
    ring_attention,
    shard,
    start,
    ulysses_attention,
)


def cases(world, few):
    """(name, function, layout, causal, backend, dtype, documents, heads of a mesh)."""
    n = 32 * world if few else 1024 * world
    low = torch.bfloat16
    for layout in LAYOUTS[1:2] if few else LAYOUTS:
        for causal in (False, True):
            yield f"ring {layout}", ring_attention, layout, causal, "auto", low, (n,), 1
            if not few:
                yield f"ring {layout}", ring_attention, layout, causal, "triton", torch.float16, (n,), 1
    yield "ring, PyTorch", ring_attention, "zigzag", True, "torch", torch.float32, (n,), 1
    yield "ring of documents", ring_attention, "zigzag", True, "auto", low, (n // 4, n // 2, n // 4), 1
    yield "gather", all_gather_attention, "zigzag", True, "auto", low, (n,), 1
    yield "ulysses", ulysses_attention, "contiguous", True, "auto", low, (n,), 1
    for heads in range(2, world + 1):
        if world % heads == 0 and 8 % heads == 0:
            yield f"mesh {world // heads} x {heads}", None, "zigzag", True, "auto", low, (n,), heads


def passes(q, k, v, grad_o, attention):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    o = attention(q, k, v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), grad_o)


def main(few):
    link = start(timeout=120)
    wrong = 0
    for name, function, layout, causal, backend, dtype, documents, heads in cases(link.world, few):
        began, n = time.perf_counter(), sum(documents)
        g = torch.Generator().manual_seed(0)  # the same on every rank
        whole = [torch.randn(1, h, n, 64, generator=g).to(dtype).to(link.device) for h in (16, 8, 8, 16)]
        cut = dict(layout=layout, documents=None if len(documents) == 1 else documents, heads=heads)
        mine = [shard(x, link.rank, link.world, **cut) for x in whole]
        options = dict(causal=causal, layout=layout, backend=backend)
        if len(documents) > 1:
            options["documents"] = documents
        found, _ = both_passes(link, *mine, function, options, heads)
        by_document = zip(*(x.split(list(documents), 2) for x in whole), strict=True)
        alone = partial(flashlab.flash_attention, causal=causal, backend=backend)
        one = [torch.cat(x, 2) for x in zip(*(passes(*part, alone) for part in by_document), strict=True)]
        said = []
        want = formula(*whole, causal, documents)
        for what, mine_, right, alone in zip(("o", "dq", "dk", "dv"), found, want, one, strict=True):
            right, alone = (shard(x.double(), link.rank, link.world, **cut) for x in (right, alone))
            far, near = ((x.double() - right).abs().max().item() for x in (mine_, alone))
            # A NaN is not. In 16 bits a rank's parts of a gradient are rounded, one per block, and then their sum
            fine = far <= (2 if what == "o" or dtype == torch.float32 else 3) * near + 1e-5
            wrong += not fine
            said.append(f"{what} {far:.1e} ({near:.1e} on one){'' if fine else ' WRONG'}")
        said.append("ok" if not wrong else "wrong")
        if link.rank == 0 or wrong:
            took = time.perf_counter() - began
            which = f"{name}, {'causal' if causal else 'full'}, {dtype}"
            print(f"rank {link.rank}: {which}: {', '.join(said)}, {took:.1f} s", flush=True)
    torch.distributed.destroy_process_group()
    if wrong:
        raise SystemExit(1)
    print("all cases right", flush=True)


if __name__ == "__main__":
    main("few" in sys.argv[1:])
