"""Which nodes may work where bits cannot tell who is right. Pure: knows nodes, and how far two answers are apart.

In `async` and `local` every update is made with other weights, so none can be compared with another. Now and then two
nodes are given the same batch with the same weights in the same moment, and only their gradients' distance counts. A
node that is new has to pass that before it is given work, if there is another one; so has a node that others' updates
have made suspicious (quarantine). Who differs from two others that have passed is wrong; where there are only two, who
came later has no work until a third comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from wide.coordinator.audits import AGAIN_COST, AGAIN_S
from wide.coordinator.leases import Lease
from wide.strategy.description import Strategy
from wide.strategy.tree import Block

MOST_PAIRS = 4  # at a time: the first answer of each is kept until the other one comes
MOST_STRIKES = 3  # times that it was doubted, and another node found nothing odd in the same batches


@dataclass(slots=True)
class Pair:
    """Two nodes at the same batch. `number` tells their answers from those of pairs before."""

    number: int
    nodes: tuple[int, int]
    out: list[Lease] = field(default_factory=list)  # what was not answered
    has_problem: bool = False  # the one who has answered could not compute it


class Outcome(NamedTuple):
    """Of a comparison: who is out of quarantine, who is wrong, and of whom nobody can tell."""

    cleared: frozenset[int] = frozenset()
    wrong: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()


class Canaries:
    """`is_active`: this strategy's updates cannot be compared, but gradients can."""

    def __init__(self, is_lossless: bool) -> None:
        self._is_lossless, self.is_active = is_lossless, False
        self.verified: dict[int, float] = {}  # and when that was
        self.quarantined: set[int] = set()
        self._open: dict[int, Pair] = {}  # pairs that are at it, by number
        self._pairs = 0
        self._waiting: dict[int, None] = {}  # for a partner, in their order
        self._helper = 0  # who is given nothing more, so that it can be a partner
        self._strikes: Counter[int] = Counter()
        self._passed: set[int] = set()  # who was near another one once
        self._differed: dict[int, set[int]] = {}  # from whom
        self.doubted: set[int] = set()  # positions for which an update was refused, and no other one merged since
        self.suspect = 0  # whose that was; 0: nobody is to blame, for others have found the like

    def follow(self, strategy: Strategy) -> None:
        """It begins, and everybody has to pass its checks. Where weights are rounded on their way, who has been there
        for long has others than a newcomer, and no two gradients can be compared.
        """
        self.is_active = not strategy.needs_whole_steps and self._is_lossless
        self.verified.clear()
        self.quarantined.clear()
        self._waiting.clear()
        self.doubted.clear()
        self._strikes.clear()
        self._differed.clear()
        self._passed.clear()
        self._open.clear()

    def is_open(self, pair: int) -> bool:
        """Is the other one's answer still to come?"""
        return pair in self._open

    # ── doubts ───────────────────────────────────────────────────────────────────────────────────────────────────

    def refuses(self, node: int, block: Block, members: AbstractSet[int]) -> bool:
        """Its update for this block was doubted. If another one's was, and nobody has looked at that yet, it is the job
        (a spike that all of them see): both are believed. So is who is the only one that could work.
        """
        if (self.doubted and self.suspect != node) or not self._others(node, members):
            self.suspect = 0
            return False
        self.suspect = node
        self.doubted.update(range(*block))
        return True

    def has_to_wait(self, node: int, members: AbstractSet[int]) -> bool:
        """For another one to find the like, or not: it would be given the same batches again."""
        return self.suspect == node and bool(self.doubted) and bool(self._others(node, members))

    def merged(self, node: int, block: Block) -> int:
        """Nothing was odd there, or it is believed. Who is in quarantine because of that; 0: nobody."""
        if self.doubted.isdisjoint(range(*block)):
            return 0
        self.doubted.difference_update(range(*block))
        if self.doubted or self.suspect in (0, node):
            return 0
        self._strikes[self.suspect] += 1
        if self._strikes[self.suspect] < MOST_STRIKES:
            return 0
        del self._strikes[self.suspect]
        self.quarantined.add(self.suspect)
        self.verified.pop(self.suspect, None)
        return self.suspect

    def _others(self, node: int, members: AbstractSet[int]) -> set[int]:
        """Who could tell something about this one."""
        return {other for other in members - self.quarantined if self._may_meet(node, other)}

    # ── pairs ────────────────────────────────────────────────────────────────────────────────────────────────────

    def has_to_pass(self, node: int, members: AbstractSet[int], batch_s: float, now: float) -> bool:
        """Before it is given work. `batch_s`: what a batch takes it."""
        if not self.is_active or node in self.quarantined:
            return self.is_active
        if node not in self.verified:
            return len(members) > 1
        is_due = now - self.verified[node] > max(AGAIN_S, AGAIN_COST * batch_s)
        return is_due and bool(self._others(node, members))

    def wait(self, node: int) -> None:
        self._waiting[node] = None

    def partner_for(self, node: int, idle: AbstractSet[int]) -> int:
        """Another one that waits, and is idle; 0: none."""
        return next((other for other in self._waiting if other in idle and self._may_meet(node, other)), 0)

    def is_wanted(self, node: int, members: AbstractSet[int]) -> bool:
        """Does somebody wait for whom this one, which may work, would be a partner?"""
        if self._helper not in (0, node) and self._helper in members:
            return False
        return any(other in members and self._may_meet(node, other) for other in self._waiting)

    def hold(self, node: int) -> None:
        """It is given nothing more, until it is idle."""
        self._helper = node

    def _may_meet(self, node: int, other: int) -> bool:
        """Nobody is compared again with who it differed from."""
        have_met = other in self._differed.get(node, ()) or node in self._differed.get(other, ())
        return node != other and not have_met

    def awaits(self, node: int, is_lost: Callable[[Lease], bool]) -> bool:
        """Has it done its part of a pair, and may the other one still do its own? `is_lost`: it may never come."""
        return any(node in pair.nodes and not any(map(is_lost, pair.out)) for pair in self._open.values())

    def has_room(self, is_lost: Callable[[Lease], bool]) -> bool:
        """For one more pair. One whose answers may never come is given up for it."""
        if len(self._open) < MOST_PAIRS:
            return True
        lost = next((pair.number for pair in self._open.values() if any(map(is_lost, pair.out))), 0)
        return self._open.pop(lost, None) is not None

    def begin(self, node: int, other: int) -> Pair:
        self._pairs += 1
        pair, self._helper = Pair(self._pairs, (node, other)), 0
        self._open[pair.number] = pair
        for one in (node, other):
            self._waiting.pop(one, None)
        return pair

    def answered(
        self, number: int, node: int, distance: float | None, has_problem: bool, members: AbstractSet[int], now: float
    ) -> Outcome | None:
        """The answer of one of a pair: how far it is from the other's, in units of what is allowed (None: it is the
        first); or that it could not compute that, which says nothing if neither could. None, if nothing follows yet.
        """
        pair = self._open.get(number)
        if pair is None or node not in pair.nodes:
            return None
        pair.out = [lease for lease in pair.out if lease.node != node]
        if pair.out:
            pair.has_problem = has_problem
            return None
        del self._open[number]
        if has_problem or pair.has_problem:
            return None if has_problem and pair.has_problem else self._far(pair, members, now)
        if distance is None:
            return None
        if distance <= 1.0:
            return self._near(pair, now)
        return self._far(pair, members, now)

    def _near(self, pair: Pair, now: float) -> Outcome:
        cleared = self.quarantined & set(pair.nodes)
        for node in pair.nodes:
            self.verified[node] = now
            self._passed.add(node)
            self.quarantined.discard(node)
            self._strikes.pop(node, None)
            self._differed.pop(node, None)
        return Outcome(cleared=frozenset(cleared), wrong=self._wrong())  # they may have differed from it before

    def _far(self, pair: Pair, members: AbstractSet[int], now: float) -> Outcome:
        """Who was right before is not doubted because of somebody who was not."""
        suspects = [node for node in pair.nodes if node not in self.verified] or list(pair.nodes)
        for node in suspects:
            self.verified.pop(node, None)
            self._differed.setdefault(node, set()).update(other for other in pair.nodes if other != node)
        wrong = self._wrong()
        if wrong or members - set(pair.nodes):
            return Outcome(wrong=wrong)
        held = max(suspects, key=lambda node: (node in self.quarantined, node))
        self.verified |= {node: now for node in pair.nodes if node != held}
        return Outcome(held=frozenset((held,)))

    def _wrong(self) -> frozenset[int]:
        return frozenset(node for node, others in self._differed.items() if len(others & self._passed - {node}) > 1)

    def left(self, node: int) -> None:
        self.verified.pop(node, None)
        self._passed.discard(node)
        self._waiting.pop(node, None)
        self._strikes.pop(node, None)
        self._differed.pop(node, None)
        for others in self._differed.values():
            others.discard(node)
        if self.suspect == node:
            self.doubted.clear()
        self.quarantined.discard(node)
        self._helper = 0 if self._helper == node else self._helper
        self._open = {number: pair for number, pair in self._open.items() if node not in pair.nodes}
