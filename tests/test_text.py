"""Tokens cut into windows, and documents packed into blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wide
from wide.errors import UsageError
from wide.job.reach import reach
from wide.job.stream import Stream


def shown(samples):
    return [(inputs.tolist(), targets.tolist()) for inputs, targets in samples]


@pytest.mark.parametrize(
    "tokens",
    [
        torch.arange(10),
        torch.arange(10, dtype=torch.uint8),
        np.arange(10, dtype=np.uint16),
        np.arange(10, dtype=">u4"),
        list(range(10)),
    ],
    ids=["int64", "uint8", "uint16", "big-endian", "a list"],
)
def test_windows_lie_one_behind_the_other_and_targets_are_the_next_tokens(tokens):
    windows = wide.text.blocks(tokens, 3)
    expected = [([0, 1, 2], [1, 2, 3]), ([3, 4, 5], [4, 5, 6]), ([6, 7, 8], [7, 8, 9])]
    assert shown(windows[i] for i in range(len(windows))) == expected
    assert shown(windows.__getitems__([2, 0])) == [expected[2], expected[0]]
    assert windows[0][0].dtype == torch.int64
    with pytest.raises(IndexError):
        windows[3]


def test_a_memory_mapped_file_is_not_copied_and_nobody_takes_it_for_state(tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="r")
    windows = wide.text.blocks(mapped, 9)
    assert np.shares_memory(windows._tokens[0], mapped)
    assert not [place for place in reach(dataset=windows).places if isinstance(place.get(), np.ndarray)]
    memory = torch.arange(100)
    assert np.shares_memory(wide.text.blocks(memory, 9)._tokens[0], memory.numpy())


@pytest.mark.parametrize(
    ("tokens", "length", "words"),
    [
        (torch.arange(4), 4, "4 tokens make no window of 4"),
        (torch.arange(4), 0, "length is a whole number of at least 1, got 0"),
        (torch.zeros(4), 2, "these are float32 of shape (4,)"),
        (torch.zeros(4, 4, dtype=torch.int64), 2, "these are int64 of shape (4, 4)"),
    ],
)
def test_what_is_no_row_of_tokens_is_said(tokens, length, words):
    with pytest.raises(UsageError) as error:
        wide.text.blocks(tokens, length)
    assert words in str(error.value)


@given(st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=8), st.integers(1, 6))
def test_blocks_are_the_documents_in_a_row(documents, length):
    row = [token for document in documents for token in [*document, 0]]
    expected = [(row[i : i + length], row[i + 1 : i + length + 1]) for i in range(0, len(row) - length, length)]
    data = wide.text.packed(documents, length, 0)
    assert shown(data) == expected
    assert shown(data) == expected, "another pass begins anew"
    assert shown(wide.text.packed(lambda: iter(documents), length, 0)) == expected


class Counting:
    """Documents with a state of their own."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        while self.at < 20:
            self.at += 1
            yield [self.at] * (self.at % 7)
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Numbered(list):
    """Notes which ones were looked up."""

    def __init__(self, items):
        super().__init__(items)
        self.asked = []

    def __getitem__(self, index):
        self.asked.append(index)
        return super().__getitem__(index)


@pytest.mark.parametrize("make", [Counting, lambda: [[i] * (i % 7) for i in range(1, 21)]], ids=["state", "numbers"])
@pytest.mark.parametrize("until", [1, 4, 10])
def test_a_stream_goes_on_in_the_middle_of_a_document_as_if_nothing_had_been(make, until):
    through = Stream(wide.text.packed(make(), 3, None), seed=0)
    before = Stream(wide.text.packed(make(), 3, None), seed=0)
    before.fetch(0, until)
    after = Stream(wide.text.packed(make(), 3, None), seed=0)
    assert after.go_on_from(until, before.state(until)) == 0, "nothing is read again"
    assert shown(after.fetch(until, 40)) == shown(through.fetch(0, 40))[until:]


def test_documents_with_numbers_are_not_looked_up_again():
    documents = Numbered([[i] * 3 for i in range(20)])
    data = wide.text.packed(documents, 3, None)
    data.load_state_dict({"read": 15, "rest": [14], "documents": None})
    assert len(list(data)) == 5
    assert documents.asked == list(range(15, 20))


def test_documents_that_can_only_be_read_have_no_state():
    data = wide.text.packed(([i] for i in range(3)), 2, 0)
    assert not hasattr(data, "state_dict")


@pytest.mark.parametrize(
    ("documents", "end", "words"),
    [
        ("some text", 0, "documents are lists of tokens, got str"),
        (3, 0, "documents are lists of tokens, got int"),
        ([[1, 2]], "<end>", "end is a token, a whole number, or None, got '<end>'"),
        ([[1, 2], "text"], 0, "document 1 is no list of tokens, but str"),
        ([[1, 2], [1, 2.5]], 0, "document 1 has 2.5, which is no token"),
    ],
)
def test_what_are_no_documents_is_said(documents, end, words):
    with pytest.raises(UsageError) as error:
        list(wide.text.packed(documents, 2, end))
    assert words in str(error.value)
