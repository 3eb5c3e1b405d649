"""Does this program give the same numbers whenever, and in whatever order, its batches are computed? Tried, not
believed: two batches forwards, then backwards. Knows a trainer and samples; no network.

A pool gives any batch to any node at any time. Whatever the user's code keeps from one batch to the next (a counter, a
generator of its own, a teacher updated in the loss, weights changed in forward) would train something else than a
plain loop, and nobody would notice. So it is refused, in words.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from wide.codec.batch import fingerprints
from wide.codec.layout import Flat
from wide.errors import TrainingFailed
from wide.job.loading import users_code
from wide.job.samples import Samples
from wide.job.seeding import mix
from wide.node.trainer import Trainer

BATCHES = 2
REMEDY = "a pool computes any batch anywhere, so a result must follow from weights and batch alone (or: --no-check)"


class Seen(NamedTuple):
    """What came of one batch."""

    data: list[tuple[int, str]]
    loss: float
    raw: torch.Tensor  # gradients, and what changed in the buffers
    touched: int


class SelfCheck:
    """`digest` is of all that was computed: another process, which begins with the other batch, must find the same."""

    def __init__(self, trainer: Trainer, samples: Samples, batch_size: int, is_reversed: bool = False) -> None:
        self._is_reversed = is_reversed
        self._trainer, self._samples, self._batch_size = trainer, samples, batch_size
        self._parameters = list(trainer.model.named_parameters())
        self._before = [(p.data_ptr(), p.detach().clone()) for _, p in self._parameters]
        trainer.buffers_changed()
        self._modes = [module.training for module in trainer.model.modules()]
        self.digest = ""

    def problem(self) -> str:
        """What is wrong, and what to write instead; empty if nothing is."""
        count = min(BATCHES, -(-len(self._samples) // self._batch_size))
        first: dict[int, Seen] = {}
        try:
            order = list(range(count))[:: -1 if self._is_reversed else 1]
            for i in (*order, *reversed(order)):
                seen = self._compute(i)
                problem = self._touched() or (_difference(first[i], seen, self._trainer) if i in first else "")
                if problem:
                    return f"{problem}; {REMEDY}"
                first.setdefault(i, seen)
        except TrainingFailed:
            return ""  # it will be met again, and told with its place in the run
        finally:
            self._restore()
        digest = hashlib.sha256()
        for _, seen in sorted(first.items()):
            digest.update(f"{seen.loss!r}{seen.touched}".encode())
            digest.update(seen.raw.numpy().data)
        self.digest = digest.hexdigest()
        return ""

    def _compute(self, i: int) -> Seen:
        ids = torch.arange(i * self._batch_size, min((i + 1) * self._batch_size, len(self._samples)))
        seed = mix(self._trainer.seed, 0, i)
        batch = self._samples.batch(ids, seed)
        data = fingerprints([(i, batch)])
        with users_code("computing the loss and its gradient failed"):
            leaf, loss = self._trainer.leaf(batch, seed, 1.0)
        seen = Seen(data, loss, leaf.raw.clone(), leaf.touched)
        self._trainer.release(leaf)
        return seen

    def _touched(self) -> str:
        """Has computing a batch changed what only the optimizer may change?"""
        for (name, parameter), (pointer, value) in zip(self._parameters, self._before, strict=True):
            kind = "parameter" if parameter.requires_grad else "frozen parameter"
            if parameter.data_ptr() != pointer:
                return (
                    f"{kind} {name} was replaced while a batch was computed (by .data = …, or vector_to_parameters): "
                    "compute with a changed copy instead, or use torch.nn.utils.parametrizations"
                )
            if not _same(parameter.detach(), value):
                return (
                    f"{kind} {name} was changed while a batch was computed: only the optimizer may do that. Keep what "
                    "follows the weights (a teacher, an average) in buffers"
                )
        if [module.training for module in self._trainer.model.modules()] != self._modes:
            return "the loss switches the model between train() and eval(): switch it back before the loss returns"
        return ""

    def _restore(self) -> None:
        """As if nothing had been computed."""
        with torch.no_grad():
            for (_, parameter), (pointer, value) in zip(self._parameters, self._before, strict=True):
                if parameter.data_ptr() == pointer:
                    parameter.copy_(value)
        self._trainer.restore_buffers()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit; a NaN is itself."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def _difference(first: Seen, again: Seen, trainer: Trainer) -> str:
    """In which way the same batch gave something else, and the likeliest reason."""
    if first.data != again.data:
        return (
            "the data of a batch is another one when it is fetched again: dataset or collate keeps state, or draws "
            "from a generator of its own. Draw from torch's, numpy's or random's global one, which is seeded for each "
            "batch"
        )
    is_same_loss = repr(first.loss) == repr(again.loss)
    if is_same_loss and first.touched == again.touched and torch.equal(first.raw, again.raw):
        return ""
    where = f"the loss ({first.loss:.6g}, then {again.loss:.6g})"
    if is_same_loss:
        where = _tensor(first, again, trainer)
    return (
        f"{where} of a batch is another one when it is computed again: the model or the loss keeps state from batch to "
        "batch (a counter, an average in a plain attribute, a generator of its own). Keep it in a buffer "
        "(register_buffer), or derive it from the batch"
    )


def _tensor(first: Seen, again: Seen, trainer: Trainer) -> str:
    """Which one."""
    one, other = Flat(trainer.layout, only_live=True), Flat(trainer.layout, only_live=True)
    one.raw.copy_(first.raw)
    other.raw.copy_(again.raw)
    for slot, a, b in zip(trainer.layout.trainable, one.trainable, other.trainable, strict=True):
        if not _same(a, b):
            return f"the gradient of {slot.name}"
    slots = trainer.layout.averaged + trainer.layout.kept
    for slot, a, b in zip(slots, one.averaged + one.kept, other.averaged + other.kept, strict=True):
        if not _same(a, b):
            return f"what is added to buffer {slot.name}"
    return "the set of parameters with a gradient"
