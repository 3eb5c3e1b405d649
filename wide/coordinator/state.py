"""Every decision of the coordinator: `handle(event, now) -> actions`. Pure: no sockets, clock, threads or tensors.

Membership, results, making versions, ending; who is given what is granting.py's. How work is cut and when a version is
due is the policy's (strategy/). A shell (server.py, launch/alone.py) carries the actions out, in their order; what
happens meanwhile is the next event, never a call back into here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from wide.coordinator import events
from wide.coordinator.audits import Audits
from wide.coordinator.canaries import Canaries
from wide.coordinator.deadly import Deadly
from wide.coordinator.events import (
    Action,
    ChangeStrategy,
    CloseStep,
    DropNode,
    EndRun,
    Event,
    MakeVersion,
    MergeUpdate,
    NameNode,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeSilent,
    Position,
    RejectUpdate,
    SaveCheckpoint,
    TellOf,
    UpdateArrived,
    VoidVersion,
    WorkFailed,
)
from wide.coordinator.failures import Failures
from wide.coordinator.granting import Granting
from wide.coordinator.leases import Lease, Leases
from wide.coordinator.machines import Machines
from wide.coordinator.roster import Member, Roster
from wide.coordinator.trust import Finding, Trust
from wide.job.schedule import Schedule
from wide.strategy.catalogue import EXACT, STRATEGIES
from wide.strategy.description import Stage, Strategy
from wide.strategy.policy import Policy, Reached
from wide.strategy.tree import Block


class Verdicts(NamedTuple):
    """Something follows from evaluations: nothing is merged into a version before the last one is judged. `awaited` are
    being made right now; the best one's weights are kept.
    """

    awaited: int = 0
    keeps_best: bool = False


class Pool:
    """The state of one run."""

    def __init__(
        self,
        schedule: Schedule,
        steps: int | None,
        seconds: float | None,
        is_open: bool = False,
        strategy: str = EXACT.name,
        is_eager: bool = False,
        start: Position | None = None,
        save_every_s: float = math.inf,
        verdicts: Verdicts | None = None,
        audits: Audits | None = None,
        canaries: Canaries | None = None,
        are_steps_lent: bool = False,
    ) -> None:
        self.schedule = schedule
        self.is_open = is_open  # others may still join, so a lone node that fails does not speak for all
        self.last_step, self.seconds = steps, seconds
        start = start or Position()
        self.version = start.version  # updates of the model so far
        self.steps = start.steps  # all batches of these, and of none after them, are merged
        self._worth = start.worth  # how many steps' worth of batches are in the weights
        self._spent_s = start.seconds  # before this process
        self.is_over = False
        self._next_strategy, self._is_eager, self._are_steps_lent = strategy, is_eager, are_steps_lent
        self._save_every_s, self._saved_at = save_every_s, -math.inf
        self._saves_soon = False  # because somebody wants it
        self.is_paused = self._is_full = False  # by the run's owner; of weights to be evaluated
        self._failures = Failures()
        self._verdicts, self._awaited = verdicts, verdicts.awaited if verdicts is not None else 0
        self._held_back: list[int] = []  # steps that are whole, but for a verdict
        self.deadly = Deadly(is_open)
        self.strategy: Strategy
        self.policy: Policy
        reached = self._reached(start)
        if reached is None:
            self._worth = float(start.steps)
        is_ragged = reached is not None and STRATEGIES[strategy].needs_whole_steps
        first = start.strategy if is_ragged else strategy  # holes are filled by who has left them, or one like it
        self._choose(first, reached)
        self.leases = Leases(self.policy)
        self.roster = Roster(self.leases)
        self.members = self.roster.members
        self.trust = Trust(audits, canaries, self.roster, self._where, is_open)
        self._machines = Machines()
        self._granting = Granting(
            self.leases, self.roster, self._machines, audits, canaries, lambda: self._first_batch(self.steps)
        )
        self._granting.is_paused = self._awaited > 0
        self._follow()
        if first != strategy:
            self.policy.end_soon()

    def handle(self, event: Event, now: float) -> list[Action]:
        """The one door: what happened, and when; what to do about it."""
        return [] if self.is_over else HANDLERS[type(event)](self, event, now)

    def position(self, now: float) -> Position:
        """Where the run is, right after a version was made: whoever begins there loses and doubles nothing."""
        front, holes, filled = self.policy.reached(self.leases.out)
        elapsed_s = self._elapsed_s(now)
        return Position(self.strategy.name, self.version, self.steps, self._worth, front, holes, filled, elapsed_s)

    # ── strategies ───────────────────────────────────────────────────────────────────────────────────────────────

    def _reached(self, start: Position) -> Reached | None:
        """None: that is between two steps, and there is nothing else to know."""
        if start.front == self.schedule.position(start.steps):
            return None
        return Reached(start.front, [Block(*hole) for hole in start.holes], start.filled)

    def _choose(self, name: str, reached: Reached | None = None) -> None:
        self.strategy = STRATEGIES[name]
        stage = Stage(self.schedule, self.steps, self.last_step, self._is_eager, reached, self._are_steps_lent)
        self.policy = self.strategy.policy(stage)

    def _follow(self) -> None:
        self.leases.follow(self.policy)
        self.roster.follow(self.strategy)
        self._granting.follow(self.strategy, self.policy)
        self.trust.follow(self.strategy)

    def _strategy_chosen(self, event: events.StrategyChosen, now: float) -> list[Action]:
        if event.strategy != self._next_strategy:
            self._next_strategy = event.strategy
            self.policy.end_soon()
        return self._settle(now)

    # ── members ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _joined(self, event: NodeJoined, now: float) -> list[Action]:
        member = self.members[event.node] = Member(event.node, self.leases.welcome(event.node), event.known_as)
        self._machines.joined(event.node, event.machine, event.cores)
        return self._grant(member, now)

    def _left(self, event: NodeLeft, now: float) -> list[Action]:
        member = self.members.pop(event.node, None)
        if member is None:
            return []
        held = next(iter(member.leases.values()), None)
        was_needed = held is not None and not held.is_check and held.block in self.leases.out
        self._forget(event.node)
        if held is None:
            return self._give_up_audits(now)
        if event.died and was_needed and (failure := self.deadly.died_at(held.block, self._where(held.block))):
            return self._end(now, "failed", failure)
        self._granting.is_careful = self.deadly.is_suspicious
        return self._give_up_audits(now) or self._settle(now) or self._grant_all(now)

    def _silent(self, event: NodeSilent, now: float) -> list[Action]:
        """Others may take what it holds; should it come back first, its result counts."""
        member = self.members.get(event.node)
        if member is None:
            return []
        self.roster.fall_silent(member)
        self._machines.away(event.node)
        return self._look_around(now)

    def _heard(self, event: NodeHeard, now: float) -> list[Action]:
        member = self.members.get(event.node)
        if member is None:
            return []
        member.is_silent = False
        self._machines.back(event.node)
        return self._grant(member, now)

    def _link_measured(self, event: events.LinkMeasured, now: float) -> list[Action]:
        if event.node in self.members:
            self.members[event.node].transfer_s = event.transfer_s
        return []

    def _drop(self, member: Member, why: str, now: float) -> list[Action]:
        del self.members[member.node]
        self._forget(member.node)
        return [DropNode(member.node, why), *(self._settle(now) or self._grant_all(now))]

    def _forget(self, node: int) -> None:
        self._granting.forget(node)
        self.trust.left(node)
        self.leases.farewell(node)
        self._machines.left(node)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, event: UpdateArrived, now: float) -> list[Action]:
        member = self.members.get(event.node)
        lease = member.leases.get(event.lease) if member is not None else None
        if member is None or lease is None:
            return self._unknown(event, member, now)
        if lease.is_check:
            return self._compared(member, lease, event, now)
        member.measure(lease, now, self.strategy.memory, self.roster.most_s(lease, event.compute_s, now))
        block, staleness, batches = lease.block, self.policy.age - lease.age, event.batches
        is_part = batches is not None and batches < block.size
        member.is_leaving |= is_part and not self._are_steps_lent  # a loop that ends wants to see what came of it
        is_wanted = self.leases.claim(lease)
        if is_wanted and event.problem:
            return self._failed_on(member, lease, 0, event.problem, "", now)
        self.leases.answered(lease)
        if not is_wanted:
            return self._refuse(member, lease, "late", "somebody else has it, or was first", now)
        if is_part and batches is not None:
            kept = self.leases.keep_first(lease, batches)
            if kept is None:
                return self._refuse(member, lease, "wrong part", f"{batches} of them", now)
            block = kept
        if staleness > self.strategy.most_stale:
            self.leases.give_back(block)
            return self._refuse(member, lease, "stale", f"{staleness} steps old", now)
        if event.doubt and (refused := self.trust.refuses(lease, block, event.doubt)):
            self.leases.give_back(block)
            return [*refused, *self._grant_all(now)]
        self.leases.merge(block)
        closed = self.policy.accept(event.node, block, now)
        member.staleness, discount = staleness, self.policy.discount(staleness)
        self.deadly.survived(block)
        told = self._told_by(event.node, block) if self._failures.are_any or self.trust.has_doubts else []
        self._granting.is_careful = self.deadly.is_suspicious
        granted = lease.granted_at, lease.group
        merge = MergeUpdate(event.node, lease.number, block, self.version + 1, discount, staleness, *granted)
        if (finding := self.trust.check(lease, block, event, now)) is None:
            return [merge, *told, *(self._settle(now, closed) or self._grant(member, now))]
        self._held_back += closed or ()
        return [merge, *told, *self._found(finding, now)]

    def _refuse(self, member: Member, lease: Lease, reason: str, why: str, now: float) -> list[Action]:
        detail = f"{self._where(lease.block)}: {why}"
        reject = RejectUpdate(member.node, lease.number, reason, detail, lease.block, lease.granted_at)
        return [reject, *self._grant(member, now)]

    def _unknown(self, event: UpdateArrived, member: Member | None, now: float) -> list[Action]:
        """Said twice, perhaps: it counted once, and the answer is said again, which is the next work."""
        if member is None or event.lease > member.answered:
            detail = f"lease {event.lease} is not this node's"
            return [RejectUpdate(event.node, event.lease, "unknown lease", detail)]
        twice = RejectUpdate(event.node, event.lease, "duplicate", f"lease {event.lease} was answered before")
        return [twice, *self._grant(member, now)]

    def _work_failed(self, event: WorkFailed, now: float) -> list[Action]:
        member = self.members.get(event.node)
        if member is None:
            return []
        lease = member.leases.get(event.lease)
        if lease is None or not self._is_first_at(lease):
            return self._drop(member, event.problem, now)  # somebody else was, or will be, able to do it
        return self._failed_on(member, lease, event.batch, event.problem, event.details, now)

    def _is_first_at(self, lease: Lease) -> bool:
        """Or is somebody else's answer there already, as far as it matters?"""
        if lease.is_check:
            return lease.pair > 0 or lease.block in self.leases.out
        return self.leases.claim(lease)

    def _failed_on(
        self, member: Member, lease: Lease, batch: int, problem: str, details: str, now: float
    ) -> list[Action]:
        """One machine may be broken: its work is tried on another. Where two agree, or no other can come, we fail."""
        position = min(lease.block.first + max(batch, 0), lease.block.end - 1)
        where = f"{self._where(Block(position, position + 1))}, node {member.node}: {problem}"
        reject = RejectUpdate(member.node, lease.number, "failed", where, lease.block, lease.granted_at)
        is_agreed = self._failures.agree(position, member.who, member.node)
        if is_agreed or (len(self.members) == 1 and not self.is_open):
            return [reject, *self._end(now, "failed", where, details)]
        return [reject, *self._drop(member, problem, now)]

    def _told_by(self, node: int, block: Block) -> list[Action]:
        """What the merging of this one's update tells of those who were doubted there, or failed."""
        finding = self.trust.merged(node, block)
        told = self._follow_up(finding) if finding is not None else []
        return [*told, *self._failed_alone(node, block)]

    def _failed_alone(self, node: int, block: Block) -> list[Action]:
        """Another one had no trouble there: so it was not the job."""
        return [
            TellOf(who, "faulty", f"{self._where(Block(at, at + 1))}: it failed there, and node {node} did not")
            for at, who in self._failures.managed(block, self.members[node].who)
        ]

    # ── who is right ─────────────────────────────────────────────────────────────────────────────────────────────

    def _compared(self, member: Member, lease: Lease, event: UpdateArrived, now: float) -> list[Action]:
        """The answer to a check."""
        member.measure(lease, now, self.strategy.memory, math.inf)
        self.leases.answered(lease)
        is_part = event.batches is not None and event.batches < lease.block.size
        member.is_leaving |= is_part
        if event.problem and (not lease.pair or self._failures.agree(lease.block.first, member.who, member.node)):
            return self._failed_on(member, lease, 0, event.problem, "", now)
        faulty = [] if event.problem else self._failed_alone(member.node, lease.block)
        compared, *follows = self._found(self.trust.compared(lease, event, is_part, now), now)
        return [compared, *faulty, *follows]

    def _give_up_audits(self, now: float) -> list[Action]:
        finding = self.trust.given_up()
        return self._found(finding, now) if finding is not None else []

    def _found(self, finding: Finding, now: float) -> list[Action]:
        actions = self._follow_up(finding)
        if finding.failure:
            return [*actions, *self._end(now, "failed", finding.failure)]
        return [*actions, *(self._settle(now) or self._grant_all(now))]

    def _follow_up(self, finding: Finding) -> list[Action]:
        """Who is wrong is not here any more, and none of their work becomes part of a version."""
        actions = [*finding.said, *self._send_away(finding.wrong, finding.why)]
        return [*actions, *self._void()] if finding.voids else actions

    def _send_away(self, nodes: Iterable[int], why: str) -> list[Action]:
        for node in nodes:
            if self.members.pop(node, None) is not None:
                self._forget(node)
        return [NameNode(node, why) for node in nodes]

    def _void(self) -> list[Action]:
        """The open version begins anew; what is out for it still counts."""
        assert self.trust.audits is not None
        self.policy.void(block for _, block in self.trust.audits.merged)
        self.trust.audits.version_done()
        self._held_back.clear()
        return [VoidVersion(self.version + 1)]

    # ── versions ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _settle(self, now: float, closed: list[int] | None = None) -> list[Action]:
        """Make the version that is due, close the steps that are complete, end or go on. Nothing, if nothing is due."""
        if self._awaited or self.trust.is_checking:  # what the next version would contain
            self._held_back += closed or ()
            return []
        closed, self._held_back = [*self._held_back, *(closed or ())], []
        policy = self.policy
        made: list[Action] = []
        kept: list[Action] = []
        is_last = not self.strategy.needs_whole_steps and (policy.is_complete or self._is_time_over(now))
        is_step = False
        if policy.is_due(self.roster.holders, now) or (is_last and policy.pending):
            make = self._make_version(now)
            is_step = make.made.is_step
            made.append(make)
        if closed:
            self.steps = closed[-1] + 1
            kept += [CloseStep(step, self._is_evaluated(step)) for step in closed]
            self._failures.step_closed()
            self._await_verdicts(sum(map(self._is_evaluated, closed)))
        if is_step and self._granting.started_at is not None and self._is_time_to_save(now):
            kept.append(self._save(now))
        if self._awaited:
            return [*made, *kept]
        if not (made or kept or is_last or policy.is_complete):
            return []
        if self._goes_on(now):
            return [*made, *self._grant_all(now), *kept]  # nodes compute while all is written down and copied
        return [*made, *kept, *self._turn_or_end(now)]

    def _is_evaluated(self, step: int) -> bool:
        return self.schedule.is_evaluated(self.schedule.step(step)) or step + 1 == self.last_step

    def _await_verdicts(self, count: int) -> None:
        if self._verdicts is not None and count:
            self._awaited += count
            self._granting.is_paused = True
            self._saves_soon |= self._verdicts.keeps_best

    def _judged(self, event: events.Judged, now: float) -> list[Action]:
        self._awaited = max(0, self._awaited - 1)
        actions: list[Action] = [events.NameBest(self.steps)] if event.is_best else []
        if event.why_stop:
            return [*actions, *self._end(now, event.why_stop)]
        self._granting.is_paused = self._is_held
        return [*actions, *(self._settle(now) or self._grant_all(now))]

    @property
    def _is_held(self) -> bool:
        return self._is_full or self.is_paused or self._awaited > 0

    def _is_time_to_save(self, now: float) -> bool:
        began_at = self._granting.started_at or 0.0
        return self._saves_soon or now - max(self._saved_at, began_at) >= self._save_every_s

    def _save(self, now: float) -> SaveCheckpoint:
        self._saved_at, self._saves_soon = now, False
        return SaveCheckpoint(self.position(now))

    def _checkpoint_requested(self, event: Event, now: float) -> list[Action]:
        self._saves_soon = True
        return self._save_soon(now)

    def _save_soon(self, now: float) -> list[Action]:
        """What was merged since the last version would be lost: it is waited for, and if the run is paused, a version
        is made of what there is.
        """
        if not self._saves_soon:
            return []
        if self.strategy.needs_whole_steps or not self.policy.pending:
            return [self._save(now)]
        if self.is_paused and not self.leases.out:
            return [self._make_version(now, is_end=True), self._save(now)]
        return []

    def _make_version(self, now: float, is_end: bool = False) -> MakeVersion:
        is_end = is_end or self.policy.is_complete or self.is_over or self._is_time_over(now)
        made = self.policy.make(lambda: self.roster.pace(self.schedule.batches_per_step), now, is_end)
        self._worth += made.worth
        make = MakeVersion(self.version, made, max(1, round(self._worth)))
        self.version += 1
        if self.trust.audits is not None:
            self.trust.audits.version_done()
        self._granting.version_made(now)
        return make

    def _goes_on(self, now: float) -> bool:
        """Just as before?"""
        is_done = self.last_step is not None and self.steps >= self.last_step
        is_over = self._is_time_over(now) and not self.policy.pending
        return not (is_done or is_over or self.policy.is_complete)

    def _turn_or_end(self, now: float) -> list[Action]:
        if self.last_step is not None and self.steps >= self.last_step:
            return self._end(now, f"{self.steps} steps done")
        if self._is_time_over(now) and not self.policy.pending:
            return self._end(now, f"{self.seconds:g} seconds are over")
        self._worth = float(self.steps)
        self._choose(self._next_strategy)
        self._follow()
        return [ChangeStrategy(self.strategy.name), *self._grant_all(now)]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _look_around(self, now: float) -> list[Action]:
        """Time has passed."""
        if (not self.members or self.is_paused) and self._is_time_over(now):
            return self._end(now, f"{self.seconds:g} seconds are over")  # nobody will make the step whole
        self.roster.look_for_mutes(now)
        if not self.strategy.needs_whole_steps:  # in a line of batches nobody comes back for what is long overdue
            for lease in self.roster.overdue(now):
                self.leases.expire(lease)
        return self._save_soon(now) or self._give_up_audits(now) or self._settle(now) or self._grant_all(now)

    def _is_time_over(self, now: float) -> bool:
        return self.seconds is not None and self._elapsed_s(now) >= self.seconds

    def _elapsed_s(self, now: float) -> float:
        """Since the first lease, by all processes that have coordinated this run."""
        began_at = self._granting.started_at
        return self._spent_s + (now - began_at if began_at is not None else 0.0)

    def _evaluation_full(self, event: Event, now: float) -> list[Action]:
        self._is_full = self._granting.is_paused = True
        return []

    def _evaluation_caught_up(self, event: Event, now: float) -> list[Action]:
        self._is_full = False
        return self._go_on(now)

    def _pause_requested(self, event: Event, now: float) -> list[Action]:
        self.is_paused = self._granting.is_paused = True
        return []

    def _resume_requested(self, event: Event, now: float) -> list[Action]:
        self.is_paused = False
        return self._go_on(now)

    def _go_on(self, now: float) -> list[Action]:
        """If nothing else is in the way."""
        was_paused, self._granting.is_paused = self._granting.is_paused, self._is_held
        return self._grant_all(now) if was_paused and not self._granting.is_paused else []

    def _end(self, now: float, why: str, failure: str = "", details: str = "") -> list[Action]:
        self.is_over = True
        actions: list[Action] = []
        if not self.strategy.needs_whole_steps and self.policy.pending:
            actions.append(self._make_version(now))
        hurries = self.seconds is not None
        return [*actions, SaveCheckpoint(self.position(now)), EndRun(why, failure, details, hurries)]

    # ── grants ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _grant(self, member: Member, now: float) -> list[Action]:
        return self._granting.to_one(member, self.version, now)

    def _grant_all(self, now: float) -> list[Action]:
        return self._granting.to_all(self.version, now)

    def _first_batch(self, step: int) -> Block:
        position = self.schedule.position(step)
        return Block(position, position + 1)

    def _where(self, block: Block) -> str:
        step, first, end = self.schedule.stretches(*block)[0]
        return f"step {step.number}, " + (f"batch {first}" if end - first == 1 else f"batches {first}…{end - 1}")


HANDLERS: dict[type[Event], Callable[[Pool, Any, float], list[Action]]] = {
    NodeJoined: Pool._joined,
    NodeLeft: Pool._left,
    NodeSilent: Pool._silent,
    NodeHeard: Pool._heard,
    UpdateArrived: Pool._arrived,
    WorkFailed: Pool._work_failed,
    events.LinkMeasured: Pool._link_measured,
    events.StrategyChosen: Pool._strategy_chosen,
    events.EvaluationFull: Pool._evaluation_full,
    events.EvaluationCaughtUp: Pool._evaluation_caught_up,
    events.PauseRequested: Pool._pause_requested,
    events.ResumeRequested: Pool._resume_requested,
    events.CheckpointRequested: Pool._checkpoint_requested,
    events.Judged: Pool._judged,
    events.RunFailed: lambda pool, event, now: pool._end(now, "failed", event.problem, event.details),
    events.StopRequested: lambda pool, event, now: pool._end(now, event.why),
    events.Ticked: lambda pool, event, now: pool._look_around(now),
}
assert set(HANDLERS) == set(events.EVENTS)
