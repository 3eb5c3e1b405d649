"""What a model of transformers records while it computes, if it is asked to: hidden states, attentions, router logits.

It notes in __init__ what there is to be recorded, and hangs hooks into the model when somebody asks for the first time.
A copy has no __init__, hooks cannot be sent, and what comes with the first batch would look like state. So they are
taken out of what is sent, which gets them again when it is asked again, and put into each copy at once.
"""

from __future__ import annotations

from types import FunctionType

from torch import nn

MODULE = "transformers.utils.output_capturing"
MARK = "_output_capturing_hooks_installed"


def forget(model: nn.Module) -> None:
    for module in model.modules():
        vars(module).pop(MARK, None)
        hooks = module._forward_hooks
        for number, hook in list(hooks.items()):
            if isinstance(hook, FunctionType) and hook.__module__ == MODULE:
                del hooks[number]


def record(model: nn.Module) -> None:
    try:
        from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY, maybe_install_capturing_hooks
    except ImportError:  # an older version, whose models do all that in forward
        return
    models = [module for module in model.modules() if hasattr(module, "_can_record_outputs")]
    for it in models:
        _CAN_RECORD_REGISTRY[it] = it._can_record_outputs
    for it in models:
        maybe_install_capturing_hooks(it)
