"""What is computed a second time, and what follows from two answers that differ. Pure: knows nodes, blocks and digests.

Where results are exact, two nodes that compute the same batches with the same weights give the same bits. So what was
merged can be checked while its version is not made: another node computes it too. If the two differ, a third decides;
without one both are asked again, and whoever contradicts itself is wrong. The version waits for that, so what is found
to be wrong is never part of one. Where nobody can tell, who was never right before has no work until a third comes.

A node that is new is checked once, before its speed counts (a canary); later on now and then, by chance (an audit), and
whenever what it sent is unlike what others send (a doubt). Chance chooses when work is given, and another node may
compute it beside, so that the version need not wait; what each of them is told is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import NamedTuple

from wide.coordinator.leases import Lease
from wide.strategy.tree import Block

AGAIN_S = 60.0  # after so long a node is checked once more, and after
AGAIN_COST = 200.0  # so many times what the check takes
TWICE = 2  # nobody is asked more often about the same batches


class Opinion(NamedTuple):
    """What a node says that these batches give."""

    node: int
    digest: Hashable


@dataclass(slots=True)
class Audit:
    """A block that was merged, and what was said about it; the first opinion is the one that was merged."""

    block: Block
    opinions: list[Opinion]
    out: dict[int, Lease] = field(default_factory=dict)  # by node: who is at it

    @property
    def nodes(self) -> set[int]:
        return {opinion.node for opinion in self.opinions}

    @property
    def wrong(self) -> set[int]:
        """Whose answer two others contradict, or who contradicts itself."""
        said: dict[Hashable, set[int]] = {}
        for node, digest in self.opinions:
            said.setdefault(digest, set()).add(node)
        agreed = max(said.values(), key=len)
        if len(agreed) > 1:
            return {node for nodes in said.values() if nodes is not agreed for node in nodes}
        by_node = {node: [digest for other, digest in self.opinions if other == node] for node in self.nodes}
        if not any(len(said) > 1 and len(set(said)) == 1 for said in by_node.values()):
            return set()  # nobody gives the same twice: it may be the job
        return {node for node, said in by_node.items() if len(set(said)) > 1}

    @property
    def is_agreed(self) -> bool:
        return len(self.opinions) > 1 and len({digest for _, digest in self.opinions}) == 1

    def may_be_asked(self, node: int, members: AbstractSet[int]) -> bool:
        """A third, if there is one; else both again, so often that each can contradict itself."""
        if len(self.opinions) == 1 or members - self.nodes:
            return node not in self.nodes
        return sum(opinion.node == node for opinion in self.opinions) < TWICE


@dataclass(slots=True)
class Beside:
    """A block that chance has chosen, while `node` is at it. Another one may be at it, too, or done."""

    node: int
    out: Lease | None = None
    opinion: Opinion | None = None


class Outcome(NamedTuple):
    """Whose block was confirmed, and by whom; who is wrong; or between whom nobody can tell."""

    confirmed: tuple[int, int] | None = None
    wrong: frozenset[int] = frozenset()
    undecided: frozenset[int] = frozenset()


class Audits:
    """`share` of all leases is computed twice; `chance` gives numbers that nobody can guess. `verified` are the nodes
    that were right when somebody looked.
    """

    def __init__(self, share: float, chance: Callable[[], float]) -> None:
        self.share, self._chance = share, chance
        self.verified: dict[int, float] = {}  # and when that was
        self.held: set[int] = set()  # nobody could tell whether they are right: they only compute what decides that
        self._differed: set[int] = set()  # they, and from whom
        self._told: set[frozenset[int]] = set()  # between whom it is known that nobody can tell
        self.merged: list[tuple[int, Block]] = []  # for the version that is being gathered: whose, and what
        self.open: dict[Block, Audit] = {}  # the version waits for these
        self.beside: dict[Block, Beside] = {}  # to be audited once they are merged

    def forget_all(self) -> None:
        """Nobody is verified, and nothing is merged: another strategy begins."""
        self.verified.clear()
        self._release()
        self.version_done()

    def version_done(self) -> None:
        """It is made, or void."""
        self.merged.clear()
        self.open.clear()
        self.beside.clear()

    @property
    def is_wanted(self) -> bool:
        """Is there anything that somebody could compute?"""
        return bool(self.open or self.beside)

    def given(self, lease: Lease) -> None:
        """Work for the open version: some of it is chosen, and nobody is told."""
        if self.share > 0 and self._chance() < self.share:
            self.beside.setdefault(lease.block, Beside(lease.node))

    def merge(self, lease: Lease, block: Block, doubt: str, now: float) -> bool:
        """The answer to this lease counts, at least for that block. Should another one compute it, too?"""
        self.merged.append((lease.node, block))
        ago_s = now - self.verified.get(lease.node, -math.inf)
        is_due = ago_s > AGAIN_S and ago_s > AGAIN_COST * (now - lease.granted_at)
        return is_due or bool(doubt) or lease.block in self.beside

    def begin(
        self, lease: Lease, block: Block, digest: Hashable, present: AbstractSet[int], now: float
    ) -> Outcome | None:
        """What its node said is to be computed by another one of those who are present, or was already. None: there is
        no other one.
        """
        node, beside = lease.node, self.beside.pop(lease.block, None)
        others = present - {node}
        if node in self._differed:
            others -= self._differed  # what they would say is known, and decides nothing
        if not others:
            self.verified.setdefault(node, now)  # all that is trained is its work: whoever comes is measured by it
            return None
        audit = self.open[block] = Audit(block, [Opinion(node, digest)])
        if beside is None or block != lease.block:
            return Outcome()
        if beside.out is not None and beside.out.node != node:
            audit.out[beside.out.node] = beside.out
        if beside.opinion is None or beside.opinion.node == node:
            return Outcome()
        audit.opinions.append(beside.opinion)
        return self._settle(audit, present, now)

    def next_beside(self, node: int) -> Block | None:
        """What this one could compute while another one is at it."""
        if node in self.held:
            return None
        for block, it in self.beside.items():
            would_say_nothing = node in self._differed and it.node in self._differed
            if it.out is None and it.opinion is None and it.node != node and not would_say_nothing:
                return block
        return None

    def next_for(self, node: int, members: AbstractSet[int], is_slow: Callable[[Lease], bool]) -> Block | None:
        """What this one could compute to decide something; `members` are all who could. `is_slow`: who has that lease
        would be done much later.
        """
        for audit in self.open.values():
            is_awaited = not all(map(is_slow, audit.out.values()))
            if not is_awaited and node not in audit.out and audit.may_be_asked(node, members):
                return audit.block
        return None

    def granted(self, lease: Lease) -> None:
        if (audit := self.open.get(lease.block)) is not None:
            audit.out[lease.node] = lease
        else:
            self.beside[lease.block].out = lease

    def answered(self, lease: Lease, digest: Hashable, members: AbstractSet[int], now: float) -> Outcome:
        """`digest` is None if it did not get to the end; `members` are all, also those who are silent just now."""
        beside = self.beside.get(lease.block)
        if beside is not None and beside.out is lease:
            beside.out, beside.opinion = None, Opinion(lease.node, digest) if digest is not None else None
            return Outcome()
        audit = self.open.get(lease.block)
        if audit is None or audit.out.get(lease.node) is not lease:
            return Outcome()
        del audit.out[lease.node]
        if digest is None:
            return Outcome()
        audit.opinions.append(Opinion(lease.node, digest))
        return self._settle(audit, members, now)

    def _settle(self, audit: Audit, members: AbstractSet[int], now: float) -> Outcome:
        wrong = audit.wrong
        right = audit.nodes - wrong
        if not right or not (wrong or audit.is_agreed):
            return Outcome(undecided=frozenset() if self._can_go_on(audit, members) else frozenset(audit.nodes))
        del self.open[audit.block]
        if not right <= self._differed:
            self._release()  # there is a third one now
        self.verified |= dict.fromkeys(right & members, now)
        whose = audit.opinions[0].node
        others = right - {whose}
        return Outcome((whose, min(others)) if whose in right and others else None, frozenset(wrong))

    def _can_go_on(self, audit: Audit, members: AbstractSet[int]) -> bool:
        return bool(audit.out.keys() & members) or any(audit.may_be_asked(node, members) for node in members)

    def hold(self, nodes: AbstractSet[int]) -> set[int]:
        """Nobody can tell who of these is right. Which of them are given no work, if that is news: all, if none was
        right before.
        """
        held = set(nodes - self.verified.keys()) or set(nodes)
        self.held |= held
        self._differed |= nodes
        is_news = nodes not in self._told
        self._told.add(frozenset(nodes))
        return held if is_news else set()

    def _release(self) -> None:
        """Who differed from each other is looked at once more, all of them, as if they were new."""
        for node in self._differed:
            self.verified.pop(node, None)
        self.held.clear()
        self._differed.clear()

    def left(self, node: int) -> None:
        """Nobody will hear its answers."""
        self.verified.pop(node, None)
        self.held.discard(node)
        self._differed.discard(node)
        self._told = {nodes for nodes in self._told if node not in nodes}
        if not self.held or len(self._differed) < 2:
            self._release()  # from whom it differed is gone
        for audit in self.open.values():
            audit.out.pop(node, None)
        self.beside = {block: it for block, it in self.beside.items() if it.node != node}
        for it in self.beside.values():
            if it.out is not None and it.out.node == node:
                it.out = None
            if it.opinion is not None and it.opinion.node == node:
                it.opinion = None

    def given_up(self, present: AbstractSet[int], members: AbstractSet[int]) -> Iterator[Audit]:
        """What nobody can decide; it is open no more. For who is silent nobody waits, unless two have differed."""
        for audit in list(self.open.values()):
            if not self._can_go_on(audit, members if len(audit.opinions) > 1 else present):
                del self.open[audit.block]
                yield audit
