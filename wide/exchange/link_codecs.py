"""Which codec each link uses, and why: measured, decided again every second, told of when it changes.

Knows peers' links and speeds; carries nothing out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future

from wide.codec.choose import Role, candidates, choose, seconds
from wide.codec.encoders import Encoders
from wide.codec.ladder import LADDER, LOSSLESS, RAW
from wide.codec.lossy import Floats
from wide.codec.planes import Bytes
from wide.codec.speeds import PRIORS, Cpu, Speed, Trial, measure
from wide.exchange.happenings import Chose
from wide.exchange.peer import Peer
from wide.telemetry.link import Link
from wide.telemetry.log import log
from wide.telemetry.snapshot import LinkView
from wide.wire.messages import Update

DECIDE_S = 1.0
MEASURE_S = 30.0
WORTH_TRYING_S = 1e-3  # a payload that is sent in less is left alone
STRONGEST_FOR_WEIGHTS = "int4"
PLAUSIBLE = (1e-9, 1e15)  # what a codec's speed, ratio or cost of a call may be


class LinkCodecs:
    """The pool's wish (`--compress`), and what it means on each link. `tell` hears of every choice."""

    def __init__(
        self,
        compress: str,
        live_nbytes: int,
        encoders: Encoders,
        tell: Callable[[Chose], None],
        try_codecs: Trial = measure,
    ) -> None:
        self._wish = compress
        self.compress = RAW if compress == "none" else compress
        self.update_role: Role = "gradient"  # or "delta", if nodes make steps of their own
        self.is_lossless = self.compress == "lossless" or self.compress in LOSSLESS
        self.live_nbytes, self._encoders, self._tell, self._try = live_nbytes, encoders, tell, try_codecs
        self._here: dict[Role, Cpu] = {"weights": Cpu(), "batch": Cpu()}  # what this machine encodes
        self._measured_at: dict[str, float] = {}
        self.wants_sample: set[Role] = set()  # codecs should be tried on the next of these that is sent
        self._measuring: dict[Role, Future[dict[str, Speed]]] = {}

    def probed(self, peer: Peer, link: Link) -> None:
        """Two links, each with its own future."""
        peer.link.up, peer.link.down = link, Link(link.bytes_per_s, link.delay_s, link.is_guess)
        log.debug("node %d: %.2g ms away, %s", peer.node, 1000 * link.delay_s, link.words)

    def observe(self, peer: Peer, update: Update, nbytes: int, elapsed_s: float, busy_s: float) -> None:
        """What an update's way says: `nbytes` of it came within `elapsed_s`, while this loop was busy for `busy_s`; and
        how its node received its last work.
        """
        link = peer.link
        if link.up is None or link.down is None:
            return
        if nbytes:  # it did not come in one read
            encoding_s = self._busy_s(self.update_role, peer, update.codec)
            link.up.observe(nbytes, elapsed_s, max(encoding_s, busy_s))
        if update.received_nbytes:
            busy_s = self._busy_s("weights", peer, link.codecs["weights"])
            link.down.observe(update.received_nbytes, update.received_s, max(busy_s, update.distracted_s))
        if update.speeds is not None:
            for name, numbers in update.speeds.items():
                if LADDER.get(name) is not None and all(PLAUSIBLE[0] < n < PLAUSIBLE[1] for n in numbers):
                    link.cpu.speeds[name] = Speed(*numbers)
            link.decided_at = float("-inf")

    def decide(self, peer: Peer, batch_nbytes: int, now: float) -> None:
        """Called often; looks again once a second."""
        link = peer.link
        if link.up is None or link.down is None or now - link.decided_at < DECIDE_S:
            return
        link.decided_at = now
        for role in [role for role, future in self._measuring.items() if future.done()]:
            self._here[role].speeds |= self._measuring.pop(role).result()
        self._set(peer, self.update_role, self.live_nbytes, link.up, link.cpu)
        self._set(peer, "weights", self.live_nbytes, link.down, self._here["weights"])
        if not peer.has_data:
            self._set(peer, "batch", batch_nbytes, link.down, self._here["batch"])
        if peer.is_on_this_machine:
            return
        role = self.update_role
        if self._is_worth_trying(role, self.live_nbytes, link.up) and self._is_due(f"node {peer.node}", now):
            link.wants_speeds = candidates(role, self.is_lossless)[1:]
        here: dict[Role, int] = {"weights": self.live_nbytes, "batch": batch_nbytes}
        for role, nbytes in here.items():
            if self._is_worth_trying(role, nbytes, link.down) and self._is_due(role, now):
                self.wants_sample.add(role)

    def take_wish(self, peer: Peer) -> tuple[str, ...]:
        """Codecs that its node should try, said once."""
        wish, peer.link.wants_speeds = peer.link.wants_speeds, ()
        return wish

    def forget(self, peer: Peer) -> None:
        self._measured_at.pop(f"node {peer.node}", None)

    def for_differences(self, peers: Iterable[Peer]) -> str:
        """All nodes hold the same weights, so differences have one codec: that of the narrowest link that wants any."""
        links = [peer.link for peer in peers if peer.link.codecs["weights"] != RAW]
        narrowest = min(links, key=lambda link: link.down.bytes_per_s if link.down else 0.0, default=None)
        return narrowest.codecs["weights"] if narrowest is not None else RAW

    def try_on(self, role: Role, exact: Bytes, width: int, numbers: Floats) -> None:
        """Measure beside the work: lossless codecs on the data's bytes, lossy ones on its numbers."""
        self.wants_sample.discard(role)
        names = candidates(role, self.is_lossless)[1:]
        self._measuring[role] = self._encoders.submit(self._try, names, exact, width, numbers)

    def transfer_s(self, peer: Peer) -> float:
        """How long new weights and an update travel, as things are."""
        link = peer.link
        if link.up is None or link.down is None:
            return 0.0
        there = seconds(link.codecs["weights"], self.live_nbytes, link.down, self._here["weights"])
        return there + seconds(link.codecs[self.update_role], self.live_nbytes, link.up, link.cpu)

    def view(self, peer: Peer) -> LinkView | None:
        """A picture of it: how long an update and new weights would travel, in each codec that the wish allows."""
        link = peer.link
        if link.up is None or link.down is None:
            return None
        allowed = candidates(self.update_role, self.is_lossless) if self._is_open("weights") else (self.compress,)
        names = [RAW] if peer.is_on_this_machine else [name for name in allowed if name == RAW or name in PRIORS]
        is_slow = not peer.is_on_this_machine and self._is_worth_trying("weights", self.live_nbytes, link.up)
        known = candidates(self.update_role, lossless=False) if is_slow else ()
        others = [name for name in known if name in PRIORS and name not in allowed]
        incoming, codecs = peer.incoming, {str(role): codec for role, codec in link.codecs.items()}
        return LinkView(
            link.up.bytes_per_s,
            link.down.bytes_per_s,
            link.up.delay_s,
            codecs,
            {name: self._travel_s(name, link.up, link.down, link.cpu) for name in names},
            incoming.batches_per_s,
            incoming.updates,
            {name: self._travel_s(name, link.up, link.down, link.cpu) for name in others},
            peer.is_on_this_machine,
        )

    def _travel_s(self, name: str, up: Link, down: Link, cpu: Cpu) -> tuple[float, float]:
        for_weights = STRONGEST_FOR_WEIGHTS if name == "topk" else name
        nbytes = self.live_nbytes
        return seconds(name, nbytes, up, cpu), seconds(for_weights, nbytes, down, self._here["weights"])

    def _busy_s(self, role: Role, peer: Peer, name: str) -> float:
        """How long encoding has probably kept the sender: the time that a payload would take on an endless link."""
        cpu = self._here.get(role, peer.link.cpu)
        return 0.0 if name == RAW else seconds(name, self.live_nbytes, Link(1e15), cpu)

    def _set(self, peer: Peer, role: Role, nbytes: int, link: Link, cpu: Cpu) -> None:
        state = peer.link
        current, is_new = state.codecs[role], role not in state.chosen
        if self._is_open(role) and peer.is_on_this_machine:
            codec, why = RAW, "it runs on this machine, whose cores have better things to do"
        elif self._is_open(role):
            codec, why = choose(role, nbytes, link, cpu, self.is_lossless, None if is_new else current)
        else:
            codec, why = self._fixed(role), f"--compress {self._wish}"
        if codec != current or is_new:
            log.debug("node %d: %s for its %s: %s", peer.node, codec, role, why)
            self._tell(Chose(peer.node, role, codec, why))
        state.codecs[role] = codec
        state.chosen.add(role)

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
