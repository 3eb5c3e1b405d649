"""Trained weights: their fingerprint, and their files. Knows state dicts and safetensors."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn


def weights_sha256(model: nn.Module) -> str:
    """Over the state dict, keys sorted: key (UTF-8), dtype ("torch.float32"), shape ("(10, 20)"), raw bytes."""
    digest = hashlib.sha256()
    state = model.state_dict()
    for key in sorted(state):
        tensor = state[key]
        if isinstance(tensor, torch.Tensor):
            digest.update(f"{key}{tensor.dtype}{tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def load_weights(model: nn.Module, run_dir: Path) -> nn.Module:
    """Put the run's newest weights into a freshly built model."""
    latest = (run_dir / "checkpoints" / "latest").read_text().strip()
    model.load_state_dict(load_file(run_dir / "checkpoints" / latest / "model.safetensors"), strict=False)
    return model


def save_checkpoint(run_dir: Path, model: nn.Module, step: int, state: dict[str, Any]) -> Path:
    """checkpoints/step-00000040/ with the weights and `state`; complete before `latest` names it."""
    folder = run_dir / "checkpoints"
    temporary, final = folder / f".step-{step:08d}", folder / f"step-{step:08d}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {key: value.contiguous().clone() for key, value in model.state_dict().items() if torch.is_tensor(value)}
    save_file(tensors, temporary / "model.safetensors")  # clones: safetensors refuses tensors that share memory
    (temporary / "state.json").write_bytes(msgspec.json.encode(state))
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    pointer = folder / ".latest"
    pointer.write_text(final.name + "\n")
    os.replace(pointer, folder / "latest")
    return final
