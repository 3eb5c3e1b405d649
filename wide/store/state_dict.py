"""State dicts as plain JSON and tensors apart, and back: no pickle. Knows containers; knows nothing of what they mean.

What JSON cannot say is tagged: {"tuple": […]}, {"dict": [[key, value], …]}, {"float": "inf"}, {"tensor": "a.0.b"}.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

Tensors = dict[str, torch.Tensor]
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {"tuple": tuple, "set": set, "deque": deque}
MAPPINGS: dict[str, Callable[[list[Any]], Any]] = {
    "dict": dict,
    "ordered": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}
KINDS: dict[type, str] = {
    tuple: "tuple",
    set: "set",
    deque: "deque",
    dict: "dict",
    defaultdict: "dict",
    OrderedDict: "ordered",
    Counter: "counter",
}


class Unwritable(Exception):
    """There is something in it that neither JSON nor tensors can say: a function, an object."""


class Packing:
    """Nests as JSON can hold them. Copies of their tensors go to `tensors`, by where they are; of a dict, what is
    unwritable is left out, and named in `left_out`.
    """

    def __init__(self) -> None:
        self.tensors: Tensors = {}
        self.left_out: list[str] = []

    def pack(self, value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            while path in self.tensors:  # {"a.b": …, "a": {"b": …}}, or 1 and "1"
                path += "'"
            self.tensors[path] = value.detach().to("cpu", copy=True).contiguous()
            return {"tensor": path}
        if isinstance(value, np.generic):
            value = value.item()
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, list):
            return [self.pack(item, f"{path}.{i}") for i, item in enumerate(value)]
        kind = KINDS.get(type(value))
        if kind is None and isinstance(value, tuple | Mapping):  # torch.Size, a dict of somebody's own
            kind = "tuple" if isinstance(value, tuple) else "dict"
        if kind is None:
            raise Unwritable(type(value).__name__)
        if isinstance(value, Mapping):
            return {kind: self._pairs(value, path)}
        return {kind: [self.pack(item, f"{path}.{i}") for i, item in enumerate(value)]}

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        pairs = []
        for key, item in value.items():
            try:
                pairs.append([self.pack(key, f"{path}.key"), self.pack(item, f"{path}.{key}")])
            except Unwritable as kind:
                self.left_out.append(f"{path}.{key} ({kind})")
        return pairs


def unpack(value: Any, tensors: Tensors) -> Any:
    """What was packed."""
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "float":
        return float(inner)
    if kind in CONTAINERS:
        return CONTAINERS[kind](unpack(inner, tensors))
    return MAPPINGS[kind]([(unpack(key, tensors), unpack(item, tensors)) for key, item in inner])
