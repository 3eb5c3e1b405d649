"""Checkpoints that Lightning's own load_from_checkpoint reads: trained weights and what the module was made with. Knows
the file's few keys; optimizer and loops are in wide's own checkpoints, for --resume.
"""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from wide.errors import UsageError
from wide.lightning.module import as_it_was
from wide.lightning.refuse import base_of, overrides

FILE = "model.ckpt"


class Finish:
    """In the process of whoever called wide.run: from now on the module that was given is the trained one."""

    def __init__(self, module: Any, data: Any) -> None:
        self._module, self._data = module, data

    def __call__(self, result: Any) -> None:
        as_it_was(result.model)
        _load(self._module, result.model.state_dict())
        _write(_content(result, self._module, self._data), Path(result.run_dir) / FILE)


def save(run: Any, module: Any, path: str | os.PathLike[str], data: Any = None) -> Path:
    """Write a run's weights (what wide.run or wide.load returned) as a checkpoint of `module`, which takes them over:
    `wide.lightning.save(wide.load("runs/…"), module, "model.ckpt")`.
    """
    base_of(module)
    weights = getattr(run, "weights", None)
    if weights is None and getattr(run, "model", None) is None:
        raise UsageError("wide.lightning.save(run, module, path): run is what wide.run or wide.load returned")
    _load(module, weights if weights is not None else run.model.state_dict())
    return _write(_content(run, module, data), Path(path))


def _load(module: Any, weights: dict[str, torch.Tensor]) -> None:
    if overrides(module, base_of(module), "configure_model"):
        module.configure_model()  # may be called as often as anybody likes, says Lightning
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        lines = " ".join(line.strip() for line in str(error).splitlines()[1:3])
        raise UsageError(
            f"the trained weights are not {type(module).__name__}'s, as it is now ({lines[:200]}): build in __init__ "
            "what setup() builds"
        ) from None


def _content(run: Any, module: Any, data: Any) -> dict[str, Any]:
    root = base_of(module).__module__.partition(".")[0]
    content = {
        "epoch": int(run.epochs),
        "global_step": run.steps,
        "pytorch-lightning_version": str(getattr(sys.modules.get(root), "__version__", "")),
        "state_dict": module.state_dict(),
        "loops": {},
        "callbacks": {},
        "optimizer_states": [],
        "lr_schedulers": [],
    }
    for each in (module, data):
        if getattr(each, "hparams", None):
            content |= _made_with(each)
    module.on_save_checkpoint(content)
    return content


def _made_with(each: Any) -> dict[str, Any]:
    """The arguments that save_hyperparameters() has kept. A container of OmegaConf's stays one, and says so."""
    own = type(each.hparams)
    is_foreign = own.__module__.startswith("omegaconf")
    values: Any = each.hparams if is_foreign else _writable(dict(each.hparams))
    kept = {each.CHECKPOINT_HYPER_PARAMS_KEY: values}
    if getattr(each, "_hparams_name", None):
        kept[each.CHECKPOINT_HYPER_PARAMS_NAME] = each._hparams_name
    if is_foreign:
        kept[each.CHECKPOINT_HYPER_PARAMS_TYPE] = own
    return kept


def _writable(values: dict[str, Any]) -> dict[str, Any]:
    kept, lost = {}, []
    for name, value in values.items():
        try:
            pickle.dumps(value)
            kept[name] = value
        except Exception:  # a lambda, a lock: whatever it says
            lost.append(name)
    if lost:
        warnings.warn(
            f"wide.lightning: hyperparameter {', '.join(lost)} cannot be pickled and is not in the checkpoint: give it "
            f"to load_from_checkpoint(…, {lost[0]}=…)",
            UserWarning,
            stacklevel=2,
        )
    return kept


def _write(content: dict[str, Any], path: Path) -> Path:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
    return path
