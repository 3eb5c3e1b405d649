"""Versions of the weights while they are being sent: they must not change until the last byte has left."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wide.codec.layout import Flat


class Snapshots:
    """One copy per version, made when the first node needs it; its memory is used again when nobody sends from it."""

    def __init__(self, weights: Flat) -> None:
        self._weights = weights
        self._by_version: dict[int, torch.Tensor] = {}
        self._newest = -1
        self._view = memoryview(b"")

    def get(self, version: int, in_flight: Callable[[], set[int]]) -> memoryview:
        """The current weights, which are `version`. `in_flight`: the versions that are still being sent."""
        if version != self._newest:
            sending = in_flight()
            free = [old for old in self._by_version if old not in sending]
            copy = self._by_version.pop(free[0]) if free else torch.empty_like(self._weights.raw)
            for old in free[1:]:
                del self._by_version[old]
            self._by_version[version] = copy.copy_(self._weights.raw)
            self._newest, self._view = version, copy.numpy().data
        return self._view
