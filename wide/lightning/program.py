"""A Lightning program as a Job sees it: functions that build the model, its data and its optimizer, anywhere. Travels
to the nodes by pickle; what it has opened does not.
"""

from __future__ import annotations

import math
from typing import Any

from torch.utils.data import DataLoader

from wide.errors import UsageError
from wide.lightning import data as loading
from wide.lightning.data import Loaders
from wide.lightning.module import alone, copied, take_notes
from wide.lightning.optimizers import Form, keep_together, understood
from wide.lightning.refuse import overrides
from wide.lightning.standin import StandIn


class Program:
    """`module` is a copy of the user's, which is never trained itself; `data` is the user's own."""

    def __init__(self, module: Any, base: type, data: Any, fields: dict[str, Any]) -> None:
        self.module, self.base, self.data = module, base, data
        self.epochs: float | None = fields.get("epochs")
        self.steps: int | None = fields.get("steps")
        self.batches_per_step: int | None = fields.get("batches_per_step")
        self.clip_norm: float | None = fields.get("clip_norm")
        self.seed: int = fields.get("seed", 0)
        self._loaders: Loaders | None = None
        self._is_opening = False

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"data": loading.to_be_sent(self.data), "_loaders": None, "_is_opening": False}

    # ── what a Job asks for ──────────────────────────────────────────────────────────────────────────────────────

    def model(self) -> Any:
        """As Lightning prepares one: setup() and configure_model(), if the module has them."""
        model = alone(copied(self.module), self, self.base)
        if overrides(model, self.base, "setup"):
            model.setup(stage=loading.STAGE)
        if overrides(model, self.base, "configure_model"):
            model.configure_model()
        take_notes(model)
        return model

    def dataset(self) -> DataLoader[Any]:
        return self.loaders.train

    def optimizer(self, model: Any) -> Any:
        return keep_together(self.form(model))

    def form(self, model: Any) -> Form:
        return understood(model.configure_optimizers())

    # ── what is known of the run ─────────────────────────────────────────────────────────────────────────────────

    @property
    def loaders(self) -> Loaders:
        """Opened once in each process that asks."""
        if self._loaders is None:
            owner = None if isinstance(self.data, DataLoader) else self.data
            self._is_opening = True
            before = getattr(owner, "trainer", None)
            try:
                if owner is not None:
                    owner.trainer = StandIn(self, is_validating=False)
                model = self.model() if self._needs_module else None
                self._loaders = loading.opened(model, self.data, self.seed)
            finally:
                self._is_opening = False
                if owner is not None:
                    owner.trainer = before
        return self._loaders

    @property
    def _needs_module(self) -> bool:
        """Does it have loaders of its own?"""
        return any(overrides(self.module, self.base, name) for name in ("train_dataloader", "val_dataloader"))

    @property
    def datamodule(self) -> Any:
        """The user's, set up."""
        if self.data is None or isinstance(self.data, DataLoader):
            return None
        if not self._is_opening:
            _ = self.loaders
        return self.data

    @property
    def batches(self) -> int | None:
        return self.loaders.batches

    @property
    def steps_per_epoch(self) -> int | None:
        """Left out, batches_per_step is 1 for Lightning: a batch of the loader's makes an update."""
        batches = self.batches
        return None if batches is None else math.ceil(batches / (self.batches_per_step or 1))

    @property
    def estimated_steps(self) -> int:
        per_epoch = self.steps_per_epoch if self.epochs is not None else None
        if per_epoch is not None and self.epochs is not None:
            steps = max(1, math.ceil(self.epochs * per_epoch - 1e-9))
            return steps if self.steps is None else min(steps, self.steps)
        if self.steps is None:
            raise UsageError(
                "self.trainer.estimated_stepping_batches: nobody knows how long this run will be: "
                "wide.lightning.job(epochs=…), or steps=…"
            )
        return self.steps
