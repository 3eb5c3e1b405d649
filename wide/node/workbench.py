"""What a node has built: data, model, and a training for each strategy. It stays when a connection breaks."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from wide.codec.batch import fingerprints
from wide.codec.encoders import Encoders
from wide.errors import NotRepeatable, TrainingFailed
from wide.job.definition import Job
from wide.job.program import Program
from wide.job.samples import Samples
from wide.node import selfcheck
from wide.node.carried import Carried
from wide.node.fused import Fused
from wide.node.own_loop import LoopLoss
from wide.node.payloads import Payloads
from wide.node.selfcheck import BatchAt, SelfCheck
from wide.node.trainer import Trainer
from wide.node.training import Training, training_of
from wide.node.worker import own
from wide.node.workers import Workers, workers_for
from wide.telemetry.process import give_back_free_memory
from wide.wire import messages as say

TRY_EVERY_S = 300.0


class Workbench:
    """Built as the pool's welcome says. `samples` is None if batches are streamed, or if `problem` says why not."""

    def __init__(
        self,
        job: Job,
        welcome: say.Welcome,
        device: torch.device,
        program: Program | None = None,
        workers: int | None = None,
    ) -> None:
        self._job, self._built_for, self._program = job, _kind(welcome), program or {}
        self._seed = welcome.seed
        self.samples: Samples | None = None
        self.problem = ""
        self.workers: Workers | None = None
        before = own()
        if welcome.data != "stream":
            try:
                self.samples = Samples(job, welcome.seed)
            except TrainingFailed as error:
                self.problem = str(error)
        if self.samples is not None:
            again = (lambda: Samples(job, welcome.seed)) if own() - before else None
            self.workers = workers_for(self.samples, job.workers if workers is None else workers, job.threads, again)
        self.trainer = Trainer(job, welcome.seed, device, moved=welcome.moved)
        self.trainer.steps = welcome.steps
        if isinstance(job.loss, LoopLoss):
            job.loss.trainer = self.trainer
        give_back_free_memory()  # the tensors that the model was built with
        self._encoders = Encoders()
        self.payloads = Payloads(self.trainer, self._encoders)
        self._fused = Fused(self.trainer)
        self._trainings: dict[str, Training] = {}
        self._check = ""
        self._tried_at: float | None = None
        self._carried: Carried | None = None
        self._to_try: list[Any] = []  # batches that were streamed
        self._has_to_try = self.samples is None

    @property
    def is_own_loop(self) -> bool:
        """The user's loop computes: what fails in it is this node's trouble alone, and it is never tried."""
        return self._job.own_loop is not None

    def try_again(self) -> None:
        """The same now and then, if this node was asked to try the job in the beginning."""
        if self._tried_at is not None and time.monotonic() - self._tried_at > TRY_EVERY_S:
            self.try_job(is_reversed=False)

    def try_job(self, is_reversed: bool) -> None:
        """Raises, if the job does not give the same numbers twice. Without data: as soon as there are batches."""
        self._tried_at = time.monotonic()
        if self._carried is not None and self.samples is not None:
            digest = self._try(self._first_batch, -(-len(self.samples) // self.samples.batch_size), is_reversed)
            self._check = self._check or digest  # of the first weights

    def keep_an_eye(self) -> None:
        """On what the user's code carries from batch to batch; but not where kernels may differ by themselves."""
        if self.trainer.is_on_cpu:
            roots = self.samples.roots if self.samples is not None else {}
            self._carried = Carried(self.trainer.namespaces, **self.trainer.roots, **roots)

    def look_around(self, batches: list[Any] | None, compute_s: float) -> None:
        """After a lease: has anything changed that was never tried? `batches` are the lease's own, if streamed."""
        if self._carried is None:
            return
        if self.samples is not None:
            if self._carried.has_news(compute_s):
                self._try(self._first_batch, -(-len(self.samples) // self.samples.batch_size))
        elif batches is not None and not self._has_to_try and (self._to_try or self._carried.has_news(compute_s)):
            self._try_streamed(batches)

    def try_batches(self, batches: list[Any]) -> None:
        """With the first batches that were streamed, before they are computed; if this node was asked to."""
        if self._tried_at is not None and self._has_to_try and self._carried is not None:
            self._try_streamed(batches)

    def _try_streamed(self, batches: list[Any]) -> None:
        """A batch that cannot be copied is not tried."""
        try:
            self._to_try += copy.deepcopy(batches[: selfcheck.BATCHES])
        except Exception:
            self._carried = None
            return
        if len(self._to_try) >= selfcheck.BATCHES:
            mine, self._to_try, self._has_to_try = self._to_try, [], False
            self._try(lambda i, other: copy.deepcopy(mine[i]), len(mine))

    def _try(self, batch_at: BatchAt, count: int, is_reversed: bool = False) -> str:
        assert self._carried is not None
        check = SelfCheck(self.trainer, batch_at, count, self._carried, is_reversed)
        if problem := check.problem():
            raise NotRepeatable(problem)
        return check.digest

    def _first_batch(self, i: int, other: int) -> Any:
        assert self.samples is not None
        return self.samples.first_batch(i, self.samples.batch_size, self._seed, other)

    @property
    def why_streamed(self) -> str:
        """Why this machine's own data is not used, as far as is known here."""
        if self.problem:
            return f": {self.problem}"
        return ": what it has itself is not the pool's" if self.samples is not None else ""

    def is_good_for(self, welcome: say.Welcome) -> bool:
        return _kind(welcome) == self._built_for

    def training(self, strategy: str) -> Training:
        if strategy not in self._trainings:
            self._trainings[strategy] = training_of(strategy, self._job, self.trainer, self._fused)
        return self._trainings[strategy]

    def describe(self, memory: str = "") -> say.Ready:
        """What the coordinator should know of it; `memory` is what this node saw in the coordinator's."""
        length = len(self.samples) if self.samples is not None else None
        probes = fingerprints(self.samples.probes(self._seed)) if self.samples is not None else []
        tensors, weights = self.trainer.layout.describe(), self.trainer.weights.fingerprint()
        return say.Ready(tensors, length, self.problem, weights, self._program, probes, self._check, memory)

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()
        self._encoders.close()


def _kind(welcome: say.Welcome) -> tuple[int, str, list[str]]:
    """All of it that a bench depends on."""
    return welcome.seed, welcome.data, welcome.moved
