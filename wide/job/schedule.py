"""Which samples make which batch: that follows from the job alone, never from the pool.

A batch has a position in the run: its number, counted through all epochs. A step is some batches of one epoch, and one
update of the model. How an epoch is cut into batches and steps is its Cut: a few divisions where all batches are alike,
a table where the user's order makes them.
"""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch

from wide.errors import TrainingFailed
from wide.job.order import Ids, Order, Told, ask, remark, shuffled
from wide.job.seeding import mix

PIECES = 8  # batches that an update is cut into, if the job does not say; of two samples at least, as BatchNorm needs


class Step(NamedTuple):
    """`batches` batches of one epoch, from the epoch's batch `first` on; one update of the model."""

    number: int
    epoch: int
    first: int
    batches: int
    samples: int
    is_last_of_epoch: bool


class Stretch(NamedTuple):
    """The batches first…end-1 of one step."""

    step: Step
    first: int
    end: int


class Cut(Protocol):
    """How an epoch's samples are cut into batches, and these into steps."""

    batches: int
    steps: int

    def start(self, batch: int) -> int: ...  # the place of its first sample
    def first(self, step: int) -> int: ...  # the step's first batch
    def step_at(self, batch: int) -> int: ...


class Even:
    """Batches of one size, so many to a step; only the epoch's last ones may have less."""

    def __init__(self, samples: int, batch_size: int, batches_per_step: int) -> None:
        self._samples, self._size, self._per_step = samples, batch_size, batches_per_step
        self.batches = math.ceil(samples / batch_size)
        self.steps = math.ceil(self.batches / batches_per_step)

    def start(self, batch: int) -> int:
        return min(batch * self._size, self._samples)

    def first(self, step: int) -> int:
        return min(step * self._per_step, self.batches)

    def step_at(self, batch: int) -> int:
        return batch // self._per_step


class Pieces:
    """Updates of one size, each cut into batches that differ by a sample at most; only the epoch's last is smaller."""

    def __init__(self, samples: int, update: int) -> None:
        self._samples, self._update, self._most = samples, update, _count(update)
        self.steps = math.ceil(samples / update)
        self._rest = samples - (self.steps - 1) * update  # in the last step
        self.batches = (self.steps - 1) * self._most + _count(self._rest)

    def start(self, batch: int) -> int:
        step, piece = divmod(batch, self._most)
        samples = self._update if step < self.steps - 1 else self._rest
        size, larger = divmod(samples, _count(samples))
        return min(step * self._update + piece * size + min(piece, larger), self._samples)

    def first(self, step: int) -> int:
        return min(step * self._most, self.batches)

    def step_at(self, batch: int) -> int:
        return batch // self._most


class Table:
    """Batches as the user's order made them."""

    def __init__(self, sizes: Sequence[int], batches_per_step: int | None) -> None:
        cuts = [[size] for size in sizes] if batches_per_step is not None else [_pieces(size) for size in sizes]
        self._starts = [0, *itertools.accumulate(size for cut in cuts for size in cut)]
        self._firsts = [0, *itertools.accumulate(map(len, cuts))][:: batches_per_step or 1]
        self.batches = len(self._starts) - 1
        if self._firsts[-1] != self.batches:
            self._firsts.append(self.batches)
        self.steps = len(self._firsts) - 1

    def start(self, batch: int) -> int:
        return self._starts[batch]

    def first(self, step: int) -> int:
        return self._firsts[step]

    def step_at(self, batch: int) -> int:
        return bisect.bisect_right(self._firsts, batch) - 1


def _count(samples: int) -> int:
    """Of pieces."""
    return max(1, min(PIECES, samples // 2))


def _pieces(samples: int) -> list[int]:
    count = _count(samples)
    size, larger = divmod(samples, count)
    return [size + (i < larger) for i in range(count)]


class Sheet(NamedTuple):
    """An epoch: its samples in their order, as bytes too if they are kept, and how they are cut."""

    ids: Ids
    raw: memoryview | None
    cut: Cut


class Begin(NamedTuple):
    """Where an epoch begins: so many steps and batches of the run come before it."""

    steps: int
    batches: int


class Schedule:
    """The order of all samples of a run. `samples` are those of the data set, `per_epoch` those that an epoch sees (of
    a user's own order: the first one). If the job leaves out batches_per_step, batch_size is what one update sees.
    """

    def __init__(
        self,
        samples: int,
        batch_size: int,
        batches_per_step: int | None,
        seed: int,
        order: Order | Callable[[int, Any], Any] | None = None,
        drop_last: bool = False,
        evaluate_every: int | None = None,
    ) -> None:
        if samples < 1:
            raise TrainingFailed("the data set is empty (its length is 0): dataset() must return at least one sample")
        self.samples, self.batch_size, self.seed = samples, batch_size, seed
        self.given = {"samples": samples, "batch_size": batch_size, "batches_per_step": batches_per_step}
        self._asked_per_step, self._drop_last, self._evaluate_every = batches_per_step, drop_last, evaluate_every
        self._order = order if order is not None else shuffled()
        self.batches_per_step = batches_per_step or _count(batch_size)
        self.samples_per_step = batch_size * (batches_per_step or 1)
        self._sheets: dict[int, Sheet] = {}
        self._sums: dict[int, int] = {}  # of a user's order, by epoch
        self._begins: list[Begin] = []  # of epochs that differ
        self.remark = ""  # what is odd about the user's order
        count = self._order.count(samples) if isinstance(self._order, Order) else None
        self._even: Cut | None = self._cut(self._whole(count)) if count is not None else None
        if self._even is None:
            first = self._again(0)
            self.remark, count = remark(torch.as_tensor(first.ids), samples), len(first.ids)
        self.per_epoch = self._whole(count or 0)
        cut = self._even or self._sheet(0).cut
        self.batches_per_epoch, self.steps_per_epoch = cut.batches, cut.steps
        if self._even is None and batches_per_step is None:
            self.batches_per_step = cut.first(1)
            self.samples_per_step = cut.start(self.batches_per_step)
        if batches_per_step is not None or self._even is None:
            self.given["per_epoch"] = self.per_epoch
        self.step = lru_cache(maxsize=8)(self._step)  # asked for again and again, on the way of every gradient
        self._last = self._before = (self.step(0), 0)  # steps that were asked for, and where they begin

    @property
    def is_even(self) -> bool:
        """Are all epochs cut in the same way?"""
        return self._even is not None

    def is_evaluated(self, step: Step) -> bool:
        """Is the model evaluated after this one?"""
        if self._evaluate_every is None:
            return step.is_last_of_epoch
        return (step.number + 1) % self._evaluate_every == 0

    def steps_for(self, epochs: float) -> int:
        if self._even is not None:
            return max(1, math.ceil(epochs * self.steps_per_epoch - 1e-9))
        whole, part = divmod(epochs, 1)
        more = math.ceil(part * self._sheet(int(whole)).cut.steps - 1e-9) if part > 0 else 0
        return max(1, self._begin(int(whole)).steps + more)

    def _step(self, number: int) -> Step:
        epoch, within, cut = self._at_step(number)
        first, end = cut.first(within), cut.first(within + 1)
        return Step(number, epoch, first, end - first, cut.start(end) - cut.start(first), within == cut.steps - 1)

    def position(self, number: int) -> int:
        """Of a step's first batch."""
        epoch, within, cut = self._at_step(number)
        return self._begin(epoch).batches + cut.first(within)

    def step_at(self, position: int) -> Step:
        return self._around(position)[0]

    def _around(self, position: int) -> tuple[Step, int]:
        """The step there, and its first position: mostly one of two neighbours, for work is given ahead. Threads may
        ask at the same time.
        """
        last, here = self._last, self._before
        step, start = last
        if start <= position < start + step.batches:
            return last
        step, start = here
        if not start <= position < start + step.batches:
            step = self._step_at(position)
            here = step, self.position(step.number)
        self._last, self._before = here, last
        return here

    def _step_at(self, position: int) -> Step:
        if self._even is not None:
            epoch, index = divmod(position, self.batches_per_epoch)
        else:
            epoch = self._epoch_of(position, 1)
            index = position - self._begins[epoch].batches
        return self.step(self._begin(epoch).steps + self._cut_of(epoch).step_at(index))

    def stretches(self, first: int, end: int) -> list[Stretch]:
        """The positions first…end-1, step by step."""
        found = []
        while first < end:
            step, start = self._around(first)
            until = min(end, start + step.batches)
            found.append(Stretch(step, first - start, until - start))
            first = until
        return found

    def sizes(self, step: Step, first: int, end: int) -> list[int]:
        """How many samples each of the step's batches first…end-1 has."""
        cut = self._cut_of(step.epoch)
        starts = [cut.start(step.first + batch) for batch in range(first, end + 1)]
        return [after - before for before, after in itertools.pairwise(starts)]

    def share(self, first: int, sizes: Sequence[int]) -> float:
        """How many steps' worth of samples are in batches of these sizes, from the position `first` on."""
        step, start = self._around(first)
        if first + len(sizes) <= start + step.batches:
            return sum(sizes) / step.samples
        found = 0.0
        for step, begin, end in self.stretches(first, first + len(sizes)):
            found += sum(sizes[: end - begin]) / step.samples
            sizes = sizes[end - begin :]
        return found

    def ids(self, step: Step, first: int, end: int) -> torch.Tensor:  # (samples,) int64, a view
        """The samples of the step's batches first…end-1, in order."""
        sheet = self._sheet(step.epoch)
        ids = sheet.ids[sheet.cut.start(step.first + first) : sheet.cut.start(step.first + end)]
        return ids if isinstance(ids, torch.Tensor) else torch.arange(ids.start, ids.stop)

    def ids_as_bytes(self, step: Step, first: int, end: int) -> memoryview:
        """The same, as they are sent."""
        sheet = self._sheet(step.epoch)
        if sheet.raw is None:
            raw: memoryview = self.ids(step, first, end).numpy().data.cast("B")
            return raw
        return sheet.raw[8 * sheet.cut.start(step.first + first) : 8 * sheet.cut.start(step.first + end)]

    # ── epochs ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _at_step(self, number: int) -> tuple[int, int, Cut]:
        """The epoch of a step, its number there, and how that epoch is cut."""
        if self._even is not None:
            epoch, within = divmod(number, self.steps_per_epoch)
            return epoch, within, self._even
        epoch = self._epoch_of(number, 0)
        return epoch, number - self._begins[epoch].steps, self._cut_of(epoch)

    def _epoch_of(self, number: int, kind: int) -> int:
        """Of a step (0) or of a batch (1), where epochs differ."""
        while not self._begins or self._begins[-1][kind] <= number:
            self._begin(len(self._begins))
        return bisect.bisect_right(self._begins, number, key=lambda begin: begin[kind]) - 1

    def _begin(self, epoch: int) -> Begin:
        if self._even is not None:
            return Begin(epoch * self.steps_per_epoch, epoch * self.batches_per_epoch)
        while len(self._begins) <= epoch:
            before = self._begins[-1] if self._begins else Begin(0, 0)
            cut = self._sheet(len(self._begins) - 1).cut if self._begins else None
            self._begins.append(Begin(before.steps + cut.steps, before.batches + cut.batches) if cut else before)
        return self._begins[epoch]

    def _cut_of(self, epoch: int) -> Cut:
        return self._even or self._sheet(epoch).cut

    def _sheet(self, epoch: int) -> Sheet:
        if epoch not in self._sheets:
            self._sheets = {e: kept for e, kept in self._sheets.items() if abs(e - epoch) == 1}  # leases may overlap
            self._sheets[epoch] = self._made(epoch)
        return self._sheets[epoch]

    def _made(self, epoch: int) -> Sheet:
        seed = mix(self.seed, epoch)
        if self._even is not None:
            assert isinstance(self._order, Order)
            ids = self._order.ids(self.samples, self.batch_size, epoch, torch.Generator().manual_seed(seed))
            return Sheet(ids, _raw(ids), self._even)
        told = self._again(epoch)
        cut = self._cut(self._whole(len(told.ids))) if told.sizes is None else Table(told.sizes, self._asked_per_step)
        return Sheet(told.ids, _raw(told.ids), cut)

    def _again(self, epoch: int) -> Told:
        """A user's order is asked for an epoch whenever that is needed: it must say the same."""
        assert not isinstance(self._order, Order)
        told = ask(self._order, self.samples, epoch, mix(self.seed, epoch))
        if epoch not in self._sums:
            self._sums[epoch] = _sum(told.ids)
            told = ask(self._order, self.samples, epoch, mix(self.seed, epoch))
        if self._sums[epoch] != _sum(told.ids):
            raise TrainingFailed(
                f"order gives another order for epoch {epoch} when it is asked again: derive it from epoch and "
                "generator alone (a loader's sampler: from set_epoch, or torch's generator)"
            )
        return told

    def _cut(self, samples: int) -> Cut:
        if self._asked_per_step is None:
            return Pieces(samples, self.batch_size)
        return Even(samples, self.batch_size, self._asked_per_step)

    def _whole(self, samples: int) -> int:
        """Without a last batch that is smaller, if that is wanted."""
        if not self._drop_last:
            return samples
        if samples < self.batch_size:
            raise TrainingFailed(f"drop_last leaves nothing: {samples} samples are less than one batch")
        return samples - samples % self.batch_size


def _raw(ids: Ids) -> memoryview | None:
    if isinstance(ids, range):
        return None
    raw: memoryview = ids.numpy().data.cast("B")
    return raw


def _sum(ids: torch.Tensor) -> int:
    return zlib.crc32(ids.numpy().data.cast("B"))
