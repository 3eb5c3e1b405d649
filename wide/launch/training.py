"""One run, from options to result, in the process that coordinates it (or, without nodes, does all the work)."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from wide import __version__
from wide.codec.encoders import Encoders
from wide.codec.layout import unbind
from wide.config import Options
from wide.coordinator import assembly, resume
from wide.coordinator.assembly import Course
from wide.coordinator.checkpoints import FileWriter
from wide.coordinator.master import Master
from wide.coordinator.resume import Start
from wide.coordinator.run import Run
from wide.dashboard.terminal import watching
from wide.errors import Interrupted, TrainingFailed
from wide.exchange.door import Door
from wide.exchange.feed import Feed
from wide.job.definition import Job
from wide.job.model import build_model
from wide.job.program import program_of
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.launch.alone import Alone
from wide.launch.crew import Crew
from wide.launch.folder import CHECKPOINTS, DATABASE, LOG, RunFolder
from wide.launch.result import Result
from wide.launch.story import Story
from wide.node.greeting import pick_device
from wide.store import checkpoint
from wide.store.rundb import RunDb
from wide.store.weights import weights_sha256
from wide.telemetry.log import log, logging_to
from wide.telemetry.process import build
from wide.telemetry.snapshot import Window
from wide.telemetry.totals import NodeTotals
from wide.transport.hub import TcpHub


class Training:
    """One run: its folder, its job, its numbers."""

    def __init__(self, job: Job, name: str, options: Options, command: list[str], file: Path | None = None) -> None:
        self.job, self.options, self._command, self._file = job, options, command, file
        self.folder = RunFolder(options.out, options.resume, name)
        self.dir = self.folder.path
        self._run: Run | None = None  # once there is one
        self._stop_reason = ""
        self.plan_words = ""  # the plan as JSON, if that is all that was wanted

    def train(self, crew: Crew | None) -> Result:
        """Train to the end, with whoever comes in by the crew's door; without a crew, all alone."""
        with contextlib.closing(self.folder), logging_to(self.options.log, self.dir / LOG):
            story = Story(self.dir, self._command, self._file, self.options, __version__)
            try:
                result = self._train(crew)
            except BaseException as error:
                story.failed(error)
                raise
            story.ended(result.summary())
            return result

    def _train(self, crew: Crew | None) -> Result:
        with contextlib.ExitStack() as stack:
            db = stack.enter_context(contextlib.closing(RunDb(self.dir / DATABASE, log.error)))
            stack.enter_context(_threads(self.job.threads))
            course, samples = self._course(db, is_own_process=crew is not None)
            stack.enter_context(watching(course.window, self.options.log != "silent"))
            received = stack.enter_context(_signals_to(self._stop))  # until the last checkpoint is written
            try:
                with contextlib.closing(FileWriter(self.dir / CHECKPOINTS, self.options.keep, db)) as writer:
                    course = replace(course, writer=None if self.options.only_plans else writer)
                    nodes = self._alone(course, samples) if crew is None else self._pool(course, samples, crew)
            except TrainingFailed as error:
                steps = len(self._run.record.losses) if self._run is not None else 0
                kept = f"; what was trained until step {steps} is in {self.dir}" if steps else ""
                raise TrainingFailed(f"{error}{kept}", error.details) from None
            result = self._result(course, nodes)
            if received:
                words = f"interrupted after step {result.steps}; go on with --resume {self.dir}"
                raise Interrupted(words, received[0])
            return result

    def _course(self, db: RunDb, is_own_process: bool) -> tuple[Course, Samples]:
        """What was asked for, and, if this run was begun before, where it is."""
        found = self._find_checkpoint()
        where = str(self.dir)
        if found is not None:
            self.options = resume.remembered(self.options, found[1], where)
        seed = self.options.seed if self.options.seed is not None else self.job.seed
        samples = Samples(self.job, seed)
        schedule = Schedule(len(samples), self.job.batch_size, self.job.batches_per_step, seed)
        with _collector_paused(is_own_process):
            master = Master(self.job, build_model(self.job, seed), seed)
        start = Start(is_resumed=self.folder.holds_run)
        if found is not None:
            start = resume.restore(found[1], schedule, master, where)
            self._forget_newer(found[0])
        steps = resume.length(self._length(schedule), start.position, schedule, where)
        if start.is_resumed:
            log.info("going on from step %d of %s", start.position.steps, self.dir)
        return Course(self.options, schedule, master, steps, db, None, start, window=Window()), samples

    def _find_checkpoint(self) -> tuple[Path, checkpoint.Checkpoint] | None:
        """The one to go on from, if there is one."""
        folder = self.dir / CHECKPOINTS
        if not self.folder.holds_run or not checkpoint.is_any(folder):
            return None
        path, saved, problems = checkpoint.newest(folder)
        for problem in problems:
            log.error("%s", problem)
        return path, saved

    def _forget_newer(self, path: Path) -> None:
        folder = self.dir / CHECKPOINTS
        try:
            checkpoint.forget_after(folder, path)
        except OSError as error:
            raise TrainingFailed(
                f"{folder} cannot be written ({error.strerror}): free some room, then try again"
            ) from None

    def _length(self, schedule: Schedule) -> int | None:
        """How long to train. --steps or --epochs replace what the job says; --seconds is a limit on top of either."""
        if self.options.only_plans:
            return None
        steps, epochs = self.options.steps, self.options.epochs
        if steps is None and epochs is None:
            steps, epochs = self.job.steps, self.job.epochs
        if steps is None and epochs is None and self.options.seconds is None:
            epochs = 1
        limits = [steps] if steps is not None else []
        limits += [schedule.steps_for(epochs)] if epochs is not None else []
        return min(limits) if limits else None

    def _alone(self, course: Course, samples: Samples) -> list[NodeTotals]:
        alone = Alone(self.job, course, samples, pick_device(self.options.device), self.options.check)
        self._began(alone.run)
        alone.train()
        self._tell_end()
        return alone.totals()

    def _pool(self, course: Course, samples: Samples, crew: Crew) -> list[NodeTotals]:
        here = build(pick_device(self.options.device), self.job.threads)
        seed = course.schedule.seed
        # Nodes of our own have the very same files, and looking through all modules would copy memory that is shared.
        program = program_of(self._file) if crew.is_open and self._file is not None else {}
        options, tokens = self.options, (crew.token, crew.evaluator_token)
        door = Door(*tokens, seed, options.data, options.codecs, here, program, options.check)
        feed, encoders = Feed(samples, course.schedule), Encoders()
        evaluates = self.job.evaluate is not None and not self.options.only_plans
        server = assembly.server(course, TcpHub(crew.listener), door, feed, encoders, crew.is_open, evaluates)
        self._began(server.run)
        try:
            server.serve(crew.trouble, crew.is_evaluator_gone)
        finally:
            encoders.close()
            server.close()
            feed.close()
        self._tell_end()
        self.plan_words = server.plan_words
        return server.totals()

    def _began(self, run: Run) -> None:
        self._run = run
        run.stop_reason = self._stop_reason or run.stop_reason  # a signal may have come before

    def _stop(self, reason: str) -> None:
        self._stop_reason = reason
        if self._run is not None:
            self._run.stop_reason = reason

    def _tell_end(self) -> None:
        end = self._run.ended if self._run is not None else None
        if end is not None and end.failure:
            raise TrainingFailed(end.failure, end.details)
        log.info("%s", end.why if end is not None else "")

    def _result(self, course: Course, nodes: list[NodeTotals]) -> Result:
        assert self._run is not None
        record, model = self._run.record, course.master.model
        record.flush(force=True)
        unbind(model)
        seconds = max(record.seconds, 1e-9)
        tenth = max(1, len(record.losses) // 10)
        first, last = record.losses[:tenth], record.losses[-tenth:]
        return Result(
            run_dir=str(self.dir),
            strategy=self._run.strategy.name,
            steps=len(record.losses),
            epochs=record.batches / course.schedule.batches_per_epoch,
            batches=record.batches,
            samples=record.samples,
            seconds=record.seconds,
            batches_per_s=record.batches / seconds,
            samples_per_s=record.samples / seconds,
            loss_first=sum(first) / tenth if first else None,
            loss_last=sum(last) / tenth if last else None,
            weights_sha256=weights_sha256(model),
            metrics={name: value if math.isfinite(value) else None for name, value in record.metrics.items()},
            nodes=nodes,
            model=model,
        )


@contextlib.contextmanager
def _collector_paused(is_own_process: bool) -> Iterator[None]:
    """The first optimizer imports torch's compiler: 1.0 s instead of 1.35 s without the collector, which would then
    look through half a million objects that never go away; in a process of our own they are put aside.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if is_own_process:
            gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    """Reductions round differently with other thread counts, so the coordinator uses the job's too."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def _signals_to(stop: Callable[[str], None]) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the run cleanly; a second Ctrl-C ends it at once. Yields the signals that came."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        stop("stopped by a signal")

    if threading.current_thread() is not threading.main_thread():
        yield received  # only a main thread may have handlers; elsewhere the caller decides
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
