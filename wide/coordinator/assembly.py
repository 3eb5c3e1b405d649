"""A coordinator put together from its parts: the same for a real pool and for a simulated one. Decides nothing."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from wide.codec.digest import KEY_NBYTES, Digest
from wide.codec.encoders import Encoders
from wide.codec.ladder import LOSSLESS
from wide.codec.speeds import Trial, measure
from wide.config import Options
from wide.coordinator import resume
from wide.coordinator.aside import Aside
from wide.coordinator.audits import Audits
from wide.coordinator.canaries import Canaries
from wide.coordinator.checkpoints import Checkpoints, Writer
from wide.coordinator.evaluation import Evaluation
from wide.coordinator.gatekeeper import Gatekeeper
from wide.coordinator.journal import Points
from wide.coordinator.judging import Judge
from wide.coordinator.master import Master
from wide.coordinator.planning import Planner
from wide.coordinator.record import Db, Record
from wide.coordinator.resume import Start
from wide.coordinator.run import Evaluation as Evaluates
from wide.coordinator.run import Run
from wide.coordinator.server import Server
from wide.coordinator.state import Pool, Verdicts
from wide.coordinator.steering import Asked
from wide.exchange.common import Common
from wide.exchange.door import Door
from wide.exchange.exchange import Exchange
from wide.exchange.feed import Feed
from wide.exchange.goods import Goods
from wide.job.definition import OwnLoop
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.strategy.catalogue import EXACT, MEASURES
from wide.strategy.gather import Sum
from wide.strategy.robust import GATHERINGS
from wide.telemetry.clock import REAL, Clock
from wide.telemetry.snapshot import Window
from wide.telemetry.totals import NodeTotals
from wide.transport.hub import Hub


@dataclass(frozen=True)
class Course:
    """One run, as it was asked for: what is trained, how long, from where, and where it is written down."""

    options: Options
    schedule: Schedule
    master: Master
    steps: int | None
    db: Db
    writer: Writer | None  # None: no checkpoints are kept
    start: Start = field(default_factory=Start)
    clock: Clock = REAL
    window: Window = field(default_factory=Window)
    data: dict[str, str] = field(default_factory=dict)  # fingerprints of some samples, by number
    name: str = ""  # of the job
    points: Points | None = None  # where numbers go besides run.db
    asked: Asked | None = None  # what its owner asks for while it runs
    stop: Callable[[], None] = lambda: None  # as a signal would

    digest: Digest = field(default_factory=lambda: Digest(secrets.token_bytes(KEY_NBYTES)))  # of updates
    judge: Judge | None = None  # if anything follows from evaluations
    chance: Callable[[], float] = secrets.SystemRandom().random  # that nobody can guess
    own_loop: OwnLoop | None = None  # if nodes do not compute a loss of the job's
    samples: Samples | None = None  # what is told which steps are done; None: nobody wants to know

    @property
    def _verdicts(self) -> Verdicts | None:
        """One is awaited, if the run ended before it was given."""
        if self.judge is None:
            return None
        steps, schedule = self.start.position.steps, self.schedule
        is_due = steps > 0 and (schedule.is_evaluated(schedule.step(steps - 1)) or steps == self.steps)
        return Verdicts(int(is_due and self.judge.steps < steps), self.judge.keeps_best)

    @property
    def _audits(self) -> Audits | None:
        """Bits can be compared only where nothing is rounded on its way."""
        return Audits(self.options.audit, self.chance) if self.options.check and self._is_lossless else None

    @property
    def _is_lossless(self) -> bool:
        return self.options.codecs in (*LOSSLESS, "lossless", "none")

    def pool(self, is_open: bool, is_alone: bool = False) -> Pool:
        wish = self.options.strategy or EXACT.name
        strategy = MEASURES.name if wish == "auto" else wish
        are_steps_lent = self.own_loop is not None and self.own_loop.every > 0  # nobody else could have made them
        return Pool(
            self.schedule,
            self.steps,
            self.options.seconds,
            is_open,
            EXACT.name if is_alone else strategy,  # of one node all are the same
            self.master.descent.is_plain and self.options.robust not in ("trimmed", "median"),
            self.start.position,
            self.options.checkpoint_every,
            self._verdicts,
            None if is_alone else self._audits,
            None if is_alone or not self.options.check or are_steps_lent else Canaries(self._is_lossless),
            are_steps_lent,
        )

    def record(self) -> Record:
        record = Record(self.db, self.schedule, self.clock, self.points)
        resume.restore_record(record, self.start)
        return record

    def run(
        self,
        pool: Pool,
        record: Record,
        evaluation: Evaluates,
        nodes: Callable[[], list[NodeTotals]],
        aside: Aside | None = None,
    ) -> Run:
        start, saving = self.start, None
        if self.writer is not None:
            asked = resume.asked(self.schedule.seed, self.options)
            version = start.position.version if start.state else None
            judged = self.judge.state if self.judge is not None else dict
            samples, schedule = self.samples, self.schedule
            stream = (lambda steps: samples.state(schedule, steps)) if samples is not None else lambda steps: None
            saving = Checkpoints(self.master, record, nodes, asked, self.writer, self.data, version, judged, stream)
        fold_state: Any = start.fold_state if pool.strategy.name == start.position.strategy else None
        gathering = GATHERINGS[self.options.robust] if self.options.robust is not None else Sum
        run = Run(self.master, record, evaluation, saving, pool.strategy.name, fold_state, aside, self.judge, gathering)
        if (samples := self.samples) is not None and samples.stream is not None:
            run.when_merged = lambda step: samples.merged(self.schedule, step)
        return run

    def catch_up(self, run: Run) -> None:
        """What the last process left undone."""
        if self.start.is_resumed:
            run.finish_evaluation(self.start.position.steps, self.steps)


def server(
    course: Course,
    hub: Hub,
    door: Door,
    feed: Feed,
    encoders: Encoders,
    is_open: bool,
    evaluates: bool,
    try_codecs: Trial = measure,
    common: Common | None = None,
) -> Server:
    """The coordinator of a pool whose nodes come in by that hub and that door."""
    pool, record, master = course.pool(is_open), course.record(), course.master
    goods = Goods(
        *(master.layout, master.weights, master.spare, feed, encoders, course.digest),
        common or Common(is_wanted=False),
    )
    traffic = {totals.node: totals.traffic for totals in course.start.nodes}
    exchange = Exchange(hub, door, goods, course.clock, traffic, try_codecs)
    evaluation = Evaluation(evaluates, exchange.evaluate, course.clock.now)
    aside = Aside(master.layout.live_nbytes, hub.ring)
    run = course.run(pool, record, evaluation, lambda: coordinator.totals(), aside)
    planner = None
    if course.options.strategy == "auto":
        nbytes, only_plans = master.layout.live_nbytes, course.options.only_plans
        planner = Planner(course.schedule, nbytes, record.journal.chose, only_plans)
    coordinator = Server(
        *(exchange, pool, run, evaluation, course.clock, course.window),
        *(planner, course.name, course.asked, course.stop),
        Gatekeeper(is_clipped=master.descent.is_clipped),
    )
    course.catch_up(run)
    return coordinator
