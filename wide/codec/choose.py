"""Which codec makes this link fastest: a pure function of what was measured. Knows no clock, socket or tensor."""

from __future__ import annotations

from typing import Literal

from wide.codec.encoders import THREADED
from wide.codec.ladder import LADDER, LOSSLESS, RAW
from wide.codec.pieces import PIECE_NBYTES
from wide.codec.speeds import Cpu
from wide.telemetry.link import Link

Role = Literal["weights", "gradient", "delta", "batch"]
ROLES: tuple[Role, ...] = ("weights", "gradient", "delta", "batch")

FAITH = 1.05  # a more faithful codec is taken if it costs no more than this beside the quickest
HELP = 0.3  # what another thread adds to the first one's speed
STAY = 1.15  # and the present one is kept while it costs no more than this


def choose(
    role: Role, nbytes: int, link: Link, cpu: Cpu, lossless: bool, current: str | None = None
) -> tuple[str, str]:
    """The codec with the least encode + transfer + decode time, and the reason in words."""
    times = {
        name: seconds(name, nbytes, link, cpu)
        for name in candidates(role, lossless)
        if name in cpu.speeds or name == RAW
    }
    best = min(times.values())
    if current in times and times[current] <= STAY * best:
        chosen = current
    else:
        chosen = next(name for name, needed in times.items() if needed <= FAITH * best)
    others = min((needed, name) for name, needed in times.items() if name != chosen) if len(times) > 1 else None
    reason = f"{_ms(times[chosen])} for {nbytes / 1e6:.3g} MB of {role} at {link.words}"
    return chosen, reason + (f"; {others[1]} would take {_ms(others[0])}" if others else "")


def candidates(role: Role, lossless: bool) -> tuple[str, ...]:
    """From faithful to strong. Data is never falsified, and nothing is thinned out without being asked: with topk
    digits reached 93.9–96.4 % where int4 reached 96.4–96.9, and deltas cost 8 to 25 % in loss (docs/findings.md).
    """
    if lossless or role == "batch":
        return LOSSLESS
    return tuple(name for name in LADDER if name != "topk")


def seconds(name: str, nbytes: int, link: Link, cpu: Cpu) -> float:
    """How long a payload takes from one memory to the other. Pieces are encoded, sent and decoded at the same time, so
    the longest of the three counts whole, and of the others what the first or the last piece needs.
    """
    if name == RAW:
        return link.delay_s + nbytes / link.bytes_per_s
    speed = cpu.speeds[name]
    pieces = max(1, -(-nbytes // PIECE_NBYTES))
    hands = 1 + HELP * (min(cpu.threads, pieces) - 1) if name in THREADED else 1
    parts = (
        (pieces * speed.encode_call_s + nbytes / speed.encode_bytes_per_s) / hands,
        nbytes / speed.ratio / link.bytes_per_s,
        pieces * speed.decode_call_s + nbytes / speed.decode_bytes_per_s,
    )
    longest = max(parts)
    return link.delay_s + longest + (sum(parts) - longest) / pieces


def _ms(needed_s: float) -> str:
    return f"{needed_s * 1000:.3g} ms"
