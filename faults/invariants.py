"""What must hold after every event of a run, whatever happens to its nodes. Knows events and actions, and keeps its own
books about them; knows nothing of how the coordinator decides. At a coordinator's end, its ledger and its buffers are
looked at, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from wide.codec.layout import Flat
from wide.coordinator.deadly import LIMIT
from wide.coordinator.events import (
    Action,
    ChangeStrategy,
    CloseStep,
    CompareUpdate,
    Confirm,
    DropNode,
    EndRun,
    Event,
    GrantLease,
    MakeVersion,
    MergeUpdate,
    NameNode,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeSilent,
    Position,
    RejectUpdate,
    RunFailed,
    SaveCheckpoint,
    TellOf,
    UpdateArrived,
    VoidVersion,
    WorkFailed,
)
from wide.coordinator.server import Server
from wide.job.schedule import Schedule
from wide.strategy.description import Strategy
from wide.strategy.tree import Block

if TYPE_CHECKING:
    from faults.disk import Disk

MOST_HELD = 2  # leases of one node at once: one is computed while the result of the last one travels
TINY = 1e-6


class Violation(AssertionError):
    """Something happened that never may. Its seed plays it again."""

    def __init__(self, seed: int, message: str) -> None:
        super().__init__(f"seed {seed}: {message}")
        self.seed, self.message = seed, message

    def __reduce__(self) -> tuple[type[Violation], tuple[int, str]]:
        return Violation, (self.seed, self.message)  # it travels between processes


class Judge:
    """The books of one run, over all processes that coordinate it: what was merged, and who was given what."""

    def __init__(self, seed: int, schedule: Schedule, steps: int | None, seconds: float | None, is_open: bool) -> None:
        self.seed, self.schedule, self.last_step, self.seconds, self.is_open = seed, schedule, steps, seconds, is_open
        self.end = schedule.position(steps) if steps is not None else None
        self.merged: dict[int, int] = {}  # position -> the version that contains it
        self.granted_version: dict[int, int] = {}  # lease -> the version that it was granted with
        self.wrong: set[tuple[int, int]] = set()  # nodes and leases whose updates are not what they should be
        self.is_tainted = False  # such an update is in a version, and nobody had looked at it
        self.begin(Position())
        self._rules: dict[type[Action], Callable[..., None]] = {
            GrantLease: self._granted,
            MergeUpdate: self._merged,
            RejectUpdate: self._rejected,
            MakeVersion: self._made,
            CloseStep: self._closed,
            SaveCheckpoint: self._saved,
            ChangeStrategy: self._changed,
            DropNode: self._dropped,
            CompareUpdate: self._compared,
            Confirm: self._confirmed,
            NameNode: self._named,
            VoidVersion: self._voided,
            TellOf: self._told,
            EndRun: self._ended,
        }

    def begin(self, start: Position) -> None:
        """A coordinator starts there: of what came later nothing is left, and it knows no node."""
        self.merged = {position: version for position, version in self.merged.items() if version <= start.version}
        self.version, self.steps = start.version, start.steps
        self._spent_s = start.seconds
        self._started_at: float | None = None  # with the first lease
        self._unfolded = self._unstepped = 0  # batches merged since the last version, and since one that was a step
        self._held: dict[int, dict[int, Block]] = {}  # members, and their leases that were not answered
        self._ahead: dict[int, GrantLease] = {}  # work for the next version, by node: it may not be begun yet
        self._silent: set[int] = set()
        self._checks: set[int] = set()  # leases whose answers are only compared
        self.wrong = {(node, 0) for node, _ in self.wrong}  # leases are numbered anew
        self._gathered: dict[Block, tuple[int, int]] = {}  # whose lease each block of the next version is
        self._sent_away: set[int] = set()
        self._is_exact = False
        self._leaving: set[int] = set()
        self.granted_version.clear()
        self._failures: dict[int, set[int]] = {}  # who failed at a position, since a step was closed
        self._deaths: Counter[int] = Counter()  # how many nodes died at a position

    def refuse(self, message: str) -> NoReturn:
        raise Violation(self.seed, message)

    def hear(self, event: Event) -> Block | None:
        """Before the coordinator is told: what the event is about, if it is about a lease that was not answered."""
        if isinstance(event, NodeJoined):
            self._held[event.node] = {}
            self._sent_away.discard(event.node)  # it was cut off when it was named, and is looked at as if it were new
        elif isinstance(event, NodeLeft):
            lease, held = next(iter(self._held.get(event.node, {}).items()), (0, None))
            if event.died and held is not None and lease not in self._checks:
                self._deaths.update(range(held.first, held.end))
            self._forget(event.node)
        elif isinstance(event, NodeSilent):
            self._silent.add(event.node)
        elif isinstance(event, NodeHeard):
            self._silent.discard(event.node)
        elif isinstance(event, UpdateArrived):
            block = self._held.get(event.node, {}).pop(event.lease, None)
            if block is not None and event.batches is not None and event.batches < block.size:
                self._leaving.add(event.node)
            return block
        elif isinstance(event, WorkFailed):
            return self._held.get(event.node, {}).get(event.lease)
        return None

    def see_answer(self, event: Event, actions: list[Action]) -> None:
        """All that was decided, before any of it is done."""
        first = actions[0] if actions else None
        if isinstance(event, UpdateArrived) and not isinstance(first, MergeUpdate | RejectUpdate | CompareUpdate):
            self.refuse(f"{event} is neither merged nor rejected nor compared")
        if any(isinstance(action, MergeUpdate) for action in actions[1:]):
            self.refuse(f"an update is merged after something else was done about {event}")

    def see_done(self, actions: list[Action]) -> None:
        """All of it was done."""
        if actions and any(len(nodes) > 1 for nodes in self._failures.values()) and not isinstance(actions[-1], EndRun):
            self.refuse("work that failed on two nodes is tried on a third one")

    def see(self, event: Event, block: Block | None, action: Action, now: float) -> None:
        """One thing is done now."""
        self._rules[type(action)](event, block, action, now)

    def elapsed_s(self, now: float) -> float:
        return self._spent_s + (now - self._started_at if self._started_at is not None else 0.0)

    # ── one rule for each action ─────────────────────────────────────────────────────────────────────────────────

    def _granted(self, event: Event, block: Block | None, grant: GrantLease, now: float) -> None:
        if grant.node not in self._held:
            self.refuse(f"{grant}: that node is not there")
        if grant.node in self._silent or grant.node in self._leaving:
            self.refuse(f"{grant}: that node is silent, or about to leave")
        if grant.lease in self.granted_version:
            self.refuse(f"{grant}: there was a lease of that number before")
        if grant.block.first < 0 or grant.block.size < 1 or (self.end is not None and grant.block.end > self.end):
            self.refuse(f"{grant}: there are no such batches")
        if grant.is_check:
            self._granted_check(grant)
        elif any(position in self.merged for position in range(*grant.block)):
            self.refuse(f"{grant}: some of it is merged already")
        self._is_exact = grant.strategy == "sync" if not grant.is_check else self._is_exact
        self.granted_version[grant.lease] = grant.version
        if grant.strategy == "sync" and grant.version == self.version + 1:
            self._granted_ahead(grant)
            return
        if grant.version != self.version:
            self.refuse(f"{grant}: the weights are version {self.version}")
        held = self._held[grant.node]
        held[grant.lease] = grant.block
        if len(held) > MOST_HELD:
            self.refuse(f"{grant}: it holds {len(held)} leases at once")
        if self._started_at is None:
            self._started_at = now

    def _granted_check(self, grant: GrantLease) -> None:
        """What is computed once more is part of the next version, or will be, and exact."""
        elsewhere = (held for node, held in self._held.items() if node != grant.node)
        is_out = any(
            grant.block == block and lease not in self._checks for held in elsewhere for lease, block in held.items()
        )
        if grant.strategy != "sync" or not (grant.pair or grant.block in self._gathered or is_out):
            self.refuse(f"{grant}: nothing like that was merged for version {self.version + 1}")
        self._checks.add(grant.lease)

    def _compared(self, event: Event, block: Block | None, compare: CompareUpdate, now: float) -> None:
        if compare.lease not in self._checks or block != compare.block:
            self.refuse(f"{compare} because of {event}: that is no check")
        if isinstance(event, UpdateArrived) and event.problem:
            self._failures.setdefault(compare.block.first, set()).add(compare.node)
        else:
            self._managed(compare.node, compare.block)

    def _confirmed(self, event: Event, block: Block | None, confirm: Confirm, now: float) -> None:
        node, lease = self._gathered.get(confirm.block, (0, 0))
        if node != confirm.node or confirm.by == node:
            self.refuse(f"{confirm}: it is node {node}'s")
        if (node, lease) in self.wrong:
            self.refuse(f"{confirm}: it is wrong")

    def _named(self, event: Event, block: Block | None, named: NameNode, now: float) -> None:
        liars = {node for node, _ in self.wrong}
        if named.node not in liars and (self._is_exact or len(liars) < 2):  # elsewhere two liars can outvote a third
            self.refuse(f"{named}: it was always right")
        self._sent_away.add(named.node)
        self._forget(named.node)

    def _told(self, event: Event, block: Block | None, told: TellOf, now: float) -> None:
        liars = {node for node, _ in self.wrong}
        if told.kind == "quarantined" and told.node not in liars:
            self.refuse(f"{told}: it was always right")

    def _voided(self, event: Event, block: Block | None, void: VoidVersion, now: float) -> None:
        if void.version != self.version + 1:
            self.refuse(f"{void} of version {self.version}")
        self.merged = {position: version for position, version in self.merged.items() if version < void.version}
        self._gathered.clear()
        self._unfolded = self._unstepped = 0

    def _granted_ahead(self, grant: GrantLease) -> None:
        """Work for the step after the open one; nobody else has it, and its node has nothing else like it."""
        if grant.block.first < self.schedule.position(self.steps + 1):
            self.refuse(f"{grant}: that is work for version {self.version}")
        if grant.node in self._ahead:
            self.refuse(f"{grant}: it has {self._ahead[grant.node]} already")
        if any(
            grant.block.first < other.block.end and other.block.first < grant.block.end
            for other in self._ahead.values()
        ):
            self.refuse(f"{grant}: somebody else has it")
        self._ahead[grant.node] = grant

    def _merged(self, event: Event, block: Block | None, merge: MergeUpdate, now: float) -> None:
        if not isinstance(event, UpdateArrived) or (merge.node, merge.lease) != (event.node, event.lease):
            self.refuse(f"{merge} because of {event}")
        if event.problem:
            self.refuse(f"{merge} because of {event}")
        if merge.node in self._sent_away or merge.lease in self._checks:
            self.refuse(f"{merge}: it was sent away, or should only have been compared")
        if block is None:
            self.refuse(f"{merge}: node {event.node} holds no lease {event.lease}, or it was answered before")
        part = block if event.batches is None else Block(block.first, min(block.end, block.first + event.batches))
        if merge.block != part:
            self.refuse(f"{merge}: what was handed in is {part}")
        if merge.version != self.version + 1:
            self.refuse(f"{merge}: the next version is {self.version + 1}")
        for position in range(*merge.block):
            if position in self.merged:
                self.refuse(f"{merge}: position {position} was merged before")
            self.merged[position] = merge.version
        self._managed(merge.node, merge.block)
        self._gathered[merge.block] = merge.node, merge.lease
        self._unfolded += merge.block.size
        self._unstepped += merge.block.size

    def _rejected(self, event: Event, block: Block | None, reject: RejectUpdate, now: float) -> None:
        if not reject.reason or not reject.detail:
            self.refuse(f"{reject} because of {event}: without a reason")
        if reject.reason == "failed" and block is not None:
            batch = event.batch if isinstance(event, WorkFailed) else 0
            position = min(block.first + max(batch, 0), block.end - 1)
            self._failures.setdefault(position, set()).add(reject.node)

    def _managed(self, node: int, block: Block) -> None:
        """It had no trouble there: so it was not the job, but those who had."""
        for position in range(*block):
            if position in self._failures:
                self._failures[position] &= {node}

    def _made(self, event: Event, block: Block | None, make: MakeVersion, now: float) -> None:
        if make.version != self.version:
            self.refuse(f"{make} of version {self.version}")
        if not self._unstepped:
            self.refuse(f"{make}: there is nothing new in it")
        self.is_tainted |= any(whose in self.wrong for whose in self._gathered.values())
        liars = {node for node, _ in self._gathered.values()} & self._sent_away
        if liars and self._is_exact:  # elsewhere what is merged is in the sum, and cannot be taken out
            self.refuse(f"{make}: updates of {liars}, which were found to be wrong, are in it")
        self._gathered.clear()
        self.version += 1
        for node, grant in self._ahead.items():
            self._held[node][grant.lease] = grant.block
        self._ahead.clear()
        self._unfolded = 0
        if make.made.is_step:
            self._unstepped = 0

    def _closed(self, event: Event, block: Block | None, close: CloseStep, now: float) -> None:
        if close.step != self.steps:
            self.refuse(f"{close}: the next one is {self.steps}")
        missing = [p for p in range(*self._positions(close.step)) if p not in self.merged]
        if missing:
            self.refuse(f"{close}: {missing} are not merged")
        self.steps += 1
        self._failures.clear()

    def _saved(self, event: Event, block: Block | None, save: SaveCheckpoint, now: float) -> None:
        position = save.position
        if (position.version, position.steps) != (self.version, self.steps):
            self.refuse(f"{save}: it is version {self.version}, step {self.steps}")
        described = set(range(position.front))
        for hole in position.holes:
            if not described.issuperset(range(*hole)):
                self.refuse(f"{save}: {hole} is a hole in nothing")
            described.difference_update(range(*hole))
        contained = {at for at, version in self.merged.items() if version <= position.version}
        if described != contained:
            self.refuse(f"{save}: lost {sorted(described - contained)}, doubled {sorted(contained - described)}")
        worth = sum(1 / self.schedule.step_at(at).batches for at in contained)
        if abs(position.worth + position.filled - worth) > TINY:
            self.refuse(f"{save}: so many batches are worth {worth} steps")

    def _changed(self, event: Event, block: Block | None, change: ChangeStrategy, now: float) -> None:
        if self._unfolded:
            self.refuse(f"{change}: {self._unfolded} merged batches are in no version")

    def _dropped(self, event: Event, block: Block | None, drop: DropNode, now: float) -> None:
        if drop.node not in self._held:
            self.refuse(f"{drop}: that node is not there")
        self._forget(drop.node)

    def _ended(self, event: Event, block: Block | None, end: EndRun, now: float) -> None:
        if isinstance(event, RunFailed):
            return
        if end.failure and isinstance(event, NodeLeft):
            if self.is_open or not any(n >= LIMIT and at not in self.merged for at, n in self._deaths.items()):
                self.refuse(f"{end}: not so many nodes died at one batch")
        elif end.failure:
            is_agreed = any(len(nodes) > 1 for nodes in self._failures.values())
            if not is_agreed and (self.is_open or len(self._held) > 1):
                self.refuse(f"{end}: no two nodes agree on that")
        elif self.end is not None and self.steps == self.last_step:
            if sorted(self.merged) != list(range(self.end)):
                self.refuse(f"{end}: merged are {sorted(self.merged)}")
        elif "over" in end.why and (self.seconds is None or self.elapsed_s(now) < self.seconds - TINY):
            self.refuse(f"{end}: after {self.elapsed_s(now)} s")
        elif "done" in end.why:
            self.refuse(f"{end}: after {self.steps} steps")

    def _positions(self, step: int) -> Block:
        return Block(self.schedule.position(step), self.schedule.position(step + 1))

    def _forget(self, node: int) -> None:
        self._held.pop(node, None)
        self._ahead.pop(node, None)
        self._silent.discard(node)
        self._leaving.discard(node)


def check_ledger(judge: Judge, disk: Disk, strategies: Mapping[str, Strategy]) -> None:
    """Does run.db say the same as the judge's own books: each batch once, in the version that contains it?"""
    rows = disk.read("SELECT step, first_batch, last_batch, version FROM ledger")
    written: Counter[tuple[int, int]] = Counter()
    for step_number, first, last, version in rows:
        step = judge.schedule.step(step_number)
        start = judge.schedule.position(step_number)
        is_by_epoch = first >= step.batches or last >= step.batches
        for batch in range(first, last + 1):
            within = batch - step.first if is_by_epoch else batch
            written[start + within, version] += 1
    merged = Counter((at, version) for at, version in judge.merged.items())
    positions, expected = Counter(at for at, _ in written.elements()), Counter(at for at, _ in merged.elements())
    if len(rows) and positions != expected:
        judge.refuse(f"the ledger has {positions.total()} batches, {expected.total()} were merged")
    ((last, samples),) = disk.read("SELECT max(step), sum(samples) FROM steps")  # old rows stand for several steps
    closed = sum(judge.schedule.step(number).samples for number in range(judge.steps))
    if judge.steps and (last, samples) != (judge.steps - 1, closed):
        judge.refuse(f"run.db has {samples} samples until step {last}, closed were {judge.steps} steps of {closed}")


def check_buffers(judge: Judge, server: Server) -> None:
    """Is every buffer that is in use in somebody's hands, and in nobody's twice?"""
    hands: list[Any] = [taken.flat for taken in server.run._at_hand.values()]
    hands += [taken.flat for taken in server.run._compare.kept.values()]
    for peer in server.exchange._board.everybody:
        hands += [arriving.flat for arriving in peer.incoming.arriving]
        hands += list(peer.incoming.payloads)
        hands += [sent.room for sent in peer.outgoing.leases.values()]
    hands += [happening.flat for happening in server.exchange.happenings if hasattr(happening, "flat")]
    fold, master = server.run._fold, server.run.master
    hands.append(master._owed)
    sides = [getattr(fold, name) for name in ("_means", "_totals") if hasattr(fold, name)]  # of async
    for gather in (getattr(fold, "_gather", None), *(side.gather for side in sides)):
        hands += gather.held if gather is not None else []
    if getattr(fold, "_sum", None) is not None:
        hands += list(fold._sum._waiting.values())  # type: ignore[attr-defined]
    hands += master.spare._free
    flats = [flat for flat in hands if isinstance(flat, Flat)]
    if len({id(flat) for flat in flats}) != len(flats):
        judge.refuse("a buffer is in two hands at once, or was given back twice")
    held = [flat for flat in flats if not flat.is_spare]
    if len(held) != master.spare.in_use or len(flats) - len(held) != len(master.spare._free):
        judge.refuse(f"{master.spare.in_use} buffers are in use, {len(held)} are in somebody's hands")
