"""A job by value, on its way from a script or a notebook to the processes that train it. What is large in it lies in
memory that all of them see, once, and is copied where somebody writes to it. Does not import torch by itself.

From a parent to its own children: the only place where pickle is allowed.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import cloudpickle

LARGE_NBYTES = 1 << 20  # of all that is captured: less is told in words


class Elsewhere(NamedTuple):
    """In another process's memory: by its id, and the file's number there."""

    pid: int
    file: int
    sizes: list[int]


@contextmanager
def sent(thing: Any) -> Iterator[bytes]:
    """What others are told; it is good for as long as the block lasts. Raises what cannot be pickled."""
    if "torch" not in sys.modules or not _can_share():  # then nothing of it is a tensor
        yield cloudpickle.dumps(thing)
        return
    from wide.node.parcel import wrap
    from wide.transport.shared import Segment

    parcel = wrap(thing)
    segment = None
    if parcel.starts[-1] > LARGE_NBYTES:
        try:
            segment = Segment(parcel.starts[-1])
        except OSError:  # not as much: then as words, which may find room
            segment = None
    if segment is None or segment.name is None:
        yield cloudpickle.dumps(thing)
        return
    parcel.write(segment.bytes)
    sizes = [part.nbytes for part in parcel.parts]
    del parcel
    try:
        yield cloudpickle.dumps(Elsewhere(os.getpid(), segment.name[0], sizes))
    finally:
        segment.close()


def received(words: bytes) -> Any:
    """Raises whatever an object raises that cannot be made again here."""
    found = cloudpickle.loads(words)
    return _from(found) if isinstance(found, Elsewhere) else found


def _from(it: Elsewhere) -> Any:
    from wide.node.parcel import cut, unwrap

    file = os.open(f"/proc/{it.pid}/fd/{it.file}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        room = mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    return unwrap(cut(memoryview(room), it.sizes))


def _can_share() -> bool:
    """May a child look into this process? Not if it has more rights than its user."""
    from wide.transport.shared import IS_POSSIBLE

    return IS_POSSIBLE and os.stat(f"/proc/{os.getpid()}").st_uid == os.geteuid()
