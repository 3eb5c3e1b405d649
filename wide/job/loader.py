"""A torch DataLoader, understood: its data set, and what a Job would say of it. Its processes and its memory stay its
own business: batches are made where they are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from wide.errors import TrainingFailed
from wide.job.order import Order, sequential, shuffled


class Understood(NamedTuple):
    """What it gives; `collate` is None if it is torch's own, `order` if the data is read as it comes."""

    dataset: Any
    batch_size: int
    collate: Callable[[list[Any]], Any] | None
    order: Order | Callable[[int, Any], Any] | None
    drop_last: bool


def understood(loader: DataLoader[Any]) -> Understood:
    collate = loader.collate_fn if loader.collate_fn is not default_collate else None
    if isinstance(loader.dataset, IterableDataset):
        if loader.batch_size is None:
            raise TrainingFailed("dataset() returned a DataLoader without a batch_size: give it one")
        return Understood(loader.dataset, loader.batch_size, collate, None, loader.drop_last)
    if loader.batch_sampler is None:
        raise TrainingFailed("dataset() returned a DataLoader that makes no batches: give it a batch_size")
    if type(loader.batch_sampler) is not BatchSampler:
        return Understood(loader.dataset, loader.batch_size or 1, collate, _asks(loader.batch_sampler), drop_last=False)
    size, sampler = loader.batch_sampler.batch_size, loader.batch_sampler.sampler
    return Understood(loader.dataset, size, collate, _order(sampler), loader.batch_sampler.drop_last)


def _order(sampler: Any) -> Order | Callable[[int, Any], Any]:
    if type(sampler) is SequentialSampler:
        return sequential()
    if type(sampler) is RandomSampler and not sampler.replacement and sampler._num_samples is None:
        return shuffled()
    return _asks(sampler)


class _asks:  # noqa: N801
    """Any other sampler is asked; it finds all generators seeded for the epoch."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __call__(self, epoch: int, generator: Any) -> Any:
        if callable(set_epoch := getattr(self._sampler, "set_epoch", None)):
            set_epoch(epoch)
        return self._sampler
