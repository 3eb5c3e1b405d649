"""One run, from options to result, in the process that coordinates it (or, without nodes, does all the work)."""

from __future__ import annotations

import contextlib
import gc
import math
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import msgspec
import torch

from wide.codec.layout import unbind
from wide.config import Options
from wide.coordinator.door import Door
from wide.coordinator.evaluation import Evaluation
from wide.coordinator.events import Position
from wide.coordinator.feed import Feed
from wide.coordinator.keeper import Keeper, restore, schedule_of
from wide.coordinator.master import Master
from wide.coordinator.record import Record
from wide.coordinator.server import Server
from wide.coordinator.state import Pool
from wide.dashboard.terminal import watching
from wide.errors import Interrupted, TrainingFailed, UsageError
from wide.job.definition import Job
from wide.job.model import build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.launch.alone import Alone
from wide.launch.crew import Crew
from wide.launch.folder import CHECKPOINTS, DATABASE, LOG, RunFolder
from wide.launch.result import Result
from wide.node.greeting import pick_device
from wide.store import checkpoint
from wide.store.rundb import RunDb
from wide.store.weights import weights_sha256
from wide.telemetry.log import log, logging_to
from wide.telemetry.process import build
from wide.telemetry.progress import Progress

LENGTHS = ("steps", "epochs", "seconds")  # how long to train is one wish: any of them replaces all
MEASURES = "local"  # what a pool begins with that chooses by itself: all nodes compute, whatever the network


class Run:
    """One run: its folder, its job, its numbers."""

    def __init__(self, job: Job, name: str, options: Options) -> None:
        self.job, self.options = job, options
        self.folder = RunFolder(options.out, options.resume, name)
        self.dir = self.folder.path
        self._start, self._fold_state = Position(), None
        self._saved: checkpoint.Checkpoint | None = None
        self._saved_in = self.dir
        self._only_plans, self._plan_words = False, ""

    def plan(self, crew: Crew) -> str:
        """Train only until it is known how this pool should train. Returns that, as JSON."""
        self._only_plans = True
        self.train(crew)
        return self._plan_words

    def train(self, crew: Crew | None) -> Result:
        """Train to the end, with whoever comes in by the crew's door; without a crew, all alone."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.closing(self.folder))
            stack.enter_context(logging_to(self.options.log, self.dir / LOG))
            db = stack.enter_context(contextlib.closing(RunDb(self.dir / DATABASE, log.error)))
            stack.enter_context(_threads(self.job.threads))
            self._find_checkpoint()
            self.seed = self.options.seed if self.options.seed is not None else self.job.seed
            self.strategy = MEASURES if self.options.strategy == "auto" else self.options.strategy or "sync"
            samples = Samples(self.job, self.seed)
            self.schedule = Schedule(len(samples), self.job.batch_size, self.job.batches_per_step, self.seed)
            self.steps = self._length()
            self.record = Record(db, Progress(self.steps, self.options.seconds), self.schedule)
            with _collector_paused(is_own_process=crew is not None):
                self.master = Master(self.job, build_model(self.job, self.seed), self.seed)
            self._resume()
            stack.enter_context(watching(self.record.progress, self.options.log != "silent"))
            version = self._start.version if self._saved is not None else None
            keeper = Keeper(self.dir / CHECKPOINTS, self.options.keep, self.master, self.record, self._asked(), version)
            try:
                with contextlib.closing(keeper):
                    if crew is None:
                        interrupted_by = self._alone(samples, keeper, stack)
                    else:
                        interrupted_by = self._pool(samples, crew, keeper, stack)
            except TrainingFailed as error:
                self.record.flush(time.monotonic(), force=True)
                steps = len(self.record.losses)
                kept = f"; what was trained until step {steps} is in {self.dir}" if steps else ""
                raise TrainingFailed(f"{error}{kept}", error.details) from None
            self.record.flush(time.monotonic(), force=True)
            return self._finish(interrupted_by)

    def _find_checkpoint(self) -> None:
        """The one to go on from, if there is one; options that are not given are as they were."""
        folder = self.dir / CHECKPOINTS
        if not self.folder.holds_run or not checkpoint.is_any(folder):
            return
        self._saved_in, self._saved, problems = checkpoint.newest(folder)
        for problem in problems:
            log.error("%s", problem)
        asked = {name: value for name, value in self._saved.state["asked"].items() if value is not None}
        if any(getattr(self.options, name) is not None for name in LENGTHS):
            asked = {name: value for name, value in asked.items() if name not in LENGTHS}
        given = {name: getattr(self.options, name) for name in asked if getattr(self.options, name) is not None}
        if given.get("seed", asked["seed"]) != asked["seed"]:
            raise UsageError(
                f"--seed {given['seed']}: {self.dir} was begun with seed {asked['seed']}, and stays with it"
            )
        self.options = msgspec.structs.replace(self.options, **(asked | given))

    def _forget_newer(self) -> None:
        folder = self.dir / CHECKPOINTS
        try:
            checkpoint.forget_after(folder, self._saved_in)
        except OSError as error:
            raise TrainingFailed(
                f"{folder} cannot be written ({error.strerror}): free some room, then try again"
            ) from None

    def _asked(self) -> dict[str, Any]:
        return {"seed": self.seed} | {name: getattr(self.options, name) for name in ("strategy", "compress", *LENGTHS)}

    def _resume(self) -> None:
        if not self.folder.holds_run:
            return
        if self._saved is not None:
            now = schedule_of(self.schedule)
            for name, before in self._saved.state["schedule"].items():
                if before != now[name]:
                    raise UsageError(f"{self.dir} was begun with {name} {before}, and this job has {now[name]}")
            self._start, self._fold_state = restore(self.master, self._saved)
            self._forget_newer()
        reach = self.schedule.step_at(self._start.front - 1).number + 1 if self._start.front else 0
        if self.steps is not None and self.steps < reach:
            if self._start.front != self.schedule.position(self._start.steps):
                raise UsageError(f"{self.steps} steps: {self.dir} is at step {reach} already; say --steps {reach}")
            self.steps = self._start.steps  # all is done
        self.record.resume(self._start, self._saved.state if self._saved is not None else {})
        log.info("going on from step %d of %s", self._start.steps, self.dir)

    def _length(self) -> int | None:
        """How long to train. --steps or --epochs replace what the job says; --seconds is a limit on top of either."""
        if self._only_plans:
            return None
        steps, epochs = self.options.steps, self.options.epochs
        if steps is None and epochs is None:
            steps, epochs = self.job.steps, self.job.epochs
        if steps is None and epochs is None and self.options.seconds is None:
            epochs = 1
        limits = [steps] if steps is not None else []
        limits += [self.schedule.steps_for(epochs)] if epochs is not None else []
        return min(limits) if limits else None

    def _alone(self, samples: Samples, keeper: Keeper, stack: contextlib.ExitStack) -> list[int]:
        self.strategy = "sync"  # of one node all are the same
        if self._start.front != self.schedule.position(self._start.steps):
            raise TrainingFailed(
                f"{self._start.strategy} training was stopped in the middle of a step: go on with at least one node"
            )
        alone = Alone(self.job, self.master, samples, self.schedule, self.record, keeper)
        limits = (self._start, self.steps, self.options.seconds, self.options.checkpoint_every)
        received = stack.enter_context(_signals_to(alone))  # until the last checkpoint is written
        log.info("%s", alone.train(*limits, pick_device(self.options.device)))
        return received

    def _pool(self, samples: Samples, crew: Crew, keeper: Keeper, stack: contextlib.ExitStack) -> list[int]:
        here = build(pick_device(self.options.device), self.job.threads)
        door = Door(crew.token, crew.evaluator_token, self.seed, self.options.data, self.options.codecs, here)
        pool = Pool(
            self.schedule,
            self.steps,
            self.options.seconds,
            not crew.is_local,
            self.strategy,
            self.master.descent.is_plain,
            self._start,
            self.options.checkpoint_every,
        )
        feed = Feed(samples, self.schedule)
        evaluation = Evaluation(self.record, self.job.evaluate is not None and not self._only_plans)
        kept = None if self._only_plans else keeper
        server = Server(crew.listener, door, pool, self.master, feed, self.record, evaluation, kept)
        if self.folder.holds_run:
            server.resume(self._start, self._fold_state)
        server.chooses_strategy, server.only_plans = self.options.strategy == "auto", self._only_plans
        received = stack.enter_context(_signals_to(server))  # until the last checkpoint is written
        try:
            server.serve(crew.trouble)
        finally:
            server.close()
            feed.close()
        if server.ended is not None and server.ended.failure:
            raise TrainingFailed(server.ended.failure, server.ended.details)
        log.info("%s", server.ended.why if server.ended else "")
        self.strategy, self._plan_words = pool.course.name, server.plan_words
        return received

    def _finish(self, interrupted_by: list[int]) -> Result:
        result = self._result()
        if interrupted_by:
            words = f"interrupted after step {result.steps}; go on with --resume {self.dir}"
            raise Interrupted(words, interrupted_by[0])
        return result

    def _result(self) -> Result:
        record = self.record
        unbind(self.master.model)
        seconds = max(record.seconds, 1e-9)
        tenth = max(1, len(record.losses) // 10)
        first, last = record.losses[:tenth], record.losses[-tenth:]
        return Result(
            run_dir=str(self.dir),
            strategy=self.strategy,
            steps=len(record.losses),
            epochs=record.batches / self.schedule.batches_per_epoch,
            batches=record.batches,
            samples=record.samples,
            seconds=record.seconds,
            batches_per_s=record.batches / seconds,
            samples_per_s=record.samples / seconds,
            loss_first=sum(first) / tenth if first else None,
            loss_last=sum(last) / tenth if last else None,
            weights_sha256=weights_sha256(self.master.model),
            metrics={name: value if math.isfinite(value) else None for name, value in record.metrics.items()},
            nodes=list(record.nodes.values()),
            model=self.master.model,
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
def _signals_to(runner: Server | Alone) -> Iterator[list[int]]:
    """Ctrl-C and SIGTERM end the run cleanly; a second Ctrl-C ends it at once. Yields the signals that came."""
    received: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        runner.stop_reason = "stopped by a signal"

    if threading.current_thread() is not threading.main_thread():
        yield received  # only a main thread may have handlers; elsewhere the caller decides
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
