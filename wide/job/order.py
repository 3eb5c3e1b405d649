"""In which order an epoch's samples come: `order=wide.order.shuffled()`, or a function of the user's own. Runs in the
coordinator alone; nodes are told the numbers. Knows numbers of samples, no data.

The user's function is called as (epoch, generator) and gives ids, or lists of ids, each of which is a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from wide.errors import TrainingFailed, UsageError
from wide.job.loading import users_code
from wide.job.seeding import OwnGenerators, generators, seed_everything

POOL = 50  # batches that are sorted by length together: alike within a batch, and still mixed
TIMES, LEAST = 100, 1_000_000  # an epoch of a user's order may see each sample so often; else it is endless

Ids = torch.Tensor | range


class Order:
    """`count`: how many ids an epoch has, if that is the same for all; None: whoever wants to know has to ask."""

    def count(self, samples: int) -> int | None:
        return samples

    def ids(self, samples: int, batch_size: int, epoch: int, generator: torch.Generator) -> Ids:
        raise NotImplementedError


class shuffled(Order):  # noqa: N801  (these read as functions: order=wide.order.shuffled())
    """Another order every epoch: each sample once."""

    def ids(self, samples: int, batch_size: int, epoch: int, generator: torch.Generator) -> Ids:
        return torch.randperm(samples, generator=generator)


class sequential(Order):  # noqa: N801
    """As the data lies, every epoch."""

    def ids(self, samples: int, batch_size: int, epoch: int, generator: torch.Generator) -> Ids:
        return range(samples)


class weighted(Order):  # noqa: N801
    """Each sample is drawn with a probability of its own, as by torch's WeightedRandomSampler; `count` an epoch."""

    def __init__(self, weights: Any, count: int | None = None, replacement: bool = True) -> None:
        self._weights = torch.as_tensor(weights, dtype=torch.float64).flatten()
        is_sound = bool(torch.isfinite(self._weights).all()) and bool((self._weights >= 0).all())
        if not is_sound or not bool(self._weights.any()):
            raise UsageError("wide.order.weighted: weights are numbers of at least 0, and not all of them 0")
        self._count, self._replacement = count if count is not None else len(self._weights), replacement
        most = len(self._weights) if replacement else int((self._weights > 0).sum())
        if self._count < 1 or (not replacement and self._count > most):
            raise UsageError(f"wide.order.weighted: count must be from 1 to {most}, got {self._count}")

    def count(self, samples: int) -> int:
        if len(self._weights) != samples:
            raise TrainingFailed(f"wide.order.weighted has {len(self._weights)} weights for {samples} samples")
        return self._count

    def ids(self, samples: int, batch_size: int, epoch: int, generator: torch.Generator) -> Ids:
        return torch.multinomial(self._weights, self._count, self._replacement, generator=generator)


class by_length(Order):  # noqa: N801
    """Batches of samples that are about equally long, in a shuffled order: little padding, and still random."""

    def __init__(self, lengths: Any) -> None:
        self._lengths = torch.as_tensor(lengths).flatten()

    def count(self, samples: int) -> int:
        if len(self._lengths) != samples:
            raise TrainingFailed(f"wide.order.by_length has {len(self._lengths)} lengths for {samples} samples")
        return samples

    def ids(self, samples: int, batch_size: int, epoch: int, generator: torch.Generator) -> Ids:
        mixed = torch.randperm(samples, generator=generator)
        pools = [pool[self._lengths[pool].argsort(stable=True)] for pool in torch.split(mixed, POOL * batch_size)]
        batches = list(torch.split(torch.cat(pools), batch_size))
        last = [batches.pop()] if len(batches[-1]) < batch_size else []  # the short one stays where it is
        places = torch.randperm(len(batches), generator=generator).tolist()
        return torch.cat([*(batches[i] for i in places), *last])


class blocks(Order):  # noqa: N801
    """Runs of `length` neighbours, in a shuffled order: for data that is read from a disk, or repeats itself."""

    def __init__(self, length: int) -> None:
        if not isinstance(length, int) or length < 1:
            raise UsageError(f"wide.order.blocks: its length is a whole number of at least 1, got {length!r}")
        self._length = length

    def ids(self, samples: int, batch_size: int, epoch: int, generator: torch.Generator) -> Ids:
        runs = torch.split(torch.arange(samples), self._length)
        return torch.cat([runs[i] for i in torch.randperm(len(runs), generator=generator).tolist()])


class Told(NamedTuple):
    """What a user's order says of an epoch: all ids, and, if it made batches of them, how many each has."""

    ids: torch.Tensor
    sizes: list[int] | None


def ask(order: Callable[[int, Any], Any], samples: int, epoch: int, seed: int) -> Told:
    """The user's function, as if it were called for the first time."""
    with generators, users_code(f"order failed for epoch {epoch}"):
        seed_everything(seed)
        OwnGenerators(order=order).seed(seed)
        said = order(epoch, torch.Generator().manual_seed(seed))
        return _told(said, samples, f"order, epoch {epoch}")


def _told(said: Any, samples: int, where: str) -> Told:
    if said is None or isinstance(said, str | bytes | dict) or not isinstance(said, Iterable):
        raise TrainingFailed(f"{where}: it gave {type(said).__name__}; it gives sample ids, or lists of them")
    if isinstance(said, torch.Tensor | np.ndarray):
        rows = torch.as_tensor(said)
        sizes = [rows.shape[1]] * len(rows) if rows.dim() == 2 else None
        return Told(_checked(rows, samples, where), sizes)
    items = list(_finite(said, samples, where))
    if len({_is_list(item) for item in items}) > 1:
        raise TrainingFailed(f"{where}: it gives ids, or lists of ids, but not both")
    try:
        if items and _is_list(items[0]):
            lists = [_checked(torch.as_tensor(item), samples, where) for item in items]
            return Told(torch.cat(lists), [len(ids) for ids in lists])
        return Told(_checked(torch.as_tensor(items), samples, where), None)
    except (TypeError, ValueError, RuntimeError):
        raise TrainingFailed(f"{where}: ids are whole numbers, and here is something else among them") from None


def _finite(said: Iterable[Any], samples: int, where: str) -> Iterator[Any]:
    most, seen = TIMES * samples + LEAST, 0
    for item in said:
        seen += len(item) if _is_list(item) else 1
        if seen > most:
            raise TrainingFailed(f"{where}: it gave more than {most} ids for {samples} samples: is it endless?")
        yield item


def _is_list(item: Any) -> bool:
    return (isinstance(item, Sequence | np.ndarray) and not isinstance(item, str)) or (
        isinstance(item, torch.Tensor) and item.dim() > 0
    )


def _checked(ids: torch.Tensor, samples: int, where: str) -> torch.Tensor:
    if not ids.numel():
        raise TrainingFailed(f"{where}: it is empty, or has an empty batch")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TrainingFailed(f"{where}: ids are whole numbers, these are {ids.dtype}")
    flat = ids.to(torch.int64).flatten()
    if (low := int(flat.min())) < 0 or (high := int(flat.max())) >= samples:
        wrong = low if low < 0 else high
        raise TrainingFailed(f"{where}: there is no sample {wrong}; they go from 0 to {samples - 1}")
    return flat.contiguous()


def remark(ids: torch.Tensor, samples: int) -> str:
    """In which way an epoch is not every sample once; empty if it is."""
    seen = torch.bincount(ids, minlength=samples)
    missing, again = int((seen == 0).sum()), int((seen > 1).sum())
    parts = [f"leaves out {missing} of {samples} samples"] * bool(missing) + [f"has {again} more than once"] * bool(
        again
    )
    return f"the job's order {' and '.join(parts)}" if parts else ""
