"""Data sets for language models: tokens cut into windows, documents packed into blocks. Knows numbers of tokens; where
they come from, and what they mean, is the user's business.

A sample is (inputs, targets), two int64 tensors of one length: what is to be predicted is the next token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset

from wide.errors import UsageError

Sample = tuple[torch.Tensor, torch.Tensor]  # (length,) int64, twice


class blocks(Dataset[Sample]):  # noqa: N801  (these read as functions: dataset=lambda: wide.text.blocks(tokens, 256))
    """Windows of `length` tokens, one behind the other, over a 1-D tensor, array or np.memmap of them. Nothing is
    copied but the windows that are asked for; the last tokens are left out if they fill no window.
    """

    def __init__(self, tokens: Any, length: int) -> None:
        self._length = _length(length, "wide.text.blocks")
        array = tokens.detach().cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise UsageError(
                f"wide.text.blocks: tokens are whole numbers in one row, these are {array.dtype} of shape {array.shape}"
            )
        if len(array) <= length:
            raise UsageError(f"wide.text.blocks: {len(array)} tokens make no window of {length} and the one behind it")
        self._tokens = (array,)  # in a tuple it is data: whoever looks for state that changes would read all of it

    def __len__(self) -> int:
        return (len(self._tokens[0]) - 1) // self._length

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        starts = np.asarray(indices, dtype=np.int64)
        starts = np.where(starts < 0, starts + len(self), starts)
        if len(starts) and not (starts.min() >= 0 and starts.max() < len(self)):
            raise IndexError(f"there are {len(self)} windows, and {list(indices)} were asked for")
        places = starts[:, None] * self._length + np.arange(self._length + 1)
        windows = torch.from_numpy(self._tokens[0][places].astype(np.int64))  # (samples, length + 1)
        return [(window[:-1], window[1:]) for window in windows]


def packed(documents: Any, length: int, end: int | None) -> IterableDataset[Sample]:
    """Blocks of `length` tokens, filled with one document after the other, each followed by `end` (None: by nothing).
    What is left over at the end of a pass is left out.

    `documents` are lists of tokens: a list of them or another map-style data set, anything that can be iterated over,
    or a function that gives an iterator. A run that was stopped goes on where it was, without reading what came before,
    if documents can be looked up by number, or have state_dict() and load_state_dict(); others are read again.
    """
    has_numbers = hasattr(documents, "__getitem__") and hasattr(documents, "__len__")
    has_state = hasattr(documents, "state_dict") and hasattr(documents, "load_state_dict")
    if isinstance(documents, str | bytes) or not (has_numbers or hasattr(documents, "__iter__") or callable(documents)):
        raise UsageError(f"wide.text.packed: documents are lists of tokens, got {type(documents).__name__}")
    if end is not None and not _is_whole(end):
        raise UsageError(f"wide.text.packed: end is a token, a whole number, or None, got {end!r}")
    kind = _Resumable if has_numbers or has_state else _Packed
    return kind(documents, _length(length, "wide.text.packed"), end)


class _Packed(IterableDataset[Sample]):
    def __init__(self, documents: Any, length: int, end: int | None) -> None:
        self._documents, self._length, self._end = documents, length, [end] if end is not None else []
        self._rest: list[int] = []  # tokens that are in no block yet
        self._read = 0  # documents, of this pass
        self._goes_on = False

    def __iter__(self) -> Iterator[Sample]:
        if not self._goes_on:
            self._rest, self._read = [], 0
        self._goes_on = False
        yield from self._full()
        for document in self._unread():
            self._read += 1
            self._rest += [*_tokens(document, self._read - 1), *self._end]
            yield from self._full()

    def _full(self) -> Iterator[Sample]:
        while len(self._rest) > self._length:
            block = torch.tensor(self._rest[: self._length + 1])  # (length + 1,) int64
            del self._rest[: self._length]  # the last token is what the next block begins with
            yield block[:-1], block[1:]

    def _unread(self) -> Iterator[Any]:
        is_function = not hasattr(self._documents, "__iter__") and callable(self._documents)
        return iter(self._documents() if is_function else self._documents)


class _Resumable(_Packed):
    """Its documents can be found again without reading those before them."""

    def _unread(self) -> Iterator[Any]:
        if self._has_state:
            return super()._unread()
        return (self._documents[i] for i in range(self._read, len(self._documents)))

    @property
    def _has_state(self) -> bool:
        return hasattr(self._documents, "load_state_dict")

    def state_dict(self) -> dict[str, Any]:
        theirs = self._documents.state_dict() if self._has_state else None
        return {"read": self._read, "rest": list(self._rest), "documents": theirs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._read, self._rest, self._goes_on = state["read"], list(state["rest"]), True
        if self._has_state:
            self._documents.load_state_dict(state["documents"])


def _tokens(document: Any, number: int) -> list[int]:
    found = document.tolist() if isinstance(document, torch.Tensor | np.ndarray) else document
    if isinstance(found, str | bytes) or not isinstance(found, Iterable):
        raise UsageError(f"wide.text.packed: document {number} is no list of tokens, but {type(document).__name__}")
    tokens = list(found)
    if wrong := [token for token in tokens if not _is_whole(token)]:
        raise UsageError(f"wide.text.packed: document {number} has {wrong[0]!r}, which is no token: those are numbers")
    return tokens


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _length(length: int, whose: str) -> int:
    if not _is_whole(length) or length < 1:
        raise UsageError(f"{whose}: length is a whole number of at least 1, got {length!r}")
    return length
