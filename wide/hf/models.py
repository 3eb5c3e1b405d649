"""The trainer's model for a node: a copy, made ready as `trainer.train()` makes it ready. Knows modules; neither data
nor steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wide.errors import UsageError
from wide.hf.copies import copied
from wide.hf.recording import record


class Model:
    """Called on every machine; the weights come from the pool, and begin as those of the trainer's own model."""

    def __init__(self, trainer: Any) -> None:
        args = trainer.args
        self.source: nn.Module = trainer.model
        self._processing = getattr(trainer, "processing_class", None)
        self._noise = getattr(trainer, "neftune_noise_alpha", None)
        self._is_bf16 = bool(args.bf16)
        self._checkpointing: dict[str, Any] | None = None
        if getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False):
            given = getattr(args, "activation_checkpointing_kwargs", None)
            self._checkpointing = dict(given or getattr(args, "gradient_checkpointing_kwargs", None) or {})

    def __call__(self) -> Any:
        model: Any = copied(self.source)
        record(model)
        model.train()  # all of it, as training_step() does before every batch
        if self._checkpointing is not None:
            _checkpoint(model, self._checkpointing)
        align(model, self._processing)
        if self._noise is not None:
            _add_noise(model, self._noise)
        if self._is_bf16:
            model.forward = _Autocast(model.forward)
        return model

    def with_weights_of(self, model: nn.Module) -> nn.Module:
        """A copy of a copy, where a forward of somebody's own holds on to the model that it was made for."""
        if not any("forward" in vars(module) for module in model.modules()):
            return model
        mine: nn.Module = self().to(next(model.parameters()).device)
        mine.load_state_dict(model.state_dict(), strict=False)
        return mine

    def __getstate__(self) -> dict[str, Any]:
        is_here = all(parameter.device.type == "cpu" for parameter in self.source.parameters())
        return vars(self) | {} if is_here else vars(self) | {"source": copied(self.source)}


class _Autocast:
    """A forward in bf16 whose results are fp32, as accelerate wraps it. What is around it stays as it is."""

    def __init__(self, forward: Any) -> None:
        self.__wrapped__ = forward  # whoever asks for its signature is told that one's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import convert_to_fp32

        model: nn.Module = self.__wrapped__.__self__
        device = next(model.parameters()).device.type
        with torch.autocast(device_type=device, dtype=torch.bfloat16):
            said = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(said)


def _checkpoint(model: Any, given: dict[str, Any]) -> None:
    """Activations are computed again in backward. The name changed with transformers 5.2x."""
    if hasattr(model, "activation_checkpointing_enable"):
        rest = {name: value for name, value in given.items() if name not in ("every_n_layers", "offload")}
        more = {name: given[name] for name in ("every_n_layers", "offload") if name in given}
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=rest or None, **more)
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=given or None)
    else:
        raise UsageError(f"wide.hf.job: {type(model).__name__} has no gradient checkpointing: leave it out")


def align(model: Any, processing: Any) -> None:
    """The tokenizer's special tokens are the model's: train() sees to that."""
    try:
        from transformers import PreTrainedTokenizerBase
        from transformers.trainer_utils import align_special_tokens
    except ImportError:  # an older version, in which it is the trainer's own
        return
    if isinstance(processing, PreTrainedTokenizerBase) and hasattr(model, "config"):
        align_special_tokens(model, processing)


def _add_noise(model: nn.Module, alpha: float) -> None:
    try:
        from transformers.integrations.neftune import activate_neftune
    except ImportError:
        raise UsageError("wide.hf.job: neftune_noise_alpha needs transformers 5.23 here: leave it out") from None
    activate_neftune(model, alpha)
