"""Every decision of the coordinator: `handle(event, now) -> actions`. Pure: no sockets, clock, threads or tensors.

Membership, leases, making versions, rejecting, ending. How work is cut and when a version is due is the course's
(strategy/course.py). The shell (server.py) carries the actions out, in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
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
    NodeJoined,
    NodeLeft,
    RejectUpdate,
    RunDiverged,
    StopRequested,
    StrategyChosen,
    Ticked,
    UpdateArrived,
    WorkFailed,
)
from wide.job.schedule import Schedule
from wide.strategy.course import Course, Cut, Pace, Share, course
from wide.strategy.tree import Block

RESCUE_GAIN = 2.0  # an idle node takes over if it should be done this much sooner than the holder
OVERDUE = 4.0  # a lease that took this many times what was expected may never come back
OVERDUE_S = 1.0  # and at least so much longer, if others would have something else to do
COLD = 0.1  # what a node's first result weighs, against later ones
GREEN_S = 10.0  # the same for a node's first lease: it may have to load and to warm up


@dataclass(slots=True)
class Lease:
    """`block` of the run, granted to `node` at this `age` of the weights, when the clock showed `granted_at`."""

    number: int
    node: int
    block: Block
    group: int
    age: int
    granted_at: float
    change: int  # how often the strategy had changed by then
    is_expired: bool = False


@dataclass(slots=True)
class Member:
    """A node in the pool. `batches_per_s` is None until its first result; `leases` are computed in their order."""

    node: int
    batches_per_s: float | None = None
    leases: dict[int, Lease] = field(default_factory=dict)
    lately: tuple[float, float] = (0.0, 0.0)  # batches, and the seconds that they took
    heard_at: float = 0.0
    transfer_s: float = 0.0

    def measure(self, lease: Lease, now: float, memory: float, most_s: float) -> None:
        """From the grant, or from its result before, to this one; but not longer than `most_s`."""
        elapsed_s = min(now - max(lease.granted_at, self.heard_at), most_s)
        batches, seconds = self.lately
        weight = 1.0 if seconds else COLD  # the first time nothing is warm
        self.lately = memory * batches + weight * lease.block.size, memory * seconds + weight * max(elapsed_s, 1e-6)
        self.batches_per_s = self.lately[0] / self.lately[1]
        self.heard_at = now


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
    ) -> None:
        self.schedule = schedule
        self.is_open = is_open  # others may still join, so a lone node that fails does not speak for all
        self.last_step = steps
        self.seconds = seconds
        self.members: dict[int, Member] = {}
        self.version = 0  # updates of the model so far
        self.steps = 0  # all batches of these, and of none after them, are merged
        self.course: Course = course(strategy, schedule, 0, steps, is_eager)
        self._worth = 0.0  # how many steps' worth of batches are in the weights
        self.started_at: float | None = None
        self.is_over = False
        self._next_strategy, self._is_eager = strategy, is_eager
        self._leases = self._changes = 0
        self._pool_rate = 0.0  # batches/s of all measured members together, as of the last version
        self._newest: dict[Block, Lease] = {}  # who was last given each block that is out
        self._failed: dict[int, str] = {}  # position -> what went wrong there on the first node
        self._handlers: dict[type[Event], Callable[[Any, float], list[Action]]] = {
            NodeJoined: self._joined,
            NodeLeft: self._left,
            UpdateArrived: self._arrived,
            WorkFailed: self._work_failed,
            LinkMeasured: self._link_measured,
            StrategyChosen: self._strategy_chosen,
            RunDiverged: lambda event, now: self._end(now, "failed", event.problem),
            StopRequested: lambda event, now: self._end(now, event.why),
            Ticked: self._ticked,
        }

    def handle(self, event: Event, now: float) -> list[Action]:
        """The one door: what happened, and when; what to do about it."""
        return [] if self.is_over else self._handlers[type(event)](event, now)

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
            others = [other for m in self.members.values() for other in m.leases.values() if m is not member]
            same = [other for other in others if other.block == lease.block]
            if same:
                self._newest[lease.block] = same[-1]
            else:
                del self._newest[lease.block]
                self.course.give_back(lease.block)

    # ── results ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _arrived(self, event: UpdateArrived, now: float) -> list[Action]:
        member = self.members.get(event.node)
        lease = member.leases.pop(event.lease, None) if member is not None else None
        if member is None or lease is None:
            return [RejectUpdate(event.node, "unknown lease", f"lease {event.lease} is not this node's")]
        member.measure(lease, now, self.course.memory, self._most_s(member, lease, event, now))
        block, staleness = lease.block, self.course.age - lease.age
        if not self.course.is_out(block) and not self.course.take_back(block):
            late = RejectUpdate(event.node, "late", f"{self._where(block)}: somebody else has it, or was first")
            return [late, *self._grant(member, now)]
        if event.problem:
            member.leases[lease.number] = lease
            return self._failed_on(member, lease, 0, event.problem, "", now)
        if staleness > self.course.most_stale:
            self._newest.pop(block, None)
            self.course.give_back(block)
            stale = RejectUpdate(event.node, "stale", f"{self._where(block)}: {staleness} steps old")
            return [stale, *self._grant(member, now)]
        closed = self.course.accept(event.node, block, now)
        self._newest.pop(block, None)
        merge = MergeUpdate(event.node, block, self.version + 1, self.course.discount(staleness), staleness)
        return [merge, *(self._settle(now, closed) or self._grant(member, now))]

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
        if self.course.is_due(self._holders, now) or (is_last and self.course.pending):
            actions.append(self._make_version(now))
        if closed:
            self.steps = closed[-1] + 1
            actions += [CloseStep(step, self.course.name == "sync") for step in closed]
            self._failed.clear()
        if not actions and not is_last and not self.course.is_complete:
            return []
        return actions + self._go_on(now)

    def _make_version(self, now: float) -> Action:
        is_end = self.course.is_complete or self.is_over or self._is_time_over(now)
        worth = self.course.worth or float(is_end)  # of what is left over in the end, a step is made
        self._worth += worth
        make = MakeVersion(self.version, max(1, round(self._worth)), self.course.length, is_step=worth > 0)
        self.version += 1
        rates = [member.batches_per_s for member in self.members.values() if member.batches_per_s is not None]
        self._pool_rate = sum(rates)
        tick_s = self.schedule.batches_per_step / self._pool_rate if rates else 0.0
        transfer_s = max((member.transfer_s for member in self.members.values()), default=0.0)
        self.course.version_made(Pace(tick_s, transfer_s, 1 / min(rates, default=1.0)), now, make.is_step)
        return make

    def _holders(self) -> set[int]:
        """Whose results may still come."""
        return {m.node for m in self.members.values() for lease in m.leases.values() if not lease.is_expired}

    def _go_on(self, now: float) -> list[Action]:
        if self.last_step is not None and self.steps >= self.last_step:
            return self._end(now, f"{self.steps} steps done")
        if self._is_time_over(now) and not self.course.pending:
            return self._end(now, f"{self.seconds:g} seconds are over")
        changes: list[Action] = []
        if self.course.is_complete:
            self._changes += 1
            self.course = course(self._next_strategy, self.schedule, self.steps, self.last_step, self._is_eager)
            changes = [ChangeStrategy(self.course.name)]
        return changes + self._grant_all(now)

    def _is_time_over(self, now: float) -> bool:
        return self.seconds is not None and self.started_at is not None and now - self.started_at >= self.seconds

    def _work_failed(self, event: WorkFailed, now: float) -> list[Action]:
        member = self.members.get(event.node)
        if member is None:
            return []
        lease = member.leases.get(event.lease)
        if lease is None:
            return self._drop(member, event.problem, now)
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
        if self.course.may_flush:
            self._expire(now)
        return self._settle(now) or self._grant_all(now)

    def _expire(self, now: float) -> None:
        """What is long overdue is free again: in a line of batches nobody comes back for it before the run's end."""
        rates = [member.batches_per_s for member in self.members.values() if member.batches_per_s is not None]
        if not rates or len(self.members) == 1:
            return
        for block, lease in list(self._newest.items()):
            rate = self.members[lease.node].batches_per_s
            grace_s = OVERDUE_S if rate is not None else GREEN_S
            elapsed, expected = self._progress(lease, rate or median(rates), now)
            if elapsed > OVERDUE * expected + grace_s:
                del self._newest[block]
                self.course.give_back(block)
                lease.is_expired = True

    def _strategy_chosen(self, event: StrategyChosen, now: float) -> list[Action]:
        if event.strategy != self._next_strategy:
            self._next_strategy = event.strategy
            self.course.end_soon()
        return self._settle(now)

    def _end(self, now: float, why: str, failure: str = "", details: str = "") -> list[Action]:
        self.is_over = True
        end = EndRun(why, failure, details)
        is_flushed = self.course.may_flush and self.course.pending and not failure
        return [self._make_version(now), end] if is_flushed else [end]

    # ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _grant_all(self, now: float) -> list[Action]:
        if self.course.patience and self._is_worth_waiting(now):
            return []
        idle = [member for member in self.members.values() if len(member.leases) < self.course.depth]
        return [action for i, member in enumerate(idle) for action in self._give(member, now, len(idle) - i)]

    def _grant(self, member: Member, now: float) -> list[Action]:
        """Work for one node, if there is any, and nothing better is about to come."""
        if self.course.patience and self._is_worth_waiting(now):
            return []
        return self._give(member, now, 1)

    def _give(self, member: Member, now: float, takers: int) -> list[Action]:
        """`takers` are the nodes that are still to be served."""
        actions: list[Action] = []
        if any(lease.change != self._changes for lease in member.leases.values()):
            return actions  # it is still at something from before
        while len(member.leases) < self.course.depth and self.course.may_lease(member.node):
            if self.course.free:
                cut = self.course.cut(self._share(member, takers, now), now)
            else:
                late = self._worth_rescuing(member, now)
                if late is None:
                    break
                cut = Cut(late.block, late.group)
            if self.started_at is None:
                self.started_at = now
            self._leases += 1
            lease = Lease(self._leases, member.node, cut.block, cut.group, self.course.age, now, self._changes)
            member.leases[lease.number] = self._newest[cut.block] = lease
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
            elapsed, expected = self._progress(next(reversed(member.leases.values())), member.batches_per_s, now)
            busy_s = max(0.0, expected - elapsed)
        part = min(1.0, member.batches_per_s / self._pool_rate)
        return Share(part, takers, member.batches_per_s, len(member.leases), busy_s, self._at_work(now))

    def _at_work(self, now: float) -> float:
        """Batches of the step that are being computed; looked at closely when few are left to lease."""
        if self.course.may_flush:
            return 0.0
        if 2 * self.course.free > self.course.missing:
            return self.course.missing - self.course.free
        return sum(self._left_of(lease, now) for lease in self._newest.values())

    def _left_of(self, lease: Lease, now: float) -> float:
        """Batches of a lease that its holder, by its own speed, has not computed yet."""
        rate = self.members[lease.node].batches_per_s
        return lease.block.size if rate is None else max(0.0, lease.block.size - rate * (now - lease.granted_at))

    def _is_worth_waiting(self, now: float) -> bool:
        """Will the step be whole in a moment? Then work begins with the new weights, and the nodes fall into step."""
        if not self._pool_rate:
            return False
        patience_s = self.course.patience * self.schedule.batches_per_step / self._pool_rate
        soon = 0
        for lease in self._newest.values():
            rate = self.members[lease.node].batches_per_s
            if rate is not None:
                elapsed, expected = self._progress(lease, rate, now)
                soon += lease.block.size if -patience_s < expected - elapsed < patience_s else 0
        return soon > 0 and soon >= self.course.missing - 1e-6

    def _worth_rescuing(self, member: Member, now: float) -> Lease | None:
        """The lease whose holder will be done last, if this idle node should be done with it much sooner."""
        if member.batches_per_s is None or member.leases or not self._newest:
            return None
        slowest, longest = None, 0.0
        for lease in self._newest.values():
            remaining = self._remaining_s(lease, member.batches_per_s, now)
            if remaining > longest:
                slowest, longest = lease, remaining
        if slowest is None or longest < RESCUE_GAIN * slowest.block.size / member.batches_per_s:
            return None
        return slowest

    def _remaining_s(self, lease: Lease, rescuer_rate: float, now: float) -> float:
        """How long its holder will still need, by its own speed; one that is far too late may never come back."""
        rate = self.members[lease.node].batches_per_s or rescuer_rate
        elapsed, expected = self._progress(lease, rate, now)
        return float("inf") if elapsed > OVERDUE * expected else max(0.0, expected - elapsed)

    def _progress(self, lease: Lease, rate: float, now: float) -> tuple[float, float]:
        """For how long its holder has been at it and what comes before it, and how long that should take."""
        holder = self.members[lease.node]
        ahead = [held for held in holder.leases.values() if held.number <= lease.number]
        travel_s = 0.0 if self.course.waits_for_travel else holder.transfer_s  # not in its speed
        computing_s = sum(held.block.size for held in ahead) / rate
        return now - max(ahead[0].granted_at, holder.heard_at), computing_s + travel_s

    def _where(self, block: Block) -> str:
        step, first, end = self.schedule.stretches(*block)[0]
        return f"step {step.number}, " + (f"batch {first}" if end - first == 1 else f"batches {first}…{end - 1}")
