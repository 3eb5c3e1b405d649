"""One run, from options to result, in the process that coordinates it (or, without nodes, does all the work)."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from wide.codec.layout import unbind
from wide.config import Options
from wide.coordinator.door import Door
from wide.coordinator.evaluation import Evaluation
from wide.coordinator.feed import Feed
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
from wide.launch.result import Result
from wide.node.greeting import pick_device
from wide.store.rundb import RunDb
from wide.store.weights import save_checkpoint, weights_sha256
from wide.telemetry.log import log, logging_to
from wide.telemetry.process import build
from wide.telemetry.progress import Progress

MEASURES = "local"  # what a pool begins with that chooses by itself: all nodes compute, whatever the network


class Run:
    """One run: its folder, its job, its numbers."""

    def __init__(self, job: Job, name: str, options: Options) -> None:
        self.job, self.options = job, options
        self.seed = options.seed if options.seed is not None else job.seed
        self.strategy = MEASURES if options.strategy == "auto" else options.strategy
        self.dir = make_run_dir(options.out, name)
        self._only_plans, self._plan_words = False, ""

    def plan(self, crew: Crew) -> str:
        """Train only until it is known how this pool should train. Returns that, as JSON."""
        self._only_plans = True
        self.train(crew)
        return self._plan_words

    def train(self, crew: Crew | None) -> Result:
        """Train to the end, with whoever comes in by the crew's door; without a crew, all alone."""
        with contextlib.ExitStack() as stack:
            db = stack.enter_context(contextlib.closing(RunDb(self.dir / "run.db")))
            stack.enter_context(logging_to(self.options.log, self.dir / "log.jsonl"))
            stack.enter_context(_threads(self.job.threads))
            samples = Samples(self.job, self.seed)
            self.schedule = Schedule(len(samples), self.job.batch_size, self.job.batches_per_step, self.seed)
            self.steps = self._length()
            self.record = Record(db, Progress(self.steps, self.options.seconds), self.schedule)
            with _collector_paused(is_own_process=crew is not None):
                self.master = Master(self.job, build_model(self.job, self.seed), self.seed)
            stack.enter_context(watching(self.record.progress, self.options.log != "silent"))
            try:
                interrupted_by = self._alone(samples) if crew is None else self._pool(samples, crew)
            except TrainingFailed as error:
                self.record.flush(time.monotonic(), force=True)
                raise self._kept(error) from None
            self.record.flush(time.monotonic(), force=True)
            return self._finish(interrupted_by)

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

    def _alone(self, samples: Samples) -> list[int]:
        self.strategy = "sync"  # of one node all are the same
        alone = Alone(self.job, self.master, samples, self.schedule, self.record)
        with _signals_to(alone) as received:
            log.info("%s", alone.train(self.steps, self.options.seconds, pick_device(self.options.device)))
        return received

    def _pool(self, samples: Samples, crew: Crew) -> list[int]:
        here = build(pick_device(self.options.device), self.job.threads)
        door = Door(crew.token, crew.evaluator_token, self.seed, self.options.data, self.options.codecs, here)
        pool = Pool(
            self.schedule,
            self.steps,
            self.options.seconds,
            not crew.is_local,
            self.strategy,
            self.master.descent.is_plain,
        )
        feed = Feed(samples, self.schedule)
        evaluation = Evaluation(self.record, self.job.evaluate is not None and not self._only_plans)
        server = Server(crew.listener, door, pool, self.master, feed, self.record, evaluation)
        server.chooses_strategy, server.only_plans = self.options.strategy == "auto", self._only_plans
        try:
            with _signals_to(server) as received:
                server.serve(crew.trouble)
        finally:
            server.close()
            feed.close()
        if server.ended is not None and server.ended.failure:
            raise TrainingFailed(server.ended.failure, server.ended.details)
        log.info("%s", server.ended.why if server.ended else "")
        self.strategy, self._plan_words = pool.course.name, server.plan_words
        return received

    def _kept(self, error: TrainingFailed) -> TrainingFailed:
        """What was trained until then is not lost."""
        if not self.record.losses:
            return error
        self._save(self._result())
        return TrainingFailed(
            f"{error}; the weights after step {len(self.record.losses)} are in {self.dir}", error.details
        )

    def _save(self, result: Result) -> None:
        state = {"step": result.steps, "epochs": result.epochs, "seed": self.seed, "sha256": result.weights_sha256}
        save_checkpoint(self.dir, self.master.model, result.steps, state)

    def _finish(self, interrupted_by: list[int]) -> Result:
        result = self._result()
        self._save(result)
        if interrupted_by:
            words = f"interrupted after step {result.steps}; the weights are in {self.dir}"
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


def make_run_dir(out: Path | None, name: str) -> Path:
    """--out, which must not hold a run yet, or a new folder runs/<time>-<job>."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (
        [out] if out else [Path("runs") / f"{stamp}-{name}{tail}" for tail in ("", *(f"-{i}" for i in range(2, 99)))]
    )
    for path in candidates:
        try:
            path.mkdir(parents=True, exist_ok=out is not None)
            if (path / "run.db").exists():
                raise UsageError(f"{path} already holds a run: choose another folder with --out, or remove it")
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
            return path
        except FileExistsError:
            if out is not None:
                raise UsageError(f"{path} is a file: --out must name a folder") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose a folder with --out") from None
    raise UsageError("too many runs began in this second: choose a folder with --out")


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
