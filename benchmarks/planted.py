"""Bugs that others have made, put into the real classes for a while: a simulator that does not find them is of no use.

Each is a context manager, named after what goes wrong. Knows the insides of what it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from benchmarks.invariants import Judge, Violation
from benchmarks.simulator import World
from wide.coordinator.events import (
    Action,
    MergeUpdate,
    NodeLeft,
    NodeSilent,
    Position,
    RejectUpdate,
    UpdateArrived,
)
from wide.coordinator.roster import Lease, Member, Roster
from wide.coordinator.state import Pool
from wide.strategy.course import Synchronous
from wide.strategy.line import Line
from wide.strategy.sync import OpenStep
from wide.strategy.tree import Block

MOST_SEEDS = 400
MOST_NODES = 12  # bugs show in small pools, too, and these are quick

PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def planted(bug: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    PLANTED[bug.__name__] = contextmanager(bug)
    return PLANTED[bug.__name__]


def caught(name: str) -> int | None:
    """The first seed with which the bug shows."""
    with PLANTED[name]():
        for seed in range(MOST_SEEDS):
            try:
                World(seed, MOST_NODES).run()
            except Violation:
                return seed
    return None


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────


@planted
def no_dedupe() -> Iterator[None]:
    real = Pool._arrived

    def arrived(self: Pool, event: UpdateArrived, now: float) -> list[Action]:
        answered: dict[tuple[int, int], Block] = self.__dict__.setdefault("answered", {})
        if event.node in self.members and (event.node, event.lease) in answered:
            return [MergeUpdate(event.node, answered[event.node, event.lease], self.version + 1)]
        actions = real(self, event, now)
        if isinstance(actions[0], MergeUpdate):
            answered[event.node, event.lease] = actions[0].block
        return actions

    with patch.object(Pool, "_arrived", arrived):
        yield


@planted
def acknowledged_before_merged() -> Iterator[None]:
    real = Pool.handle

    def handle(self: Pool, event: Any, now: float) -> list[Action]:
        actions = real(self, event, now)
        return sorted(actions, key=lambda action: isinstance(action, MergeUpdate))

    with patch.object(Pool, "handle", handle):
        yield


@planted
def late_update_accepted_though_reissued() -> Iterator[None]:
    def take_back(self: Line, block: Block) -> bool:
        self._returned = [free for free in self._returned if free.end <= block.first or block.end <= free.first]
        self._out.add(block)
        return True

    with patch.object(Line, "take_back", take_back):
        yield


@planted
def stale_update_in_the_wrong_step() -> Iterator[None]:
    real = OpenStep.accept

    def like(step: OpenStep, block: Block) -> Block | None:
        return next((out for out in step._out if out.size == block.size), None)

    def is_out(self: OpenStep, block: Block) -> bool:
        return like(self, block) is not None

    def accept(self: OpenStep, block: Block) -> None:
        real(self, block if block in self._out else like(self, block) or block)

    with patch.object(OpenStep, "is_out", is_out), patch.object(OpenStep, "accept", accept):
        yield


@planted
def part_counted_as_whole() -> Iterator[None]:
    def shortened(self: Pool, *details: Any) -> Block:
        lease: Lease = details[-2]
        return lease.block

    with patch.object(Pool, "_shortened", shortened):
        yield


@planted
def rejected_without_a_reason() -> Iterator[None]:
    def unknown(self: Pool, event: UpdateArrived, member: Member | None, now: float) -> list[Action]:
        return [RejectUpdate(event.node, "", "")]

    with patch.object(Pool, "_unknown", unknown):
        yield


@planted
def retried_without_end() -> Iterator[None]:
    real = Pool._failed_on

    def failed_on(self: Pool, *details: Any) -> list[Action]:
        self._failed.clear()
        return real(self, *details)

    with patch.object(Pool, "_failed_on", failed_on):
        yield


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────


@planted
def leases_of_the_dead_kept() -> Iterator[None]:
    def void(self: Pool, member: Member) -> None:
        for lease in member.leases.values():
            self.roster.newest.pop(lease.block, None)

    with patch.object(Pool, "_void", void):
        yield


@planted
def lease_to_one_who_left() -> Iterator[None]:
    def left(self: Pool, event: NodeLeft, now: float) -> list[Action]:
        if event.node in self.members:
            self._void(self.members[event.node])
            self.members[event.node].leases.clear()
        return self._settle(now) or self._grant_all(now)

    with patch.object(Pool, "_left", left):
        yield


@planted
def block_given_back_twice() -> Iterator[None]:
    real = OpenStep.give_back

    def give_back(self: OpenStep, block: Block) -> None:
        real(self, block)
        self._free.append(block)

    with patch.object(OpenStep, "give_back", give_back):
        yield


@planted
def silence_not_noticed() -> Iterator[None]:
    def silent(self: Pool, event: NodeSilent, now: float) -> list[Action]:
        return []

    with patch.object(Pool, "_silent", silent):
        yield


@planted
def nobody_takes_over() -> Iterator[None]:
    with patch.object(Roster, "worth_rescuing", lambda *_: None), patch.object(Roster, "overdue", lambda *_: ()):
        yield


@planted
def newcomers_never_take_over() -> Iterator[None]:
    real = Roster.worth_rescuing

    def worth_rescuing(self: Roster, member: Member, now: float) -> Lease | None:
        return real(self, member, now) if member.batches_per_s is not None else None

    with patch.object(Roster, "worth_rescuing", worth_rescuing):
        yield


@planted
def more_leases_than_a_node_can_use() -> Iterator[None]:
    with patch.object(Synchronous, "depth", 8):
        yield


# ── time, versions, going on ─────────────────────────────────────────────────────────────────────────────────────


@planted
def wall_clock() -> Iterator[None]:
    with patch.object(World, "monotonic_s", World.wall_s):
        yield


@planted
def step_closed_too_early() -> Iterator[None]:
    with patch.object(OpenStep, "is_complete", property(lambda self: self.missing <= self.batches // 8)):
        yield


@planted
def saved_with_what_is_leased() -> Iterator[None]:
    with patch.object(Line, "holes", property(lambda self: sorted(self._returned))):
        yield


@planted
def saved_one_version_too_late() -> Iterator[None]:
    real = Pool.position

    def position(self: Pool, now: float) -> Position:
        before: Position = self.__dict__.get("before", Position())
        self.__dict__["before"] = real(self, now)
        return before

    with patch.object(Pool, "position", position):
        yield


@planted
def holes_forgotten() -> Iterator[None]:
    real = Pool._begin

    def begin(self: Pool, start: Position) -> None:
        real(self, msgspec.structs.replace(start, holes=[]))

    with patch.object(Pool, "_begin", begin):
        yield


@planted
def versions_begin_again() -> Iterator[None]:
    real = Pool._begin

    def begin(self: Pool, start: Position) -> None:
        real(self, start)
        self.version = 0

    with patch.object(Pool, "_begin", begin):
        yield


@planted
def later_rows_kept() -> Iterator[None]:
    real = Judge.begin

    def begin(self: Judge, start: Position) -> None:
        rows = self.merged
        real(self, start)
        self.merged = rows

    with patch.object(Judge, "begin", begin):
        yield
