"""The pager against a plain dict of lists, whatever the order of its operations; and by hand."""

from collections import Counter

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from flashlab.models.pager import OutOfPages, Pager, pages_for


class Paged(RuleBasedStateMachine):
    """`said` is what each sequence holds; `memory` holds it in pages, written where the pager says."""

    @initialize(pages=st.integers(1, 12), page_size=st.integers(1, 4))
    def build(self, pages, page_size):
        self.pager, self.page_size, self.pages = Pager(pages, page_size), page_size, pages
        self.memory = [[-1] * page_size for _ in range(pages)]
        self.said, self.freed, self.token = {}, [], 0

    def one(self, data):
        return data.draw(st.sampled_from(sorted(self.said)))

    def state(self):
        return {s: (self.pager.pages(s), self.pager.length(s)) for s in self.said}, list(self.pager.references)

    @rule()
    def allocate(self):
        sequence = self.pager.allocate()
        assert sequence not in self.said and sequence not in self.freed
        self.said[sequence] = []

    @precondition(lambda self: self.said)
    @rule(data=st.data(), everyone=st.booleans())
    def append(self, data, everyone):
        some = sorted(self.said)
        some = some if everyone else data.draw(st.lists(st.sampled_from(some), unique=True, min_size=1, max_size=4))
        counts = data.draw(st.lists(st.integers(0, 6), min_size=len(some), max_size=len(some)))
        before, needed = self.state(), self.needed(some, counts)
        try:
            copies = self.pager.append(some, counts)
        except OutOfPages:
            assert self.state() == before and needed > self.pages
            return
        assert self.pages - self.pager.free_pages == needed  # and none more
        for source, target in copies:
            self.memory[target] = list(self.memory[source])
        for sequence, count in zip(some, counts, strict=True):
            for _ in range(count):
                at, self.token = len(self.said[sequence]), self.token + 1
                page = self.pager.pages(sequence)[at // self.page_size]
                self.memory[page][at % self.page_size] = self.token
                self.said[sequence].append(self.token)

    def needed(self, some, counts):
        """How many pages are in use after the append: each sequence that appends to a shared page ends with its own."""
        pages, more = set(), dict(zip(some, counts, strict=True))
        for sequence, tokens in self.said.items():
            held = list(self.pager.pages(sequence))
            if more.get(sequence) and len(tokens) % self.page_size:
                held[-1] = ("its last", sequence) if self.pager.references[held[-1]] > 1 else held[-1]
            total = pages_for(len(tokens) + more.get(sequence, 0), self.page_size)
            pages.update(held, (("new", sequence, n) for n in range(total - len(held))))
        return len(pages)

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def fork(self, data):
        sequence, free = self.one(data), self.pager.free_pages
        self.said[self.pager.fork(sequence)] = list(self.said[sequence])
        assert self.pager.free_pages == free

    @precondition(lambda self: self.said)
    @rule(data=st.data())
    def free(self, data):
        sequence = self.one(data)
        self.pager.free(sequence)
        del self.said[sequence]
        self.freed.append(sequence)

    @precondition(lambda self: self.freed)
    @rule(data=st.data())
    def free_twice(self, data):
        before, sequence = self.state(), data.draw(st.sampled_from(self.freed))
        with pytest.raises(ValueError, match=f"sequence {sequence} was freed already"):
            self.pager.free(sequence)
        assert self.state() == before

    @invariant()
    def every_sequence_reads_what_it_was_told(self):
        table, lengths = self.pager.tensors(list(self.said))
        assert lengths.tolist() == [len(tokens) for tokens in self.said.values()]
        for row, tokens in zip(table.tolist(), self.said.values(), strict=True):
            assert [self.memory[row[t // self.page_size]][t % self.page_size] for t in range(len(tokens))] == tokens
            assert set(row[pages_for(len(tokens), self.page_size) :]) <= {-1}

    @invariant()
    def no_page_is_lost(self):
        held = Counter(page for sequence in self.said for page in self.pager.pages(sequence))
        assert self.pager.references == [held[page] for page in range(self.pages)]
        assert self.pager.free_pages == self.pages - len(held)

    def teardown(self):
        for sequence in list(getattr(self, "said", ())):
            self.pager.free(sequence)
        assert not hasattr(self, "pager") or self.pager.free_pages == self.pages


Paged.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestAgainstADictOfLists = Paged.TestCase


def test_the_tensors_are_what_a_kernel_reads():
    pager = Pager(8, 2)
    long, empty = pager.allocate(), pager.allocate()
    pager.append([long], [5])
    table, lengths = pager.tensors([empty, long], 4)
    assert table.dtype == lengths.dtype == torch.int32
    assert table.tolist() == [[-1, -1, -1, -1], [0, 1, 2, -1]] and lengths.tolist() == [0, 5]
    assert pager.tensors([])[0].shape == (0, 0) and pager.tensors([empty])[0].shape == (1, 0)


def test_it_refuses():
    pager = Pager(2, 4)
    one = pager.allocate()
    pager.append([one], [5])
    for act, sentence in (
        (lambda: Pager(0, 4), "pages is 0 and page_size is 4; both must be at least 1"),
        (lambda: pager.length(7), "sequence 7 was never allocated"),
        (lambda: pager.pages(-1), "sequence -1 was never allocated"),
        (lambda: pager.append([one, one], [1, 1]), r"sequences is \[0, 0\] and counts is \[1, 1\]; each sequence is"),
        (lambda: pager.append([one], [-1]), "one count of at least 0"),
        (lambda: pager.append([one], []), "one count of at least 0"),
        (lambda: pager.tensors([one], 1), "a sequence has 2 pages, and the page table has room for 1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            act()
    with pytest.raises(OutOfPages, match="4 tokens need 1 more page of 4 tokens, and 0 of 2 are free: free a"):
        pager.append([one], [4])
    assert pager.append([one], [3]) == [] and pager.length(one) == 8
