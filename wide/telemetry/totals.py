"""What each node did in a run, added up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class NodeTotals:
    """One node's part in a run; the JSON result carries these fields."""

    node: int
    name: str
    pid: int
    batches: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    raw_bytes: int = 0
    compute_s: float = 0.0
    codec_s: float = 0.0
    network_s: float = 0.0
    compression_ratio: float = 1.0
    rss_bytes: int = 0
