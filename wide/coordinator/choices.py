"""Which codec each link uses, and why: measured, decided again every second, written down when it changes.

Knows peers' links and speeds; carries nothing out.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from wide.codec.choose import Role, candidates, choose, seconds
from wide.codec.encoders import Encoders
from wide.codec.ladder import LADDER, LOSSLESS, RAW
from wide.codec.lossy import Floats
from wide.codec.planes import Bytes
from wide.codec.speeds import PRIORS, Cpu, Speed, measure
from wide.coordinator.peer import Peer
from wide.coordinator.record import Record
from wide.strategy.plan import Travel
from wide.telemetry.link import Link
from wide.telemetry.log import log

DECIDE_S = 1.0
MEASURE_S = 30.0
WORTH_TRYING_S = 1e-3  # a payload that is sent in less is left alone
STRONGEST_FOR_WEIGHTS = "int4"


class Choices:
    """The pool's wish (`--compress`), and what it means on each link."""

    def __init__(self, compress: str, live_nbytes: int, record: Record, encoders: Encoders) -> None:
        self._wish = compress
        self.compress = RAW if compress == "none" else compress
        self.update_role: Role = "gradient"  # or "delta", if nodes make steps of their own
        self.is_lossless = self.compress == "lossless" or self.compress in LOSSLESS
        self.live_nbytes, self._record, self._encoders = live_nbytes, record, encoders
        self._here: dict[Role, Cpu] = {"weights": Cpu(), "batch": Cpu()}  # what this machine encodes
        self._measured_at: dict[str, float] = {}
        self.wants_sample: set[Role] = set()  # codecs should be tried on the next of these that is sent
        self._measuring: dict[Role, Future[dict[str, Speed]]] = {}

    def decide(self, peer: Peer, batch_nbytes: int, now: float) -> None:
        """Called often; looks again once a second."""
        if peer.up is None or peer.down is None or now - peer.decided_at < DECIDE_S:
            return
        peer.decided_at = now
        for role in [role for role, future in self._measuring.items() if future.done()]:
            self._here[role].speeds |= self._measuring.pop(role).result()
        self._set(peer, self.update_role, self.live_nbytes, peer.up, peer.cpu)
        self._set(peer, "weights", self.live_nbytes, peer.down, self._here["weights"])
        if not peer.has_data:
            self._set(peer, "batch", batch_nbytes, peer.down, self._here["batch"])
        if peer.is_on_this_machine:
            return
        role = self.update_role
        if self._is_worth_trying(role, self.live_nbytes, peer.up) and self._is_due(f"node {peer.node}", now):
            peer.wants_speeds = candidates(role, self.is_lossless)[1:]
        here: dict[Role, int] = {"weights": self.live_nbytes, "batch": batch_nbytes}
        for role, nbytes in here.items():
            if self._is_worth_trying(role, nbytes, peer.down) and self._is_due(role, now):
                self.wants_sample.add(role)

    def for_differences(self, peers: Iterable[Peer]) -> str:
        """All nodes hold the same weights, so differences have one codec: that of the narrowest link that wants any."""
        wishes = [peer for peer in peers if peer.down is not None and peer.codecs["weights"] != RAW]
        narrowest = min(wishes, key=lambda peer: peer.down.bytes_per_s if peer.down else 0.0, default=None)
        return narrowest.codecs["weights"] if narrowest is not None else RAW

    def heard_speeds(self, peer: Peer, speeds: dict[str, tuple[float, float, float, float, float]]) -> None:
        for name, numbers in speeds.items():
            if LADDER.get(name) is not None and all(0 < number < 1e15 for number in numbers):
                peer.cpu.speeds[name] = Speed(*numbers)
        peer.decided_at = 0.0

    def try_on(self, role: Role, exact: Bytes, width: int, numbers: Floats) -> None:
        """Measure beside the work: lossless codecs on the data's bytes, lossy ones on its numbers."""
        self.wants_sample.discard(role)
        names = candidates(role, self.is_lossless)[1:]
        self._measuring[role] = self._encoders.submit(measure, names, exact, width, numbers)

    def busy_s(self, role: Role, peer: Peer, name: str, nbytes: int) -> float:
        """How long encoding has probably kept the sender: the time that a payload would take on an endless link."""
        cpu = self._here.get(role, peer.cpu)
        return 0.0 if name == RAW else seconds(name, nbytes, Link(1e15), cpu)

    def transfer_s(self, peer: Peer) -> float:
        """How long new weights and an update travel, as things are."""
        if peer.up is None or peer.down is None:
            return 0.0
        there = seconds(peer.codecs["weights"], self.live_nbytes, peer.down, self._here["weights"])
        return there + seconds(peer.codecs[self.update_role], self.live_nbytes, peer.up, peer.cpu)

    def travel(self, peer: Peer) -> dict[str, Travel]:
        """How long an update and new weights would travel, in each codec that the pool's wish allows."""
        if peer.up is None or peer.down is None:
            return {RAW: Travel(0.0, 0.0)}
        allowed = candidates(self.update_role, self.is_lossless) if self._is_open("weights") else (self.compress,)
        names = [RAW] if peer.is_on_this_machine else [name for name in allowed if name == RAW or name in PRIORS]
        nbytes, here = self.live_nbytes, self._here["weights"]
        return {
            name: Travel(
                seconds(name, nbytes, peer.up, peer.cpu),
                seconds(STRONGEST_FOR_WEIGHTS if name == "topk" else name, nbytes, peer.down, here),
            )
            for name in names
        }

    def _set(self, peer: Peer, role: Role, nbytes: int, link: Link, cpu: Cpu) -> None:
        current = peer.codecs[role]
        if self._is_open(role) and peer.is_on_this_machine:
            codec, why = RAW, "it runs on this machine, whose cores have better things to do"
        elif self._is_open(role):
            codec, why = choose(role, nbytes, link, cpu, self.is_lossless, current if role in peer.reasons else None)
        else:
            codec, why = self._fixed(role), f"--compress {self._wish}"
        if codec != current or role not in peer.reasons:
            log.debug("node %d: %s for its %s: %s", peer.node, codec, role, why)
            self._record.chose(peer.node, role, codec, why)
        peer.codecs[role], peer.reasons[role] = codec, why

    def _is_open(self, role: Role) -> bool:
        """Is there anything to choose?"""
        return self.compress in ("lossless", "auto") or (role == "batch" and self.compress not in LOSSLESS)

    def _fixed(self, role: Role) -> str:
        return STRONGEST_FOR_WEIGHTS if role == "weights" and self.compress == "topk" else self.compress

    def _is_worth_trying(self, role: Role, nbytes: int, link: Link) -> bool:
        return self._is_open(role) and nbytes / link.bytes_per_s > WORTH_TRYING_S

    def _is_due(self, what: str, now: float) -> bool:
        if now - self._measured_at.get(what, -MEASURE_S) < MEASURE_S:
            return False
        self._measured_at[what] = now
        return True
