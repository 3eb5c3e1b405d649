"""What a run gives back: to Python as an object, to scripts as one JSON object. Does not import torch."""

from __future__ import annotations

import functools
import html
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wide.errors import UsageError
from wide.telemetry.totals import NodeTotals

if TYPE_CHECKING:
    from wide.launch.history import Picture

KEPT_BACK = ("build", "nodes", "model")  # not as they are in the JSON


@dataclass(frozen=True)
class Result:
    """A run, as far as it has come. `build` gives its trained model, which is not part of the JSON."""

    run_dir: str
    strategy: str
    steps: int
    epochs: float
    batches: int
    samples: int
    seconds: float
    batches_per_s: float
    samples_per_s: float
    loss_first: float | None
    loss_last: float | None
    weights_sha256: str
    metrics: dict[str, float | None]  # None: not a finite number
    nodes: list[NodeTotals]
    set: dict[str, Any] = field(default_factory=dict)  # the values of a job that is a function, defaults included
    build: Any = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def model(self) -> Any:
        """The trained torch.nn.Module; None, if nobody here knows how to build it."""
        build: Callable[[], Any] | None = self.build
        return build() if build is not None else None

    @property
    def history(self) -> Any:
        """One row for each step, with its loss and what evaluate() said: a DataFrame if pandas is there, else dicts."""
        from wide.launch.history import history

        return history(Path(self.run_dir), self.steps)

    def plot(self) -> Picture:
        """Losses and metrics; shows itself in a notebook."""
        from wide.launch.history import picture

        return picture(Path(self.run_dir))

    def _repr_html_(self) -> str:
        from wide.launch.history import shown

        try:
            return shown(self.summary(), Path(self.run_dir))
        except UsageError as error:  # its folder is gone
            return f"<div>{html.escape(self.summary())}</div><div>{html.escape(str(error))}</div>"

    def to_json(self) -> str:
        fields = {name: value for name, value in vars(self).items() if name not in KEPT_BACK}
        nodes = [asdict(node) for node in self.nodes]
        return msgspec.json.encode({"schema": "wide.result/1"} | fields | {"nodes": nodes}).decode()

    def summary(self) -> str:
        metrics = "".join(f", {k} {'not finite' if v is None else format(v, '.4g')}" for k, v in self.metrics.items())
        has_loss = self.loss_first is not None and self.loss_last is not None
        loss = f"loss {self.loss_first:.4g} → {self.loss_last:.4g}" if has_loss else "no update"
        verified = sum(node.verified_samples for node in self.nodes)
        part = f", {verified / max(1, self.samples):.1%} of its samples verified" if verified else ""
        return (
            f"{self.steps} step{'s' * (self.steps != 1)}, {self.batches} batch{'es' * (self.batches != 1)} "
            f"in {self.seconds:.1f} s ({self.batches_per_s:.0f} batches/s), "
            f"{loss}{metrics}{part}; weights {self.weights_sha256[:12]}… in {self.run_dir}"
        )


def from_json(text: bytes) -> Result:
    return msgspec.json.decode(text, type=Result)
