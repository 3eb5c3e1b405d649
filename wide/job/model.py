"""Calling the user's model and loss, and saying in words what is wrong with what they return."""

from __future__ import annotations

import itertools
import math
import os
import pickle
from collections import UserDict, deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from torch.nn.parameter import is_lazy

from wide.errors import TrainingFailed, UsageError
from wide.job.definition import Job, total
from wide.job.here import log
from wide.job.loading import users_code
from wide.job.reach import reach
from wide.job.seeding import OwnGenerators, seed_everything

LEFT = (
    "backward() was called before the pool's own, and its gradients are still there: return the sum of all losses "
    "instead, or put them away with model.zero_grad()"
)
MIXED = "the loss returned wide.total for some batches of a step, and a mean for others: choose one"
LEAST_COUNT = 1e-12  # of a batch: no number overflows because it is divided by that


def build_model(job: Job, seed: int) -> nn.Module:
    """The job's model; its initial weights follow from the seed."""
    OwnGenerators(model=job.model).rewind()
    seed_everything(seed)
    with users_code("model() failed"):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise TrainingFailed(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise TrainingFailed(
            "model() returned a torch.jit module, which cannot be looked into: return the module itself"
        )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise TrainingFailed(f"parameter {name!r} is lazy: run one forward pass inside model() to shape it")
    if not model.training:  # as a pretrained one comes; parts of it that were put into eval mode by hand stay so
        model.train()
    return model


def begun(model: nn.Module, init: Any) -> nn.Module:
    """The same model with the weights to begin with: a state dict, or a file that has one."""
    if init is None:
        return model
    what = "a state dict"
    if isinstance(init, str | os.PathLike):
        what = str(init)
        init = _state_dict(Path(init))
    if not isinstance(init, Mapping):
        raise UsageError(
            f"Job(init=…) is a state dict, or a .safetensors or .pt file with one, got {type(init).__name__}"
        )
    try:
        model.load_state_dict(init)
    except (RuntimeError, TypeError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UsageError(f"Job(init=…): {what} is not this model's: {' '.join(lines[1:3])[:300]}") from None
    return model


def _state_dict(path: Path) -> Any:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        found = torch.load(path, map_location="cpu", weights_only=True)
        return found["state_dict"] if isinstance(found, dict) and isinstance(found.get("state_dict"), dict) else found
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        is_there = path.is_file() and not isinstance(error, OSError)
        why = "it holds no state dict: save model.state_dict()" if is_there else str(error).splitlines()[0]
        raise UsageError(f"Job(init=…): {path} cannot be read: {why}") from None


def batch_to(batch: Any, device: torch.device) -> Any:
    """The same batch with its tensors on `device`."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: batch_to(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(batch_to(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(batch_to(value, device) for value in batch)
    if callable(
        move := getattr(batch, "to", None)
    ):  # a tokenizer's BatchEncoding, a PackedSequence, a class of one's own
        return move(device)
    if isinstance(batch, UserDict):
        return type(batch)({key: batch_to(value, device) for key, value in batch.items()})
    return batch


class Said(NamedTuple):
    """What a loss says of a batch: the tensor that has the gradient, and, if that is a sum, over how many."""

    loss: torch.Tensor
    over: float | None

    @property
    def mean(self) -> float:
        """A sum over nothing is no loss."""
        value: float = self.loss.item()
        if self.over is None:
            return value
        return value / self.over if self.over else 0.0 * value


def without_gradients(parameters: Iterable[nn.Parameter], words: str = LEFT) -> None:
    """The loss may call backward() for something else, if it puts that away: what is left would be added to its own."""
    for parameter in parameters:
        if parameter.grad is not None:
            if parameter.grad.is_sparse or bool(parameter.grad.any()):
                raise TrainingFailed(words)
            parameter.grad = None


def understood(said: Any) -> Said:
    """(loss, metrics), totals and plain means; anything else is explained."""
    if isinstance(said, tuple) and len(said) == 2 and isinstance(said[1], dict):
        said, metrics = said
        log(**{str(name): value for name, value in metrics.items()})
    if isinstance(said, total):
        return Said(check_loss(said.sum, "sum"), _count(said.count))
    return Said(check_loss(said), None)


def _count(count: Any) -> float:
    if isinstance(count, torch.Tensor) and count.requires_grad:
        raise TrainingFailed("wide.total(sum, count): count has a gradient, which would be lost: detach() it")
    try:
        number = float(count)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if isinstance(count, torch.Tensor) and count.numel() != 1:
        raise TrainingFailed(
            f"wide.total(sum, count): count has shape {tuple(count.shape)}, not one number: count.sum()?"
        )
    if not (0 <= number < math.inf):
        what = f"{number}" if isinstance(count, int | float | torch.Tensor) else type(count).__name__
        raise TrainingFailed(f"wide.total(sum, count): count is a number of at least 0, got {what}")
    if 0 < number < LEAST_COUNT:
        raise TrainingFailed(f"wide.total(sum, count): count is 0, or at least {LEAST_COUNT:g}, got {number:g}")
    return number


def check_loss(loss: Any, kind: str = "mean") -> torch.Tensor:
    """A job's loss must be one number with a gradient; anything else is explained."""
    if isinstance(loss, tuple):
        raise TrainingFailed('loss returned a tuple: return the loss, or (loss, {"name": number}) with metrics')
    if not isinstance(loss, torch.Tensor):
        raise TrainingFailed(f"loss returned {type(loss).__name__}, not a tensor: return the batch's {kind} loss")
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        raise TrainingFailed(f"loss has shape {shape}, not a scalar: return its {kind}, e.g. loss.{kind}()")
    if not loss.requires_grad:
        raise TrainingFailed("loss does not depend on any trainable parameter: was it detached, or is all frozen?")
    return loss


def check_aliases(model: nn.Module, loss: Any) -> None:
    """Parameters get memory of their own. What looks at it by another name would look at an old copy."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
    seen = {id(parameter) for parameter in parameters.values()}
    others: list[tuple[str, Any]] = [(f"buffer {name}", buffer) for name, buffer in model.named_buffers()]
    made = _made_anew(model)
    for place in reach(model=model, loss=loss).places:
        if (id(place.owner), place.key) not in made:
            others += [(place.name, tensor) for tensor in _tensors(place.get())]
    homes = [(*_bytes_of(parameter), name) for name, parameter in parameters.items()]
    for (_, end, one), (start, _, other) in itertools.pairwise(sorted(homes)):
        if start < end:
            home, name = (name for _, _, name in homes if name in (one, other))
            _refuse_alias(f"parameter {name}", home)
    _check_buffers(model)
    for name, other in others:
        if id(other) in seen or other.layout is not torch.strided or not other.numel():
            continue
        first, last = _bytes_of(other)
        for start, end, home in homes:
            if first < end and start < last:
                _refuse_alias(name, home)


def _check_buffers(model: nn.Module) -> None:
    """Buffers get memory of their own, too; one tensor under two names stays one."""
    strided = [(n, b) for n, b in model.named_buffers() if b.layout is torch.strided and b.numel()]
    homes = sorted(((*_bytes_of(buffer), name, buffer) for name, buffer in strided), key=lambda home: home[:3])
    for (_, end, one, first), (start, _, other, second) in itertools.pairwise(homes):
        if start < end and _overlap(first, second):
            raise TrainingFailed(
                f"buffer {other} shares its memory with buffer {one}, and would not follow it: use one of them, or "
                "clone() it"
            )


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Do they share an element? (Real and imaginary parts, say, lie between each other and do not.)"""
    if one.dtype != other.dtype or one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return True
    start = min(one.storage_offset(), other.storage_offset())
    marks = torch.zeros(one.untyped_storage().nbytes() // one.element_size() - start, dtype=torch.bool)
    torch.as_strided(marks, one.shape, one.stride(), one.storage_offset() - start).fill_(True)
    return bool(torch.as_strided(marks, other.shape, other.stride(), other.storage_offset() - start).any())


def _refuse_alias(name: str, home: str) -> None:
    raise TrainingFailed(
        f"{name} shares its memory with parameter {home}, and would not follow it: use the parameter itself "
        "(one Parameter under two names is fine), or clone() it"
    )


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the first of its bytes lies, and where the last one ends."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def _tensors(value: Any) -> list[torch.Tensor]:
    """In a plain value: itself, or what a container holds."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, np.ndarray):
        return [torch.from_numpy(value)] if value.flags.writeable and value.dtype.kind in "fiuc" else []
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple | deque) else ()
    return [item for item in items if isinstance(item, torch.Tensor)]


def _made_anew(model: nn.Module) -> set[tuple[int, str]]:
    """Attributes that torch's own hooks (the old spectral_norm and weight_norm) set again before every forward."""
    return {
        (id(module.__dict__), hook.name)
        for module in model.modules()
        for hook in module._forward_pre_hooks.values()
        if type(hook).__module__.startswith("torch.nn.utils.") and hasattr(hook, "name")
    }
