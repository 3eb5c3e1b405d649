"""What a run gives back: to Python as an object, to scripts as one JSON object. Does not import torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from wide.telemetry.totals import NodeTotals


@dataclass(frozen=True)
class Result:
    """A finished run. `model` is the trained torch.nn.Module; it is not part of the JSON."""

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
    model: Any = None

    def to_json(self) -> str:
        fields = {name: value for name, value in vars(self).items() if name not in ("model", "nodes")}
        nodes = [asdict(node) for node in self.nodes]
        return msgspec.json.encode({"schema": "wide.result/1"} | fields | {"nodes": nodes}).decode()

    def summary(self) -> str:
        metrics = "".join(f", {k} {'not finite' if v is None else format(v, '.4g')}" for k, v in self.metrics.items())
        has_loss = self.loss_first is not None and self.loss_last is not None
        loss = f"loss {self.loss_first:.4g} → {self.loss_last:.4g}" if has_loss else "no update"
        return (
            f"{self.steps} step{'s' * (self.steps != 1)}, {self.batches} batch{'es' * (self.batches != 1)} "
            f"in {self.seconds:.1f} s ({self.batches_per_s:.0f} batches/s), "
            f"{loss}{metrics}; weights {self.weights_sha256[:12]}… in {self.run_dir}"
        )


def from_json(text: bytes) -> Result:
    return msgspec.json.decode(text, type=Result)
