"""Where flat buffers lie: in memory of this process, or in some that its neighbours on this machine can map too. Knows
tensors; who shares what with whom is the caller's.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Protocol

import torch

LARGE_NBYTES = 8 << 20  # a pass over so much takes longer than others should wait for
LAZY_NBYTES = 1 << 20  # from here on, memory that nobody writes to costs nothing
Name = tuple[int, int]  # by which a neighbour finds it (transport/shared.py)


class Memory(Protocol):
    """`raw` is (nbytes,) uint8, all zeros in the beginning, and `bytes` the same, if it is not on another device.
    Without a `name` nobody else can see it.
    """

    raw: torch.Tensor
    bytes: memoryview
    name: Name | None

    def close(self) -> None: ...  # nobody who does not have it yet can have it any more


Allocate = Callable[[int], Memory]


class Private:
    """Of this process, or of its device."""

    name: Name | None = None

    def __init__(self, nbytes: int, device: torch.device | str = "cpu") -> None:
        self.raw = (
            _untouched(nbytes) if _is_lazy(nbytes, device) else torch.zeros(nbytes, dtype=torch.uint8, device=device)
        )
        self.bytes = self.raw.numpy().data if self.raw.device.type == "cpu" else memoryview(b"")

    def close(self) -> None:
        """It goes with the last tensor in it."""


def _is_lazy(nbytes: int, device: torch.device | str) -> bool:
    return nbytes >= LAZY_NBYTES and torch.device(device).type == "cpu" and hasattr(mmap, "MAP_PRIVATE")


def _untouched(nbytes: int) -> torch.Tensor:
    """Zeros that the system gives page by page, when they are first written to: torch writes to all of them at once,
    which takes a quarter of a second for 200 MB (docs/findings.md), and many buffers are used in part only.
    """
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)
