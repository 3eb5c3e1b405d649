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


def pack(value: Any, tensors: Tensors, path: str) -> Any:
    """`value` as JSON can hold it; copies of its tensors go to `tensors`, by where in it they are. Of a dict, what is
    unwritable is left out.
    """
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach().to("cpu", copy=True).contiguous()
        return {"tensor": path}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, list):
        return [pack(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]
    kind = KINDS.get(type(value))
    if kind is None:
        raise Unwritable(type(value).__name__)
    if not isinstance(value, Mapping):
        return {kind: [pack(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]}
    pairs = []
    for key, item in value.items():
        try:
            pairs.append([pack(key, tensors, f"{path}.key"), pack(item, tensors, f"{path}.{key}")])
        except Unwritable:
            continue
    return {kind: pairs}


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
