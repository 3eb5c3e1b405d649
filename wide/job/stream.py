"""Data that can only be read from its beginning to its end: an IterableDataset. Read once, by one process; what was
read stays until its step is merged, for a batch may have to be handed out again.

Samples are numbered through all passes. Random numbers follow from a sample's number, however far ahead it is read.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator
from typing import Any

from wide.errors import TrainingFailed
from wide.job.here import nowhere
from wide.job.loading import users_code
from wide.job.order import Ids, Order
from wide.job.seeding import OwnGenerators, generators, mix, seed_everything

ENDLESS = 1 << 50  # samples, if nobody has said how many passes are wanted
READING = 7  # in the seeds' path


class as_read(Order):  # noqa: N801
    """The only order there is."""

    def ids(self, samples: int, batch_size: int, epoch: int, generator: Any) -> Ids:
        return range(epoch * samples, (epoch + 1) * samples)


class Stream:
    """`length` of a pass; ENDLESS: one pass follows the other, without an end between them."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self._dataset, self._seed = dataset, seed
        self._own = OwnGenerators(dataset=dataset)
        self.length, self._every = ENDLESS, 1
        self._iterator: Iterator[Any] | None = None
        self._pass = self._in_pass = 0  # which one is being read, and how much of it was
        self._next = self._base = 0  # the numbers of the sample that will be read next, and of the first that is kept
        self._reading = threading.RLock()
        self._broken: TrainingFailed | None = None
        self._kept: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}  # where steps begin: how to go on from there

    def use(self, length: int, every: int) -> None:
        """How many samples a pass has, and a step."""
        self.length, self._every = length, every

    def count(self) -> int:
        """As it says itself; or by reading all of it once."""
        with users_code("the data set cannot say how long it is"):
            if hasattr(self._dataset, "__len__"):
                return len(self._dataset)
        counted = Stream(self._dataset, self._seed)
        while counted._read():
            counted._kept.clear()
        return counted._in_pass

    @property
    def base(self) -> int:
        return self._base

    def fetch(self, first: int, end: int) -> list[Any]:
        with self._reading:
            while self._next < end:
                self._read_next()
        try:
            return [self._kept[i] for i in range(first, end)]
        except KeyError:
            raise TrainingFailed(f"sample {first} of the stream was read, and is gone") from None

    def forget(self, below: int) -> None:
        """Nobody will ask for those."""
        for number in range(self._base, min(below, self._next)):
            self._kept.pop(number, None)
        for number in list(self._marks):  # another thread may be reading
            if number < below:
                self._marks.pop(number, None)
        self._base = max(self._base, below)

    def state(self, number: int) -> Any:
        """How to go on with this sample, which begins a step; None, if that is not known."""
        if number not in self._marks and self._reading.acquire(blocking=False):
            try:
                if number == self._next:
                    self._mark()
            finally:
                self._reading.release()
        return self._marks.get(number)

    def go_on_from(self, number: int, state: Any) -> int:
        """The next sample is this one. Returns how many had to be read again, because the data set has no state_dict,
        or did not say.
        """
        self._base = number
        again = 0
        if state is not None:
            self._pass, self._in_pass, self._next, said = state
            if said is not None:
                with users_code("the data set does not take back its state (load_state_dict)"):
                    self._dataset.load_state_dict(said)
                if not self._in_pass:
                    self._see_end()
        while self._next < number:
            self._read_next()
            self._kept.pop(self._next - 1, None)
            again += 1
        return again

    def _see_end(self) -> None:
        """Between two passes: a data set that was told where it had been has to be seen to end there, before it begins
        anew. One that begins at once is in the next pass already.
        """
        if not self._read():
            self._iterator = None

    def _read_next(self) -> None:
        self._mark()
        if self._in_pass < self.length and self._read():
            return
        if self.length != ENDLESS and self._in_pass < self.length:
            raise TrainingFailed(
                f"the data set ended after {self._in_pass} samples of {self.length}: its length, or an earlier "
                "pass, said otherwise"
            )
        if not self._in_pass:
            raise TrainingFailed(
                f"the data set gave no sample in pass {self._pass + 1}: can it be read only once? Give it an "
                "__iter__ that begins anew, or fewer steps"
            )
        if self._in_pass == self.length and self._iterator is not None and self._read():
            self._next -= 1  # it goes on, but this is as long as it said; otherwise it was seen to end
            self._kept.pop(self._next)
        self._pass, self._in_pass, self._iterator = self._pass + 1, 0, None
        self._read_next()

    def _mark(self) -> None:
        """Only at a step's beginning, for it may be large. The end of a pass is the beginning of the next one."""
        is_over = self._in_pass == self.length
        number, in_pass = (self._pass + 1, 0) if is_over else (self._pass, self._in_pass)
        at = in_pass if self.length != ENDLESS else self._next
        if at % self._every == 0 and self._next not in self._marks and hasattr(self._dataset, "state_dict"):
            with users_code("the data set's state_dict() failed"):
                said = copy.deepcopy(self._dataset.state_dict()) if self._next else None  # nothing was read yet
            self._marks[self._next] = (number, in_pass, self._next, said)

    def _read(self) -> bool:
        """One more; not, if there is none in this pass."""
        if self._broken is not None:
            raise self._broken  # a generator that has raised would look as if it were at its end
        try:
            with generators, nowhere(), users_code(f"the data set failed at sample {self._next}"):
                if self._iterator is None:
                    self._reseed(mix(self._seed, READING, self._pass))
                    if callable(set_epoch := getattr(self._dataset, "set_epoch", None)):
                        set_epoch(self._pass)
                    self._iterator = iter(self._dataset)
                self._reseed(mix(self._seed, READING, self._pass, self._in_pass))
                found = list(itertools.islice(self._iterator, 1))
        except TrainingFailed as error:
            self._broken = error
            raise
        if not found:
            return False
        self._kept[self._next] = found[0]
        self._next += 1
        self._in_pass += 1
        return True

    def _reseed(self, seed: int) -> None:
        seed_everything(seed)
        self._own.seed(seed)
