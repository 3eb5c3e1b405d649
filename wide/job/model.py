"""Calling the user's model and loss, and saying in words what is wrong with what they return."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import torch
from torch import nn

from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.loading import users_code
from wide.job.seeding import seed_everything


def build_model(job: Job, seed: int) -> nn.Module:
    """The job's model; its initial weights follow from the seed."""
    seed_everything(seed)
    with users_code("model() failed"):
        model = job.model()
    if not isinstance(model, nn.Module):
        raise TrainingFailed(f"model() returned {type(model).__name__}, not a torch.nn.Module")
    if not model.training:  # as a pretrained one comes; parts of it that were put into eval mode by hand stay so
        model.train()
    return model


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


def check_loss(loss: Any) -> torch.Tensor:
    """A job's loss must be one number with a gradient; anything else is explained."""
    if not isinstance(loss, torch.Tensor):
        raise TrainingFailed(f"loss returned {type(loss).__name__}, not a tensor: return the batch's mean loss")
    if loss.numel() != 1:
        raise TrainingFailed(f"loss has shape {tuple(loss.shape)}, not a scalar: return its mean, e.g. loss.mean()")
    if not loss.requires_grad:
        raise TrainingFailed("loss does not depend on any trainable parameter: was it detached, or is all frozen?")
    return loss
