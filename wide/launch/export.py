"""`wide export`: a run's newest weights, or its best, as one file. Knows checkpoints and two file formats."""

from __future__ import annotations

import os
from pathlib import Path

from wide.errors import UsageError
from wide.launch.load import newest_in


def export(run: str, file: str | None, is_forced: bool, is_best: bool = False) -> Path:
    """Write the weights, by the names of the model's state dict, to `file`: .safetensors, or .pt for torch.load."""
    import torch
    from safetensors.torch import save_file

    folder = Path(run)
    path = Path(file) if file is not None else Path(f"{folder.resolve().name}.safetensors")
    if path.suffix not in (".safetensors", ".pt"):
        raise UsageError(f"{path}: expected a file that ends in .safetensors or .pt")
    if path.exists() and not is_forced:
        raise UsageError(f"{path} exists already: choose another name, or say --force")
    newest = newest_in(folder, is_best)
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
