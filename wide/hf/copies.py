"""Copies of objects in which some parts are named instead of copied, and of a model with all that is tied to it.

`copy.deepcopy` shares functions: a forward that somebody has put over the model's own (TRL's fused head, say) keeps
calling the model that it was made for. Pickled by value, a function takes what it holds along.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import cloudpickle
import torch
from torch import nn

from wide.errors import UsageError


def copied(model: nn.Module) -> nn.Module:
    """In host memory. Tensors are copied once, as they share their memory; none has a gradient."""
    tensors: list[torch.Tensor] = []
    places: dict[int, int] = {}

    def named(it: Any) -> Any:
        if not isinstance(it, torch.Tensor):
            return None
        if id(it) not in places:
            places[id(it)] = len(tensors)
            tensors.append(it)
        return places[id(it)]

    try:
        words = dumps(model, named)
    except Exception as error:
        why = str(error).partition("\n")[0]
        raise UsageError(f"wide.hf.job: the model cannot be copied for nodes ({why}): take that out of it") from None
    if any(tensor.device.type != "cpu" for tensor in tensors):
        ours = [it.detach().to("cpu", copy=True).requires_grad_(it.requires_grad) for it in tensors]
        ours = [
            nn.Parameter(o, i.requires_grad) if isinstance(i, nn.Parameter) else o
            for i, o in zip(tensors, ours, strict=True)
        ]
    else:
        ours = copy.deepcopy(tensors)
    for tensor in ours:
        tensor.grad = None
    made: nn.Module = loads(words, lambda place: ours[place])
    return made


def dumps(thing: Any, named: Callable[[Any], Any]) -> bytes:
    """`named` gives a name for what is not to be in it, and None for everything else."""

    class Pickler(cloudpickle.CloudPickler):  # type: ignore[misc]
        def persistent_id(self, it: Any) -> Any:
            return named(it)

    room = io.BytesIO()
    Pickler(room).dump(thing)
    return room.getvalue()


def loads(words: bytes, found: Callable[[Any], Any]) -> Any:
    """Only for what this program has written: from a process to itself, and to its own children."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, name: Any) -> Any:
            return found(name)

    return Unpickler(io.BytesIO(words)).load()
