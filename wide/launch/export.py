"""`wide export`: a run's newest weights as a file of their own. Knows checkpoints and two file formats."""

from __future__ import annotations

import os
from pathlib import Path

from wide.errors import TrainingFailed, UsageError
from wide.launch.folder import CHECKPOINTS, DATABASE
from wide.telemetry.log import log


def export(run: str, file: str | None, is_forced: bool) -> Path:
    """Write the weights, by the names of the model's state dict, to `file`: .safetensors, or .pt for torch.load."""
    import torch
    from safetensors.torch import save_file

    from wide.store import checkpoint

    folder = Path(run)
    if not (folder / DATABASE).exists():
        raise UsageError(f"{folder}: there is no run in it (no {DATABASE}); give a run's folder, such as runs/…")
    path = Path(file) if file is not None else Path(f"{folder.resolve().name}.safetensors")
    if path.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"{path}: expected a file that ends in .safetensors or .pt")
    if path.exists() and not is_forced:
        raise UsageError(f"{path} exists already: choose another name, or say --force")
    if not checkpoint.is_any(folder / CHECKPOINTS):
        raise TrainingFailed(f"{folder} has no checkpoint yet: its run has only just begun, or never got that far")
    _, newest, problems = checkpoint.newest(folder / CHECKPOINTS)
    for problem in problems:
        log.warning("%s", problem)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.touch()  # what does not work is said by Python, in its own words
        if path.suffix == ".pt":
            torch.save(newest.model, temporary)
        else:
            save_file(newest.model, temporary, {"wide_step": str(newest.step)})
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path
