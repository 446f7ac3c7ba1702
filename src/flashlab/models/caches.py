"""Three caches of keys and values, for a model that writes one token after the other; and what each reserves.

    dense     K and V are concatenated with those of the new tokens: a new tensor, and a copy of all, in every step
    static    one tensor with room for the longest text: nothing is copied, and most of it may stay empty
    paged     pages of a few tokens, which a pager hands out: less than a page per sequence stays empty

A step goes the same way through each of them:

    cache.reserve(counts)            on the host: room for the new tokens; lengths and page table are written
    cache.write(layer, k, v)         on the device, for each layer
    attend(q, *cache.read(layer))    likewise; attend = attention_of(cache, new, backend), once a step

`write` and `read` of a static and of a paged cache look at tensors on the device alone, and these stay where they are.
So a step may be captured in a CUDA graph, and replayed after each `reserve`.

Sources: Pope et al., "Efficiently Scaling Transformer Inference" (2022), arXiv 2211.05102, for the cache; Kwon et al.,
"Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), arXiv 2309.06180, for pages,
and for memory that is reserved against memory that is used.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch.nn import functional as F

from flashlab.attention.cache_door import decode_reference, flash_attention_with_cache
from flashlab.attention.inputs import one_of
from flashlab.models.language_model import Config
from flashlab.models.pager import Pager, pages_for

CACHES = ("dense", "static", "paged")


def attention_of(cache: "StaticCache", new: int, backend: str) -> Callable[..., torch.Tensor]:
    """What gives o of (q, *cache.read(layer)) for the last `new` tokens of each sequence, in every layer of one step.

    q, o: [batch, heads, new, head_dim]. backend: of `flashlab.flash_attention_with_cache`; or "sdpa", PyTorch's, which
    reads all that there is room for, under a mask. A query that sees no key gives 0.
    """
    if backend == "sdpa":
        if cache.page_table is not None:
            raise ValueError("backend is 'sdpa', which cannot follow a page table; take a dense or a static cache")
        columns = torch.arange(cache.capacity, device=cache.lengths.device)
        mask = (columns <= cache.positions(new)[:, :, None])[:, None]  # [batch, 1, new, capacity]
        return lambda q, k, v, *others: F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, enable_gqa=q.shape[1] != k.shape[1]
        )
    if backend == "reference" or (backend == "auto" and cache.lengths.device.type == "cpu"):  # its places are right
        options = dict(left=None, softcap=None, new=0)
        return lambda q, *kept: decode_reference(q, *kept, scale=q.shape[-1] ** -0.5, **options)[0]  # type: ignore[arg-type]
    return lambda q, *kept: flash_attention_with_cache(q, *kept, backend=backend)  # type: ignore[return-value]


class StaticCache:
    """K and V of every layer with room for `capacity` tokens of each sequence.

    Args:
        config: of the model. batch: sequences. capacity: the most tokens of one.
        dtype: of K and V. device: where they are.
    Attributes:
        k, v: for each layer [batch, kv_heads, capacity, head_dim].
        lengths: [batch], int32, on the device: the tokens of each sequence, those that are reserved among them.
        page_table: None; a paged cache has one.
    """

    page_table: torch.Tensor | None = None

    def __init__(
        self, config: Config, batch: int, capacity: int, *,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        shape = (batch, config.key_heads, capacity, config.head_dim)
        self.k, self.v = (  # SDPA multiplies what its mask hides by 0, so that it may be no NaN
            [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.depth)] for _ in "kv"
        )
        self.capacity, self.tokens = capacity, [0] * batch
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self._new: tuple[torch.Tensor, torch.Tensor] | None = None

    def reserve(self, counts: Sequence[int]) -> None:
        """Make room for counts[b] more tokens of sequence b: for all of them, or for none.

        Raises:
            ValueError: more tokens than there is room for; not one count for each sequence.
            flashlab.models.pager.OutOfPages: the pool of a paged cache has too few free pages.
        """
        batch = len(self.tokens)
        if len(counts) != batch or min(counts, default=0) < 0:
            raise ValueError(f"counts is {list(counts)}; each of the {batch} sequences has one count of at least 0")
        tokens = [old + more for old, more in zip(self.tokens, counts, strict=True)]
        self._make_room(counts, max(tokens, default=0))
        self._count(counts)
        self.tokens = tokens
        self.lengths.copy_(torch.tensor(tokens, dtype=torch.int32))

    def positions(self, new: int) -> torch.Tensor:
        """[batch, new], int64: where the last `new` tokens of each sequence stand; below 0 where it has fewer."""
        return self.lengths.long()[:, None] - new + torch.arange(new, device=self.lengths.device)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write the tokens that were reserved last into a layer.

        Args:
            k, v: [batch, kv_heads, new, head_dim]. Of each sequence the last counts[b] rows are written: where the
                counts differ, shorter pieces are filled up in front.
        """
        if self._new is None:
            k, v = (x.to(self.k[layer].dtype) for x in (k, v))
            kernel = "triton" if k.is_cuda else "reference"
            torch.ops.flashlab.append_to_cache(
                self.k[layer], self.v[layer], k, v, self.lengths - k.shape[2], self.page_table, kernel
            )
            return
        rows, columns = self._new
        first, second = self._place(rows, self.positions(k.shape[2])[rows, columns])
        for cache, x in ((self.k[layer], k), (self.v[layer], v)):
            cache[first, :, second] = x[rows, :, columns].to(cache.dtype)

    def read(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(k_cache, v_cache, lengths, page_table) of a layer, as `attend` takes them behind q."""
        return self.k[layer], self.v[layer], self.lengths, self.page_table

    def _make_room(self, counts: Sequence[int], longest: int) -> None:
        """Change nothing and raise where there is no room; `longest` is the most tokens of a sequence afterwards."""
        if longest > self.capacity:
            raise ValueError(f"a sequence would have {longest} tokens; this cache has room for {self.capacity}")

    def _count(self, counts: Sequence[int]) -> None:
        """Note which of the next rows are real where the counts differ; else the device needs no note."""
        new, self._new = max(counts, default=0), None
        if any(count != new for count in counts):
            real = torch.tensor([[column >= new - count for column in range(new)] for count in counts])
            rows, columns = real.nonzero(as_tuple=True)
            self._new = rows.to(self.lengths.device), columns.to(self.lengths.device)

    def _place(self, rows: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the third index in K and V of the tokens at these positions."""
        return rows, at


class DenseCache(StaticCache):
    """K and V as large as the longest sequence: a layer's tensors are concatenated with room for the new tokens.

    Arguments as `StaticCache`, without a capacity.
    """

    def __init__(
        self, config: Config, batch: int, *,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, batch, 0, dtype=dtype, device=device)

    def _make_room(self, counts: Sequence[int], longest: int) -> None:
        self.capacity = max(self.capacity, longest)

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """As `StaticCache.write`, into new tensors."""
        for caches in (self.k, self.v):
            old = caches[layer]
            batch, heads, there, head_dim = old.shape
            caches[layer] = torch.cat([old, old.new_zeros(batch, heads, self.capacity - there, head_dim)], dim=2)
        super().write(layer, k, v)


class PagedCache(StaticCache):
    """K and V of every layer in pages, handed out by a pager; the layers share its page table.

    Args:
        config, batch, dtype, device: as `StaticCache`.
        pages: of the pool, in each layer. page_size: tokens per page.
        capacity: the most tokens of one sequence, for the width of the table; the model's positions unless given.
    Attributes:
        k, v: for each layer [pages, kv_heads, page_size, head_dim].
        pager: the `Pager`. sequences: its number of each row of the batch.
        page_table: [batch, most_pages], int32, on the device; -1 behind a sequence's last page.
    """

    page_table: torch.Tensor

    def __init__(
        self, config: Config, batch: int, pages: int, page_size: int = 16, *, capacity: int | None = None,
        dtype: torch.dtype = torch.float32, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, pages, page_size, dtype=dtype, device=device)  # a page lies as a sequence does there
        self.pager = Pager(pages, page_size)
        self.capacity = config.positions if capacity is None else capacity
        self.sequences: list[int] = []
        self.follow([self.pager.allocate() for _ in range(batch)])

    def follow(self, sequences: Sequence[int]) -> None:
        """Let the batch be these sequences of the pager: forks, new ones, without those that have ended.

        The tensors on the device stay where they are if the batch is as large as before.
        Raises:
            ValueError: a sequence that is not there.
        """
        table, lengths = self._tensors(sequences)
        if self.sequences and len(sequences) == len(self.sequences):
            self.page_table.copy_(table)
            self.lengths.copy_(lengths)
        else:
            self.page_table, self.lengths = table, lengths
        self.sequences = list(sequences)
        self.tokens = [self.pager.length(sequence) for sequence in sequences]

    def _make_room(self, counts: Sequence[int], longest: int) -> None:
        """A page that is shared and part-filled is copied here, in every layer."""
        super()._make_room(counts, longest)
        free = self.pager.free_pages
        copies = self.pager.append(self.sequences, counts)
        if copies:
            source, target = torch.tensor(copies, device=self.lengths.device).T
            for cache in (*self.k, *self.v):
                cache[target] = cache[source]
        if self.pager.free_pages < free:
            self.page_table.copy_(self._tensors(self.sequences)[0])

    def _tensors(self, sequences: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        return self.pager.tensors(sequences, pages_for(self.capacity, self.pager.page_size), self.lengths.device)

    def _place(self, rows: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        page_size = self.pager.page_size
        return self.page_table[rows, at // page_size].long(), at % page_size


class CacheMemory(NamedTuple):
    """Bytes of a cache: what it holds of memory, K and V of the tokens that are there, and the page table."""

    reserved: int
    used: int
    table: int

    @property
    def share(self) -> float:
        """The part of what is reserved that is used; 1 where nothing is reserved."""
        return self.used / self.reserved if self.reserved else 1.0


def cache_memory(
    config: Config, lengths: Sequence[int], kind: str, *,
    capacity: int | None = None, page_size: int = 16, itemsize: int = 2,
) -> CacheMemory:  # fmt: skip
    """Bytes that a cache of sequences of these lengths reserves, in all layers, and how many it uses.

    A dense cache, while it grows, has one layer's K or V twice for a moment; that is left out. So are pages of the pool
    that no sequence refers to, because any sequence may take them.

    Args:
        lengths: tokens of each sequence. kind: "dense", "static" or "paged".
        capacity: of a static cache, and for the width of a page table; the model's positions unless given.
        page_size: tokens per page. itemsize: bytes per element.
    Raises:
        ValueError: another kind; a length that is negative, or over the capacity; a page size below 1.
    """
    capacity = config.positions if capacity is None else capacity
    if kind not in CACHES:
        raise ValueError(f"kind is {kind!r}; it must be {one_of([repr(name) for name in CACHES])}")
    shortest, longest = min(lengths, default=0), max(lengths, default=0)
    if shortest < 0 or longest > capacity:
        raise ValueError(f"lengths go from {shortest} to {longest}; each is 0 to the capacity, {capacity}")
    token = 2 * config.depth * config.key_heads * config.head_dim * itemsize
    reserved = {
        "dense": len(lengths) * longest,
        "static": len(lengths) * capacity,
        "paged": sum(pages_for(length, page_size) for length in lengths) * page_size,
    }[kind]
    table = len(lengths) * pages_for(capacity, page_size) * 4 if kind == "paged" else 0
    return CacheMemory(reserved * token, sum(lengths) * token, table)
