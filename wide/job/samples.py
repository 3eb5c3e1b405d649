"""From sample ids to a batch. Knows data sets and collate functions; knows nothing of nodes or sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.loading import users_code
from wide.job.opened import dataset_of
from wide.job.seeding import OwnGenerators, generators, mix, seed_everything

PROBES = 5  # samples that machines compare


class Samples:
    """The job's data set, opened once; `batch(ids, seed)` is what DataLoader would have given for those ids."""

    def __init__(self, job: Job, seed: int) -> None:
        self._dataset = dataset_of(job, seed)
        _check_kind(self._dataset)
        with users_code("dataset() failed: what it returned has no length"):
            self._length = len(self._dataset)
        self._collate: Callable[[list[Any]], Any] = job.collate or default_collate
        self._gather = _gatherer(self._dataset) if job.collate is None else None
        self.roots = {"dataset": self._dataset, "collate": job.collate} if self._gather is None else {}
        self._own = OwnGenerators(**self.roots)

    def __len__(self) -> int:
        return self._length

    def probes(self, seed: int) -> list[tuple[int, Any]]:
        """Some samples by number, each as a batch of its own, by which two data sets are compared."""
        chosen = torch.randperm(self._length, generator=torch.Generator().manual_seed(seed))[:PROBES]
        found = []
        for i in chosen:
            with contextlib.suppress(TrainingFailed):  # if it fails, then where it is needed, with its place in the run
                found.append((int(i), self.batch(i[None], mix(seed, int(i)))))
        return found

    @property
    def is_gathered(self) -> bool:
        """One call per batch, and none of the user's code runs."""
        return self._gather is not None

    def batch(self, ids: torch.Tensor, seed: int) -> Any:
        """One batch. Augmentations that draw random numbers draw the same ones wherever this runs."""
        if self._gather is not None:
            return self._gather(ids)
        with generators:
            seed_everything(seed)
            self._own.seed(seed)
            samples = self._fetch(ids.tolist())
            try:
                return self._collate(samples)
            except Exception:
                why = _why_not(ids.tolist(), samples, is_own=self._collate is not default_collate)
                with users_code(f"collate failed ({why})" if why else "collate failed"):
                    raise

    def first_batch(self, i: int, batch_size: int, seed: int, other: int = 0) -> Any:
        """The i-th batch of the data as it lies, as step 0 would seed it (or in another way): for trying the job."""
        ids = torch.arange(i * batch_size, min((i + 1) * batch_size, self._length))
        return self.batch(ids, mix(seed, 0, i + other))

    def _fetch(self, ids: list[int]) -> list[Any]:
        many = getattr(self._dataset, "__getitems__", None)
        if many is not None:
            with users_code(f"the data set failed at samples {ids[0]}…{ids[-1]}"):
                return list(many(ids))
        samples: list[Any] = []
        try:
            for i in ids:
                samples.append(self._dataset[i])
        except Exception:
            with users_code(f"the data set failed at sample {ids[len(samples)]}"):
                raise
        return samples


def _why_not(ids: list[int], samples: list[Any], is_own: bool) -> str:
    """The likeliest reason why samples cannot be put together; of a collate of the user's own only what is plain."""
    for i, sample in zip(ids, samples, strict=False):
        parts = list(sample.values()) if isinstance(sample, dict) else sample
        if sample is None or (isinstance(parts, list | tuple) and any(part is None for part in parts)):
            return f"sample {i} is, or has, a None: leave it out, or give it a value"
    return "" if is_own else "samples of a batch must have the same shapes"


def _check_kind(dataset: Any) -> None:
    """What cannot be looked up by number is explained."""
    if isinstance(dataset, DataLoader):
        raise TrainingFailed(
            "dataset() returned a DataLoader: return its data set (loader.dataset), "
            "and give Job its batch_size and collate"
        )
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if isinstance(dataset, IterableDataset) or not has_items:
        raise TrainingFailed(
            f"dataset() returned a {type(dataset).__name__}, whose samples cannot be looked up by number: nodes fetch "
            "any sample of any batch, so return a data set with __len__ and __getitem__ (a list of its items, say)"
        )


def _gatherer(dataset: Any) -> Callable[[torch.Tensor], Any] | None:
    """For data that is one big tensor, in memory or mapped from a file: whole batches in one call, no sample copied."""
    if type(dataset) is Subset:  # a subclass may transform what it gives
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
