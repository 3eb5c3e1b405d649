"""Batches on their way to a node: any nest of dicts, lists and tuples of tensors, as a description and raw bytes.

Knows tensors and plain values; never pickle. A description is made of lists, so that MessagePack can carry it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from wide.codec.tensor import ALIGN_NBYTES, Described, describe, rebuild
from wide.errors import ProtocolError, TrainingFailed

PADDING = memoryview(bytes(ALIGN_NBYTES))


class Mapping(UserDict[Any, Any]):
    """What a mapping with attributes (a tokenizer's BatchEncoding, say) is on a node that was streamed to."""

    def __getattr__(self, name: str) -> Any:
        if name != "data" and name in self.data:
            return self.data[name]
        raise AttributeError(name)

    def to(self, device: Any) -> Mapping:
        return Mapping({key: v.to(device) if hasattr(v, "to") else v for key, v in self.data.items()})


class Packed(NamedTuple):
    """A batch as it is sent: what it looks like, and its bytes, straight from the tensors' own memory."""

    description: list[Any]
    buffers: list[memoryview]
    nbytes: int
    width: int  # bytes in a number of its largest tensor: what a codec may count on


def pack(batch: Any) -> Packed:
    buffers: list[memoryview] = []
    widths = [(0, 1)]
    description = _describe(batch, buffers, widths)
    return Packed(description, buffers, sum(map(len, buffers)), max(widths)[1])


def _describe(value: Any, buffers: list[memoryview], widths: list[tuple[int, int]]) -> list[Any]:
    if isinstance(value, torch.Tensor):
        described, raw = describe(value)
        buffers += [raw, PADDING[: -len(raw) % ALIGN_NBYTES]]
        widths.append((len(raw), min(value.itemsize, 8)))
        return ["tensor", *described._replace(device="cpu")]  # a node computes where it likes
    if type(value) in (np.ndarray, np.memmap) and value.dtype.kind in "fiubc" and value.dtype.isnative:
        plain = value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy(order="K")
        return ["array", *_describe(torch.from_numpy(plain), buffers, widths)[1:]]
    if isinstance(value, np.generic) and value.dtype.kind in "fiubcUS":
        return ["scalar", value.dtype.str, value.tobytes()]
    if value is None or type(value) in (bool, float, str, bytes) or (type(value) is int and -(2**63) <= value < 2**64):
        return ["value", value]
    if type(value) is int:
        return ["int", str(value)]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    is_known = type(value) in (dict, OrderedDict, defaultdict) or isinstance(value, UserDict)
    if is_known and all(isinstance(key, str | int | float | bytes) for key in value):
        kind = "dict" if isinstance(value, dict) else "mapping"
        return [kind, list(value), [_describe(item, buffers, widths) for item in value.values()]]
    if type(value).__bases__ == (tuple,) and hasattr(value, "_fields"):  # not what adds methods to it
        return [
            "named",
            type(value).__name__,
            list(value._fields),
            [_describe(item, buffers, widths) for item in value],
        ]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_describe(item, buffers, widths) for item in value]]
    raise TrainingFailed(
        f"a batch holds a {type(value).__name__}, which cannot be streamed to nodes: "
        "use --data local, or a collate that returns tensors in dicts, lists or tuples"
    )


def fingerprints(probes: list[tuple[int, Any]]) -> list[tuple[int, str]]:
    """Of samples by number: their values, wherever and however they lie in memory. Of what is not made of tensors and
    plain values nothing is known.
    """
    found = []
    for number, batch in probes:
        digest = hashlib.sha256()
        if _feed(digest.update, batch):
            found.append((number, digest.hexdigest()))
    return found


def _feed(update: Callable[[Any], None], value: Any) -> bool:
    """Is all of it known?"""
    if isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized:
        here = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        update(f"{value.dtype}{tuple(value.shape)}".encode())
        update(here.reshape(-1).view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"{value.dtype.str}{value.shape}".encode())
        update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, dict | UserDict):
        update(f"{type(value).__name__}{len(value)}".encode())
        return all(_feed(update, key) and _feed(update, item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        update(f"{type(value).__name__}{len(value)}".encode())
        return all(_feed(update, item) for item in value)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        update(f"{type(value).__name__}{value!r}".encode())
    else:
        return False
    return True


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
    if kind == "scalar":
        return np.frombuffer(rest[1], np.dtype(rest[0]))[0]
    if kind == "int":
        return int(rest[0])
    if kind == "complex":
        return complex(*rest)
    if kind in ("dict", "mapping"):
        found = dict(zip(rest[0], [_build(item, raw, cursor) for item in rest[1]], strict=True))
        return found if kind == "dict" else Mapping(found)
    if kind == "named":
        return namedtuple(rest[0], rest[1])(*(_build(item, raw, cursor) for item in rest[2]))
    items = [_build(item, raw, cursor) for item in rest[0]]
    return tuple(items) if kind == "tuple" else items


def _tensor(rest: list[Any], raw: torch.Tensor, cursor: list[int]) -> torch.Tensor:
    try:
        described = msgspec.convert(rest, Described)
    except msgspec.ValidationError as error:
        raise ProtocolError("bad tensor", f"a batch's description cannot be read: {error}") from None
    start, end = cursor[0], cursor[0] + described.nbytes
    cursor[0] += -(-described.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
    if cursor[0] > raw.numel():
        raise ProtocolError("bad tensor", f"a batch's {described.dtype} {described.shape} goes beyond its bytes")
    return rebuild(described, raw[start:end])
