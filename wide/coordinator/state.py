"""Every decision of the coordinator: `handle(event, now) -> actions`. Pure: no sockets, clock, threads or tensors.

Membership, leases, making versions, rejecting, ending. How work is cut and when a version is due is the course's
(strategy/course.py). The shell (server.py) carries the actions out, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from wide.coordinator.events import (
    Action,
    ChangeStrategy,
    CloseStep,
    DropNode,
    EndRun,
    Event,
    GrantLease,
    LinkMeasured,
    MakeVersion,
    MergeUpdate,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeSilent,
    Position,
    RejectUpdate,
    RunFailed,
    SaveCheckpoint,
    StopRequested,
    StrategyChosen,
    Ticked,
    UpdateArrived,
    WorkFailed,
)
from wide.coordinator.roster import OVERDUE_S, Lease, Member, Roster
from wide.job.schedule import Schedule
from wide.strategy.course import Course, Cut, Share, Standing, course
from wide.strategy.tree import Block


class Pool:
    """The state of one run."""

    def __init__(
        self,
        schedule: Schedule,
        steps: int | None,
        seconds: float | None,
        is_open: bool = False,
        strategy: str = "sync",
        is_eager: bool = False,
        start: Position | None = None,
        save_every_s: float = math.inf,
    ) -> None:
        self.schedule = schedule
        self.is_open = is_open  # others may still join, so a lone node that fails does not speak for all
        self.last_step = steps
        self.seconds = seconds
        self.roster = Roster()
        self.members = self.roster.members
        start = start or Position()
        self.version = start.version  # updates of the model so far
        self.steps = start.steps  # all batches of these, and of none after them, are merged
        self._worth = start.worth  # how many steps' worth of batches are in the weights
        self._spent_s = start.seconds  # before this process
        self.started_at: float | None = None
        self.is_over = False
        self._next_strategy, self._is_eager = strategy, is_eager
        self._save_every_s, self._saved_at = save_every_s, 0.0
        self._leases = self._changes = 0
        self._pool_rate = 0.0  # batches/s of all measured members together, as of the last version
        self._begin(start)
        self._failed: dict[int, str] = {}  # position -> what went wrong there on the first node
        self._handlers: dict[type[Event], Callable[[Any, float], list[Action]]] = {
            NodeJoined: self._joined,
            NodeLeft: self._left,
            UpdateArrived: self._arrived,
            WorkFailed: self._work_failed,
            LinkMeasured: self._link_measured,
            StrategyChosen: self._strategy_chosen,
            NodeSilent: self._silent,
            NodeHeard: self._heard,
            RunFailed: lambda event, now: self._end(now, "failed", event.problem, event.details),
            StopRequested: lambda event, now: self._end(now, event.why),
            Ticked: self._ticked,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """The one door: what happened, and when; what to do about it."""
        return [] if self.is_over else self._handlers[type(event)](event, now)

    def _begin(self, start: Position) -> None:
        """From there. Holes in the line of batches are filled by the strategy that has left them, or one like it."""
        standing = Standing(start.front, [Block(*hole) for hole in start.holes], start.filled)
        strategy, is_whole = self._next_strategy, standing.front == self.schedule.position(self.steps)
        if is_whole:
            self._worth = float(self.steps)
        elif strategy == "sync":
            strategy = start.strategy
        self._follow(strategy)
        if not is_whole:
            self.course.resume(standing)
        if strategy != self._next_strategy:
            self.course.end_soon()

    def _follow(self, strategy: str) -> None:
        self.course: Course = course(strategy, self.schedule, self.steps, self.last_step, self._is_eager)
        self.roster.waits_for_travel = self.course.waits_for_travel

    def position(self, now: float) -> Position:
        """Where the run is, right after a version was made: whoever begins there loses and doubles nothing."""
        front, holes, filled = self.course.standing
        return Position(
            self.course.name, self.version, self.steps, self._worth, front, holes, filled, self._elapsed_s(now)
        )

    # ── members ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _joined(self, event: NodeJoined, now: float) -> list[Action]:
        member = self.members[event.node] = Member(event.node)
        return self._grant(member, now)

    def _left(self, event: NodeLeft, now: float) -> list[Action]:
        member = self.members.pop(event.node, None)
        if member is None or not member.leases:
            return []
        self._void(member)
        return self._settle(now) or self._grant_all(now)

    def _silent(self, event: NodeSilent, now: float) -> list[Action]:
        """Others may take what it holds; should it come back first, its result counts."""
        if event.node not in self.members:
            return []
        self.roster.fall_silent(event.node)
        return self._ticked(Ticked(), now)

    def _heard(self, event: NodeHeard, now: float) -> list[Action]:
        member = self.members.get(event.node)
        if member is None:
            return []
        member.is_silent = False
        return self._grant(member, now)

    def _link_measured(self, event: LinkMeasured, now: float) -> list[Action]:
        if event.node in self.members:
            self.members[event.node].transfer_s = event.transfer_s
        return []

    def _drop(self, member: Member, why: str, now: float) -> list[Action]:
        del self.members[member.node]
        self._void(member)
        return [DropNode(member.node, why), *(self._settle(now) or self._grant_all(now))]

    def _void(self, member: Member) -> None:
        """Nobody will answer its leases: their blocks are free again, unless somebody else is at them too."""
        for lease in member.leases.values():
            if not self.course.is_out(lease.block):
                continue
            if others := self.roster.others_at(lease):
                self.roster.newest[lease.block] = others[-1]
            else:
                self.roster.newest.pop(lease.block, None)  # if it had expired, and was taken back, nobody had it
                self.course.give_back(lease.block)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, event: UpdateArrived, now: float) -> list[Action]:
        member = self.members.get(event.node)
        lease = member.leases.pop(event.lease, None) if member is not None else None
        if member is None or lease is None:
            return self._unknown(event, member, now)
        member.measure(lease, now, self.course.memory, self._most_s(member, lease, event, now))
        block, staleness = lease.block, self.course.age - lease.age
        member.is_leaving |= event.batches is not None and event.batches < block.size
        if not self.course.is_out(block) and not self.course.take_back(block):
            late = RejectUpdate(event.node, "late", f"{self._where(block)}: somebody else has it, or was first")
            return [late, *self._grant(member, now)]
        if event.problem:
            member.leases[lease.number] = lease
            return self._failed_on(member, lease, 0, event.problem, "", now)
        if event.batches is not None and (kept := self._shortened(lease, event.batches)) != block:
            if kept is None:
                return [RejectUpdate(event.node, "wrong part", f"{self._where(block)}: {event.batches} of them")]
            block = kept
        if staleness > self.course.most_stale:
            self.roster.newest.pop(block, None)
            self.course.give_back(block)
            stale = RejectUpdate(event.node, "stale", f"{self._where(block)}: {staleness} steps old")
            return [stale, *self._grant(member, now)]
        closed = self.course.accept(event.node, block, now)
        self.roster.newest.pop(block, None)
        merge = MergeUpdate(event.node, block, self.version + 1, self.course.discount(staleness), staleness)
        return [merge, *(self._settle(now, closed) or self._grant(member, now))]

    def _unknown(self, event: UpdateArrived, member: Member | None, now: float) -> list[Action]:
        """Said twice, perhaps: it counted once, and the answer is said again, which is the next work."""
        if member is None or event.lease > member.answered:
            return [RejectUpdate(event.node, "unknown lease", f"lease {event.lease} is not this node's")]
        twice = RejectUpdate(event.node, "duplicate", f"lease {event.lease} was answered before")
        return [twice, *self._grant(member, now)]

    def _shortened(self, lease: Lease, batches: int) -> Block | None:
        """Of a lease only the first batches were computed, because its node has to go."""
        if batches == lease.block.size:
            return lease.block
        if others := self.roster.others_at(lease):
            self.roster.newest[lease.block] = others[-1]
            return None  # they are at all of it
        kept = self.course.keep_first(lease.block, batches) if 0 < batches < lease.block.size else None
        if kept is None:
            self.course.give_back(lease.block)
        self.roster.newest.pop(lease.block, None)
        return kept

    def _most_s(self, member: Member, lease: Lease, event: UpdateArrived, now: float) -> float:
        """What a lease may have taken, where travel does not count: what the node says, if that can be true."""
        if self.course.waits_for_travel:
            return math.inf
        elapsed = now - max(lease.granted_at, member.heard_at)
        return max(event.compute_s, elapsed - 2 * member.transfer_s - OVERDUE_S)

    def _settle(self, now: float, closed: list[int] | None = None) -> list[Action]:
        """Make the version that is due, close the steps that are complete, end or go on. Nothing, if nothing is due."""
        actions: list[Action] = []
        is_last = self.course.may_flush and (self.course.is_complete or self._is_time_over(now))
        is_step = False
        if self.course.is_due(self.roster.holders, now) or (is_last and self.course.pending):
            make = self._make_version(now)
            is_step = make.is_step
            actions.append(make)
        if closed:
            self.steps = closed[-1] + 1
            actions += [CloseStep(step, self.course.name == "sync") for step in closed]
            self._failed.clear()
        if is_step and now - self._saved_at >= self._save_every_s:
            self._saved_at = now
            actions.append(SaveCheckpoint(self.position(now)))
        if not actions and not is_last and not self.course.is_complete:
            return []
        return actions + self._go_on(now)

    def _make_version(self, now: float) -> MakeVersion:
        is_end = self.course.is_complete or self.is_over or self._is_time_over(now)
        worth = self.course.worth
        self._worth += worth or (self.course.filled if is_end else 0.0)  # in the end a step is made of what is left
        make = MakeVersion(self.version, max(1, round(self._worth)), self.course.length, worth > 0 or is_end)
        self.version += 1
        self._pool_rate = sum(self.roster.rates)
        self.course.version_made(self.roster.pace(self.schedule.batches_per_step), now, make.is_step)
        return make

    def _go_on(self, now: float) -> list[Action]:
        if self.last_step is not None and self.steps >= self.last_step:
            return self._end(now, f"{self.steps} steps done")
        if self._is_time_over(now) and not self.course.pending:
            return self._end(now, f"{self.seconds:g} seconds are over")
        changes: list[Action] = []
        if self.course.is_complete:
            self._changes, self._worth = self._changes + 1, float(self.steps)
            self._follow(self._next_strategy)
            changes = [ChangeStrategy(self.course.name)]
        return changes + self._grant_all(now)

    def _is_time_over(self, now: float) -> bool:
        return self.seconds is not None and self._elapsed_s(now) >= self.seconds

    def _elapsed_s(self, now: float) -> float:
        """Since the first lease, by all processes that have coordinated this run."""
        return self._spent_s + (now - self.started_at if self.started_at is not None else 0.0)

    def _work_failed(self, event: WorkFailed, now: float) -> list[Action]:
        member = self.members.get(event.node)
        if member is None:
            return []
        lease = member.leases.get(event.lease)
        if lease is None or not (self.course.is_out(lease.block) or self.course.take_back(lease.block)):
            return self._drop(member, event.problem, now)  # somebody else was, or will be, able to do it
        return self._failed_on(member, lease, event.batch, event.problem, event.details, now)

    def _failed_on(
        self, member: Member, lease: Lease, batch: int, problem: str, details: str, now: float
    ) -> list[Action]:
        """One machine may be broken: its work is tried on another. Where two agree, or no other can come, we fail."""
        position = min(lease.block.first + max(batch, 0), lease.block.end - 1)
        where = f"{self._where(Block(position, position + 1))}, node {member.node}: {problem}"
        reject = RejectUpdate(member.node, "failed", where)
        if position in self._failed or (len(self.members) == 1 and not self.is_open):
            return [reject, *self._end(now, "failed", where, details)]
        self._failed[position] = problem
        return [reject, *self._drop(member, problem, now)]

    # ── time, and changes of mind ────────────────────────────────────────────────────────────────────────────────

    def _ticked(self, event: Ticked, now: float) -> list[Action]:
        if not self.members and self._is_time_over(now):
            return self._end(now, f"{self.seconds:g} seconds are over")  # nobody is there to make the step whole
        if self.course.may_flush:
            self._expire(now)
        return self._settle(now) or self._grant_all(now)

    def _expire(self, now: float) -> None:
        """What is long overdue is free again: in a line of batches nobody comes back for it before the run's end."""
        for lease in self.roster.overdue(now):
            del self.roster.newest[lease.block]
            self.course.give_back(lease.block)
            lease.is_expired = True

    def _strategy_chosen(self, event: StrategyChosen, now: float) -> list[Action]:
        if event.strategy != self._next_strategy:
            self._next_strategy = event.strategy
            self.course.end_soon()
        return self._settle(now)

    def _end(self, now: float, why: str, failure: str = "", details: str = "") -> list[Action]:
        self.is_over = True
        actions: list[Action] = []
        if self.course.may_flush and self.course.pending:
            actions.append(self._make_version(now))
        return [*actions, SaveCheckpoint(self.position(now), is_last=True), EndRun(why, failure, details)]

    # ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _grant_all(self, now: float) -> list[Action]:
        if self.course.patience and self._is_worth_waiting(now):
            return []
        idle = self.roster.idle(self.course.depth)
        if not self.course.free:
            idle.sort(key=lambda member: -(member.batches_per_s or 0.0))
        actions: list[Action] = []
        for i, member in enumerate(idle):
            actions += (given := self._give(member, now, len(idle) - i))
            if not (given or self.course.free or member.leases) and self.course.may_lease(member.node):
                break  # what is not worth the quickest one's while is not worth anybody's
        return actions

    def _grant(self, member: Member, now: float) -> list[Action]:
        """Work for one node, if there is any, and nothing better is about to come."""
        if self.course.patience and self._is_worth_waiting(now):
            return []
        return self._give(member, now, 1)

    def _give(self, member: Member, now: float, takers: int) -> list[Action]:
        """`takers` are the nodes that are still to be served."""
        actions: list[Action] = []
        if member.is_silent or member.is_leaving:
            return actions
        if member.leases and any(lease.change != self._changes for lease in member.leases.values()):
            return actions  # it is still at something from before
        while len(member.leases) < self.course.depth and self.course.may_lease(member.node):
            if self.course.free:
                cut = self.course.cut(self._share(member, takers, now), now)
            else:
                late = self.roster.worth_rescuing(member, now)
                if late is None:
                    break
                cut = Cut(late.block, late.group)
            if self.started_at is None:
                self.started_at = self._saved_at = now
            self._leases += 1
            lease = Lease(self._leases, member.node, cut.block, cut.group, self.course.age, now, self._changes)
            self.roster.hold(lease)
            actions.append(GrantLease(member.node, lease.number, cut.block, cut.group))
        return actions

    def _share(self, member: Member, takers: int, now: float) -> Share:
        """This node's part of the pool's speed; while nothing is known of it, or of the pool, an equal part."""
        if not self._pool_rate:  # before the first version: as soon as everybody was measured, that is known
            rates = [other.batches_per_s for other in self.members.values()]
            self._pool_rate = sum(rate for rate in rates if rate) if None not in rates else 0.0
        if member.batches_per_s is None or not self._pool_rate:
            return Share(1 / len(self.members), takers)
        busy_s = 0.0
        if member.leases:
            elapsed, expected = self.roster.progress(next(reversed(member.leases.values())), member.batches_per_s, now)
            busy_s = max(0.0, expected - elapsed)
        part = min(1.0, member.batches_per_s / self._pool_rate)
        return Share(part, takers, member.batches_per_s, len(member.leases), busy_s, self._at_work(now))

    def _at_work(self, now: float) -> float:
        """Batches of the step that are being computed; looked at closely when few are left to lease."""
        if self.course.may_flush:
            return 0.0
        if 2 * self.course.free > self.course.missing:
            return self.course.missing - self.course.free
        return sum(self.roster.left_of(lease, now) for lease in self.roster.newest.values())

    def _is_worth_waiting(self, now: float) -> bool:
        """Will the step be whole in a moment? Then work begins with the new weights, and the nodes fall into step."""
        if not self._pool_rate:
            return False
        patience_s = self.course.patience * self.schedule.batches_per_step / self._pool_rate
        soon = self.roster.due_within(patience_s, now)
        return soon > 0 and soon >= self.course.missing - 1e-6

    def _where(self, block: Block) -> str:
        step, first, end = self.schedule.stretches(*block)[0]
        return f"step {step.number}, " + (f"batch {first}" if end - first == 1 else f"batches {first}…{end - 1}")
