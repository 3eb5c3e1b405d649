"""What a run leaves behind: ledger, steps, leases, evaluations, and the counts of the final result. Knows run.db's
tables; what is written for people only is the journal's.
"""

from __future__ import annotations

import bisect
import logging
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from wide.codec.digest import Later
from wide.coordinator.events import CompareUpdate, MergeUpdate, Position, RejectUpdate
from wide.coordinator.journal import Journal, Points
from wide.errors import TrainingFailed
from wide.job.here import MOST_NAMES, Logged
from wide.job.schedule import Schedule, Step
from wide.strategy.description import Strategy
from wide.strategy.tree import Block
from wide.telemetry.clock import Clock
from wide.telemetry.divergence import Divergence
from wide.telemetry.journey import Answer, Journey, Logbook
from wide.telemetry.log import log
from wide.telemetry.snapshot import Bins
from wide.telemetry.totals import Part

FLUSH_S = 0.25
TELL_S = 10.0  # of evaluations that are quicker, not all are told
SETTLE_S = 30.0
MOST_POINTS = 100_000  # of each metric, in memory
FEW = 60  # losses, at least, for a small picture of all


class Db(Protocol):
    """What the record needs of a database (store/rundb.py)."""

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]: ...
    def settle(self, timeout_s: float) -> bool: ...
    def insert_packed(self, table: str, at: float, count: int, words: str, data: bytes) -> None: ...
    def rewind(self, version: int, steps: int) -> None: ...
    def void(self, version: int) -> None: ...
    def keep_from(self, step: int) -> None: ...
    def beside(self, deed: Callable[[], None]) -> None: ...
    @property
    def waiting(self) -> int: ...


class Merged(NamedTuple):
    """An update that counts: whose, how it was folded, its batches, how it came about, and when by both clocks."""

    merge: MergeUpdate
    strategy: Strategy
    sizes: Sequence[int]
    losses: Sequence[float]
    journey: Journey
    at: float
    now: float
    weights: Sequence[float]
    digest: int | Later | None


class Counted(NamedTuple):
    """What a node was given credit for, in a step that is not closed yet."""

    version: int  # that it is to be part of
    step: int
    node: int
    batches: int
    samples: int


class Point(NamedTuple):
    """A metric's mean over so many samples, in one step."""

    step: int
    value: float
    samples: float


class Record:
    """Rows are gathered in memory and handed to the database's thread a few times a second."""

    def __init__(self, db: Db, schedule: Schedule, clock: Clock, points: Points | None = None) -> None:
        self.db, self.schedule, self._clock = db, schedule, clock
        self.journal = Journal(db, clock, points)
        self.divergence = Divergence()
        self.parts: dict[int, Part] = {}  # by node
        self.losses = array("d")  # of each step
        self.batches = self.samples = 0
        self._evaluated: dict[str, float] = {}  # what evaluate() said last
        self._logged: dict[str, list[Point]] = {}  # by name: of the last steps, not all of them
        self.started_at: float | None = None  # with the first lease
        self.before = (0, 0)  # steps and batches that were done before this process
        self.last_node = 0  # the highest number that was given to one
        self._ended_at = self._step_began_at = 0.0
        self._spent_s = 0.0  # by processes before this one
        self._merged: list[Merged] = []
        self._counted: list[Counted] = []
        self._confirmed: list[Counted] = []  # of these, what another node has computed too
        self._verified: set[int] = set()  # nodes of whom there is news of that kind
        self._refused: list[tuple[RejectUpdate, Journey, float, float]] = []
        self._logbook = Logbook()
        self._closed: list[tuple[Step, Strategy, float, float]] = []
        self._weighted_losses: dict[int, dict[int, list[tuple[float, float]]]] = {}  # by step, by a block's first batch
        self._evaluation_problem = ""
        self._flushed_at = self._told_at = 0.0
        self.few_losses = Bins(FEW)
        if schedule.is_even:
            shape = (
                schedule.per_epoch,
                schedule.samples_per_step / schedule.batches_per_step,
                schedule.batches_per_step,
            )
            rows = [(0, *shape, schedule.batches_per_epoch, schedule.steps_per_epoch)]
            db.write("INSERT OR REPLACE INTO shape VALUES (?, ?, ?, ?, ?, ?)", rows)

    @property
    def seconds(self) -> float:
        """From the first lease granted to the last update merged."""
        return self._spent_s + (self._ended_at - self.started_at if self.started_at is not None else 0.0)

    def elapsed_s(self, now: float) -> float:
        """Since the first lease, by all processes that have coordinated this run."""
        return self._spent_s + (now - self.started_at if self.started_at is not None else 0.0)

    @property
    def epoch(self) -> int:
        return self.schedule.step(max(0, len(self.losses) - 1)).epoch

    def started(self, now: float) -> None:
        self.started_at = self._ended_at = self._step_began_at = now

    def go_on_from(self, position: Position, state: Mapping[str, Any], parts: Mapping[int, Part]) -> None:
        """What was written later is dropped, and will be computed again."""
        self.db.rewind(position.version, position.steps)
        ended = "UPDATE nodes SET left_at=?, why='the coordinator ended' WHERE left_at IS NULL"
        self.db.write(ended, [(self._clock.wall(),)])
        self.db.write("DELETE FROM verified", [()])
        self.parts = dict(parts)
        self._verified = {node for node, part in parts.items() if part.verified}
        self._write_verified()
        if not self.db.settle(SETTLE_S):
            raise TrainingFailed("run.db cannot be written")
        self.batches, self.samples = state.get("batches", 0), state.get("samples", 0)
        self.last_node = self.db.read("SELECT max(node) FROM nodes")[0][0] or 0
        self._spent_s = state.get("seconds", position.seconds)
        self.before = position.steps, self.batches
        for step, loss in self.db.read("SELECT step, loss FROM steps ORDER BY step"):
            value = math.nan if loss is None else loss
            self.losses.extend([value] * (step + 1 - len(self.losses)))  # old ones may stand for several
        for loss in self.losses:
            self.few_losses.add(loss)
        for loss in self.losses[:1]:
            self.divergence.observe(loss)  # where it began; what made it diverge since then may have been mended
        query = "SELECT step, first_batch, samples, loss FROM ledger WHERE step >= ?"
        for step, first, samples, loss in self.db.read(query, position.steps):
            start = self.schedule.step(step).first
            self._weighted_losses.setdefault(step, {})[first - start] = [(loss * samples, float(samples))]
        query = "SELECT metric, value FROM evaluations WHERE step = (SELECT max(step) FROM evaluations)"
        self._evaluated = {name: math.nan if value is None else value for name, value in self.db.read(query)}
        query = "SELECT metric, step, value, samples FROM logged ORDER BY rowid"
        for name, step, value, samples in self.db.read(query):
            self.remember(name, Point(step, math.nan if value is None else value, samples))

    def is_evaluated(self, step: int) -> bool:
        return bool(self.db.read("SELECT 1 FROM evaluations WHERE step = ?", step))

    def node_joined(self, node: int, name: str, host: str, pid: int, machine: str = "", address: str = "") -> None:
        self.parts.setdefault(node, Part(name, pid))
        self.last_node = max(self.last_node, node)
        self.journal.node_joined(node, name, host, machine, address)

    def merged(
        self,
        merge: MergeUpdate,
        strategy: Strategy,
        sizes: Sequence[int],
        losses: Sequence[float],
        journey: Journey,
        weights: Sequence[float] = (),
        digest: int | Later = 0,
    ) -> None:
        """On the way of every gradient: only remember it. `weights` of the batches, if they are not their sizes;
        `digest` of the update, which is worth something where anybody would have computed the same.
        """
        now, at = self._clock.now(), self._clock.wall()
        kept = digest if digest and strategy.needs_whole_steps else None
        self._merged.append(Merged(merge, strategy, sizes, losses, journey, at, now, weights or sizes, kept))
        if not strategy.needs_whole_steps:
            self._ended_at = now

    def confirmed(self, node: int, block: Block, by: int) -> None:
        """What this node computed for the block, another one has computed too, to the bit."""
        for step, first, end in self.schedule.stretches(*block):
            samples = sum(self.schedule.sizes(step, first, end))
            self._confirmed.append(Counted(0, step.number, node, end - first, samples))
            self.parts[node].verified += samples
            self._verified.add(node)

    def void(self, version: int) -> None:
        """What was merged for this version, which will not be made of it, is computed again: it counts for nobody."""
        self._work_up()
        gone = [it for it in self._counted if it.version == version]
        steps = {it.step for it in gone}
        for it in gone:
            self.parts[it.node].batches -= it.batches
            self.parts[it.node].samples -= it.samples
        unsaid = [it for it in self._confirmed if it.step in steps]
        for it in unsaid:
            self.parts[it.node].verified -= it.samples
            self._verified.add(it.node)
        self._write_verified()
        self._counted = [it for it in self._counted if it.version != version]
        self._confirmed = [it for it in self._confirmed if it.step not in steps]
        for step in steps:
            self._weighted_losses.pop(step, None)
        self.db.void(version)

    def _write_verified(self) -> None:
        rows = [(node, self.parts[node].verified) for node in self._verified]
        self._verified = set()
        self.db.write("INSERT OR REPLACE INTO verified VALUES (?, ?)", rows)

    def refused(self, reject: RejectUpdate, journey: Journey | None) -> None:
        self.journal.rejected(reject.node, reject.reason, reject.detail)
        if journey is not None and reject.granted_at is not None:
            self._refused.append((reject, journey, self._clock.wall(), self._clock.now()))

    def compared(self, compare: CompareUpdate, journey: Journey) -> None:
        """It shows in the timeline, as what did not count."""
        what = (compare.node, compare.lease, "check", "", compare.block, compare.granted_at)
        self._refused.append((RejectUpdate(*what), journey, self._clock.wall(), self._clock.now()))

    def given_by(self, node: int) -> str:
        """What of this node's is in the weights, and how to get rid of it."""
        batches = self.parts[node].batches
        return f"; {batches} of its batches were merged before: --resume RUN --without {node}" if batches else ""

    def decided(self, node: int, kind: str, words: str) -> None:
        """About a node: for whoever reads the log, and for run.db."""
        name = self.parts[node].name
        log.warning("node %d (%s) %s: %s", node, name, kind, words)
        self.journal.tell(kind, node, f"{name}: {words}")

    def step_closed(self, step: Step, strategy: Strategy) -> None:
        now = self._clock.now()
        self._closed.append((step, strategy, now - self._step_began_at, self._clock.wall()))
        self._ended_at = self._step_began_at = now

    def _work_up(self, is_last: bool = False) -> None:
        """What was remembered, as rows and counts. A step's loss is added up in the order of its batches, so that it
        is the same from any pool. Where a version needs whole steps, batches count when their step does.
        """
        merged, self._merged = self._merged, []
        closed, self._closed = self._closed, []
        rows: list[tuple[int | float | None, ...]] = []
        for merge, strategy, sizes, losses, journey, at, now, weights, digest in merged:
            weights = weights[: len(losses)]
            weighted = [(loss * n, n) for loss, n in zip(losses, weights, strict=True)]
            done, key = 0, None if digest is None else int(digest)
            stretches = self.schedule.stretches(*merge.block)
            for step, first, end in stretches:
                mine = slice(done, done + end - first)
                done += end - first
                samples = sum(sizes[mine])
                self._weighted_losses.setdefault(step.number, {})[first] = weighted[mine]
                start = step.first if strategy.counts_by_epoch else 0
                loss = _mean(weighted[mine])
                place = (step.number, start + first, start + end - 1)
                rows.append((*place, merge.node, samples, loss, merge.version, at, key))
                self._counted.append(Counted(merge.version, step.number, merge.node, end - first, samples))
            part = self.parts[merge.node]
            part.batches += done
            part.samples += sum(sizes)
            if not strategy.needs_whole_steps:
                self.batches += done
                self.samples += sum(sizes)
            granted_at = merge.granted_at if merge.granted_at is not None else journey.came_at
            began, first, _ = stretches[0]
            what = (merge.lease, merge.node, began.number, first, done)
            loss = _mean(weighted)
            self._logbook.add(Answer(*what, merge.version, granted_at, now, at - now, loss), journey)
        self.db.insert("ledger", rows)
        self.db.insert("steps", [self._close(*item) for item in closed])
        if closed:
            last = closed[-1][0].number
            self._counted = [it for it in self._counted if it.step > last]
            self._confirmed = [it for it in self._confirmed if it.step > last]
        self._write_verified()
        self.journal.losses(self.losses[len(self.losses) - len(closed) :], len(self.losses), is_last)
        self._write_leases(bool(merged))

    def _write_leases(self, are_any: bool) -> None:
        """How each update came about, those that did not count included."""
        refused, self._refused = self._refused, []
        for reject, journey, at, now in refused:
            if reject.block is not None and reject.granted_at is not None:
                step, first, _ = self.schedule.stretches(*reject.block)[0]
                what = (reject.lease, reject.node, step.number, first, reject.block.size)
                self._logbook.add(Answer(*what, -1, reject.granted_at, now, at - now), journey, reject.reason)
        if are_any or refused:
            self.db.insert_packed("leases", self._clock.wall(), *self._logbook.take())

    def _close(self, step: Step, strategy: Strategy, seconds: float, at: float) -> tuple[int | float, ...]:
        by_first = self._weighted_losses.pop(step.number)
        loss = _mean([pair for first in sorted(by_first) for pair in by_first[first]])
        self.losses.append(loss)
        self.few_losses.add(loss)
        self.divergence.observe(loss)
        if strategy.needs_whole_steps:
            self.batches += step.batches
            self.samples += step.samples
        return (step.number, step.epoch, step.samples, loss, seconds, at)

    def logged(self, step: int, logged: Logged) -> None:
        """What the losses of a version's batches have logged."""
        rows = []
        for name, (total, samples) in logged.items():
            point = Point(step, total / samples if samples else math.nan, samples)
            if self.remember(name, point):
                rows.append((step, name, point.value, point.samples))
        self.db.insert("logged", rows)
        self.journal.logged(step + 1, {name: value for _, name, value, _ in rows})

    def remember(self, name: str, point: Point) -> bool:
        """Not of more names than a person could read."""
        if name not in self._logged and len(self._logged) >= MOST_NAMES:
            return False
        points = self._logged.setdefault(name, [])
        points.append(point)
        if len(points) > 2 * MOST_POINTS:
            del points[:MOST_POINTS]
        return True

    @property
    def metrics(self) -> dict[str, float]:
        """What the loss has logged, in the last tenth of the steps; and what evaluate() said last."""
        steps = len(self.losses)
        first = steps - max(1, steps // 10)
        return self._logged_means(first, steps) | self._evaluated

    def lately(self, first: int, end: int) -> dict[str, float]:
        """The training loss over these steps, and what was logged in them."""
        steps = range(first, min(end, len(self.losses)))
        pairs = [(self.losses[n] * (samples := self.schedule.step(n).samples), samples) for n in steps]
        return {"loss": _mean(pairs)} | self._logged_means(first, end)

    def _logged_means(self, first: int, end: int) -> dict[str, float]:
        found = {}
        for name, points in self._logged.items():
            low = bisect.bisect_left(points, first, key=lambda point: point.step)
            high = bisect.bisect_left(points, end, lo=low, key=lambda point: point.step)
            pairs = [(value * samples, samples) for _, value, samples in points[low:high]]
            if pairs:
                found[name] = _mean(pairs)
        return found

    def evaluated(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        at = self._clock.wall()
        self.db.insert("evaluations", [(at, epoch, step, name, value) for name, value in metrics.items()])
        self.journal.evaluated(step, metrics)
        self._evaluated = metrics
        words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        level = logging.INFO if at - self._told_at >= TELL_S else logging.DEBUG  # quick epochs would flood the screen
        self._told_at = at if level == logging.INFO else self._told_at
        log.log(
            level, "epoch %d, step %d: %s", epoch + 1, step, words, extra={"fields": {"step": step, "metrics": metrics}}
        )

    def evaluation_failed(self, problem: str, details: str) -> None:
        """Told once, and whenever it is another one; training goes on."""
        self.journal.rejected(None, "evaluate", problem)
        level = logging.ERROR if problem != self._evaluation_problem else logging.DEBUG
        self._evaluation_problem = problem
        log.log(level, "%s; training goes on", problem, extra={"fields": {"details": details}})

    def flush(self, force: bool = False) -> None:
        """Called often; does something a few times a second."""
        now = self._clock.now()
        if force or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            self._work_up(force)


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    """Of values that are multiplied with their weights already, in their order; of nothing, it is none."""
    weight = sum(weight for _, weight in pairs)
    return sum(value for value, _ in pairs) / weight if weight else math.nan
