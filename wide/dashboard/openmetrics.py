"""A run as OpenMetrics text, which Prometheus and its kin read. Knows a snapshot."""

from __future__ import annotations

import math
from collections.abc import Iterable

from wide.dashboard.account import Brief
from wide.telemetry.snapshot import NodeView, Snapshot

NODE_GAUGES = (
    ("batches_per_second", "merged of this node, lately", lambda view: view.recent.batches_per_s),
    ("compute_ratio", "part of its time that it computed, lately", lambda view: view.recent.compute),
    ("wait_ratio", "part of its time that it waited, lately", lambda view: view.recent.wait),
    ("memory_bytes", "of its process", lambda view: view.totals.rss_bytes),
    ("silent", "1: its heart does not beat", lambda view: int(view.is_silent)),
)
NODE_COUNTERS = (
    ("batches", "merged of this node", lambda view: view.totals.batches),
    ("sent_bytes", "by this node", lambda view: view.totals.bytes_sent),
    ("received_bytes", "by this node", lambda view: view.totals.bytes_received),
    ("compute_seconds", "that this node computed", lambda view: view.totals.compute_s),
    ("codec_seconds", "that this node encoded and decoded", lambda view: view.totals.codec_s),
    ("network_seconds", "that this node waited for messages", lambda view: view.totals.network_s),
)


def openmetrics(run: Brief, snapshot: Snapshot | None) -> str:
    lines = list(_pool(run, snapshot))
    for name, words, read in NODE_GAUGES:
        lines += _family(f"wide_node_{name}", "gauge", words, [(_labels(v), read(v)) for v in _nodes(snapshot)])
    for name, words, read in NODE_COUNTERS:
        lines += _family(f"wide_node_{name}", "counter", words, [(_labels(v), read(v)) for v in _nodes(snapshot)])
    return "\n".join([*lines, "# EOF"]) + "\n"


def _pool(run: Brief, snapshot: Snapshot | None) -> Iterable[str]:
    yield from _family("wide_running", "gauge", "1: it goes on", [("", int(run.state == "running"))])
    yield from _family("wide_steps", "counter", "updates of the model", [("", run.steps)])
    if run.loss is not None:
        yield from _family("wide_loss", "gauge", "of the last step", [("", run.loss)])
    metrics = [(f'{{metric="{_escaped(name)}"}}', value) for name, value in run.metrics.items() if value is not None]
    yield from _family("wide_metric", "gauge", "of the last evaluation", metrics)
    if snapshot is None:
        return
    present = sum(not view.is_silent for view in snapshot.nodes) if run.state == "running" else 0
    yield from _family("wide_batches", "counter", "merged", [("", snapshot.batches)])
    yield from _family("wide_nodes", "gauge", "that are there", [("", present)])
    yield from _family("wide_batches_per_second", "gauge", "lately", [("", snapshot.batches_per_s)])
    yield from _family("wide_coordinator_busy_ratio", "gauge", "part of its time, lately", [("", snapshot.busy)])
    if snapshot.left_s is not None:
        yield from _family("wide_left_seconds", "gauge", "until it is done", [("", snapshot.left_s)])


def _family(name: str, kind: str, words: str, values: list[tuple[str, float]]) -> list[str]:
    suffix = "_total" if kind == "counter" else ""
    sound = [(labels, value) for labels, value in values if math.isfinite(value)]
    lines = [f"{name}{suffix}{labels} {value:.10g}" for labels, value in sound]
    return [f"# TYPE {name} {kind}", f"# HELP {name} {words}", *lines] if lines else []


def _nodes(snapshot: Snapshot | None) -> tuple[NodeView, ...]:
    return snapshot.nodes if snapshot is not None else ()


def _labels(view: NodeView) -> str:
    return f'{{node="{view.totals.node}",name="{_escaped(view.totals.name)}",host="{_escaped(view.host)}"}}'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
