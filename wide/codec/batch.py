"""Batches on their way to a node: any nest of dicts, lists and tuples of tensors, as a description and raw bytes.

Knows tensors and plain values; never pickle. A description is made of lists, so that MessagePack can carry it.
"""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any, NamedTuple

import numpy as np
import torch

from wide.codec.layout import ALIGN_NBYTES
from wide.errors import ProtocolError, TrainingFailed

PADDING = memoryview(bytes(ALIGN_NBYTES))


class Packed(NamedTuple):
    """A batch as it is sent: what it looks like, and its bytes, straight from the tensors' own memory."""

    description: list[Any]
    buffers: list[memoryview]
    nbytes: int


def pack(batch: Any) -> Packed:
    buffers: list[memoryview] = []
    description = _describe(batch, buffers)
    return Packed(description, buffers, sum(map(len, buffers)))


def _describe(value: Any, buffers: list[memoryview]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape), *_append(value, buffers)]
    if isinstance(value, np.ndarray) and value.dtype.kind in "fiubc":
        tensor = torch.from_numpy(np.ascontiguousarray(value))
        return ["array", *_describe(tensor, buffers)[1:]]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return ["value", value]
    if isinstance(value, dict) and all(isinstance(key, str | int | float | bytes) for key in value):
        return ["dict", list(value), [_describe(item, buffers) for item in value.values()]]
    if type(value).__bases__ == (tuple,) and hasattr(value, "_fields"):  # not what adds methods to it
        return ["named", type(value).__name__, list(value._fields), [_describe(item, buffers) for item in value]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(item, buffers) for item in value]]
    raise TrainingFailed(
        f"a batch holds a {type(value).__name__}, which cannot be streamed to nodes: "
        "use --data local, or a collate that returns tensors in dicts, lists or tuples"
    )


def _append(tensor: torch.Tensor, buffers: list[memoryview]) -> tuple[int, list[int]]:
    """Its bytes as they lie in memory, and the strides they lie in: kernels may round differently in another order."""
    tensor = tensor.detach().cpu()
    stride = torch.empty_like(tensor, device="meta").stride()  # the tensor's own if it has no gaps, else contiguous
    if tensor.stride() != stride:
        tensor = tensor.contiguous()
    raw = torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy()
    buffers += [raw.data, PADDING[: -raw.size % ALIGN_NBYTES]]
    return int(raw.size), list(stride)


def unpack(descriptions: list[list[Any]], raw: torch.Tensor) -> list[Any]:
    """The batches whose bytes lie one behind the other in `raw` (uint8, aligned): views into it, nothing is copied."""
    cursor = [0]
    return [_build(description, raw, cursor) for description in descriptions]


def _build(description: list[Any], raw: torch.Tensor, cursor: list[int]) -> Any:
    kind, *rest = description
    if kind in ("tensor", "array"):
        tensor = _tensor(rest, raw, cursor)
        return tensor if kind == "tensor" else tensor.numpy()
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return dict(zip(rest[0], [_build(item, raw, cursor) for item in rest[1]], strict=True))
    if kind == "named":
        return namedtuple(rest[0], rest[1])(*(_build(item, raw, cursor) for item in rest[2]))
    items = [_build(item, raw, cursor) for item in rest[0]]
    return tuple(items) if kind == "tuple" else items


def _tensor(rest: list[Any], raw: torch.Tensor, cursor: list[int]) -> torch.Tensor:
    dtype_name, shape, nbytes, stride = rest
    dtype = getattr(torch, dtype_name, None)
    start = cursor[0]
    cursor[0] += -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
    count = math.prod(shape)
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if count else 0
    is_dense = reach <= count and min(stride, default=0) >= 0
    if (
        not isinstance(dtype, torch.dtype)
        or count * dtype.itemsize != nbytes
        or not is_dense
        or cursor[0] > raw.numel()
    ):
        raise ProtocolError("bad batch", f"a batch's {dtype_name} {shape} does not fit its {nbytes} bytes")
    flat = raw[start : start + nbytes].view(dtype)
    return torch.as_strided(flat, shape, stride, flat.storage_offset())
