"""Every seed of a run: each follows from the job's seed and a place in the run, never from the pool."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import torch

from wide.job.reach import reach

generators = (
    threading.RLock()
)  # they belong to the process: whoever seeds them and then runs the user's code holds this
_first_states: dict[int, tuple[Any, Any]] = {}  # the user's own generators, as they were before anybody drew from them


def mix(seed: int, *path: int) -> int:
    """A seed for one place in a run: mix(seed, epoch) orders an epoch, mix(seed, step, batch) is a batch's own."""
    for part in path:
        seed = (seed * 1_000_003 + part) % 2**63
    return seed


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Make torch, numpy and random start from `seed`. torch.manual_seed would take 170 µs, this takes 10."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if device is not None:
        seed_device(seed, device)


def seed_device(seed: int, device: torch.device) -> None:
    """That device's own generator: manual_seed of its module seeds the current one's, which may be another."""
    module = torch.get_device_module(device)
    if hasattr(module, "default_generators") and device.index is not None:
        module.init()
        module.default_generators[device.index].manual_seed(seed)
    else:
        module.manual_seed(seed)


def states(device: torch.device | None = None) -> tuple[object, ...]:
    """Of the global generators, to be compared: has anybody drawn from them?"""
    is_elsewhere = device is not None and device.type != "cpu"
    on_device = (torch.get_device_module(device).get_rng_state().numpy().tobytes(),) if is_elsewhere else ()
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), np.asarray(keys).tobytes(), position, on_device


class OwnGenerators:
    """The generators that the user's objects and functions have for themselves, wherever they keep them."""

    def __init__(self, **roots: Any) -> None:
        self._all = reach(**roots).generators

    def seed(self, seed: int) -> None:
        """Like the global ones, for a batch; each has numbers of its own."""
        for i, generator in enumerate(self._all, 1):
            own = mix(seed, i)
            if isinstance(generator, torch.Generator):
                generator.manual_seed(own)
            elif isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(own).state
            else:
                generator.seed(own % 2**32)

    def rewind(self) -> None:
        """As they were when they were first seen: model() and dataset() find them so, however often they are called."""
        for generator in self._all:
            if id(generator) not in _first_states:
                _first_states[id(generator)] = generator, _state(generator)
            else:
                _set_state(generator, _first_states[id(generator)][1])


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.getstate() if isinstance(generator, random.Random) else generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
