"""From sample ids to a batch. Knows data sets and collate functions; knows nothing of nodes or sockets."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate

from wide.errors import TrainingFailed
from wide.job.definition import DEFAULT_BATCH_SIZE, Job
from wide.job.here import Here, enter, leave
from wide.job.loader import Understood, understood
from wide.job.loading import users_code
from wide.job.opened import dataset_of
from wide.job.schedule import Schedule, Step
from wide.job.seeding import OwnGenerators, generators, mix, seed_everything
from wide.job.stream import ENDLESS, Stream, as_read

START = Here(0)
PROBES = 5  # samples that machines compare


class Samples:
    """The job's data set, opened once; `batch(ids, seed)` is what DataLoader would have given for those ids."""

    def __init__(self, job: Job, seed: int) -> None:
        leave()
        self._dataset = dataset_of(job, seed)
        self.batch_size, self.order, self.drop_last, collate = job.batch_size, job.order, job.drop_last, job.collate
        if isinstance(self._dataset, DataLoader):
            collate = self._use(understood(self._dataset), job)
        self.stream: Stream | None = None
        if _is_read_only(self._dataset):
            self._check_stream(job)
            self.stream, self.order = Stream(self._dataset, seed), as_read()
            self._length = ENDLESS
        else:
            _check_kind(self._dataset)
            with users_code("dataset() failed: what it returned has no length"):
                self._length = len(self._dataset)
        self._collate: Callable[[list[Any]], Any] = collate or default_collate
        self._gather = _gatherer(self._dataset) if collate is None and self.stream is None else None
        has_roots = self._gather is None and self.stream is None  # what a stream keeps is its own business
        self.roots = {"dataset": self._dataset, "collate": collate} if has_roots else {}
        self._own = OwnGenerators(**self.roots)

    def __len__(self) -> int:
        return self._length

    def _use(self, loader: Understood, job: Job) -> Callable[[list[Any]], Any] | None:
        """What a DataLoader says, unless the job says it, too. Returns its collate."""
        if job.batch_size not in (DEFAULT_BATCH_SIZE, loader.batch_size):
            raise TrainingFailed(
                f"dataset() returned a DataLoader with batch_size {loader.batch_size}, and the job has "
                f"{job.batch_size}: leave it out of one of them"
            )
        self._dataset, self.batch_size = loader.dataset, loader.batch_size
        self.drop_last = job.drop_last or loader.drop_last
        self.order = job.order or loader.order
        return job.collate or loader.collate

    def _check_stream(self, job: Job) -> None:
        if job.order is not None:
            kind = type(self._dataset).__name__
            raise TrainingFailed(f"dataset() returned a {kind}, which is read as it comes: leave out order")

    def measure(self, counts_epochs: bool, samples_per_step: int) -> None:
        """For a stream: how long a pass is, if anybody wants to know."""
        if self.stream is not None:
            self._length = self.stream.count() if counts_epochs else ENDLESS
            self.stream.use(self._length, samples_per_step)

    def merged(self, schedule: Schedule, step: Step) -> None:
        """Nobody will ask for this step's samples again, nor for those of steps before it."""
        if self.stream is not None:
            self.stream.forget(_first(schedule, step.number + 1))

    def state(self, schedule: Schedule, steps: int) -> Any:
        """What a run that goes on after so many steps has to know of the data."""
        return self.stream.state(_first(schedule, steps)) if self.stream is not None else None

    def go_on_from(self, schedule: Schedule, steps: int, state: Any) -> int:
        """Returns how many samples had to be read again for that."""
        return self.stream.go_on_from(_first(schedule, steps), state) if self.stream is not None else 0

    def probes(self, seed: int) -> list[tuple[int, Any]]:
        """Some samples by number, each a batch of its own, by which two data sets are compared. Of a stream, none."""
        if self.stream is not None:
            return []
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

    def batch(self, ids: torch.Tensor, seed: int, here: Here = START) -> Any:
        """One batch. Augmentations that draw random numbers draw the same ones wherever this runs."""
        if self._gather is not None:
            return self._gather(ids)
        enter(here)
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
        """The i-th batch of the data as it lies, as step 0 would seed it (or in another way): for trying the job. Of a
        stream, of what will be needed next.
        """
        first = self.stream.base if self.stream is not None else 0
        ids = torch.arange(first + i * batch_size, first + min((i + 1) * batch_size, self._length))
        return self.batch(ids, mix(seed, 0, i + other))

    def _fetch(self, ids: list[int]) -> list[Any]:
        if self.stream is not None:
            return self.stream.fetch(ids[0], ids[-1] + 1)
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


def _first(schedule: Schedule, step: int) -> int:
    return int(schedule.ids(schedule.step(step), 0, 1)[0])


def _why_not(ids: list[int], samples: list[Any], is_own: bool) -> str:
    """The likeliest reason why samples cannot be put together; of a collate of the user's own only what is plain."""
    for i, sample in zip(ids, samples, strict=False):
        parts = list(sample.values()) if isinstance(sample, dict) else sample
        if sample is None or (isinstance(parts, list | tuple) and any(part is None for part in parts)):
            return f"sample {i} is, or has, a None: leave it out, or give it a value"
    return "" if is_own else "samples of a batch must have the same shapes"


def _is_read_only(dataset: Any) -> bool:
    """From its beginning to its end, and not by number."""
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    return isinstance(dataset, IterableDataset) or (hasattr(dataset, "__iter__") and not has_items)


def _check_kind(dataset: Any) -> None:
    """What cannot be looked up by number is explained."""
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise TrainingFailed(
            f"dataset() returned a {type(dataset).__name__}, whose samples cannot be looked up by number: return a "
            "data set with __len__ and __getitem__ (a list of its items, say), or one with __iter__"
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
