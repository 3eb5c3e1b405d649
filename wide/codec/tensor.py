"""One tensor as a description and its own memory, and back. Knows every torch dtype; never pickle.

Strides are kept where the tensor has no gaps, because kernels may round differently in another order of memory.
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


def describe(tensor: torch.Tensor) -> tuple[Described, memoryview]:
    """The tensor's memory itself, unless it has gaps, is on another device, or is a lazy conjugate."""
    if tensor.is_quantized or tensor.layout != torch.strided:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise TrainingFailed(f"a {kind} tensor cannot be sent: make it an ordinary one, for example with to_dense()")
    here = tensor.detach().cpu().resolve_conj().resolve_neg()
    words = here.view(WORDS.get(here.itemsize, here.dtype))
    stride = torch.empty_like(words, device="meta").stride()  # the tensor's own, with its gaps closed
    if words.stride() != stride:
        words = torch.empty_like(words).copy_(words)
    raw = torch.as_strided(words, (words.numel(),), (1,)).view(torch.uint8).numpy()
    name = str(tensor.dtype).removeprefix("torch.")
    described = Described(
        name, list(tensor.shape), int(raw.size), list(stride), str(tensor.device), tensor.requires_grad
    )
    return described, raw.data


def rebuild(described: Described, raw: torch.Tensor) -> torch.Tensor:
    """The tensor whose bytes are `raw` (uint8, aligned): a view, if it was on the CPU. A device that this machine does
    not have is replaced by the CPU.
    """
    dtype_name, shape, nbytes, stride, device, requires_grad = described
    dtype = getattr(torch, dtype_name, None)
    if not isinstance(dtype, torch.dtype) or not _fits(shape, stride, nbytes, dtype.itemsize) or nbytes != raw.numel():
        raise ProtocolError("bad tensor", f"a {dtype_name} {shape} does not fit {raw.numel()} bytes")
    words = raw.view(WORDS.get(dtype.itemsize, dtype))
    tensor = torch.as_strided(words, shape, stride, words.storage_offset()).view(dtype)
    if device != "cpu" and _has(device):
        tensor = tensor.to(device)
    return tensor.requires_grad_() if requires_grad else tensor


def _fits(shape: list[int], stride: list[int], nbytes: int, itemsize: int) -> bool:
    if len(shape) != len(stride) or not all(0 <= n <= MOST for n in (*shape, *stride)):
        return False
    count = math.prod(shape)
    reach = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if count else 0
    return count * itemsize == nbytes and reach <= count


def _has(device: str) -> bool:
    try:
        wanted = torch.device(device)
        module = torch.get_device_module(wanted)
        return bool(module.is_available()) and (wanted.index or 0) < module.device_count()
    except RuntimeError:
        return False
