"""A batch on its way from a worker to its node, whatever it is made of: large ones lie in memory that both see, so the
node copies nothing. Knows pickle and memory; knows nothing of data sets.

From a process to its own parent, and by no other way: nobody else can say anything here. The memory has no name
(transport/shared.py), so nothing is left behind, whoever is killed.
"""

from __future__ import annotations

import io
import os
import pickle
import struct
from collections.abc import Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NamedTuple

import cloudpickle
import torch

from wide.transport.shared import Segment, mapped

ALIGN_NBYTES = 64  # as torch's own memory: a product rounds differently, should it begin elsewhere
INLINE_NBYTES = 16 << 10  # goes through the pipe: so little that whoever sends a few of them never waits for the reader
HEAD = struct.Struct("=?I")  # lies it in memory? how many parts are there?


class Parcel(NamedTuple):
    """What was pickled, and beside it the memory of tensors and arrays, one behind the other."""

    parts: list[memoryview]

    @property
    def starts(self) -> list[int]:
        return _starts([part.nbytes for part in self.parts])

    def write(self, room: memoryview) -> None:
        for start, part in zip(self.starts, self.parts, strict=False):
            room[start : start + part.nbytes] = part.cast("B") if part.nbytes else b""


def wrap(thing: Any) -> Parcel:
    """Raises whatever an object raises that cannot be pickled."""
    body, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(body, protocol=5, buffer_callback=buffers.append).dump(thing)
    return Parcel([body.getbuffer(), *(buffer.raw() for buffer in buffers)])


def send(pipe: Connection, parcel: Parcel) -> None:
    """Raises OSError, before anything is sent, where there is no memory for it."""
    nbytes = parcel.starts[-1]
    sizes = [part.nbytes for part in parcel.parts]
    head = HEAD.pack(nbytes > INLINE_NBYTES, len(sizes)) + struct.pack(f"={len(sizes)}Q", *sizes)
    if nbytes <= INLINE_NBYTES:
        room = bytearray(nbytes)
        parcel.write(memoryview(room))
        pipe.send_bytes(head + room)
        return
    segment = Segment(nbytes)
    try:
        assert segment.name is not None
        parcel.write(segment.bytes)
        pipe.send_bytes(head)
        send_handle(pipe, segment.name[0], None)
    finally:
        segment.close()


def receive(pipe: Connection) -> Parcel:
    """Raises EOFError or OSError if there is nobody who sends."""
    said = pipe.recv_bytes()
    is_in_memory, count = HEAD.unpack_from(said)
    sizes = struct.unpack_from(f"={count}Q", said, HEAD.size)
    inline = memoryview(said)[HEAD.size + 8 * count :]
    return cut(_memory(pipe, _starts(sizes)[-1]) if is_in_memory else _aligned(inline), sizes)


def cut(room: memoryview, sizes: Sequence[int]) -> Parcel:
    """The parcel that was written there."""
    return Parcel([room[start : start + size] for start, size in zip(_starts(sizes), sizes, strict=False)])


def unwrap(parcel: Parcel) -> Any:
    """Raises whatever an object raises that cannot be made again."""
    return pickle.loads(parcel.parts[0], buffers=parcel.parts[1:])


def _memory(pipe: Connection, nbytes: int) -> memoryview:
    file = recv_handle(pipe)
    try:
        return mapped(file, nbytes).numpy().data
    finally:
        os.close(file)


def _aligned(said: memoryview) -> memoryview:
    room = torch.empty(len(said), dtype=torch.uint8, device="cpu").numpy().data
    room[:] = said
    return room


def _starts(sizes: Sequence[int]) -> list[int]:
    """Where parts of these sizes begin, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // ALIGN_NBYTES) * ALIGN_NBYTES)
    return starts


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Tensors keep their strides, and what they share within a batch: kernels may round differently without."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is torch.Tensor and _is_plain(thing):
            return _of_tensor(thing)
        if type(thing) is torch.UntypedStorage and thing.device.type == "cpu":
            return _storage, (pickle.PickleBuffer(_bytes_of(thing).numpy().data),)
        return super().reducer_override(thing)


def _is_plain(tensor: torch.Tensor) -> bool:
    is_here = tensor.layout == torch.strided and tensor.device.type == "cpu" and not tensor.is_quantized
    return is_here and not (tensor.is_conj() or tensor.is_neg() or tensor.__dict__)


def _of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Of a view into something large (the data set itself, say) only its own part."""
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    start = offset * tensor.itemsize // ALIGN_NBYTES * ALIGN_NBYTES
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    end = (offset + last + 1) * tensor.itemsize if tensor.numel() else start
    if storage.nbytes() > 2 * (end - start) + ALIGN_NBYTES:
        storage = _bytes_of(storage)[start:end].clone().untyped_storage()
        offset -= start // tensor.itemsize
    return _tensor, (storage, tensor.dtype, offset, tensor.shape, tensor.stride(), tensor.requires_grad)


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: torch.Size,
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, shape, stride).requires_grad_(requires_grad)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _storage(memory: Any) -> torch.UntypedStorage:
    if not len(memory):
        return torch.empty(0).untyped_storage()
    return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
