"""The order of samples that `trainer.train()` would take, epoch by epoch: its own sampler is asked, told the epoch as
accelerate's loader tells it.
"""

from __future__ import annotations

from typing import Any

from wide.errors import UsageError
from wide.hf.refusals import is_stream


class Batches:
    """(epoch, generator) -> lists of ids. Accelerate's sampler shuffles by its first seed plus the epoch; one that
    draws from torch's generators finds them seeded for the epoch.
    """

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, epoch: int, generator: Any) -> list[list[int]]:
        for it in _within(self._sampler):
            if callable(set_epoch := getattr(it, "set_epoch", None)):
                set_epoch(epoch)
        return [[int(i) for i in batch] for batch in self._sampler]


def batches_of(loader: Any) -> Batches | None:
    """None, if its data is read as it comes."""
    if is_stream(loader.dataset):
        return None
    if getattr(loader, "batch_sampler", None) is None:
        raise UsageError("wide.hf.job: the training DataLoader makes no batches: give it a batch_size")
    return Batches(loader.batch_sampler)


def _within(sampler: Any) -> list[Any]:
    """A batch sampler, what it takes batches from, and the samplers of both."""
    inner = getattr(sampler, "batch_sampler", None)
    found = (sampler, getattr(sampler, "sampler", None), inner, getattr(inner, "sampler", None))
    return [it for it in found if it is not None]


class Given:
    """() -> the data set, as it is."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __call__(self) -> Any:
        return self._dataset
