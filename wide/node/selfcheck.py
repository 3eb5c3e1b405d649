"""Does this program give the same numbers whenever, and in whatever order, its batches are computed? Tried, not
believed: two batches forwards, then backwards. Knows a trainer and batches; no network.

A pool gives any batch to any node at any time. Whatever the user's code keeps from one batch to the next (a counter, a
generator of its own, a teacher updated in the loss, weights changed in forward) would train something else than a
plain loop, and nobody would notice. So it is refused, in words.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from wide.codec.batch import fingerprints
from wide.codec.layout import Flat
from wide.errors import ParametersMoved, TrainingFailed
from wide.job.loading import users_code
from wide.job.samples import Samples
from wide.node.carried import Carried
from wide.node.trainer import Place, Trainer

BATCHES = 2
OTHER_SEED = 1_000_003  # far from that of any batch that is tried
KEEP = "keep it in a buffer (register_buffer), or derive it from the batch"
KEEP_DATA = "derive it from the sample's number, or draw from a generator, which is seeded for each batch"
OTHER_DATA = (
    "the data of a batch is another one when it is fetched again: dataset or collate keeps state, the loss changes "
    f"the samples themselves, or it follows from the time or the process. Whatever it is, {KEEP_DATA}"
)
REMEDY = "a pool computes any batch anywhere, so a result must follow from weights and batch alone (or: --no-check)"


BatchAt = Callable[[int, int], Any]


class Seen(NamedTuple):
    """What came of one batch."""

    data: list[tuple[int, str]]
    loss: float
    raw: torch.Tensor  # gradients, and what changed in the buffers
    touched: int
    logged: str  # of what the loss logs, all that training goes by

    @property
    def digest(self) -> bytes:
        words = f"{self.data}{self.loss!r}{self.touched}{self.logged}".encode()
        return hashlib.sha256(words + hashlib.sha256(self.raw.numpy().data).digest()).digest()


class SelfCheck:
    """`digest` is of all that was computed: another process, which begins with the other batch, must find the same.

    `batch_at(i, other)` gives a batch of step 0, as often as it is asked; with another seed, if `other` is not 0.
    `carried` was made before any batch was computed.
    """

    def __init__(
        self,
        trainer: Trainer,
        batch_at: Callable[[int, int], Any],
        count: int,
        carried: Carried,
        is_reversed: bool = False,
    ) -> None:
        self._trainer, self._batch_at = trainer, batch_at
        self._order = list(range(min(BATCHES, count)))[:: -1 if is_reversed else 1]
        self._carried = carried
        trainer.restore()
        self._before = trainer.bound.raw.clone()
        self.digest = ""

    def problem(self) -> str:
        """What is wrong, and what to write instead; empty if nothing is."""
        try:
            first = {i: self._compute(i) for i in self._order}
            if problem := self._repeat(first):
                return f"{problem}; {REMEDY}"
        except ParametersMoved:
            raise
        except TrainingFailed:
            return ""  # it will be met again, and told with its place in the run
        finally:
            self._trainer.take_back(self._before)
        digest = hashlib.sha256()
        for _, seen in sorted(first.items()):
            digest.update(seen.digest)
        self.digest = digest.hexdigest()
        return ""

    def _repeat(self, first: dict[int, Seen]) -> str:
        """The same batches again, backwards; and once more with other values of what has changed meanwhile."""
        self._carried.look()
        problem = ""
        for i in reversed(self._order):
            problem = problem or _difference(first[i], self._compute(i), self._trainer)
        if self._carried.has_switched:
            return "the loss switches the model between train() and eval(): switch it back before the loss returns"
        culprit = self._carried.culprit(lambda: self._tried(0), first[0].digest, self._with_other_weights)
        if culprit:
            return f"{culprit} changes from batch to batch, and the loss depends on it: {KEEP}"
        return problem

    def _compute(self, i: int, seed: int = 0) -> Seen:
        batch = self._batch_at(i, seed)
        data = fingerprints([(i, batch)])
        with users_code("computing the loss and its gradient failed"):
            leaf, (loss,) = self._trainer.sum([Place(0, i + seed, 1, 1.0)], lambda _: batch)
        logged = {name: said for name, said in sorted(leaf.logged.items()) if self._trainer.job.goes_by(name)}
        seen = Seen(data, loss, leaf.raw.clone(), leaf.touched, str(logged))
        self._trainer.release(leaf)
        return seen

    def _tried(self, i: int, seed: int = 0) -> bytes | None:
        """What comes of a batch; nothing, if a value that was only tried makes it fail."""
        try:
            return self._compute(i, seed).digest
        except (TrainingFailed, SystemExit):
            return None

    def _with_other_weights(self) -> bytes | None:
        """The last batch, as it would be later in the run, and with other random numbers."""
        self._trainer.take_back(self._before)
        with torch.no_grad():
            for view in self._trainer.bound.trainable:
                if view.is_floating_point():
                    view.mul_(1.03125)
        self._trainer.buffers_changed()
        try:
            return self._tried(self._order[-1], OTHER_SEED)
        finally:
            self._trainer.take_back(self._before)


def of_data(samples: Samples, batch_size: int, seed: int) -> str:
    """The same for the data alone, where batches are made in one process and computed in others."""
    carried = Carried(**samples.roots)
    count = min(BATCHES, -(-len(samples) // batch_size))

    def data(i: int, other: int = 0) -> list[tuple[int, str]]:
        return fingerprints([(i, samples.first_batch(i, batch_size, seed, other))])

    try:
        first = {i: data(i) for i in range(count)}
        carried.look()
        is_same = all(data(i) == first[i] for i in reversed(range(count)))
        culprit = carried.culprit(lambda: data(0), first[0], lambda: data(count - 1, OTHER_SEED))
    except TrainingFailed:
        return ""
    if culprit:
        return f"{culprit} changes from batch to batch, and the data depends on it: {KEEP_DATA}; {REMEDY}"
    return "" if is_same else f"{OTHER_DATA}; {REMEDY}"


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """To the bit; a NaN is itself."""
    return one.shape == other.shape and torch.equal(
        one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8)
    )


def _difference(first: Seen, again: Seen, trainer: Trainer) -> str:
    """In which way the same batch gave something else, and the likeliest reason."""
    if first.data != again.data:
        return OTHER_DATA
    is_same_loss = repr(first.loss) == repr(again.loss)
    if is_same_loss and first.touched == again.touched and torch.equal(first.raw, again.raw):
        if first.logged == again.logged:
            return ""
        return (
            f"what the loss logs of a batch, and training goes by, is another value when it is computed again "
            f"({first.logged}, then {again.logged}): log what follows from the batch"
        )
    where = f"the loss ({first.loss:.6g}, then {again.loss:.6g})"
    if is_same_loss:
        where = _tensor(first, again, trainer)
    return (
        f"{where} of a batch is another one when it is computed again: the model or the loss keeps state from batch to "
        f"batch (a counter, an average in a plain attribute, an iterator). {KEEP.capitalize()}"
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
