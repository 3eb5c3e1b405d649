"""`wide.member(model)`: the pull loop. The pool's batches come to a loop of the user's, and gradients go back; order,
seeds, weights, optimizer and ledger are the pool's, so the bits are those of a job with the same loss.

    job = wide.Job(model=Net, dataset=load, loss=wide.member, optimizer=…)
    if __name__ == "__main__":
        model = Net()
        with wide.member(model, job) as pool:
            for images, labels in pool:
                pool.backward(F.cross_entropy(model(images), labels))
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
import torch
from torch import nn

from wide.codec.layout import unbind
from wide.errors import TrainingFailed, UsageError
from wide.job.definition import Job, OwnLoop, total
from wide.job.here import enter, leave, listen
from wide.job.loading import check_not_importing
from wide.job.model import understood, without_gradients
from wide.launch.own_loops import Served, failed, find_seat
from wide.node.own_loop import Handed, LoopLoss
from wide.node.turns import Over
from wide.telemetry.log import log

BACKWARD = "pool.backward(loss)"
BESIDE = (
    f"there are gradients that would be lost: a backward() beside {BACKWARD}. Hand in the sum of all losses; or, if it "
    "was for something else, put them away with model.zero_grad()"
)


class Batches:
    """The pool's batches, one by one. Between one and the next the loss is handed in, once."""

    def __init__(self, model: nn.Module, job: Job | None, invite: str | None) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"wide.member(model) takes the model that the loop trains, got {type(model).__name__}")
        if job is not None and (not isinstance(job, Job) or job.own_loop != OwnLoop()):
            raise UsageError("wide.member(model, job): give the wide.Job of this script, with loss=wide.member")
        self._model, self._job, self._invite = model, job, invite
        self._owed = False  # the loss of the batch at hand
        self._logged: dict[str, float] = {}
        self._watch: Reached | None = None  # over the first loss
        self._served: Served
        self._coming: Handed | None = None
        self._modes: list[bool] = []
        self._over: Over | None = None

    @property
    def node(self) -> int:
        """Its number in the pool, from 1; 0 until it was let in."""
        return self._served.node

    def __enter__(self) -> Self:
        check_not_importing("wide.member")
        loss = LoopLoss(OwnLoop())
        job, seat = _job_of(self._model, self._job, loss), find_seat("wide.member", self._invite)
        self._served = Served(job, self._model, loss, seat)
        self._served.start()
        self._wait()  # the model is as the pool has it
        self._modes = [module.training for module in self._model.modules()]
        self._watch = Reached(self._model)
        return self

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._owed:
            raise UsageError(f"a batch of the pool was left without {BACKWARD}: every one needs it, once")
        if self._over is not None:
            if self._over.error is not None:
                raise self._over.error from None
            raise StopIteration
        without_gradients(self._model.parameters(), BESIDE)
        assert self._coming is not None
        handed, self._coming = self._coming, None
        if self._modes != [module.training for module in self._model.modules()]:
            raise UsageError(
                "the loop has switched the model between train() and eval(): put it back before the next batch"
            )
        handed.begin()
        enter(handed.here)
        self._logged, self._owed = listen(), True
        return handed.batch

    def _wait(self) -> None:
        """While the session has its turn. The gradients are the pool's then: a step that the loop makes is none."""
        try:
            self._coming = self._served.turns.take()
        except Over as over:
            self._over = over
        for parameter in self._model.parameters():
            parameter.grad = None

    def backward(self, loss: Any) -> None:
        """What a job's loss would return for this batch: a mean, or wide.total(sum, count), or either with metrics."""
        if not self._owed:
            raise UsageError(f"{BACKWARD} was called without a batch that waits for it: once for each is enough")
        said = understood(loss)
        self._owed = False
        leave()
        value = said.loss if said.over is None else total(said.loss, said.over)
        self._served.turns.give((value, dict(self._logged)))
        self._wait()  # what the loop does next must not be done beside this
        if self._watch is not None and self._over is None:
            self._watch.check()
            self._watch = None

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        leave()
        if self._over is None:
            why = failed(error) if error is not None else "its loop was left"
            self._served.leave(why)
            if error is None:
                log.warning("the loop was left before the run was over: its lease goes to others")
        self._served.close()
        unbind(self._model)


class Reached:
    """Does the first loss reach the model at all? Another model's would train nothing, without a word."""

    def __init__(self, model: nn.Module) -> None:
        self._was_reached = False
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._hooks: list[Any] = []
        for parameter in trained:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._reached))  # type: ignore[no-untyped-call]

    def _reached(self, parameter: torch.Tensor) -> None:
        self._was_reached = True

    def check(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if not self._was_reached:
            raise TrainingFailed(
                f"{BACKWARD} reached none of the model's parameters: compute the loss with the model that wide.member "
                "was given"
            )


class member:  # noqa: N801  (reads as a function; as Job(loss=wide.member) it says who computes)
    """`with wide.member(model) as pool: for batch in pool: pool.backward(loss)`. Given the script's own job, which says
    loss=wide.member, it has the data here; otherwise the pool streams it. `invite`: instead of WIDE_INVITE.
    """

    own_loop = OwnLoop()

    def __new__(cls, model: nn.Module, job: Job | None = None, *, invite: str | None = None) -> Batches:  # type: ignore[misc]
        return Batches(model, job, invite)


def _job_of(model: nn.Module, job: Job | None, loss: LoopLoss) -> Job:
    """As this node has it: the model is there already, and who computes is the loop."""
    if job is not None:
        return msgspec.structs.replace(job, model=lambda: model, loss=loss, finish=None)
    return Job(model=lambda: model, dataset=_no_data, loss=loss, optimizer=lambda params: torch.optim.SGD(params, 0.1))


def _no_data() -> Any:
    raise TrainingFailed("wide.member was given no job, so there is no data here")
