"""Where pieces are encoded: some in threads, some at once. Knows executors and which codecs gain from them.

zstd takes long over a piece and lets go of the interpreter meanwhile: several pieces are compressed at once, while
others are being sent. The other codecs are done sooner than another thread would have begun (docs/findings.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from wide.codec.lossless import Buffers
from wide.codec.pieces import Piece

THREADS = min(4, os.cpu_count() or 1)
THREADED = {"zstd"}
AT_ONCE = 32  # pieces, 8 MB: some milliseconds of any other codec

T = TypeVar("T")
Encode = Callable[[Piece], Buffers]


class Encoders:
    """A pool of threads that starts none before it needs one; without threads all is done at once."""

    def __init__(self, threads: int = THREADS) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="encoder") if threads else None

    def in_order(self, name: str, encode: Encode, pieces: list[Piece]) -> Iterator[Buffers]:
        """The pieces' encodings, each when it is asked for; those of the next pieces may be in the making."""
        if self._threads is None or name not in THREADED or len(pieces) == 1:
            yield from map(encode, pieces)
        else:
            yield from self._threads.map(encode, pieces)

    def begin(self, name: str, encode: Encode, pieces: list[Piece]) -> list[Future[Buffers]]:
        """The same for a loop that must not wait: all of them, now or later."""
        if self._threads is not None and (name in THREADED or len(pieces) > AT_ONCE):
            return [self._threads.submit(encode, piece) for piece in pieces]
        return [done(encode(piece)) for piece in pieces]

    def submit(self, task: Callable[..., T], *arguments: object) -> Future[T]:
        """Anything else that should not hold up a loop."""
        return self._threads.submit(task, *arguments) if self._threads is not None else done(task(*arguments))

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(cancel_futures=True)


def done(data: T) -> Future[T]:
    """As if a thread had made it."""
    future: Future[T] = Future()
    future.set_result(data)
    return future
