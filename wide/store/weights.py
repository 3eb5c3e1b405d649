"""Trained weights: their fingerprint, and how to get them back into a model. Knows state dicts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from wide.store import checkpoint


def weights_sha256(model: nn.Module) -> str:
    return state_sha256(model.state_dict())


def state_sha256(weights: Mapping[str, Any]) -> str:
    """Over a state dict, keys sorted: key (UTF-8), dtype ("torch.float32"), shape ("(10, 20)"), raw bytes."""
    digest = hashlib.sha256()
    for key in sorted(weights):
        tensor = weights[key]
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_weights(model: nn.Module, run_dir: Path) -> nn.Module:
    """Put the run's newest weights into a freshly built model."""
    _, newest, _ = checkpoint.newest(run_dir / "checkpoints")
    model.load_state_dict(newest.model, strict=False)
    for name, parameter in model.named_parameters():  # the loss may have unfrozen some
        parameter.requires_grad_(newest.state.get("moved", {}).get(name, parameter.requires_grad))
    return model
