"""The process that runs the user's evaluate() on copies of the weights. A child of the coordinator."""

from __future__ import annotations

import copy

import torch
from torch import nn

from wide.codec.layout import Flat, Layout, bind
from wide.errors import ProtocolError, TrainingFailed
from wide.job.definition import Job
from wide.job.here import Here, enter
from wide.job.loading import users_code
from wide.job.model import build_model
from wide.job.seeding import seed_everything
from wide.node.greeting import HEADER_LIMIT, PAYLOAD_LIMIT
from wide.telemetry.process import give_back_free_memory
from wide.transport.connection import Connection
from wide.wire import messages as say
from wide.wire.frames import Destinations


def evaluate(job: Job, model: nn.Module, seed: int, where: Here) -> dict[str, float]:
    """The user's metrics as plain numbers; the model is theirs to switch to eval() and to use up."""
    assert job.evaluate is not None
    enter(where)
    seed_everything(seed)  # a random split made here is the one that dataset() made
    with users_code("evaluate() failed (it must return a dict of numbers)"):
        metrics = job.evaluate(model.eval())
        return {str(name): float(value) for name, value in dict(metrics).items()}


class Evaluator:
    """Waits for weights, answers with metrics."""

    def __init__(self, connection: Connection, job: Job, welcome: say.Welcome, device: torch.device) -> None:
        self._connection, self._job, self._seed, self._device = connection, job, welcome.seed, device
        self._steps = welcome.steps
        self._model = build_model(job, welcome.seed).cpu()
        layout = Layout(self._model, welcome.moved)
        self._weights, self._live_nbytes = Flat(layout, only_live=False), layout.live_nbytes
        bind(self._model, self._weights, layout)
        give_back_free_memory()
        connection.reader.allow(self._place_for, HEADER_LIMIT, PAYLOAD_LIMIT)
        connection.send(say.Ready(layout.describe(), None))

    def work(self) -> say.Stop:
        while not isinstance(message := self._connection.wait(), say.Stop):
            if isinstance(message, say.Evaluate):
                self._answer(message)
        return message

    def _answer(self, request: say.Evaluate) -> None:
        try:
            where = Here(request.step, request.epoch, 0, self._steps)
            metrics = evaluate(self._job, copied(self._model).to(self._device), self._seed, where)
        except TrainingFailed as error:
            self._connection.send(say.Failed(0, -1, str(error), error.details))
        else:
            self._connection.send(say.Evaluated(request.epoch, request.step, metrics))

    def _place_for(self, message: say.Message, nbytes: int) -> Destinations:
        """All of the weights the first time; then what changes."""
        if nbytes not in (0, self._live_nbytes, len(self._weights.bytes)):
            raise ProtocolError("wrong payload", f"{nbytes} bytes of weights")
        return (self._weights.bytes[:nbytes],) if nbytes else ()


def on_copy(job: Job, model: nn.Module, seed: int, where: Here) -> dict[str, float]:
    """For a run without processes: evaluate this copy, and leave torch's threads as they are."""
    threads = torch.get_num_threads()
    try:
        return evaluate(job, model, seed, where)
    finally:
        torch.set_num_threads(threads)


def copied(model: nn.Module) -> nn.Module:
    with users_code("evaluate() has no model: it cannot be copied"):
        return copy.deepcopy(model)
