"""Who is given what, and when it is better to wait. Pure: knows members, leases and a policy's answers.

A node is given its part, by speed, of what there is. When nothing is free, an idle node takes over what a slow one
holds, if it should be done much sooner; the first result counts. Otherwise it may be given work for the next version
ahead of time: it fetches its data, and begins when that version is made. Only then that work is a lease.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable

from wide.coordinator.audits import Audits
from wide.coordinator.canaries import Canaries
from wide.coordinator.events import Action, GrantLease
from wide.coordinator.leases import Lease, Leases
from wide.coordinator.machines import Machines
from wide.coordinator.roster import Member, Roster
from wide.strategy.catalogue import EXACT
from wide.strategy.description import Strategy
from wide.strategy.policy import Cut, Policy, Share
from wide.strategy.tree import Block


class Granting:
    """`started_at` is when the first lease was granted; while `is_paused`, none is; while `is_careful`, they are of one
    batch each.
    """

    def __init__(
        self,
        leases: Leases,
        roster: Roster,
        machines: Machines,
        audits: Audits | None = None,
        canaries: Canaries | None = None,
        canary_block: Callable[[], Block] = lambda: Block(0, 1),
    ) -> None:
        self._leases, self._roster, self._machines, self._audits = leases, roster, machines, audits
        self._canaries, self._canary_block = canaries, canary_block
        self.started_at: float | None = None
        self.is_paused = self.is_careful = False
        self._granted = 0
        self._ahead: dict[int, Lease] = {}  # by node: for the next version
        self._lately: deque[float] = deque(maxlen=5)  # when the last versions were made
        self._changes = -1  # how often the strategy was changed
        self._pool_rate = 0.0  # batches/s of all measured members together, as of the last version
        self._strategy: Strategy
        self._policy: Policy

    def follow(self, strategy: Strategy, policy: Policy) -> None:
        self._strategy, self._policy = strategy, policy
        self._changes += 1

    def version_made(self, now: float) -> None:
        for lease in self._ahead.values():
            lease.granted_at = now
            self._begin(lease)
        self._ahead.clear()
        if self._strategy.takes_turns:
            self._lately.append(now)
            self._machines.steps_take((now - self._lately[0]) / max(1, len(self._lately) - 1))
        members = self._roster.members.values()
        here = [m for m in members if not m.is_silent and self._has_turn(m, now) and self._is_believed(m)]
        self._pool_rate = sum(m.batches_per_s or 0.0 for m in here)

    def forget(self, node: int) -> None:
        if (lease := self._ahead.pop(node, None)) is not None:
            self._policy.give_back(lease.block)

    def to_all(self, version: int, now: float) -> list[Action]:
        if self._may_not(now):
            return []
        policy = self._policy
        idle = [member for member in self._roster.idle(policy.depth) if self._has_turn(member, now)]
        if not policy.free:
            idle.sort(key=lambda member: -(member.batches_per_s or 0.0))
        takers = len(idle)
        if self._bars_anybody:
            idle.sort(key=self._is_barred)
            takers -= sum(map(self._is_barred, idle))
        actions: list[Action] = []
        for i, member in enumerate(idle):
            actions += (given := self._give(member, version, now, max(1, takers - i)))
            is_checking = self._audits is not None and self._audits.is_wanted  # not everybody may do that
            if not (given or policy.free or member.leases or is_checking) and policy.may_lease(member.node):
                break  # what is not worth the quickest one's while is not worth anybody's
        if self._audits is not None and self._audits.open:
            for member in self._roster.idle(policy.depth):  # also who has no turn: the version waits
                actions += self._give_check(self._audits, member, version, now, only_open=True)
        if not policy.free:
            for member in idle:
                actions += self._give_ahead(member, version, now)
        return actions

    def to_one(self, member: Member, version: int, now: float) -> list[Action]:
        """Work for one node, if there is any, and nothing better is about to come."""
        if not self._has_turn(member, now):
            return self._in_place_of(member, version, now)
        if member.is_silent or member.is_leaving or self._may_not(now):
            return []
        return self._give(member, version, now, 1) or self._give_ahead(member, version, now)

    def _in_place_of(self, member: Member, version: int, now: float) -> list[Action]:
        """Its turn is over: work for those of its machine who wait."""
        actions: list[Action] = []
        for node in self._machines.in_place_of(member.node, now):
            other = self._roster.members[node]
            if not (other.leases or other.is_silent or other.is_leaving or self._may_not(now)):
                actions += self._give(other, version, now, 1) or self._give_ahead(other, version, now)
        return actions

    def _has_turn(self, member: Member, now: float) -> bool:
        return not self._strategy.takes_turns or self._machines.has_turn(member.node, now)

    def _may_not(self, now: float) -> bool:
        if self.is_paused or not self._pool_rate:
            return self.is_paused
        return self._policy.is_worth_waiting(lambda seconds: self._roster.due_within(seconds, now), self._pool_rate)

    def _give(self, member: Member, version: int, now: float, takers: int) -> list[Action]:
        """`takers` are the nodes that are still to be served."""
        actions: list[Action] = []
        policy, held = self._policy, member.leases
        if held and any(lease.change != self._changes for lease in held.values()):
            return actions  # it is still at something from before
        audits, canaries = self._audits, self._canaries
        if audits is not None and audits.is_wanted and (check := self._give_check(audits, member, version, now)):
            return check
        if (
            canaries is not None
            and canaries.is_active
            and (paired := self._pair_up(canaries, member, version, now)) is not None
        ):
            return paired
        if self._is_barred(member):
            return actions
        while len(held) < policy.depth and policy.may_lease(member.node):
            if policy.free:
                block, group = policy.cut(self._share(member, takers, now), lambda: self._roster.at_work(now), now)
            elif (cut := self._rescue(member, now)) is not None:
                block, group = cut
            else:
                break
            if self.started_at is None:
                self.started_at = now
            lease = self._lease(member, Cut(block, group), policy.age, now)
            self._begin(lease)
            actions.append(self._action(lease, version, now))
        return actions

    def _begin(self, lease: Lease) -> None:
        self._leases.grant(lease)
        if self._audits is not None and self._strategy.needs_whole_steps:
            self._audits.given(lease)

    def _give_check(
        self, audits: Audits, member: Member, version: int, now: float, only_open: bool = False
    ) -> list[Action]:
        """What somebody else has computed already, and the next version waits for; or is still at."""
        if member.leases:
            return []
        is_slow = functools.partial(self._roster.is_worth_taking, member, now=now)
        block = audits.next_for(member.node, self._roster.present, is_slow)
        if block is None and not only_open:
            block = audits.next_beside(member.node)
        if block is None:
            return []
        lease = self._lease(member, Cut(block), self._policy.age, now)
        self._leases.grant_check(lease)
        audits.granted(lease)
        return [self._action(lease, version, now)]

    def _pair_up(self, canaries: Canaries, member: Member, version: int, now: float) -> list[Action] | None:
        """Where a node has to pass a comparison before it works: its part of one, or nothing yet. None: it may work."""
        node, present = member.node, self._roster.present
        has_to_pass = canaries.has_to_pass(node, present, 1 / (member.batches_per_s or math.inf), now)
        if not has_to_pass and not canaries.is_wanted(node, present):
            return [] if any(lease.is_check for lease in member.leases.values()) else None
        if member.leases:
            if not has_to_pass:
                canaries.hold(node)
            return []
        is_lost = functools.partial(self._roster.may_be_lost, now=now)
        if has_to_pass and canaries.awaits(node, is_lost):
            return []
        if has_to_pass:
            canaries.wait(node)
        idle = {m.node for m in self._roster.idle(1)}
        partner = canaries.partner_for(node, idle)
        if not (partner and canaries.has_room(is_lost)):
            return [] if has_to_pass else None
        pair, block = canaries.begin(node, partner), self._canary_block()
        actions: list[Action] = []
        for one in pair.nodes:
            lease = self._lease(self._roster.members[one], Cut(block), self._policy.age, now)
            self._leases.grant_check(lease, pair.number)
            pair.out.append(lease)
            actions.append(
                GrantLease(one, lease.number, block, 0, version, EXACT.name, is_check=True, pair=pair.number)
            )
        return actions

    def _give_ahead(self, member: Member, version: int, now: float) -> list[Action]:
        """Nothing is left to be done for this version, but others are still at it: something for the next one."""
        if member.leases or member.node in self._ahead or self.is_careful or self._is_barred(member):
            return []
        if (cut := self._policy.cut_ahead(self._share(member, 1, now))) is None:
            return []
        lease = self._ahead[member.node] = self._lease(member, cut, self._policy.age + 1, now)
        return [self._action(lease, version + 1, now)]

    @property
    def _bars_anybody(self) -> bool:
        audits, canaries = self._audits, self._canaries
        return (audits is not None and bool(audits.held)) or (canaries is not None and canaries.suspect > 0)

    def _is_barred(self, member: Member) -> bool:
        """Others have to decide about it first."""
        audits, canaries, node = self._audits, self._canaries, member.node
        if audits is not None and node in audits.held:
            return True
        return canaries is not None and canaries.suspect == node and canaries.has_to_wait(node, self._roster.present)

    def _lease(self, member: Member, cut: Cut, age: int, now: float) -> Lease:
        self._granted += 1
        return Lease(self._granted, member.node, cut.block, cut.group, age, now, self._changes)

    def _action(self, lease: Lease, version: int, now: float) -> GrantLease:
        core = self._machines.core_of(lease.node, now) if self._strategy.takes_turns else -1
        what = (lease.node, lease.number, lease.block, lease.group, version, self._strategy.name)
        return GrantLease(*what, core, lease.is_check)

    def _is_believed(self, member: Member) -> bool:
        """How quick it is counts only when it was right once, if there is anybody who could tell."""
        return self._audits is None or member.node in self._audits.verified or len(self._roster.members) == 1

    def _rescue(self, member: Member, now: float) -> Cut | None:
        late = self._roster.worth_rescuing(member, now)
        return Cut(late.block, late.group) if late is not None else None

    def _share(self, member: Member, takers: int, now: float) -> Share:
        """This node's part of the pool's speed; while nothing is known of it, or of the pool, an equal part."""
        rate = member.batches_per_s if self._is_believed(member) else None
        if not self._pool_rate:  # before the first version: as soon as everybody was measured, that is known
            rates = [m.batches_per_s for m in self._roster.members.values() if self._has_turn(m, now)]
            self._pool_rate = sum(rate for rate in rates if rate) if None not in rates else 0.0
        if rate is None or not self._pool_rate or self.is_careful:
            return Share(1 / len(self._roster.members), takers)
        busy_s = 0.0
        if member.leases:
            elapsed, expected = self._roster.progress(next(reversed(member.leases.values())), rate, now)
            busy_s = max(0.0, expected - elapsed)
        return Share(min(1.0, rate / self._pool_rate), takers, rate, len(member.leases), busy_s)
