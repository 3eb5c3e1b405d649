"""How many callers are let as far as the door: in all, and from each address. Pure: counts and a clock's readings.

A call costs a coordinator some 0.1 ms, an encrypted one about 1 ms (docs/findings.md), in the thread that trains. So
calls have a budget. Who is beyond it for all waits outside, with the system; who is beyond its own address's is sent
away, and may call again.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

ALL_PER_S, ALL_BURST = 200.0, 400.0
AWAY_PER_S, AWAY_BURST = 500.0, 50.0  # that are sent away, which is cheap, but not free
HOST_PER_S, HOST_BURST = 40.0, 256.0
MOST_HOSTS = 4096  # that are remembered; who has not called for the longest is forgotten first


@dataclass(slots=True)
class Bucket:
    """`per_s` more each second, up to `most`."""

    per_s: float
    most: float
    left: float
    at: float

    def fill(self, now: float) -> float:
        self.left = min(self.most, self.left + (now - self.at) * self.per_s)
        self.at = now
        return self.left

    def take(self, now: float) -> bool:
        if self.fill(now) < 1:
            return False
        self.left -= 1
        return True


@dataclass(slots=True)
class Gate:
    """For callers from other processes than this pool's own."""

    now: float
    _all: Bucket = field(init=False)
    _away: Bucket = field(init=False)
    _hosts: dict[str, Bucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._all = Bucket(ALL_PER_S, ALL_BURST, ALL_BURST, self.now)
        self._away = Bucket(AWAY_PER_S, AWAY_BURST, AWAY_BURST, self.now)

    def is_open(self, now: float) -> bool:
        """May anybody come? Otherwise it is best not to look who is there."""
        return self._all.fill(now) >= 1 and self._away.fill(now) >= 1

    def may_come(self, host: str, now: float) -> bool:
        """Somebody is there. Who is sent away takes nothing from what others may."""
        host = neighbourhood(host)
        bucket = self._hosts.pop(host, None) or Bucket(HOST_PER_S, HOST_BURST, HOST_BURST, now)
        self._hosts[host] = bucket
        if len(self._hosts) > MOST_HOSTS:
            del self._hosts[next(iter(self._hosts))]
        may = bucket.take(now)
        (self._all if may else self._away).take(now)
        return may


def neighbourhood(host: str) -> str:
    """Whoever has one IPv6 address has 2^64 of them."""
    if ":" in host:
        return str(ipaddress.ip_network(f"{host.partition('%')[0]}/64", strict=False).network_address)
    return host
