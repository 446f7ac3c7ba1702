"""Sequences in a cache for the tests of decoding, and what attention over them should give."""

import torch
from drawn import DEVICE

from flashlab.check.training import wanted, worst

FLOAT32 = torch.float32
NAN = float("nan")


class Sequences:
    """Sequences of some lengths, and their keys in shuffled pages (page None: in a whole cache); all else is NaN."""

    def __init__(self, lengths, *, group=2, kv_heads=2, head_dim=16, page=16, queries=1, dtype=FLOAT32, spare=1):
        g = torch.Generator().manual_seed(0)
        batch = len(lengths)

        def draw(heads, rows):
            return torch.randn(1, heads, rows, head_dim, generator=g).to(DEVICE, dtype)

        self.q = torch.cat([draw(kv_heads * group, queries) for _ in lengths])
        self.k, self.v = ([draw(kv_heads, n) for n in lengths] for _ in "kv")
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        longest = max([*lengths, 1])
        self.table, pages, rows = None, batch, longest + spare
        if page is not None:
            width, rows = -(-longest // page) + spare, page
            pages = batch * width + 2
            self.table = (
                torch.randperm(pages, generator=g)[: batch * width].reshape(batch, width).to(DEVICE, torch.int32)
            )
        shape = (pages, kv_heads, rows, head_dim)
        self.k_cache, self.v_cache = (torch.full(shape, NAN, dtype=dtype, device=DEVICE) for _ in "kv")
        for i, n in enumerate(lengths):
            for cache, x in ((self.k_cache, self.k[i]), (self.v_cache, self.v[i])):
                self.write(cache, i, range(n), x)
                if self.table is not None:
                    self.table[i, -(-n // page) :] = -7  # a page that no key needs may be anything

    def write(self, cache, i, places, x):
        j = torch.tensor(places, dtype=torch.long, device=DEVICE)
        page, slot = torch.full_like(j, i), j
        if self.table is not None:
            page, slot = self.table[i, j // cache.shape[2]].long(), j % cache.shape[2]
        cache[page, :, slot] = x[0].transpose(0, 1)

    @property
    def given(self):
        return self.q, self.k_cache, self.v_cache, self.lengths, self.table

    def expect(self, o, lse=None, **options):
        assert o.dtype == self.q.dtype and o.shape == self.q.shape and (lse is None or lse.dtype == FLOAT32)
        for i, (k, v) in enumerate(zip(self.k, self.v, strict=True)):
            found = wanted(self.q[i : i + 1], k, v, causal=True, **options)
            name, error = worst(found, o=o[i : i + 1], **({} if lse is None else {"lse": lse[i : i + 1]}))
            assert error <= 1, f"{name} of sequence {i} is off by {error:.3g} times its bound"
