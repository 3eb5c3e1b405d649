"""What follows when two nodes differ, or one is doubted: who is wrong, what is void, who waits. Pure; the pool does it.

Which batches are computed a second time, and whose bits or gradients agree, is known to audits.py (where bits can tell)
and canaries.py (where they cannot). Either may be missing: then nothing is computed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from wide.coordinator.audits import Audits, Outcome
from wide.coordinator.canaries import Canaries
from wide.coordinator.events import Action, CompareUpdate, Confirm, RejectUpdate, TellOf, UpdateArrived
from wide.coordinator.leases import Lease
from wide.coordinator.roster import Roster
from wide.strategy.description import Strategy
from wide.strategy.tree import Block


class Finding(NamedTuple):
    """What there is to say; who is to be sent away, and why; must the open version begin anew; why the run cannot go
    on, if so.
    """

    said: list[Action]
    wrong: Iterable[int] = ()
    why: str = ""
    voids: bool = False
    failure: str = ""


class Trust:
    """`where` says in words where a block is. In an open pool somebody may come who can tell what nobody can now."""

    def __init__(
        self,
        audits: Audits | None,
        canaries: Canaries | None,
        roster: Roster,
        where: Callable[[Block], str],
        is_open: bool,
    ) -> None:
        self.audits, self.canaries = audits, canaries
        self._roster, self._where, self._is_open = roster, where, is_open
        self._is_exact = False  # would anybody compute the same bits, and can they be compared?

    def follow(self, strategy: Strategy) -> None:
        """It begins."""
        self._is_exact = self.audits is not None and strategy.needs_whole_steps
        if self.audits is not None:
            self.audits.forget_all()
        if self.canaries is not None:
            self.canaries.follow(strategy)

    def left(self, node: int) -> None:
        if self.audits is not None:
            self.audits.left(node)
        if self.canaries is not None:
            self.canaries.left(node)

    @property
    def is_checking(self) -> bool:
        """Is something computed once more that the next version would contain?"""
        return self.audits is not None and bool(self.audits.open)

    @property
    def has_doubts(self) -> bool:
        """Was an update refused, and is there none in its place yet?"""
        return self.canaries is not None and bool(self.canaries.doubted)

    @property
    def is_alone(self) -> bool:
        """Are audits wanted, and is there nobody to make them?"""
        return self.audits is not None and self.audits.share > 0 and len(self._roster.members) == 1

    # ── what nodes hand in ───────────────────────────────────────────────────────────────────────────────────────

    def check(self, lease: Lease, block: Block, event: UpdateArrived, now: float) -> Finding | None:
        """What was just merged is to be computed by somebody else, too, or was already. None: nobody does."""
        audits = self.audits
        if audits is None or not self._is_exact or not audits.merge(lease, block, event.doubt, now):
            return None
        outcome = audits.begin(lease, block, event.digest, self._roster.present, now)
        return self._follows(outcome, [], block) if outcome is not None else None

    def refuses(self, lease: Lease, block: Block, doubt: str) -> list[Action]:
        """An update that is unlike others'. Where bits can tell, somebody else computes it, too, before it counts;
        elsewhere somebody else computes it instead. Nothing, if it is believed.
        """
        node, canaries = lease.node, self.canaries
        if canaries is None or self._is_exact or not canaries.refuses(node, block, self._roster.present):
            return []
        where = f"{self._where(block)}: {doubt}"
        reject = RejectUpdate(node, lease.number, "doubtful", where, lease.block, lease.granted_at)
        return [reject, TellOf(node, "doubted", where)]

    def merged(self, node: int, block: Block) -> Finding | None:
        """This one's update counts: what does that say of who was doubted there?"""
        canaries = self.canaries
        if canaries is None or not (suspect := canaries.merged(node, block)):
            return None
        if not canaries.is_active:
            return Finding([], [suspect], "its updates are unlike others', again and again")
        words = "it is given no work until its numbers are those of another node"
        return Finding([TellOf(suspect, "quarantined", words)])

    # ── what was computed a second time ──────────────────────────────────────────────────────────────────────────

    def compared(self, lease: Lease, event: UpdateArrived, is_part: bool, now: float) -> Finding:
        """The answer to a check."""
        return self._paired(lease, event, now) if lease.pair else self._audited(lease, event, is_part, now)

    def _paired(self, lease: Lease, event: UpdateArrived, now: float) -> Finding:
        """One of two nodes that were given the same batch."""
        assert self.canaries is not None
        has_problem, present = bool(event.problem), self._roster.present
        outcome = self.canaries.answered(lease.pair, lease.node, event.distance, has_problem, present, now)
        is_kept = self.canaries.is_open(lease.pair)
        said: list[Action] = [
            CompareUpdate(lease.node, lease.number, lease.block, lease.granted_at, lease.pair, is_kept)
        ]
        if outcome is None:
            return Finding(said)
        where = self._where(lease.block)
        said += [TellOf(node, "cleared", "its numbers are those of another node") for node in outcome.cleared]
        alone = f"{where}: its gradient is not the other node's, and no third one can tell: it waits until one joins"
        said += [TellOf(node, "held", alone) for node in outcome.held]
        return Finding(said, sorted(outcome.wrong), f"{where}: its gradient is not what other nodes compute")

    def _audited(self, lease: Lease, event: UpdateArrived, is_part: bool, now: float) -> Finding:
        assert self.audits is not None
        digest = None if is_part else event.digest
        outcome = self.audits.answered(lease, digest, self._roster.awaited, now)
        said: list[Action] = [CompareUpdate(lease.node, lease.number, lease.block, lease.granted_at)]
        return self._follows(outcome, said, lease.block)

    def _follows(self, outcome: Outcome, said: list[Action], block: Block) -> Finding:
        assert self.audits is not None
        if outcome.confirmed is not None:
            whose, by = outcome.confirmed
            said.append(Confirm(whose, block, by))
        if outcome.undecided:
            return self._undecided(said, outcome.undecided, block)
        voids = any(node in outcome.wrong for node, _ in self.audits.merged)
        why = f"{self._where(block)}: it computes other bits than other nodes do"
        return Finding(said, sorted(outcome.wrong), why, voids)

    def _undecided(self, said: list[Action], nodes: AbstractSet[int], block: Block) -> Finding:
        """Two nodes, or more, differ again and again. If somebody else may come, that one will decide. If one of them
        has left, nobody is believed, and the others go on.
        """
        assert self.audits is not None
        if not nodes <= self._roster.members.keys():
            return Finding(said, voids=True)
        who = " and ".join(map(str, sorted(nodes)))
        why = f"{self._where(block)}: nodes {who} compute different bits, again and again, and no third one can tell"
        if not self._is_open:
            return Finding(said, failure=f"{why} who is right: go on with another node, or look at those machines")
        held = self.audits.hold(nodes)
        said = [*said, *(TellOf(node, "held", f"{why}: it waits until another node joins") for node in held)]
        return Finding(said, voids=True)

    def given_up(self) -> Finding | None:
        """Nobody is left who could say whether these were right."""
        if self.audits is None or not self.audits.open:
            return None
        given_up = list(self.audits.given_up(self._roster.present, self._roster.awaited))
        differ = next((audit for audit in given_up if len(audit.opinions) > 1), None)
        if differ is not None:
            return self._undecided([], differ.nodes, differ.block)
        return Finding([]) if given_up else None
