"""Every decision of the coordinator: `handle(event, now) -> actions`. Pure: no sockets, clock, threads or tensors.

Membership, leases, closing a step, rejecting, ending. The shell (server.py) carries the actions out, in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wide.coordinator.events import (
    Action,
    CloseStep,
    DropNode,
    EndRun,
    Event,
    GrantLease,
    MergeUpdate,
    NodeJoined,
    NodeLeft,
    RejectUpdate,
    StopRequested,
    Ticked,
    UpdateArrived,
    WorkFailed,
)
from wide.job.schedule import Schedule
from wide.strategy.sync import OpenStep, lease_size
from wide.strategy.tree import Block

RATE_MEMORY = 0.9  # how much of a node's measured speed is kept when a new measurement comes
RESCUE_GAIN = 2.0  # an idle node takes over if it should be done this much sooner than the holder
OVERDUE = 4.0  # a lease that took this many times what was expected may never come back


@dataclass(slots=True)
class Lease:
    """`block` of the open step, granted to `node` when the clock showed `granted_at`."""

    number: int
    node: int
    block: Block
    step: int
    granted_at: float


@dataclass(slots=True)
class Member:
    """A node in the pool. `batches_per_s` is measured from grant to arrival; None until the first result."""

    node: int
    batches_per_s: float | None = None
    lease: Lease | None = None

    def measure(self, batches: int, elapsed_s: float) -> None:
        rate = batches / max(elapsed_s, 1e-6)
        known = self.batches_per_s
        self.batches_per_s = rate if known is None else RATE_MEMORY * known + (1 - RATE_MEMORY) * rate


class Pool:
    """The state of one synchronous run."""

    def __init__(self, schedule: Schedule, steps: int | None, seconds: float | None, is_open: bool = False) -> None:
        self.schedule = schedule
        self.is_open = is_open  # others may still join, so a lone node that fails does not speak for all
        self.last_step = steps
        self.seconds = seconds
        self.members: dict[int, Member] = {}
        self.step = schedule.step(0)
        self.open = OpenStep(self.step.batches)
        self.started_at: float | None = None
        self.is_over = False
        self._leases = 0
        self._pool_rate = 0.0  # batches/s of all measured members together, as of the step's beginning
        self._newest: dict[Block, Lease] = {}  # who was last given each block that is out
        self._failed: dict[int, str] = {}  # batch of the open step -> what went wrong there on the first node
        self._handlers: dict[type[Event], Callable[[Any, float], list[Action]]] = {
            NodeJoined: self._joined,
            NodeLeft: self._left,
            UpdateArrived: self._arrived,
            WorkFailed: self._work_failed,
            StopRequested: lambda event, now: self._end(event.why),
            Ticked: lambda event, now: self._grant_all(now),
        }

    @property
    def version(self) -> int:
        """The number of updates merged so far is the number of the step that is open."""
        return self.step.number

    def handle(self, event: Event, now: float) -> list[Action]:
        """The one door: what happened, and when; what to do about it."""
        return [] if self.is_over else self._handlers[type(event)](event, now)

    def _joined(self, event: NodeJoined, now: float) -> list[Action]:
        member = self.members[event.node] = Member(event.node)
        return self._grant(member, now)

    def _left(self, event: NodeLeft, now: float) -> list[Action]:
        member = self.members.pop(event.node, None)
        if member is None or member.lease is None:
            return []
        self._void(member.lease)
        return self._grant_all(now)

    def _arrived(self, event: UpdateArrived, now: float) -> list[Action]:
        member = self.members.get(event.node)
        lease = member.lease if member is not None else None
        if member is None or lease is None or lease.number != event.lease:
            return [RejectUpdate(event.node, "unknown lease", f"lease {event.lease} is not this node's")]
        member.lease = None
        member.measure(lease.block.size, now - lease.granted_at)
        if lease.step != self.step.number or not self.open.is_out(lease.block):
            late = RejectUpdate(event.node, "late", f"step {lease.step} {_span(lease.block)}: somebody else was first")
            return [late, *self._grant(member, now)]
        if event.problem:
            return self._failed_on(member, lease, lease.block.first, event.problem, "", now)
        self.open.accept(lease.block)
        self._newest.pop(lease.block, None)
        actions: list[Action] = [MergeUpdate(event.node, lease.step, lease.block)]
        if not self.open.is_complete:
            return actions + self._grant(member, now)
        actions.append(CloseStep(self.step.number))
        return actions + self._advance(now)

    def _work_failed(self, event: WorkFailed, now: float) -> list[Action]:
        member = self.members.get(event.node)
        if member is None:
            return []
        if member.lease is None or member.lease.number != event.lease:
            return self._drop(member, event.problem, now)
        return self._failed_on(member, member.lease, event.batch, event.problem, event.details, now)

    def _failed_on(
        self, member: Member, lease: Lease, batch: int, problem: str, details: str, now: float
    ) -> list[Action]:
        """One machine may be broken: its work is tried on another. Where two agree, or no other can come, we fail."""
        where = f"step {lease.step}, batch {batch}, node {member.node}: {problem}"
        reject = RejectUpdate(member.node, "failed", where)
        member.lease = lease
        if batch in self._failed or (len(self.members) == 1 and not self.is_open):
            return [reject, *self._end("failed", where, details)]
        self._failed[batch] = problem
        return [reject, *self._drop(member, problem, now)]

    def _drop(self, member: Member, why: str, now: float) -> list[Action]:
        del self.members[member.node]
        if member.lease is not None:
            self._void(member.lease)
        return [DropNode(member.node, why), *self._grant_all(now)]

    def _void(self, lease: Lease) -> None:
        """Nobody will answer this lease: its block is free again, unless somebody else is at it too."""
        if lease.step != self.step.number or not self.open.is_out(lease.block):
            return
        others = [m.lease for m in self.members.values() if m.lease and m.lease is not lease]
        same = [other for other in others if other.step == lease.step and other.block == lease.block]
        if same:
            self._newest[lease.block] = same[-1]
        else:
            del self._newest[lease.block]
            self.open.give_back(lease.block)

    def _advance(self, now: float) -> list[Action]:
        assert self.started_at is not None  # a step cannot close before a lease was granted
        done = self.step.number + 1
        self.step = self.schedule.step(done)
        self.open = OpenStep(self.step.batches)
        self._pool_rate = sum(m.batches_per_s for m in self.members.values() if m.batches_per_s is not None)
        self._newest.clear()
        self._failed.clear()
        if self.last_step is not None and done >= self.last_step:
            return self._end(f"{done} steps done")
        if self.seconds is not None and now - self.started_at >= self.seconds:
            return self._end(f"{self.seconds:g} seconds are over")
        return self._grant_all(now)

    def _end(self, why: str, failure: str = "", details: str = "") -> list[Action]:
        self.is_over = True
        return [EndRun(why, failure, details)]

    def _grant_all(self, now: float) -> list[Action]:
        idle = [member for member in self.members.values() if member.lease is None]
        return [action for i, member in enumerate(idle) for action in self._grant(member, now, takers=len(idle) - i)]

    def _grant(self, member: Member, now: float, takers: int = 1) -> list[Action]:
        """Work for an idle node, if there is any; `takers` are the idle nodes that are still to be served."""
        if self.open.free:
            block = self.open.cut(lease_size(self.open.missing, self._share(member), self.open.free, takers))
        else:
            late = self._worth_rescuing(member, now)
            if late is None:
                return []
            block = late.block
        if self.started_at is None:
            self.started_at = now
        self._leases += 1
        member.lease = self._newest[block] = Lease(self._leases, member.node, block, self.step.number, now)
        return [GrantLease(member.node, self._leases, self.step.number, block)]

    def _share(self, member: Member) -> float:
        """This node's part of the pool's speed. While nothing is known of it, or of the pool, it gets one batch."""
        if not self._pool_rate:  # the first step: as soon as everybody was measured, that is known
            rates = [other.batches_per_s for other in self.members.values()]
            self._pool_rate = sum(rate for rate in rates if rate) if None not in rates else 0.0
        if member.batches_per_s is None or not self._pool_rate:
            return 0.0
        return min(1.0, member.batches_per_s / self._pool_rate)

    def _worth_rescuing(self, member: Member, now: float) -> Lease | None:
        """The lease whose holder will be done last, if this idle node should be done with it much sooner."""
        if member.batches_per_s is None or not self._newest:
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
        holder = self.members.get(lease.node)
        rate = (holder.batches_per_s if holder is not None else None) or rescuer_rate
        expected, elapsed = lease.block.size / rate, now - lease.granted_at
        return float("inf") if elapsed > OVERDUE * expected else max(0.0, expected - elapsed)


def _span(block: Block) -> str:
    return f"batch {block.first}" if block.size == 1 else f"batches {block.first}…{block.end - 1}"
