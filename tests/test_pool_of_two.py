"""Nodes that are right, and others that lie or never answer: the pool's decisions, on a clock that only moves when
told. A pool of two never stands still because of one of them, nor one of many that all come at once.
"""

from __future__ import annotations

from collections import Counter

import pytest

from wide.coordinator.audits import AGAIN_S, Audits
from wide.coordinator.canaries import Canaries
from wide.coordinator.events import GrantLease, MakeVersion, NameNode, NodeJoined, TellOf, Ticked, UpdateArrived
from wide.coordinator.roster import GREEN_S
from wide.coordinator.state import Pool
from wide.job.schedule import Schedule

ONE, OTHER, THIRD = 1, 2, 3
TICK_S = 0.5  # and so long takes an answer
STRATEGIES = ["sync", "async", "local"]


class Told:
    """A pool, what it was told, and what it said. `liars` say another thing than all others, and always the same."""

    def __init__(self, strategy, liars=(), hung=(), audit=0.01):
        schedule, chance = Schedule(100_000, 1, 2, seed=0), Counter()

        def one_in_many():
            chance["asked"] += 1
            return chance["asked"] * 0.618 % 1.0

        parts = Audits(audit, one_in_many), Canaries(is_lossless=True)
        self.pool = Pool(schedule, None, 1e9, True, strategy, audits=parts[0], canaries=parts[1])
        self.liars, self.hung, self.now = set(liars), set(hung), 0.0
        self.takes_s = {}  # by node, if it is not a tick
        self.out, self.versions, self.said, self._first = [], [], Counter(), {}

    def hear(self, event):
        for action in self.pool.handle(event, self.now):
            if isinstance(action, GrantLease):
                self.out.append((action, self.now))
            elif isinstance(action, MakeVersion):
                self.versions.append(self.now)
            elif isinstance(action, TellOf | NameNode):
                self.said[getattr(action, "kind", "named"), action.node] += 1

    def join(self, *nodes):
        for node in nodes:
            self.hear(NodeJoined(node))

    def run(self, seconds):
        """How many versions are made meanwhile."""
        until, before = self.now + seconds, len(self.versions)
        while self.now < until:
            self.now += TICK_S
            self.hear(Ticked())
            for grant, granted_at in [out for out in self.out if self._is_done(*out)]:
                self.out.remove((grant, granted_at))
                self.answer(grant)
        return len(self.versions) - before

    def _is_done(self, grant, granted_at):
        is_time = self.now - granted_at >= self.takes_s.get(grant.node, 0.0)
        return is_time and grant.node not in self.hung and grant.version <= self.pool.version

    def answer(self, grant):
        digest, distance = 7 + (grant.node in self.liars), None
        if grant.pair in self._first:
            distance = 900.0 * ((self._first.pop(grant.pair) in self.liars) != (grant.node in self.liars))
        elif grant.pair:
            self._first[grant.pair] = grant.node
        self.hear(UpdateArrived(grant.node, grant.lease, "", 0.1, grant.block.size, digest, distance))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("audit", [0.01, 1.0])
def test_who_is_held_does_not_hold_the_other_one(strategy, audit):
    told = Told(strategy, liars={OTHER}, audit=audit)
    told.join(ONE)
    told.run(20)
    told.join(OTHER)
    told.run(20)
    assert told.said == {("held", OTHER): 1}
    assert told.run(10 * AGAIN_S) > 5 * AGAIN_S
    assert told.said == {("held", OTHER): 1}, "once"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_third_decides_about_who_is_held(strategy):
    told = Told(strategy, liars={OTHER})
    told.join(ONE)
    told.run(20)
    told.join(OTHER)
    told.run(100)
    told.join(THIRD)
    told.run(4 * AGAIN_S)
    assert told.said["named", OTHER] == 1
    assert told.pool.members.keys() == {ONE, THIRD}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("before_s", [0, 20])
def test_who_never_answers_is_not_waited_for(strategy, before_s):
    told = Told(strategy, hung={OTHER})
    told.join(ONE)
    told.run(before_s)
    told.join(OTHER)
    assert told.run(10 * AGAIN_S) > 5 * AGAIN_S
    assert max(after - before for before, after in zip(told.versions, told.versions[1:], strict=False)) < 2 * GREEN_S


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nor_who_has_answered_before_and_does_no_more(strategy):
    told = Told(strategy)
    told.join(ONE, OTHER)
    told.run(20)
    told.hung.add(OTHER)
    assert told.run(10 * AGAIN_S) > 5 * AGAIN_S


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_it_says_counts_again_once_it_has_answered(strategy):
    told = Told(strategy, liars={OTHER}, hung={OTHER})
    told.join(ONE)
    told.run(20)
    told.join(OTHER)
    told.run(100)
    assert OTHER not in told.pool.roster.present
    told.hung.clear()
    told.run(3 * AGAIN_S)
    assert OTHER in told.pool.roster.present
    assert told.said == {("held", OTHER): 1}, "it is compared, after all"


def test_a_third_that_never_answers_cannot_keep_two_from_being_asked_again():
    told = Told("sync", liars={OTHER}, hung={THIRD})
    told.join(ONE)
    told.run(20)
    told.join(OTHER, THIRD)
    assert told.run(10 * AGAIN_S) > 5 * AGAIN_S
    assert told.said["held", OTHER] == 1


@pytest.mark.parametrize("strategy", ["async", "local"])
@pytest.mark.parametrize("hung", [set(), {3, 4, 5, 11, 17, 18, 30}])
def test_many_who_come_at_once_all_get_work(strategy, hung):
    told = Told(strategy, hung=hung)
    told.takes_s = {node: 2.0 + 7 * node % 10 for node in range(1, 41)}
    told.join(*told.takes_s)
    told.run(12 * GREEN_S)
    assert told.pool.trust.canaries.verified.keys() >= told.takes_s.keys() - hung
    assert told.run(60) > 0
