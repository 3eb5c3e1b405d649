"""What training_step leaves behind in the module's own lists, dicts and attributes. Knows containers and tensors."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from wide.job.reach import KNOWN  # torch's own attributes: parameters, hooks, …

MOST_KEPT = 64  # items that batches may leave in a list: enough for wide's self-check to see whether they matter
KEEPERS = (list, deque, dict)
Keepers = list[tuple[dict[str, Any], dict[str, int]]]  # attributes; how long those of them were that can grow


def lengths(own: dict[str, Any]) -> dict[str, int]:
    return {name: len(value) for name, value in own.items() if isinstance(value, KEEPERS)}


def tidy(keepers: Keepers) -> None:
    """What batches leave in the module's lists has no graph any more, and does not grow without end: whoever would have
    emptied them, once an epoch, is not called.
    """
    for own, before in keepers:
        for name, value in list(own.items()):
            if name in KNOWN:
                continue
            if isinstance(value, torch.Tensor):
                if value.grad_fn is not None:
                    own[name] = value.detach()
            elif isinstance(value, KEEPERS) and len(value) > (length := before.get(name, 0)):
                _tidy(value, length)


def _tidy(kept: Any, length: int) -> None:
    if len(kept) > length + MOST_KEPT:
        while len(kept) > length:
            kept.popitem() if isinstance(kept, dict) else kept.pop()
    keys = list(kept)[length:] if isinstance(kept, dict) else range(length, len(kept))
    for key in keys:
        kept[key] = detached(kept[key])


def detached(value: Any) -> Any:
    """The same without a graph."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.grad_fn is not None else value
    if isinstance(value, dict):
        return {key: detached(item) for key, item in value.items()} if type(value) is dict else value
    return type(value)(map(detached, value)) if type(value) in (list, tuple) else value
