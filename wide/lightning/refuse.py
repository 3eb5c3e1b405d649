"""What of a LightningModule's program would train something else here than in Lightning's own Trainer: refused, in one
line each. Knows Lightning's names, by which its classes are found; imports nothing of it.
"""

from __future__ import annotations

import dis
import importlib.util
import inspect
import sys
import types
import warnings
from typing import Any

from wide.errors import UsageError

ROOTS = ("lightning", "pytorch_lightning")
TESTED = "2.6"
OWN = ("model", "dataset", "loss", "optimizer", "phases", "scheduler", "evaluate", "finish")  # which the module says
TRAINERS = {  # what Lightning's Trainer calls them
    "max_epochs": "epochs",
    "max_steps": "steps",
    "gradient_clip_val": "clip_norm",
    "accumulate_grad_batches": "batches_per_step",
    "val_check_interval": "evaluate_every",
}
CHANGING = {  # hooks that are not called, and change what is trained
    "backward": "the pool calls backward()",
    "configure_gradient_clipping": "give wide.lightning.job(clip_norm=…)",
    "lr_scheduler_step": "the pool steps schedulers",
    "on_after_backward": "gradients are the whole step's, on the coordinator",
    "on_before_backward": "put it into training_step",
    "on_before_optimizer_step": "gradients are the whole step's, on the coordinator",
    "on_before_zero_grad": "write Job(after_step=…) instead",
    "on_train_batch_end": "put it into training_step, or give wide.lightning.job(after_step=…)",
    "on_train_batch_start": "put it into training_step",
    "optimizer_step": "the pool steps the optimizer",
    "optimizer_zero_grad": "the pool has no gradients to be set to zero",
    "configure_sharded_model": "build it in __init__, or in configure_model",
}
LOOKING = (  # hooks that are not called either; mostly they look, print or log
    "configure_callbacks",
    "on_fit_start",
    "on_fit_end",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_model_zero_grad",
    "on_validation_model_eval",
    "on_validation_model_train",
    "on_load_checkpoint",
    "teardown",
)
TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
DOES_MORE = {
    *("freeze", "unfreeze", "requires_grad", "requires_grad_", "param_groups", "optimizers", "load_state_dict"),
    *("data", "mul_", "add_", "copy_", "fill_", "zero_"),
}


def class_of(thing: Any, name: str) -> type | None:
    """Lightning's own class of that name among the bases of this object, in either of its two packages."""
    for kind in type(thing).__mro__:
        if kind.__name__ == name and kind.__module__.partition(".")[0] in ROOTS:
            return kind
    return None


def overrides(thing: Any, base: type | None, name: str) -> bool:
    """Does somebody's own class say this otherwise than Lightning's base, or the object itself?"""
    return name in vars(thing) or getattr(type(thing), name, None) is not getattr(base, name, None)


def base_of(module: Any) -> type:
    """Lightning's class that this is one of; or in words what it is instead."""
    base = class_of(module, "LightningModule")
    if base is not None:
        _check_version(base)
        return base
    kind = module.__name__ if isinstance(module, type) else type(module).__name__
    if class_of(getattr(module, "_orig_mod", None), "LightningModule"):
        raise UsageError("wide.lightning.job: this module is compiled: give the one that torch.compile was given")
    if isinstance(module, type) and any(k.__name__ == "LightningModule" for k in module.__mro__):
        raise UsageError(f"wide.lightning.job: {kind} is a class: give an object, {kind}(…)")
    if not any(importlib.util.find_spec(root) for root in ROOTS):
        raise UsageError(
            f"wide.lightning needs Lightning, and a LightningModule, not {kind}: pip install 'wiiiiide[lightning]'"
        )
    raise UsageError(f"wide.lightning.job: {kind} is no LightningModule: write class {kind}(lightning.LightningModule)")


def check(module: Any, base: type) -> None:
    """Would it train here what it trains there?"""
    kind = type(module).__name__
    if not getattr(module, "automatic_optimization", True):
        raise UsageError(
            f"{kind}.automatic_optimization is False: manual optimization steps optimizers on its own, which a pool "
            "cannot do; write wide.Job(phases=…) for several losses that take turns"
        )
    for name in ("training_step", "configure_optimizers"):
        if not overrides(module, base, name):
            raise UsageError(f"{kind} has no {name}(): write one, as for Lightning's own Trainer")
    for name, instead in CHANGING.items():
        if overrides(module, base, name):
            raise UsageError(f"{kind}.{name}() would not be called, and may change what is trained: {instead}")
    for name in inspect.signature(module.training_step).parameters:
        if name in ("dataloader_iter", "optimizer_idx"):
            raise UsageError(
                f"{kind}.training_step({name}) is not possible in a pool: write training_step(self, batch)"
            )
    _warn_of_the_rest(module, base)


def check_data(data: Any) -> None:
    """Of a data module: it must not do to batches what only the module is asked to do."""
    base = class_of(data, "LightningDataModule")
    for name in TRANSFER:
        if base is not None and overrides(data, base, name):
            kind = type(data).__name__
            raise UsageError(f"{kind}.{name}() would not be called: write it into the LightningModule")


def check_fields(fields: dict[str, Any]) -> None:
    for name in fields:
        if name in TRAINERS:
            raise UsageError(f"wide.lightning.job({name}=…) is called {TRAINERS[name]} here: see help(wide.Job)")
        if name in OWN:
            raise UsageError(f"wide.lightning.job({name}=…): that is what the LightningModule says; leave it out")


def _warn_of_the_rest(module: Any, base: type) -> None:
    kind = type(module).__name__
    names = [name for name in LOOKING if overrides(module, base, name)]
    read = set(_names(module, "training_step"))
    for name in names:
        if does := DOES_MORE.intersection(_names(module, name)):
            raise UsageError(
                f"{kind}.{name}() would not be called, and it has {min(does)} in it, which changes what is trained: "
                "put it into training_step (by self.current_epoch), or give wide.lightning.job(after_step=…)"
            )
    if names:
        said = ", ".join(f"{name}()" for name in names)
        missed = sorted({f"self.{name}" for hook in names for name in _set_by(module, hook) if name in read})
        what = f", so that {', '.join(missed)} in training_step stays as it is" if missed else ""
        warnings.warn(f"wide.lightning: a pool does not call {kind}'s {said}{what}", UserWarning, stacklevel=4)


def _names(module: Any, method: str) -> set[str]:
    """What the code of this method names, and that of the module's own methods which it calls."""
    return {name for code in _codes(module, method) for name in code.co_names}


def _set_by(module: Any, method: str) -> set[str]:
    codes = _codes(module, method)
    return {it.argval for code in codes for it in dis.get_instructions(code) if it.opname == "STORE_ATTR"}


def _codes(module: Any, method: str) -> list[types.CodeType]:
    found: dict[types.CodeType, None] = {}
    unread: list[Any] = [inspect.unwrap(getattr(module, method))]
    while unread:
        it = unread.pop()
        code = it if isinstance(it, types.CodeType) else getattr(it, "__code__", None)
        if code is None or code in found:
            continue
        found[code] = None
        unread += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        own = (vars(kind).get(name) for name in code.co_names for kind in type(module).__mro__ if not _is_theirs(kind))
        unread += [inspect.unwrap(each) for each in own if inspect.isfunction(each)]
    return list(found)


def _is_theirs(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in (*ROOTS, "torch", "builtins")


def _check_version(base: type) -> None:
    root = base.__module__.partition(".")[0]
    version = str(getattr(sys.modules.get(root), "__version__", ""))
    if version and not version.startswith(f"{TESTED}."):
        warnings.warn(
            f"wide.lightning was tried with {root} {TESTED}, this is {version}: compare a few steps with Trainer.fit",
            UserWarning,
            stacklevel=4,
        )
