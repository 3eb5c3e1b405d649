"""From sample ids to a batch. Knows data sets and collate functions; knows nothing of nodes or sockets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from wide.job.definition import Job
from wide.job.loading import blame
from wide.job.seeding import seed_everything


class Samples:
    """The job's data set, opened once; `batch(ids, seed)` is what DataLoader would have given for those ids."""

    def __init__(self, job: Job) -> None:
        try:
            self._dataset = job.dataset()
            self._length = len(self._dataset)
        except Exception as error:
            raise blame(error, "dataset() failed") from None
        self._collate: Callable[[list[Any]], Any] = job.collate or default_collate
        self._gather = _gatherer(self._dataset) if job.collate is None else None

    def __len__(self) -> int:
        return self._length

    @property
    def is_gathered(self) -> bool:
        """One call per batch, and none of the user's code runs."""
        return self._gather is not None

    def batch(self, ids: torch.Tensor, seed: int) -> Any:
        """One batch. Augmentations that draw random numbers draw the same ones wherever this runs."""
        if self._gather is not None:
            return self._gather(ids)
        seed_everything(seed)
        return self._collated(self._fetch(ids.tolist()))

    def _fetch(self, ids: Sequence[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        try:
            if many is not None:
                return list(many(ids))
        except Exception as error:
            raise blame(error, f"the data set failed at samples {ids[0]}…{ids[-1]}") from None
        samples = []
        for i in ids:
            try:
                samples.append(self._dataset[i])
            except Exception as error:
                raise blame(error, f"the data set failed at sample {i}") from None
        return samples

    def _collated(self, samples: list[Any]) -> Any:
        try:
            return self._collate(samples)
        except Exception as error:
            raise blame(error, "collate failed (samples of a batch must have the same shapes)") from None


def _gatherer(dataset: Any) -> Callable[[torch.Tensor], Any] | None:
    """For data that is one big tensor, in memory or mapped from a file: whole batches in one call, no sample copied."""
    if isinstance(dataset, Subset):
        inner = _gatherer(dataset.dataset)
        if inner is None:
            return None
        chosen = torch.as_tensor(dataset.indices)
        return lambda ids: inner(chosen[ids])
    if type(dataset) is TensorDataset:
        tensors = dataset.tensors
        return lambda ids: [tensor.index_select(0, ids) for tensor in tensors]
    if isinstance(dataset, np.ndarray) and dataset.dtype.kind in "fiub" and dataset.ndim > 1:
        array = dataset  # an np.memmap too: only the pages of these samples are read
        return lambda ids: torch.from_numpy(array[ids.numpy()])
    if isinstance(dataset, torch.Tensor) and dataset.dim() > 0:
        tensor: torch.Tensor = dataset
        return lambda ids: tensor.index_select(0, ids)
    return None
