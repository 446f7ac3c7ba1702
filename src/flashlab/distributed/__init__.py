"""One sequence over many GPUs, on torch.distributed: NCCL, or gloo on CPUs, with processes or threads as ranks.

layout      who has which tokens: contiguous, zigzag, striped; packed documents
link        a rank's place among the others, and what it may ask of them
threads     ranks as threads of one process, for a notebook
parts       one block by any kernel of the door, and the merge
ring        ring attention, forward and backward
gather      all keys on every rank
ulysses     heads exchanged for tokens; the mesh of both
scaling     what each way sends, holds and waits for, by formula; a simulation of many GPUs
train       a language model whose sequence lies on all ranks

    link = start()                                              # under torchrun
    q, k, v = (shard(x, link.rank, link.world) for x in (q, k, v))
    o = ring_attention(q, k, v, causal=True)
"""

from flashlab.distributed.gather import all_gather_attention
from flashlab.distributed.layout import LAYOUTS, positions, shard, unshard
from flashlab.distributed.link import Link, RankLost, connect, start
from flashlab.distributed.ring import ring_attention
from flashlab.distributed.threads import RanksFailed, run
from flashlab.distributed.ulysses import mesh_attention, ulysses_attention
