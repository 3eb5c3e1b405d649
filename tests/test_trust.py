"""What follows when two nodes differ, or one is doubted: facts about the pure part."""

from __future__ import annotations

import pytest

from wide.coordinator.audits import Audits
from wide.coordinator.canaries import MOST_STRIKES, Canaries
from wide.coordinator.events import CompareUpdate, Confirm, RejectUpdate, TellOf, UpdateArrived
from wide.coordinator.leases import Lease, Leases
from wide.coordinator.roster import Member, Roster
from wide.coordinator.trust import Trust
from wide.job.schedule import Schedule
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.description import Stage
from wide.strategy.tree import Block

BLOCK = Block(0, 1)
RIGHT, WRONG = 1, 2


def trust(*nodes: int, is_open: bool = True, strategy: str = "sync", is_lossless: bool = True) -> Trust:
    """Everybody is checked the first time, and never by chance."""
    described = STRATEGIES[strategy]
    leases = Leases(described.policy(Stage(Schedule(100, 1, 4, seed=0), 0, None)))
    roster = Roster(leases)
    for node in nodes:
        roster.members[node] = Member(node, leases.welcome(node))
    made = Trust(Audits(0.0, lambda: 1.0), Canaries(is_lossless), roster, lambda block: "step 0", is_open)
    made.follow(described)
    return made


def lease(node: int) -> Lease:
    return Lease(node, node, BLOCK, 0, 0, 0.0, 0)


def begins(it: Trust, node: int, digest: int) -> bool:
    return it.check(lease(node), BLOCK, UpdateArrived(node, node, digest=digest), 0.0) is not None


def answers(it: Trust, node: int, digest: int):
    assert it.audits is not None
    it.audits.granted(asked := lease(node))
    return it.compared(asked, UpdateArrived(node, node, digest=digest), False, 0.0)


def kinds(finding) -> list[object]:
    return [said.kind if isinstance(said, TellOf) else type(said) for said in finding.said]


def test_two_that_agree_confirm_each_other():
    it = trust(1, 2)
    assert begins(it, 1, RIGHT)
    assert it.is_checking
    finding = answers(it, 2, RIGHT)
    assert kinds(finding) == [CompareUpdate, Confirm]
    assert finding[1:] == ([], finding.why, False, "")
    assert not it.is_checking


@pytest.mark.parametrize(("said", "liar"), [((WRONG, RIGHT, RIGHT), 1), ((RIGHT, WRONG, RIGHT), 2)])
def test_a_third_decides_and_only_what_was_merged_is_void(said, liar):
    it = trust(1, 2, 3)
    begins(it, 1, said[0])
    assert kinds(answers(it, 2, said[1])) == [CompareUpdate], "there is a third one"
    finding = answers(it, 3, said[2])
    assert list(finding.wrong) == [liar]
    assert finding.voids == (liar == 1)


@pytest.mark.parametrize("is_open", [True, False])
def test_where_nobody_can_tell_an_open_pool_waits_and_another_one_fails(is_open):
    it = trust(1, 2, is_open=is_open)
    begins(it, 1, RIGHT)
    finding = answers(it, 2, WRONG)
    while not (finding.voids or finding.failure):
        assert it.audits is not None
        asked = next(node for node in (1, 2) if it.audits.next_for(node, {1, 2}, lambda held: False))
        finding = answers(it, asked, RIGHT if asked == 1 else WRONG)
    assert not list(finding.wrong), "nobody is named without proof"
    assert bool(finding.failure) != is_open
    assert kinds(finding)[1:] == (["held", "held"] if is_open else [])


def test_what_nobody_can_decide_any_more_is_believed_unless_two_have_differed():
    it = trust(1, 2)
    begins(it, 1, RIGHT)
    assert it.given_up() is None, "node 2 may still say something"
    it._roster.members.pop(2)
    it.left(2)
    finding = it.given_up()
    assert finding is not None
    assert not finding.voids
    assert it.given_up() is None


@pytest.mark.parametrize("is_lossless", [True, False])
def test_doubted_again_and_again_is_a_quarantine_or_the_end(is_lossless):
    """Where nothing can be compared, nothing would end a quarantine."""
    it = trust(1, 2, strategy="async", is_lossless=is_lossless)
    for _ in range(MOST_STRIKES):
        reject, told = it.refuses(lease(1), BLOCK, "its norm is 1e9")
        assert isinstance(reject, RejectUpdate)
        assert told.kind == "doubted"
        finding = it.merged(2, BLOCK)
    assert kinds(finding) == (["quarantined"] if is_lossless else [])
    assert list(finding.wrong) == ([] if is_lossless else [1])


def test_in_sync_a_doubt_refuses_nothing():
    assert trust(1, 2).refuses(lease(1), BLOCK, "its norm is 1e9") == []


def test_alone_nobody_can_check():
    it = trust(1)
    assert not begins(it, 1, RIGHT)
    assert not it.is_alone, "and nobody wants to"
    it.audits.share = 0.1
    assert it.is_alone
