"""Who is in the pool, how quick each of them is, how long what it holds should take. Plain numbers; decides nothing.

A lease's deadline follows from its holder's own speed: median + k·MAD of what its batches took.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median

from wide.coordinator.leases import Lease, Leases
from wide.strategy.description import Strategy
from wide.strategy.policy import Pace
from wide.strategy.rounds import usual_s

RESCUE_GAIN = 2.0  # an idle node takes over if it should be done this much sooner than the holder
OVERDUE = 4.0  # a lease that took this many times what was expected is overdue, while a node's spread is not known
LEAST_OVERDUE, MOST_OVERDUE = 2.0, 8.0  # and once it is
SPREADS = 8.0  # that is k
PACES = 16  # batches are remembered of so many leases
ENOUGH_PACES = 5
OVERDUE_S = 1.0  # and at least so much longer, if others would have something else to do
LOOK_S = 50e-6  # for each lease: for so long nobody looks at all of them again, which takes 2 µs each
COLD = 0.1  # what a node's first result weighs, against later ones
GREEN_S = 10.0  # the same for a node's first lease: it may have to load and to warm up


@dataclass(slots=True)
class Member:
    """A node in the pool. `batches_per_s` is None until its first result; `leases` are the book's, in their order."""

    node: int
    leases: dict[int, Lease] = field(default_factory=dict)
    known_as: str = ""  # whoever comes back under another number is known as the same
    batches_per_s: float | None = None
    lately: tuple[float, float] = (0.0, 0.0)  # batches, and the seconds that they took
    heard_at: float = 0.0
    transfer_s: float = 0.0
    is_silent: bool = False  # its heart does not beat: it may be paused, or cut off
    is_leaving: bool = False
    is_mute: bool = False  # it beats, and may never answer what it holds: nobody waits for what it would say
    answered: int = 0  # the last lease that it answered
    staleness: int = 0  # of its last update that counted
    paces_s: deque[float] = field(default_factory=lambda: deque(maxlen=PACES))  # seconds a batch, lease by lease

    @property
    def who(self) -> str:
        return self.known_as or f"node {self.node}"

    def measure(self, lease: Lease, now: float, memory: float, most_s: float) -> None:
        """From the grant, or from its result before, to this one; but not longer than `most_s`."""
        self.is_mute = False
        if lease.number > self.answered:
            self.answered = lease.number
        if lease.is_disturbed:
            self.heard_at = now
            return
        began_at = lease.granted_at if lease.granted_at > self.heard_at else self.heard_at
        elapsed_s = max(min(now - began_at, most_s), 1e-6)
        size, (batches, seconds) = lease.block.size, self.lately
        weight = 1.0 if seconds else COLD  # the first time nothing is warm
        if seconds:
            self.paces_s.append(elapsed_s / size)
        batches, seconds = memory * batches + weight * size, memory * seconds + weight * elapsed_s
        self.lately, self.batches_per_s = (batches, seconds), batches / seconds
        self.heard_at = now

    @property
    def overdue(self) -> float:
        """A lease that takes it this many times what it should is overdue."""
        if len(self.paces_s) < ENOUGH_PACES:
            return OVERDUE
        late_s = usual_s(self.paces_s, SPREADS, LEAST_OVERDUE - 1)
        return min(max(late_s / median(self.paces_s), LEAST_OVERDUE), MOST_OVERDUE)


class Roster:
    """All members. Where a node's speed includes its link, travelling is not counted a second time."""

    def __init__(self, leases: Leases) -> None:
        self.members: dict[int, Member] = {}
        self._leases = leases
        self.measures_travel = True
        self._slowest: tuple[Lease | None, float] = (None, -math.inf)  # that was found last, and when to look again

    def follow(self, strategy: Strategy) -> None:
        self.measures_travel = strategy.measures_travel

    @property
    def rates(self) -> list[float]:
        """Batches/s of all who were measured and are there."""
        members = self.members.values()
        return [m.batches_per_s for m in members if m.batches_per_s is not None and not m.is_silent]

    @property
    def present(self) -> set[int]:
        """Who could compute something."""
        return {m.node for m in self.members.values() if not (m.is_silent or m.is_leaving or m.is_mute)}

    @property
    def awaited(self) -> set[int]:
        """Whose answers may still come; also of those who are silent just now."""
        return {m.node for m in self.members.values() if not (m.is_mute or (m.is_leaving and not m.leases))}

    def pace(self, batches_per_step: int) -> Pace:
        rates = self.rates
        tick_s = batches_per_step / sum(rates) if rates else 0.0
        transfer_s = max((member.transfer_s for member in self.members.values()), default=0.0)
        return Pace(tick_s, transfer_s, 1 / min(rates, default=1.0))

    def idle(self, depth: int) -> list[Member]:
        """Who could do with another lease."""
        return [m for m in self.members.values() if len(m.leases) < depth and not m.is_silent and not m.is_leaving]

    def holders(self) -> set[int]:
        """Whose results may still come, and would count: nobody waits for work that somebody else has done."""
        members, out = self.members, self._leases.out.values()
        return {lease.node for holders in out for lease in holders if not members[lease.node].is_silent}

    def progress(self, lease: Lease, rate: float, now: float) -> tuple[float, float]:
        """For how long its holder has been at it and what comes before it, and how long that should take."""
        holder = self.members[lease.node]
        began_at, batches = lease.granted_at, lease.block.size
        if len(holder.leases) > 1:
            ahead = [held for held in holder.leases.values() if held.number <= lease.number]
            began_at, batches = ahead[0].granted_at, sum(held.block.size for held in ahead)
        travel_s = 0.0 if self.measures_travel else holder.transfer_s  # not in its speed
        return now - (began_at if began_at > holder.heard_at else holder.heard_at), batches / rate + travel_s

    def most_s(self, lease: Lease, compute_s: float, now: float) -> float:
        """What a lease may have taken, where travel does not count: what its node says, if that can be true."""
        if self.measures_travel:
            return math.inf
        holder = self.members[lease.node]
        elapsed = now - max(lease.granted_at, holder.heard_at)
        return max(compute_s, elapsed - 2 * holder.transfer_s - OVERDUE_S)

    def at_work(self, now: float) -> float:
        """Batches that their holders, by their own speed, have not computed yet."""
        batches = 0.0
        for lease in self._newest():
            rate, size = self.members[lease.node].batches_per_s, lease.block.size
            batches += size if rate is None else max(0.0, size - rate * (now - lease.granted_at))
        return batches

    def due_within(self, seconds: float, now: float) -> int:
        """Batches whose holders, by their own speed, should be done now, give or take so long."""
        batches = 0
        for lease in self._newest():
            rate = self.members[lease.node].batches_per_s
            if rate is not None:
                elapsed, expected = self.progress(lease, rate, now)
                batches += lease.block.size if -seconds < expected - elapsed < seconds else 0
        return batches

    def worth_rescuing(self, member: Member, now: float) -> Lease | None:
        """The lease whose holder will be done last, if this idle node should be done with it much sooner."""
        if member.leases:
            return None
        if member.batches_per_s is None:
            return next((lease for lease in self._newest() if self.is_worth_taking(member, lease, now)), None)
        slowest = self._done_last(member, member.batches_per_s, now)
        return slowest if slowest is not None and self.is_worth_taking(member, slowest, now) else None

    def is_worth_taking(self, member: Member, lease: Lease, now: float) -> bool:
        """Should this idle node be done with it much sooner than who has it?"""
        rate = member.batches_per_s
        if rate is None:  # how quick it would be is not known
            return self.may_be_lost(lease, now)
        return self._remaining_s(lease, member, rate, now) >= RESCUE_GAIN * lease.block.size / rate

    def _done_last(self, idle: Member, rate: float, now: float) -> Lease | None:
        """The lease whose holder will be done last; as it was found a moment ago, if there are many."""
        slowest, look_again_at = self._slowest
        if now < look_again_at:
            holders = self._leases.out.get(slowest.block) if slowest is not None else None
            return slowest if holders and holders[-1] is slowest else None
        slowest, longest = None, 0.0
        for lease in self._newest():
            remaining = self._remaining_s(lease, idle, rate, now)
            if remaining > longest:
                slowest, longest = lease, remaining
        self._slowest = slowest, now + LOOK_S * len(self._leases.out)
        return slowest

    def fall_silent(self, member: Member) -> None:
        member.is_silent = True
        for lease in member.leases.values():
            lease.is_disturbed = True
        self._slowest = None, -math.inf  # look again

    def look_for_mutes(self, now: float) -> None:
        """Who holds something for so long that others would be given it says nothing, until it has answered."""
        for member in self.members.values():
            if member.leases and not (member.is_mute or member.is_silent):
                member.is_mute = self.may_be_lost(next(iter(member.leases.values())), now)

    def overdue(self, now: float) -> list[Lease]:
        """What may never come: held by somebody silent, or past its deadline by a while."""
        rates = self.rates
        if not rates or len(self.members) == 1:
            return []
        usual = median(rates)
        return [lease for lease in self._newest() if self._is_overdue(lease, usual, now)]

    def _is_overdue(self, lease: Lease, usual: float, now: float) -> bool:
        holder = self.members[lease.node]
        grace_s = OVERDUE_S if holder.batches_per_s is not None else GREEN_S
        elapsed, expected = self.progress(lease, holder.batches_per_s or usual, now)
        return holder.is_silent or elapsed > holder.overdue * expected + grace_s

    def _newest(self) -> Iterator[Lease]:
        """Who was last given each block that is out."""
        return (holders[-1] for holders in self._leases.out.values())

    def _remaining_s(self, lease: Lease, idle: Member, rate: float, now: float) -> float:
        """How long its holder will still need, by its own speed; below zero, if it is a little late. One that is far
        too late may never come back. A newcomer may still be waiting for its weights: whoever is idle and knows what
        it would need itself gives it that long.
        """
        holder = self.members[lease.node]
        elapsed, expected = self.progress(lease, holder.batches_per_s or rate, now)
        if holder.batches_per_s is None and len(idle.paces_s) >= ENOUGH_PACES:
            is_late = elapsed >= expected
        else:
            is_late = elapsed > LEAST_OVERDUE * expected and elapsed > holder.overdue * expected
        return math.inf if is_late or holder.is_silent else expected - elapsed

    def may_be_lost(self, lease: Lease, now: float) -> bool:
        """Its holder is silent or far too late; or was never measured, and has had its time to warm up."""
        holder = self.members[lease.node]
        if holder.is_silent or holder.batches_per_s is None:
            return holder.is_silent or now - lease.granted_at > GREEN_S
        elapsed, expected = self.progress(lease, holder.batches_per_s, now)
        return elapsed > holder.overdue * expected + OVERDUE_S
