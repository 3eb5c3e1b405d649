"""What each node did in a run, added up."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Traffic:
    """What a node's connections have carried, and where its time went by its own watch. Counted by the exchange."""

    bytes_sent: int = 0
    bytes_received: int = 0
    raw_bytes: int = 0
    compute_s: float = 0.0
    codec_s: float = 0.0
    network_s: float = 0.0
    rss_bytes: int = 0
    fetch_s: float = 0.0  # of compute_s
    travel_s: float = 0.0  # that payloads were on their way

    @property
    def compression_ratio(self) -> float:
        return self.raw_bytes / max(self.bytes_sent, 1) if self.raw_bytes else 1.0


@dataclass(slots=True)
class Part:
    """What a node has contributed. Counted by the record."""

    name: str
    pid: int
    batches: int = 0
    samples: int = 0
    verified: int = 0  # of these samples: another node has computed them too, with the same result


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
    fetch_s: float = 0.0
    travel_s: float = 0.0
    verified_samples: int = 0  # of `samples`

    @property
    def traffic(self) -> Traffic:
        return Traffic(**{field.name: getattr(self, field.name) for field in fields(Traffic)})

    @property
    def part(self) -> Part:
        return Part(self.name, self.pid, self.batches, self.samples, self.verified_samples)


def totals_of(node: int, part: Part, traffic: Traffic | None) -> NodeTotals:
    t = traffic or Traffic()
    return NodeTotals(
        node,
        part.name,
        part.pid,
        part.batches,
        part.samples,
        t.bytes_sent,
        t.bytes_received,
        t.raw_bytes,
        t.compute_s,
        t.codec_s,
        t.network_s,
        t.compression_ratio,
        t.rss_bytes,
        t.fetch_s,
        t.travel_s,
        part.verified,
    )
