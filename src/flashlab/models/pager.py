"""A pager: which pages of a pool hold the tokens of which sequence. It keeps numbers alone, no K and no V.

A cache that is one piece of memory per sequence reserves for the longest text that may come. A pager cuts the memory
into pages of a few tokens. A sequence takes a page when its last one is full: less than a page of each is unused.

    sequence 0, 6 tokens   pages 0, 1          page of 4 tokens: [0 1 2 3] [4 5 . .]
    sequence 1, a fork     pages 0, 1          the same pages: two sequences refer to each
    append to sequence 1   pages 0, 2          page 1 is shared and not full: it is copied to page 2, then written to

A page that is shared is never written to. A full one need not be; one that is part-filled is copied first by whichever
sequence appends (copy on write). A page returns to the pool when the last sequence that refers to it is freed.

Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023), arXiv
2309.06180, sections 4.2 to 4.4.
"""

from collections.abc import Iterable, Sequence

import torch


class OutOfPages(RuntimeError):
    """The pool has too few free pages. Nothing has been changed: free a sequence, and ask again."""


def pages_for(tokens: int, page_size: int) -> int:
    """How many pages so many tokens fill, the last one perhaps in part.

    Raises:
        ValueError: a page size below 1.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; a page has at least 1 token")
    return -(-tokens // page_size)


class Pager:
    """The pages of a pool, and the sequences that refer to them.

    Args:
        pages: how many there are in the pool. page_size: tokens per page.
    Attributes:
        references: [pages], how many sequences refer to each page.
    Raises:
        ValueError: fewer than one page, or than one token per page.
    """

    def __init__(self, pages: int, page_size: int) -> None:
        if pages < 1 or page_size < 1:
            raise ValueError(f"pages is {pages} and page_size is {page_size}; both must be at least 1")
        self.page_size = page_size
        self.references = [0] * pages
        self._free = list(range(pages))[::-1]  # a stack: page 0 is taken first, and the page freed last is taken next
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0

    @property
    def free_pages(self) -> int:
        """How many pages no sequence refers to."""
        return len(self._free)

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its tokens; token t is at t % page_size of page t // page_size."""
        self._check(sequence)
        return tuple(self._pages[sequence])

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        self._check(sequence)
        return self._lengths[sequence]

    def allocate(self) -> int:
        """Begin a sequence without tokens, which needs no page; return its number, which is never given twice."""
        return self._begin([], 0)

    def append(self, sequences: Sequence[int], counts: Sequence[int]) -> list[tuple[int, int]]:
        """Make room for counts[i] more tokens of sequences[i]: for all of them, or for none.

        Returns:
            Pairs (source, target): copy these pages of K and V, before anything is written.
        Raises:
            OutOfPages: the pool has too few free pages. ValueError: a sequence that is not there, or is named twice; a
            count below 0, or not one count for each sequence.
        """
        self._check(*sequences)
        if len(set(sequences)) < len(sequences) or len(sequences) != len(counts) or min(counts, default=0) < 0:
            raise ValueError(
                f"sequences is {list(sequences)} and counts is {list(counts)}; each sequence is named once, and has "
                "one count of at least 0"
            )
        leaving: dict[int, int] = {}  # how many of a page's sequences take a copy; the last that refers to it keeps it
        copying, fresh = [], 0
        for sequence, count in zip(sequences, counts, strict=True):
            pages, length = self._pages[sequence], self._lengths[sequence]
            fresh += pages_for(length + count, self.page_size) - len(pages)
            if count and length % self.page_size:
                last = pages[-1]
                if self.references[last] - leaving.get(last, 0) > 1:
                    leaving[last] = leaving.get(last, 0) + 1
                    copying.append(sequence)
        need = fresh + len(copying)
        if need > len(self._free):
            raise OutOfPages(
                f"{sum(counts)} tokens need {need} more {'page' if need == 1 else 'pages'} of {self.page_size} tokens, "
                f"and {len(self._free)} of {len(self.references)} are free: free a sequence, or make the pool larger"
            )
        copies = []
        for sequence in copying:
            source = self._pages[sequence][-1]
            self._pages[sequence][-1] = target = self._take()
            self.references[source] -= 1
            copies.append((source, target))
        for sequence, count in zip(sequences, counts, strict=True):
            self._lengths[sequence] += count
            pages = self._pages[sequence]
            pages.extend(self._take() for _ in range(pages_for(self._lengths[sequence], self.page_size) - len(pages)))
        return copies

    def fork(self, sequence: int) -> int:
        """Begin a sequence with the tokens of another, whose pages it shares; no page is taken or copied.

        Returns:
            The number of the new sequence.
        Raises:
            ValueError: a sequence that is not there.
        """
        self._check(sequence)
        for page in self._pages[sequence]:
            self.references[page] += 1
        return self._begin(self._pages[sequence], self._lengths[sequence])

    def free(self, sequence: int) -> None:
        """End a sequence. A page that no other sequence refers to returns to the pool.

        Raises:
            ValueError: a sequence that was freed before, or never began.
        """
        self._check(sequence)
        del self._lengths[sequence]
        for page in reversed(self._pages.pop(sequence)):
            self.references[page] -= 1
            if not self.references[page]:
                self._free.append(page)

    def tensors(
        self, sequences: Sequence[int], most_pages: int | None = None, device: torch.device | str | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What a kernel reads: the page table [batch, most_pages] and the lengths [batch], both int32.

        Args:
            sequences: one for each row. most_pages: the table's width; what the longest sequence has unless given.
        Returns:
            Entries of the table behind a sequence's last page are -1: no page, and never to be read.
        Raises:
            ValueError: a sequence that is not there, or one that has more than most_pages pages.
        """
        self._check(*sequences)
        longest = max((len(self._pages[sequence]) for sequence in sequences), default=0)
        width = longest if most_pages is None else most_pages
        if longest > width:
            raise ValueError(f"a sequence has {longest} pages, and the page table has room for {width}")
        rows = [self._pages[sequence] + [-1] * (width - len(self._pages[sequence])) for sequence in sequences]
        table = torch.tensor(rows, dtype=torch.int32).reshape(len(rows), width)
        lengths = torch.tensor([self._lengths[sequence] for sequence in sequences], dtype=torch.int32)
        return table.to(device), lengths.to(device)

    def _begin(self, pages: Iterable[int], length: int) -> int:
        sequence, self._next = self._next, self._next + 1
        self._pages[sequence], self._lengths[sequence] = list(pages), length
        return sequence

    def _take(self) -> int:
        page = self._free.pop()
        self.references[page] = 1
        return page

    def _check(self, *sequences: int) -> None:
        for sequence in sequences:
            if sequence not in self._pages:
                ended = isinstance(sequence, int) and 0 <= sequence < self._next
                raise ValueError(f"sequence {sequence} {'was freed already' if ended else 'was never allocated'}")
