"""Tensors whose parts lie more than 2^31 elements apart: addresses in 32 bits wrap around and read wrong numbers."""

import torch
from drawn import DEVICE

from flashlab import runtime

NO_ROOM = not runtime.INTERPRETED and torch.cuda.get_device_properties(DEVICE).total_memory < 16 * 2**30
REASON = "a GPU has to have this memory; on the CPU an untouched page has none"


def far_apart(tensors, axis):
    """The same numbers, the third along an axis more than 2^31 elements behind the first; one buffer of 4 GB."""
    apart = 2**30 + 128
    buffer = torch.empty(2 * apart + 2**20, dtype=tensors[0].dtype, device=DEVICE)
    far = []
    for number, x in enumerate(tensors):
        strides = list(x.contiguous().stride())
        strides[axis] = apart
        far.append(buffer.as_strided(x.shape, strides, number * 2**16).copy_(x))
    return far
