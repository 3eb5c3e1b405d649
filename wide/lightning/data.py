"""Loaders for training and validation, from wherever a Lightning program has them: a data module, a DataLoader, or the
module itself. Knows Lightning's hooks around data; knows nothing of training.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader

from wide.errors import UsageError
from wide.job.seeding import generators, seed_everything
from wide.lightning.refuse import class_of, overrides

STAGE = "fit"


class Loaders(NamedTuple):
    train: DataLoader[Any]
    validation: list[Any]

    @property
    def batches(self) -> int | None:
        """Of an epoch, if that is known before it is over."""
        try:
            return len(self.train)
        except TypeError:
            return None


def check(data: Any) -> None:
    """Is it one of those that can be given?"""
    if data is None or is_loader(data) or class_of(data, "LightningDataModule"):
        return
    if isinstance(data, list | tuple | dict) or type(data).__name__ == "CombinedLoader":
        raise UsageError(
            f"wide.lightning.job: several train loaders ({type(data).__name__}) are not one data set: give one "
            "DataLoader, of torch.utils.data.ConcatDataset, say"
        )
    raise UsageError(
        f"wide.lightning.job: data is a LightningDataModule or a DataLoader, got {type(data).__name__}"
        f"{'' if not isinstance(data, type) else f' {data.__name__}: give an object of it'}"
    )


def is_loader(data: Any) -> bool:
    return isinstance(data, DataLoader)


def opened(module: Any, data: Any, seed: int) -> Loaders:
    """Whatever is random in a data module's setup() is the same on every machine, and nobody else draws otherwise."""
    with generators, as_if_nothing_was_drawn():
        seed_everything(seed)
        given = data if isinstance(data, DataLoader) else None
        owner = None if given is not None else data
        if owner is not None:
            owner.setup(stage=STAGE)
        train = given if given is not None else _source(module, owner, "train_dataloader")
        return Loaders(_train(train), _several(_source(module, owner, "val_dataloader")))


def has(module: Any, data: Any, name: str) -> bool:
    """Does either say this loader?"""
    return any(overrides(owner, base_of(owner), name) for owner in (data, module) if base_of(owner) is not None)


def to_be_sent(data: Any) -> Any:
    """Without the Trainer, or the processes, that it may have had elsewhere."""
    if data is None:
        return None
    same = copy.copy(data)
    vars(same).update({name: None for name in ("trainer", "_iterator") if name in vars(same)})
    return same


def in_one_process(loader: Any) -> Any:
    """The same batches without processes of its own, which those who are children themselves may not have."""
    if not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return loader
    same = copy.copy(loader)
    same.num_workers, same.timeout, same.prefetch_factor = 0, 0, None
    vars(same)["_iterator"] = None
    return same


def base_of(owner: Any) -> type | None:
    """Lightning's own class of a module, or of a data module."""
    return class_of(owner, "LightningDataModule") or class_of(owner, "LightningModule")


def _source(module: Any, data: Any, name: str) -> Any:
    """The data module's, or, if it has none, the module's own; None if nobody has one."""
    for owner in (data, module):
        if owner is not None and overrides(owner, base_of(owner), name):
            return getattr(owner, name)()
    return None


def _train(loader: Any) -> DataLoader[Any]:
    if isinstance(loader, DataLoader):
        return loader
    kind = type(loader).__name__
    if isinstance(loader, list | tuple) and len(loader) == 1 and isinstance(loader[0], DataLoader):
        return loader[0]
    if isinstance(loader, list | tuple | dict) or kind == "CombinedLoader":
        raise UsageError(
            f"train_dataloader() returned several loaders ({kind}): return one DataLoader, of "
            "torch.utils.data.ConcatDataset, say"
        )
    raise UsageError(f"train_dataloader() returned {kind}, not a torch DataLoader: a pool asks for samples by number")


def _several(loaders: Any) -> list[Any]:
    """One after the other, as Lightning does."""
    if type(loaders).__name__ == "CombinedLoader":
        if getattr(loaders, "_mode", "") != "sequential":
            raise UsageError("val_dataloader() returned a CombinedLoader whose mode is not sequential: return a list")
        loaders = loaders.flattened
    if loaders is None:
        return []
    if isinstance(loaders, dict):
        return list(loaders.values())
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


@contextmanager
def as_if_nothing_was_drawn() -> Iterator[None]:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
