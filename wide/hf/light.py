"""A trainer on its way to the nodes: all that its methods may look at, without model, data, optimizer and what cannot
be sent. On a node it gets that node's model, wherever it, or something that it holds, meant a part of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from wide.errors import TrainingFailed
from wide.hf.copies import dumps, loads
from wide.hf.recording import forget, record

ANEW = ("accelerator", "callback_handler", "control", "gather_function", "state", "_memory_tracker")  # made on the node
NONE = (  # they know that these may be missing
    *("model", "model_wrapped", "model_init", "optimizer", "optimizer_cls_and_kwargs", "lr_scheduler", "deepspeed"),
    *("train_dataset", "eval_dataset", "data_collator", "hub_model_id"),
)
LEFT_HERE = (*NONE, "args", "neftune_hook_handle", "maybe_activation_offload_context", "_eval_dataloaders", "_trial")


class _Blank:
    """What becomes the trainer, once its class is known."""


class Light:
    """`at(model)` makes the trainer of that model. `dropped` says why an attribute could not come along."""

    def __init__(self, trainer: Any) -> None:
        self._others: list[nn.Module] = []  # a teacher, say: as large as the model, so they travel as it does
        self.dropped: dict[str, str] = {}
        args = copy.copy(trainer.args)
        for name in ("distributed_state", "_setup_devices"):  # this process's own
            vars(args).pop(name, None)
        args._n_gpu = min(1, getattr(args, "_n_gpu", 1))  # a node is one device
        args.dataloader_num_workers, args.dataloader_persistent_workers = 0, False  # of evaluate(): a child has no own
        args.dataloader_prefetch_factor = None
        kept: dict[str, Any] = {}
        for name, value in vars(trainer).items():
            if name not in (*ANEW, *LEFT_HERE):
                try:
                    self._bytes(value, trainer)
                except Exception as error:  # whatever it is, nodes cannot have it
                    self.dropped[name] = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
                else:
                    kept[name] = value
        self._others.clear()
        self._words = self._bytes((type(trainer), args, kept), trainer)

    def _bytes(self, thing: Any, trainer: Any) -> bytes:
        names = _names(trainer)

        def named(it: Any) -> Any:
            if id(it) in names:
                return names[id(it)]
            if isinstance(it, nn.Module) and not any(id(part) in names for part in it.modules()):
                known = [id(other) for other in self._others]
                if id(it) not in known:
                    self._others.append(it)
                return "other", [id(other) for other in self._others].index(id(it))
            return None

        return dumps(thing, named)

    def __getstate__(self) -> dict[str, Any]:
        for other in self._others:  # which were asked here, while the job was made
            forget(other)
        return vars(self)

    def at(self, model: nn.Module) -> Any:
        """Its class and its attributes as they were, `model` in the place of its model, everything else new."""
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        modules, tensors = dict(model.named_modules()), _tensors(model)
        trainer: Any = _Blank()

        def load(said: Any) -> Any:
            kind, name = said
            if kind == "trainer":
                return trainer
            if kind == "other":
                record(self._others[name])
                return self._others[name].to(device)
            return modules[name] if kind == "module" else tensors[name]

        kind, args, kept = loads(self._words, load)
        trainer.__class__ = kind
        vars(trainer).update(dict.fromkeys(NONE), **kept)
        trainer.model = trainer.model_wrapped = model
        trainer.args, trainer.is_in_train = args, True
        _equip(trainer, device)
        return trainer

    def explain(self, error: AttributeError) -> None:
        """Raises, if what is missing is missing because it could not be sent."""
        if error.name in self.dropped:
            why = self.dropped[error.name]
            raise TrainingFailed(
                f"the trainer uses self.{error.name}, which cannot be sent to nodes ({why}): make it where it is used"
            ) from None


def _equip(trainer: Any, device: torch.device) -> None:
    """What belongs to a process: accelerate's state, and the trainer's own bookkeeping. Nobody calls back."""
    from accelerate import PartialState
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback, TrainerControl, TrainerState
    from transformers.trainer_utils import TrainerMemoryTracker

    trainer.args.distributed_state = PartialState(cpu=device.type == "cpu")
    vars(trainer.args)["_setup_devices"] = device
    trainer.create_accelerator_and_postprocess()
    trainer.state, trainer.control = TrainerState(), TrainerControl()
    quiet = [DefaultFlowCallback()]  # a handler without it says so
    trainer.callback_handler = CallbackHandler(quiet, trainer.model, vars(trainer).get("processing_class"), None, None)
    trainer._memory_tracker = TrainerMemoryTracker(True)


def _names(trainer: Any) -> dict[int, tuple[str, str]]:
    """What is said instead of the trainer, and of the parts of its model."""
    model = trainer.model
    found = {id(tensor): ("tensor", name) for name, tensor in _tensors(model).items()}
    found |= {id(module): ("module", name) for name, module in model.named_modules()}
    return found | {id(trainer): ("trainer", "")}


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
