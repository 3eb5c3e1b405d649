"""Bugs that others have made, put into the real classes for a while: a simulator that does not find them is of no use.

Each is a context manager, named after what goes wrong. Knows the insides of what it breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import msgspec

from faults.invariants import Violation
from faults.simulator import World
from wide.codec.layout import Flat
from wide.codec.spare import Spare
from wide.coordinator import resume
from wide.coordinator.events import (
    Action,
    GrantLease,
    MergeUpdate,
    NodeLeft,
    NodeSilent,
    Position,
    RejectUpdate,
    UpdateArrived,
)
from wide.coordinator.granting import Granting
from wide.coordinator.leases import Lease, Leases
from wide.coordinator.record import Record
from wide.coordinator.roster import Member, Roster
from wide.coordinator.run import Run
from wide.coordinator.server import Server
from wide.coordinator.state import Pool
from wide.exchange.delivery import Assignment, Delivery
from wide.exchange.exchange import Exchange
from wide.exchange.intake import Intake, Whole
from wide.exchange.peer import Peer
from wide.exchange.versions import Versions
from wide.store.checkpoint import Checkpoint
from wide.strategy.line import Line
from wide.strategy.policy import Reached
from wide.strategy.synchronous import OpenStep, Synchronous
from wide.strategy.tree import Block
from wide.wire import messages as say

MOST_SEEDS = 1000
MOST_NODES = 12  # bugs show in small pools, too, and these are quick

PLANTED: dict[str, Callable[[], AbstractContextManager[None]]] = {}


def planted(bug: Callable[[], Iterator[None]]) -> Callable[[], AbstractContextManager[None]]:
    PLANTED[bug.__name__] = contextmanager(bug)
    return PLANTED[bug.__name__]


SHY = {  # bugs that show seldom, and where they did: there they are looked for first
    "a_buffer_never_given_back": 216,
    "newcomers_never_take_over": 91,
    "part_counted_as_whole": 46,
    "weights_sent_from_memory_that_moves": 62,
}


def caught(name: str) -> int | None:
    """A seed with which the bug shows."""
    found = caught_by(name)
    return found[0] if found is not None else None


def caught_by(name: str) -> tuple[int, str] | None:
    """The same, and what gave it away: a judgement, or an exception that ended the coordinator."""
    with PLANTED[name]():
        for seed in (SHY.get(name, 0), *range(MOST_SEEDS)):
            try:
                World(seed, MOST_NODES).run()
            except (Violation, ArithmeticError, LookupError, RuntimeError, ValueError, Unchecked) as problem:
                return seed, repr(problem)
    return None


# ── results ──────────────────────────────────────────────────────────────────────────────────────────────────────


@planted
def no_dedupe() -> Iterator[None]:
    real = Pool._arrived

    def arrived(self: Pool, event: UpdateArrived, now: float) -> list[Action]:
        answered: dict[tuple[int, int], Block] = self.__dict__.setdefault("answered", {})
        if event.node in self.members and (event.node, event.lease) in answered:
            return [MergeUpdate(event.node, event.lease, answered[event.node, event.lease], self.version + 1)]
        actions = real(self, event, now)
        if isinstance(actions[0], MergeUpdate):
            answered[event.node, event.lease] = actions[0].block
        return actions

    with handling(UpdateArrived, arrived):
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
        self._leased += block.size
        return True

    with patch.object(Line, "take_back", take_back):
        yield


@planted
def stale_update_in_the_wrong_step() -> Iterator[None]:
    real = Leases.claim

    def claim(self: Leases, lease: Lease) -> bool:
        if not real(self, lease) and isinstance(self.policy, Synchronous):
            like = next((block for block in self.out if block.size == lease.block.size), None)
            lease.block = like or lease.block
        return lease.block in self.out

    with patch.object(Leases, "claim", claim):
        yield


@planted
def part_counted_as_whole() -> Iterator[None]:
    with patch.object(Leases, "keep_first", lambda self, lease, batches: lease.block):
        yield


@planted
def rejected_without_a_reason() -> Iterator[None]:
    def unknown(self: Pool, event: UpdateArrived, member: Member | None, now: float) -> list[Action]:
        return [RejectUpdate(event.node, event.lease, "", "")]

    with patch.object(Pool, "_unknown", unknown):
        yield


@planted
def retried_without_end() -> Iterator[None]:
    real = Pool._failed_on

    def failed_on(self: Pool, *details: Any) -> list[Action]:
        self._failures.step_closed()
        return real(self, *details)

    with patch.object(Pool, "_failed_on", failed_on):
        yield


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────


@planted
def leases_of_the_dead_kept() -> Iterator[None]:
    def farewell(self: Leases, node: int) -> None:
        for lease in self.by_node.pop(node).values():
            self.out.pop(lease.block, None)

    with patch.object(Leases, "farewell", farewell):
        yield


@planted
def lease_to_one_who_left() -> Iterator[None]:
    def left(self: Pool, event: NodeLeft, now: float) -> list[Action]:
        if event.node in self.members:
            self.leases.farewell(event.node)
            self.members[event.node].leases = self.leases.welcome(event.node)
        return self._settle(now) or self._grant_all(now)

    with handling(NodeLeft, left):
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

    with handling(NodeSilent, silent):
        yield


@planted
def nobody_takes_over() -> Iterator[None]:
    with patch.object(Roster, "worth_rescuing", lambda *_: None), patch.object(Roster, "overdue", lambda *_: []):
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
    with patch.object(Line, "holes", lambda self, out: sorted(self._returned)):
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
def versions_begin_again() -> Iterator[None]:
    real = Pool.__init__

    def begin(self: Pool, *arguments: Any) -> None:
        real(self, *arguments)
        self.version = 0

    with patch.object(Pool, "__init__", begin):
        yield


# ── the shell ────────────────────────────────────────────────────────────────────────────────────────────────────


@planted
def a_resume_that_forgets_a_hole() -> Iterator[None]:
    real = Line._begin_at

    def begin_at(self: Line, reached: Reached) -> None:
        real(self, reached._replace(holes=reached.holes[1:]))

    with patch.object(Line, "_begin_at", begin_at):
        yield


@planted
def a_resume_that_keeps_later_rows() -> Iterator[None]:
    real = Record.go_on_from

    def go_on_from(self: Record, position: Position, state: Any, parts: Any) -> None:
        rewind = self.db.rewind
        self.db.rewind = lambda version, steps: None  # type: ignore[method-assign]
        real(self, position, state, parts)
        self.db.rewind = rewind  # type: ignore[method-assign]

    with patch.object(Record, "go_on_from", go_on_from):
        yield


@planted
def a_resume_without_the_optimizer() -> Iterator[None]:
    real = resume.restore

    def restore(saved: Checkpoint, schedule: Any, master: Any, where: str) -> Any:
        master.descent.go_on_from = lambda state: ""
        return real(saved, schedule, master, where)

    with patch.object(resume, "restore", restore):
        yield


@planted
def a_grant_that_reads_the_new_version() -> Iterator[None]:
    """Work is built when there is time for it, from the weights as they are by then."""
    real = Server._grant

    def grant(self: Server, grant: GrantLease) -> None:
        waiting: list[GrantLease] = self.__dict__.setdefault("waiting", [])
        waiting.append(grant)
        while len(waiting) > 1:
            late = waiting.pop(0)
            real(self, msgspec.structs.replace(late, version=self.pool.version))

    with patch.object(Server, "_grant", grant):
        yield


@planted
def weights_sent_from_memory_that_moves() -> Iterator[None]:
    def raw(self: Versions, only_live: bool) -> list[memoryview]:
        return [self._weights.bytes[: self.live_nbytes] if only_live else self._weights.bytes]

    def later(self: Delivery, peer: Peer, work: say.Work, payload: list[memoryview], parts: Any) -> None:
        waiting: list[Any] = self.__dict__.setdefault("waiting", [])
        waiting.append((peer, work, payload, parts))
        if len(waiting) > 2:
            sent(self, *waiting.pop(0))

    sent = Delivery._send
    with patch.object(Versions, "raw", raw), patch.object(Delivery, "_send", later):
        yield


@planted
def work_ahead_begun_at_once() -> Iterator[None]:
    """With the weights that its node has."""
    real = Delivery.deliver

    def deliver(self: Delivery, peer: Peer, it: Assignment, is_ahead: bool = False) -> None:
        real(self, peer, it._replace(version=peer.outgoing.version) if is_ahead else it)

    with patch.object(Delivery, "deliver", deliver):
        yield


@planted
def work_ahead_that_is_lost_with_its_node() -> Iterator[None]:
    with patch.object(Granting, "forget", lambda self, node: self._ahead.pop(node, None)):
        yield


@planted
def memory_of_the_dead_used_again() -> Iterator[None]:
    def lose(self: Spare, flat: Flat) -> None:
        self.give(flat)

    with patch.object(Spare, "lose", lose):
        yield


@planted
def a_buffer_given_back_twice() -> Iterator[None]:
    real = Run._reject

    def give(self: Spare, flat: Flat) -> None:
        flat.is_spare = True
        self.in_use -= 1
        self._free.append(flat)

    def reject(self: Run, it: RejectUpdate) -> None:
        taken = self._at_hand.get(it.lease)
        real(self, it)
        if taken is not None:
            self.master.release(taken.flat)

    with patch.object(Run, "_reject", reject), patch.object(Spare, "give", give):
        yield


@planted
def a_buffer_never_given_back() -> Iterator[None]:
    with patch.object(Intake, "forget", lambda self, peer: peer.incoming.payloads.clear()):
        yield


@planted
def an_update_counted_before_its_payload_is_whole() -> Iterator[None]:
    real = Intake.part

    def part(self: Intake, peer: Peer) -> Whole | None:
        arriving = peer.incoming.arriving[0] if peer.incoming.arriving else None
        if arriving is not None and arriving.parts == 0:
            arriving.parts = len(self._pieces) - 1
        return real(self, peer)

    with patch.object(Intake, "part", part):
        yield


class Unchecked(BaseException):
    """Stands for whatever a shell would not catch."""


@planted
def a_peers_exception_that_ends_the_loop() -> Iterator[None]:
    real = Exchange._heard_hello

    def heard_hello(self: Exchange, peer: Peer, hello: say.Hello) -> None:
        if len(hello.proof) != 32 and hello.role == "node":
            raise Unchecked
        real(self, peer, hello)

    from wide.exchange import exchange

    with patch.dict(exchange.HEARERS, {say.Hello: heard_hello}):
        yield


@planted
def a_peers_words_as_they_came() -> Iterator[None]:
    from wide.wire import words

    with patch.object(words, "line", str), patch.object(words, "name", str):
        yield


@planted
def an_old_connection_that_still_counts() -> Iterator[None]:
    """A node that came back has two connections, and both are listened to."""
    real = Exchange.dismiss

    def dismiss(self: Exchange, peer: Peer, error: Any) -> None:
        if "another connection" not in str(error):
            real(self, peer, error)

    with patch.object(Exchange, "dismiss", dismiss):
        yield


@planted
def a_step_in_the_ledger_before_its_batches() -> Iterator[None]:
    real = Record.merged

    def merged(self: Record, merge: MergeUpdate, *details: Any) -> None:
        if merge.block.first % 7:
            real(self, merge, *details)

    with patch.object(Record, "merged", merged):
        yield


@contextmanager
def handling(event: type, handler: Callable[..., list[Action]]) -> Iterator[None]:
    """The pool handles this event in another way."""
    from wide.coordinator import state

    with patch.dict(state.HANDLERS, {event: handler}):
        yield
