"""What a run gives back: to Python as an object, to scripts as one JSON object."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
from torch import nn

from wide.codec.layout import unbind
from wide.coordinator.record import NodeTotals, Record
from wide.store.weights import weights_sha256


@dataclass(frozen=True)
class Result:
    """A finished run."""

    model: nn.Module
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
    metrics: dict[str, float]
    nodes: list[NodeTotals]

    def to_json(self) -> str:
        fields: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "model"}
        fields["nodes"] = [asdict(node) for node in self.nodes]
        return msgspec.json.encode({"schema": "wide.result/1"} | fields).decode()

    def summary(self) -> str:
        metrics = "".join(f", {name} {value:.4g}" for name, value in self.metrics.items())
        loss = f"loss {self.loss_first:.4g} → {self.loss_last:.4g}" if self.loss_last is not None else "no update"
        return (
            f"{self.steps} steps, {self.batches} batches in {self.seconds:.1f} s ({self.batches_per_s:.0f} batches/s), "
            f"{loss}{metrics}; weights {self.weights_sha256[:12]}… in {self.run_dir}"
        )


def make_result(model: nn.Module, record: Record, run_dir: Path, strategy: str, batches_per_epoch: int) -> Result:
    unbind(model)
    seconds = max(record.seconds, 1e-9)
    tenth = max(1, len(record.losses) // 10)
    first, last = record.losses[:tenth], record.losses[-tenth:]
    return Result(
        model=model,
        run_dir=str(run_dir),
        strategy=strategy,
        steps=len(record.losses),
        epochs=record.batches / batches_per_epoch,
        batches=record.batches,
        samples=record.samples,
        seconds=record.seconds,
        batches_per_s=record.batches / seconds,
        samples_per_s=record.samples / seconds,
        loss_first=sum(first) / tenth if first else None,
        loss_last=sum(last) / tenth if last else None,
        weights_sha256=weights_sha256(model),
        metrics=record.metrics,
        nodes=list(record.nodes.values()),
    )
