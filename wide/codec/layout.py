"""Flat buffers: where each tensor of a model lies in one contiguous run of bytes. Knows tensors; knows no training.

    trainable parameters │ floating buffers │ other buffers │ left │ frozen parameters │ constant buffers
    ◄──────────────────── live ──────────────────────────────────►
                         an update has just this shape, so it is one view; what is not live travels once

`left` is for jobs whose loss moves parameters (assigns them, unfreezes them): as the loss left them. For all others it
is empty. As of counters, the earliest batch's stays.

Large buffers (masks, tables) count as constant until one is seen to change (node/watch.py): then, as parameters that
move, it becomes live, and the run goes on from its last whole version.

Tensors of one dtype stand together, so a sum is one call per dtype; of these, matrices before vectors, because many
optimizers have a group for each (weight decay), and step a group's neighbours together. Each starts at a multiple of
64 bytes, as it would in memory of its own: the kernels of the maths libraries may round differently on less aligned
data.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from wide.codec.memory import Memory, Private
from wide.codec.tensor import ALIGN_NBYTES
from wide.errors import TrainingFailed
from wide.job.here import Logged, added
from wide.job.model import MIXED
from wide.job.slices import Place
from wide.wire.messages import Tensor

# What is too long for floats is measured again, in doubles.
warnings.filterwarnings("ignore", "overflow encountered in dot", RuntimeWarning, __name__)

LARGE_BUFFER_NBYTES = 16 << 10  # less is not worth a second thought


class Slot(NamedTuple):
    """A tensor's place in the flat buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # bytes
    nbytes: int


class Layout:
    """The places of all tensors of a model: the same on every machine that builds the same model."""

    def __init__(self, model: nn.Module, moved: Collection[str] = ()) -> None:
        parameters, buffers = list(model.named_parameters()), list(model.named_buffers())
        self._end = 0
        known = _statistics(model).union(moved)
        live = [(n, b) for n, b in buffers if n in known or b.nbytes < LARGE_BUFFER_NBYTES]
        self.moved_buffers = [n for n, _ in live if n in moved]
        self.trainable = self._place((n, p) for n, p in parameters if p.requires_grad or n in moved)
        self.buffers_start = self._end
        self.averaged = self._place((n, b) for n, b in live if _is_summable(b.dtype))
        self.kept_start = self._end
        self.kept = self._place((n, b) for n, b in live if not _is_summable(b.dtype))
        self.moved = [i for i, slot in enumerate(self.trainable) if slot.name in moved]  # which of the trainable ones
        by_name, flags = dict(parameters), torch.empty(len(self.moved), dtype=torch.bool)
        self.left = self._place((f"{n} (left)", by_name[n]) for n in (self.trainable[i].name for i in self.moved))
        self.left += self._place([("requires_grad", flags)]) if self.moved else []
        self.live_nbytes = self._end
        live_slots = [*self.trainable, *self.averaged, *self.kept, *self.left]
        ends = [(slot.offset + slot.nbytes, -slot.nbytes % ALIGN_NBYTES) for slot in live_slots]
        self._gaps = [(slice(end, end + nbytes), bytes(nbytes)) for end, nbytes in ends if nbytes]
        self.frozen = self._place((n, p) for n, p in parameters if not p.requires_grad and n not in moved)
        self.constant = self._place((n, b) for n, b in buffers if n not in {name for name, _ in live})
        self.nbytes = self._end

    @property
    def slots(self) -> list[Slot]:
        return [*self.trainable, *self.averaged, *self.kept, *self.left, *self.frozen, *self.constant]

    @property
    def places(self) -> list[Place]:
        """Of the trainable parameters, in runs of one dtype each."""
        runs = {dtype: (run, start) for run, (dtype, start, _) in enumerate(spans(self.trainable))}
        found = []
        for slot in self.trainable:
            (run, start), nbytes = runs[slot.dtype], slot.dtype.itemsize
            found.append(Place(run, (slot.offset - start) // nbytes, (slot.offset - start + slot.nbytes) // nbytes))
        return found

    @property
    def fixed(self) -> set[str]:
        """The parameters that nobody but the optimizer changes, and what nobody changes at all."""
        moved = {self.trainable[i].name for i in self.moved}
        return {slot.name for slot in (*self.trainable, *self.frozen, *self.constant)} - moved

    def clear_gaps(self, update: memoryview) -> None:
        """Between tensors an update has zeros. What a stranger sent there would be added up, and be found by whoever
        computes in this memory next.
        """
        for gap, zeros in self._gaps:
            update[gap] = zeros

    def describe(self) -> list[Tensor]:
        """What a node tells the coordinator it has built."""
        return [Tensor(slot.name, str(slot.dtype), slot.shape, slot.stride) for slot in self.slots]

    def _place(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[Slot]:
        slots = []
        for name, tensor in sorted(tensors, key=lambda pair: (str(pair[1].dtype), pair[1].ndim < 2)):
            nbytes = tensor.numel() * tensor.element_size()
            slots.append(Slot(name, tensor.dtype, tuple(tensor.shape), _dense_stride(tensor), self._end, nbytes))
            self._end += -(-nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        return slots


class Flat:
    """One flat buffer with the layout's views into it; in memory of this process, unless another one is given."""

    def __init__(
        self, layout: Layout, only_live: bool, device: str | torch.device = "cpu", memory: Memory | None = None
    ) -> None:
        nbytes = layout.live_nbytes if only_live else layout.nbytes
        self.memory = memory or Private(nbytes, device)
        self.raw = self.memory.raw
        self.trainable = [_view(self.raw, slot) for slot in layout.trainable]
        self.averaged = [_view(self.raw, slot) for slot in layout.averaged]
        self.kept = [_view(self.raw, slot) for slot in layout.kept]
        left = [_view(self.raw, slot) for slot in layout.left]
        self.left, self.requires_grad = left[:-1], left[-1] if left else None
        self.moved = layout.moved
        self.frozen = [] if only_live else [_view(self.raw, slot) for slot in layout.frozen]
        self.constant = [] if only_live else [_view(self.raw, slot) for slot in layout.constant]
        self.sums = [_lean(run) for run in _runs(self.raw, [*layout.trainable, *layout.averaged])]  # all that is added
        self.trainable_runs = _runs(self.raw, layout.trainable)
        self.averaged_runs = _runs(self.raw, layout.averaged)
        self.buffers_raw = self.raw[layout.buffers_start : layout.live_nbytes]
        self.kept_raw = self.raw[layout.kept_start : layout.live_nbytes]
        self.touched = 0  # bit i: trainable tensor i has had a gradient
        self.weights: list[float] = []  # of each batch whose loss is a total: its count, over the step's samples
        self.logged: Logged = {}  # what the batches' losses have logged
        self.is_spare = False  # nobody uses it (spare.py)
        self.bytes = self.memory.bytes

    def fingerprint(self) -> str:
        return hashlib.sha256(self.raw.cpu().numpy().data).hexdigest()

    def is_finite(self) -> bool:
        """No NaN and no Inf in all that will be added up; squares beyond what doubles can hold count as Inf."""
        return math.isfinite(self.norm())

    def norm(self) -> float:
        """Of all that will be added up, in one pass; not finite, if something in it is not."""
        if self.left and not all(bool(torch.isfinite(value).all()) for value in self.left):
            return math.nan
        return math.sqrt(sum(map(_squares, self.sums)))


def join(left: Flat, right: Flat) -> None:
    """left += right; of what cannot be averaged (counters, flags) the earlier batch's stays."""
    for a, b in zip(left.sums, right.sums, strict=True):
        a += b
    left.touched |= right.touched
    if right.weights:
        left.weights = left.weights + right.weights
    if right.logged:
        left.logged = added(left.logged, right.logged)


def apart(one: Flat, other: Flat) -> float:
    """How far two updates are from each other, where 1 is as far as the longer one is long."""
    longest = max(one.norm(), other.norm())
    distance = math.sqrt(sum(_squares(a - b) for a, b in zip(one.sums, other.sums, strict=True)))
    return distance / longest if longest else 0.0


def by_counts(flat: Flat, batches: int) -> None:
    """The gradient of totals: that of the sum of their sums, over the sum of their counts. Means stay as they are."""
    if not flat.weights:
        return
    if len(flat.weights) != batches:
        raise TrainingFailed(MIXED)
    weight = sum(flat.weights)
    if not weight > 0:
        raise TrainingFailed("the counts of wide.total add up to 0 in all batches of a step: there is nothing to learn")
    torch._foreach_mul_(flat.trainable, 1 / weight)
    flat.weights = []


def scale(flat: Flat, factor: float) -> None:
    """All that is added up, times `factor`."""
    for run in flat.sums:
        run *= factor


def bind(model: nn.Module, flat: Flat, layout: Layout) -> None:
    """Move the model's tensors into the flat buffer, values included; tied ones stay tied."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    moved: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for slot, view in zip(layout.trainable + layout.frozen, flat.trainable + flat.frozen, strict=True):
            view.copy_(parameters[slot.name])
            parameters[slot.name].data = view
        for i, value in zip(layout.moved, flat.left, strict=True):
            value.copy_(flat.trainable[i])
        if flat.requires_grad is not None:
            names = [layout.trainable[i].name for i in layout.moved]
            flat.requires_grad.copy_(torch.tensor([parameters[name].requires_grad for name in names]))
        slots, views = layout.averaged + layout.kept + layout.constant, flat.averaged + flat.kept + flat.constant
        for slot, view in zip(slots, views, strict=True):
            view.copy_(buffers[slot.name])
            moved[id(buffers[slot.name])] = view.data  # a version counter of its own: autograd watches these
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = moved[id(buffer)]


@torch.no_grad()
def bring_home(parameters: Iterable[torch.Tensor], views: Iterable[torch.Tensor]) -> None:
    """What was put in a parameter's place, by way of `.data`, is copied to where it lives; its memory stays."""
    for parameter, view in zip(parameters, views, strict=True):
        if parameter.data_ptr() != view.data_ptr():
            view.copy_(parameter)
            parameter.data = view


def settle(weights: Flat, update: Flat) -> None:
    """The parameters that the loss has moved become what it made of them: there the optimizer goes on."""
    if not update.left:
        return
    with torch.no_grad():
        for i, value in zip(update.moved, update.left, strict=True):
            weights.trainable[i].copy_(value)


def unbind(model: nn.Module) -> None:
    """Give the model's tensors memory of their own again, as an ordinary model has; tied ones stay tied."""
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.data.clone(), None
    moved = {id(buffer): buffer.clone() for buffer in model.buffers()}
    for module in model.modules():
        module._buffers.update({n: moved[id(b)] for n, b in module._buffers.items() if b is not None})


def difference(theirs: list[Tensor], ours: list[Tensor]) -> str:
    """The first way in which two models differ, in words; empty if they do not."""
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return f"{other.name} {other.dtype} {other.shape} where the pool has {mine.name} {mine.dtype} {mine.shape}"
    if len(theirs) != len(ours):
        return f"{len(theirs)} tensors where the pool has {len(ours)}"
    return ""


def _statistics(model: nn.Module) -> set[str]:
    """The buffers that torch's own layers change with every batch."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, _NormBase | _SpectralNorm)
        for name in module._buffers
    }


def _is_summable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Its own, if it has no gaps: kernels round differently on other layouts (a transposed weight, channels last)."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tuple(tensor.stride())


def _view(raw: torch.Tensor, slot: Slot) -> torch.Tensor:
    run = raw[slot.offset : slot.offset + slot.nbytes].view(slot.dtype)
    return torch.as_strided(run, slot.shape, slot.stride, run.storage_offset())


def _lean(run: torch.Tensor) -> Any:
    """numpy adds the same bits as torch, and starts in a tenth of the time, which counts when models are small."""
    is_plain = run.device.type == "cpu" and run.dtype in (torch.float32, torch.float64)
    return run.numpy() if is_plain else run


def _squares(run: Any) -> float:
    if isinstance(run, np.ndarray):
        squares = float(run.dot(run))
        return squares if math.isfinite(squares) else float(np.einsum("i,i", run, run, dtype=np.float64))
    real = torch.view_as_real(run) if run.is_complex() else run
    norm = float(torch.linalg.vector_norm(real, dtype=torch.promote_types(real.dtype, torch.float32)))
    norm = norm if math.isfinite(norm) else float(torch.linalg.vector_norm(real, dtype=torch.float64))
    return norm * norm


def spans(slots: list[Slot]) -> list[tuple[torch.dtype, int, int]]:
    """Neighbours of one dtype as (dtype, start, end), padding included (it is zero and stays zero)."""
    found: list[tuple[torch.dtype, int, int]] = []
    for slot in slots:
        end = slot.offset + -(-slot.nbytes // ALIGN_NBYTES) * ALIGN_NBYTES
        if found and found[-1][0] == slot.dtype and found[-1][2] == slot.offset:
            found[-1] = (slot.dtype, found[-1][1], end)
        else:
            found.append((slot.dtype, slot.offset, end))
    return found


def _runs(raw: torch.Tensor, slots: list[Slot]) -> list[torch.Tensor]:
    return [raw[start:end].view(dtype) for dtype, start, end in spans(slots)]
