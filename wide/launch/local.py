"""A run on this machine, from options to result: `wide run`, `wide.run`, and the coordinator of `wide serve`."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch

from wide.config import Options
from wide.coordinator.evaluation import Evaluation
from wide.coordinator.feed import Feed
from wide.coordinator.master import Master
from wide.coordinator.record import Record
from wide.coordinator.server import Door, Server
from wide.coordinator.state import Pool
from wide.dashboard.terminal import watching
from wide.errors import Interrupted, TrainingFailed, UsageError
from wide.job.definition import Job
from wide.job.model import build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.launch import child
from wide.launch.alone import Alone
from wide.launch.processes import GRACE_S, Children
from wide.launch.result import Result, make_result
from wide.node.worker import pick_device
from wide.store.rundb import RunDb
from wide.store.weights import save_checkpoint
from wide.telemetry.log import log, logging_to
from wide.telemetry.process import build
from wide.telemetry.progress import Progress
from wide.transport.tcp import Listener

Announce = Callable[[Listener, Path], None]


class Run:
    """One run: its folder, its job, its numbers."""

    def __init__(self, job: Job, job_for_children: str | bytes, name: str, options: Options) -> None:
        self.job, self.job_for_children, self.options = job, job_for_children, options
        self.seed = options.seed if options.seed is not None else job.seed
        self.dir = make_run_dir(options.out, name)

    def train(self, announce: Announce | None = None, token: str = "") -> Result:
        """Train to the end. With `announce`, nodes come from elsewhere; without, they are this process's children."""
        db = RunDb(self.dir / "run.db")
        with contextlib.ExitStack() as stack:
            stack.callback(db.close)
            stack.enter_context(logging_to(self.options.log, self.dir / "log.jsonl"))
            stack.enter_context(_threads(self.job.threads))
            samples = Samples(self.job)
            self.schedule = Schedule(len(samples), self.job.batch_size, self.job.batches_per_step, self.seed)
            self.steps = self._length()
            self.record = Record(db, Progress(self.steps, self.options.seconds))
            self.master = Master(self.job, build_model(self.job, self.seed))
            stack.enter_context(watching(self.record.progress, self.options.log != "silent"))
            try:
                if announce is None and self.options.node_count == 0:
                    self._alone(samples)
                else:
                    self._pool(samples, announce, token or secrets.token_hex(16))
            finally:
                self.record.flush(time.monotonic(), force=True)
            return self._finish()

    def _length(self) -> int | None:
        """How long to train. --steps or --epochs replace what the job says; --seconds is a limit on top of either."""
        steps, epochs = self.options.steps, self.options.epochs
        if steps is None and epochs is None:
            steps, epochs = self.job.steps, self.job.epochs
        if steps is None and epochs is None and self.options.seconds is None:
            epochs = 1
        limits = [steps] if steps is not None else []
        limits += [self.schedule.steps_for(epochs)] if epochs is not None else []
        return min(limits) if limits else None

    def _alone(self, samples: Samples) -> None:
        alone = Alone(self.job, self.master, samples, self.schedule, self.record)
        with _signals_to(alone) as received:
            log.info("%s", alone.train(self.steps, self.options.seconds, pick_device(self.options.device)))
        self._interrupted_by = received

    def _pool(self, samples: Samples, announce: Announce | None, token: str) -> None:
        listener = Listener(self.options.host, self.options.port)
        evaluator_token = secrets.token_hex(16)
        feed = Feed(samples, self.schedule)
        evaluation = Evaluation(self.record, self.job.evaluate is not None)
        here = build(pick_device(self.options.device), self.job.threads)
        door = Door(token, evaluator_token, self.seed, self.options.data, here)
        pool = Pool(self.schedule, self.steps, self.options.seconds)
        server = Server(listener, door, pool, self.master, feed, self.record, evaluation)
        nodes, evaluators = Children(), Children()
        try:
            if self.job.evaluate is not None:
                evaluators.start(child.main, self._child("evaluator", 0, listener, evaluator_token))
            if announce is None:
                for index in range(1, self.options.node_count + 1):
                    nodes.start(child.main, self._child("node", index, listener, token))
            else:
                announce(listener, self.dir)
            with _signals_to(server) as self._interrupted_by:
                server.serve(lambda: _trouble(nodes, server) if announce is None else "")
            if server.ended is not None and server.ended.failure:
                raise TrainingFailed(server.ended.failure, server.ended.details)
            log.info("%s", server.ended.why if server.ended else "")
        finally:
            server.close()
            feed.close()
            nodes.stop(GRACE_S)
            evaluators.stop(GRACE_S)

    def _child(self, role: str, index: int, listener: Listener, token: str) -> child.Child:
        host = "127.0.0.1" if listener.host in ("0.0.0.0", "::") else listener.host
        return child.Child(
            role=role,
            index=index,
            host=host,
            port=listener.port,
            token=token,
            job=self.job_for_children,
            device=self.options.device,
            log=self.options.log,
        )

    def _finish(self) -> Result:
        result = make_result(
            self.master.model, self.record, self.dir, self.options.strategy, self.schedule.batches_per_epoch
        )
        state = {"step": result.steps, "epochs": result.epochs, "seed": self.seed, "sha256": result.weights_sha256}
        save_checkpoint(self.dir, result.model, result.steps, state)
        if self._interrupted_by:
            number = self._interrupted_by[0]
            words = f"interrupted at step {result.steps}; the weights are in {self.dir}"
            raise Interrupted(words, number)
        return result


def _trouble(nodes: Children, server: Server) -> str:
    if not nodes.are_all_gone or server.ended is not None:
        return ""
    why = server.last_trouble or f"their exit codes: {nodes.exit_codes()}"
    return f"all nodes are gone ({why}); --log verbose tells more"


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
        runner.stop_reason = f"stopped by {signal.Signals(number).name}"

    if threading.current_thread() is not threading.main_thread():
        yield received  # only a main thread may have handlers; elsewhere the caller decides
        return
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, old in before.items():
            signal.signal(number, old)
