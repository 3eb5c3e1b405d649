"""One tensor as a description and its own memory, and back. Knows every torch dtype; never pickle.

It comes back as it lay in memory: strides, gaps, and how its address is aligned, because kernels may round differently
where any of these differs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from wide.errors import ProtocolError, TrainingFailed

ALIGN_NBYTES = 64
MOST = 2**40  # in any direction
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # what torch can copy, whatever it stands for


class Described(NamedTuple):
    """All but the bytes."""

    dtype: str
    shape: list[int]
    nbytes: int
    stride: list[int]
    device: str
    requires_grad: bool
    offset: int = 0  # of its first element within its bytes, in elements


def describe(tensor: torch.Tensor) -> tuple[Described, memoryview]:
    """The memory that the tensor spans, from the last aligned address before it; a copy only if it is on another device
    or a lazy conjugate, or if that address is not its own.
    """
    if tensor.is_quantized or tensor.layout != torch.strided:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TrainingFailed(f"a {kind} tensor cannot be sent: make it an ordinary one, for example with to_dense()")
    here = tensor.detach().cpu().resolve_conj().resolve_neg()
    words = here.view(WORDS.get(here.itemsize, here.dtype))
    span, lead = _span(words), words.data_ptr() % ALIGN_NBYTES // words.itemsize if words.numel() else 0
    if lead <= words.storage_offset():
        run = torch.as_strided(words, (lead + span,), (1,), words.storage_offset() - lead)
    else:
        run = torch.zeros(lead + span, dtype=words.dtype)
        run[lead:] = torch.as_strided(words, (span,), (1,))
    raw = run.view(torch.uint8).numpy()
    name, shape, stride = str(tensor.dtype).removeprefix("torch."), list(tensor.shape), list(words.stride())
    described = Described(name, shape, int(raw.size), stride, str(tensor.device), tensor.requires_grad, lead)
    return described, raw.data


def _span(tensor: torch.Tensor) -> int:
    """From its first element to its last, in elements of memory."""
    if not tensor.numel():
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def rebuild(described: Described, raw: torch.Tensor) -> torch.Tensor:
    """The tensor whose bytes are `raw` (uint8, aligned): a view, if it was on the CPU. A device that this machine does
    not have is replaced by the CPU.
    """
    dtype_name, shape, nbytes, stride, device, requires_grad, offset = described
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or nbytes != raw.numel() or not _fits(described, dtype.itemsize):
        raise ProtocolError("bad tensor", f"a {dtype_name} {shape} does not fit {raw.numel()} bytes")
    words = raw.view(WORDS.get(dtype.itemsize, dtype))
    tensor = torch.as_strided(words, shape, stride, words.storage_offset() + offset).view(dtype)
    if device != "cpu" and _has(device):
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


def _fits(it: Described, itemsize: int) -> bool:
    if len(it.shape) != len(it.stride) or not all(0 <= n <= MOST for n in (*it.shape, *it.stride, it.offset)):
        return False
    if it.nbytes % itemsize:
        return False
    steps = sum((n - 1) * step for n, step in zip(it.shape, it.stride, strict=True))
    return not math.prod(it.shape) or it.offset + steps < it.nbytes // itemsize


def _has(device: str) -> bool:
    try:
        wanted = torch.device(device)
        module = torch.get_device_module(wanted)
        return bool(module.is_available()) and (wanted.index or 0) < module.device_count()
    except RuntimeError:
        return False
