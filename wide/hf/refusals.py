"""What of a transformers.Trainer a pool cannot do, in one line each: what, and what to do. Knows attributes of trainers
and their arguments by name; imports none of their libraries.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from wide.errors import UsageError

TESTED = "5.23"  # transformers
LOOP = (  # what a pool does itself: a class with its own has another idea of training
    "train",
    "_inner_training_loop",
    "_run_epoch",
    "_prepare_for_training",
    "training_step",
    "_wrap_model",
    "get_batch_samples",
    "_clip_grad_norm",
    "autocast_smart_context_manager",
    "compute_loss_context_manager",
)
OFFLOADS = tuple(f"trl.trainer.{kind}_trainer" for kind in ("sft", "dpo", "reward", "kto"))  # their training_step only
# switches activation offloading on around the usual one
OURS = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback", "NotebookProgressCallback")
STOPPING = "EarlyStoppingCallback"


def base_of(trainer: Any) -> type:
    """transformers' own Trainer, of which this one is."""
    for kind in type(trainer).__mro__:
        if kind.__name__ == "Trainer" and kind.__module__.partition(".")[0] == "transformers":
            return kind
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("wide.hf needs transformers: pip install 'wiiiiide[hf]'")
    what = f"the class {trainer.__name__}" if isinstance(trainer, type) else f"a {type(trainer).__name__}"
    raise UsageError(f"wide.hf.job takes a constructed transformers.Trainer, got {what}: wide.hf.job(Trainer(…))")


def check(trainer: Any) -> None:
    """Raises what a pool cannot do; warns of another version than was tested."""
    base = base_of(trainer)
    if (name := own_loop(trainer, base)) is not None:
        raise UsageError(
            f"{type(trainer).__name__} has a {name}() of its own, which a pool would not run: put it into "
            "compute_loss, or keep to trainer.train()"
        )
    for why in _reasons(trainer, trainer.args):
        raise UsageError(f"wide.hf.job: {why}")
    version = str(getattr(sys.modules.get("transformers"), "__version__", TESTED))
    if not version.startswith(f"{TESTED}."):
        warnings.warn(f"wide.hf was tested with transformers {TESTED}, this is {version}", stacklevel=5)


def own_loop(trainer: Any, base: type) -> str | None:
    """A part of the training loop that this trainer, or its class, has for itself."""
    for name in LOOP:
        if name in vars(trainer):
            return name
        for kind in type(trainer).__mro__:
            if kind is base:
                break
            if name in vars(kind) and not (name == "training_step" and kind.__module__ in OFFLOADS):
                return name
    return None


def _reasons(trainer: Any, args: Any) -> Iterator[str]:
    said: Callable[[str], Any] = lambda name: getattr(args, name, None)  # noqa: E731  (versions differ in what they have)
    if said("fp16"):
        yield "fp16=True needs a gradient scaler, whose state depends on what came before: use bf16=True"
    if said("deepspeed") or getattr(trainer, "is_deepspeed_enabled", False):
        yield "DeepSpeed shards the model over processes of its own: leave out deepspeed, a pool's nodes hold it whole"
    if said("fsdp") or getattr(trainer, "is_fsdp_enabled", False):
        yield "FSDP shards the model over processes of its own: leave out fsdp, a pool's nodes hold it whole"
    if (said("world_size") or 1) > 1:
        yield f"this is one of {args.world_size} processes (torchrun, accelerate launch): start it once, plainly"
    optim = str(getattr(said("optim"), "value", said("optim")))
    if optim.endswith("_layerwise") or "lomo" in optim:
        yield f'optim="{optim}" steps layer by layer while gradients are computed: take it without layerwise, or AdamW'
    if said("torch_compile"):
        yield "torch_compile=True compiles on every node anew, with other bits: leave it out"
    if said("auto_find_batch_size"):
        yield "auto_find_batch_size=True would give each machine another batch size: set per_device_train_batch_size"
    if said("use_liger_kernel"):
        yield "use_liger_kernel=True changes the model when training starts: apply the kernel to the model yourself"
    if getattr(trainer, "is_model_parallel", False) or getattr(
        trainer, "is_distributed_loading_by_transformers", False
    ):
        yield "the model is spread over several devices: load it whole (leave out device_map)"
    if getattr(trainer.model, "is_quantized", False):
        yield "the model is quantized, and its packed weights cannot be sent as they are: load it in bf16"
    data = trainer.train_dataset
    if data is None:
        yield "this Trainer has no train_dataset: give it one"
    elif not hasattr(data, "__len__") and not said("max_steps") > 0:
        yield "the train_dataset has no length: say max_steps in TrainingArguments"
    elif not is_stream(data) and callable(getattr(data, "set_epoch", None)):
        yield "the train_dataset has set_epoch(), which no node would be told: look at wide.here().epoch in __getitem__"


def is_stream(data: Any) -> bool:
    """Can it only be read as it comes? (torch's own kind has a __getitem__ that raises.)"""
    return not hasattr(data, "__getitem__") or any(kind.__name__ == "IterableDataset" for kind in type(data).__mro__)


def callbacks(trainer: Any) -> tuple[Any, list[str]]:
    """The early stopping, if there is one, and the names of what is nobody's but the user's."""
    stopping, others = None, []
    for callback in trainer.callback_handler.callbacks:
        kind = type(callback)
        is_known = kind.__module__.partition(".")[0] == "transformers"
        if is_known and kind.__name__ == STOPPING:
            stopping = callback
        elif not is_known and kind.__name__ not in OURS:
            others.append(kind.__name__)
            if any("should_training_stop" in _names_in(method) for method in _methods(kind)):
                raise UsageError(
                    f"wide.hf.job: callback {kind.__name__} ends training, and callbacks are not called in a pool: use "
                    "EarlyStoppingCallback, or give wide.run(steps=…)"
                )
    return stopping, others


def _methods(kind: type) -> Iterator[Any]:
    """Its own, and those that it has from others than transformers."""
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] != "transformers":
            yield from vars(base).values()


def _names_in(method: Any) -> tuple[str, ...]:
    code = getattr(method, "__code__", None)
    return code.co_names if code is not None else ()


def tell(trainer: Any, others: list[str]) -> None:
    """Once, what is left out."""
    args = trainer.args
    if others:
        names = ", ".join(dict.fromkeys(others))
        warnings.warn(f"wide.hf: callbacks are not called in a pool: {names}", stacklevel=4)
    ignored = [name for name in ("eval_on_start", "eval_delay", "debug") if getattr(args, name, None)]
    if ignored:
        warnings.warn(f"wide.hf: without effect in a pool: {', '.join(ignored)}", stacklevel=4)
