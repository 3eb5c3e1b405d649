"""What a node has built: data, model, and a training for each strategy. It stays when a connection breaks."""

from __future__ import annotations

import torch

from wide.codec.batch import fingerprints
from wide.codec.encoders import Encoders
from wide.errors import NotRepeatable, TrainingFailed
from wide.job.definition import Job
from wide.job.program import Program
from wide.job.samples import Samples
from wide.node.fused import Fused
from wide.node.payloads import Payloads
from wide.node.selfcheck import SelfCheck
from wide.node.trainer import Trainer
from wide.node.training import TRAININGS, Training
from wide.wire import messages as say


class Workbench:
    """Built as the pool's welcome says. `samples` is None if batches are streamed, or if `problem` says why not."""

    def __init__(self, job: Job, welcome: say.Welcome, device: torch.device, program: Program | None = None) -> None:
        self._job, self._built_for, self._program = job, (welcome.seed, welcome.data), program or {}
        self._seed = welcome.seed
        self.samples: Samples | None = None
        self.problem = ""
        if welcome.data != "stream":
            try:
                self.samples = Samples(job, welcome.seed)
            except TrainingFailed as error:
                self.problem = str(error)
        self.trainer = Trainer(job, welcome.seed, device)
        self._encoders = Encoders()
        self.payloads = Payloads(self.trainer, self._encoders)
        self._fused = Fused(self.trainer)
        self._trainings: dict[str, Training] = {}
        self._check = ""

    def try_job(self, is_reversed: bool) -> None:
        """Raises, if the job does not give the same numbers twice."""
        if self.samples is None or not self.trainer.is_on_cpu:
            return  # without data there is nothing to try; and kernels of other devices may differ by themselves
        check = SelfCheck(self.trainer, self.samples, self._job.batch_size, is_reversed)
        if problem := check.problem():
            raise NotRepeatable(problem)
        self._check = check.digest

    def is_good_for(self, welcome: say.Welcome) -> bool:
        return (welcome.seed, welcome.data) == self._built_for

    def training(self, strategy: str) -> Training:
        if strategy not in self._trainings:
            self._trainings[strategy] = TRAININGS[strategy](self._job, self.trainer, self._fused)
        return self._trainings[strategy]

    def describe(self) -> say.Ready:
        """What the coordinator should know of it."""
        length = len(self.samples) if self.samples is not None else None
        probes = fingerprints(self.samples.probes(self._seed)) if self.samples is not None else []
        tensors, weights = self.trainer.layout.describe(), self.trainer.weights.fingerprint()
        return say.Ready(tensors, length, self.problem, weights, self._program, probes, self._check)

    def close(self) -> None:
        self._encoders.close()
