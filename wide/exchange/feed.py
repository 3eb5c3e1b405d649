"""What a lease's batches are made of: sample ids for nodes that have the data, whole batches for those that do not.

Batches are built ahead of time in one thread, so that the coordinator's loop seldom waits for the user's data set.
"""

from __future__ import annotations

import functools
from concurrent.futures import Future, ThreadPoolExecutor

from wide.codec.batch import Packed, fingerprints, pack
from wide.errors import TrainingFailed
from wide.job.here import Here
from wide.job.samples import Samples
from wide.job.schedule import Schedule, Step, Stretch
from wide.job.seeding import generators, mix

AHEAD_BATCHES = 32
AHEAD_NBYTES = 256 << 20


class Feed:
    """Hands out the data of blocks, as ids or as packed batches."""

    def __init__(self, samples: Samples, schedule: Schedule, steps: int | None = None) -> None:
        self.samples, self.steps = samples, steps
        self.schedule = schedule
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="feed")
        self._ready: dict[tuple[int, int], Future[Packed]] = {}

    @functools.cached_property
    def probes(self) -> list[tuple[int, str]]:
        """Fingerprints of some samples, by number; looked up once, when the first node has some to compare."""
        return fingerprints(self.samples.probes(self.schedule.seed))

    def ids(self, stretches: list[Stretch]) -> list[memoryview]:
        """The sample ids of a lease: int64, straight from the epoch's permutation."""
        return [self.schedule.ids_as_bytes(*stretch) for stretch in stretches]

    def batches(self, stretches: list[Stretch]) -> list[Packed]:
        """The lease's batches, packed."""
        places = [(step, batch) for step, first, end in stretches for batch in range(first, end)]
        if self.samples.is_gathered:  # one call into one big tensor: no thread could be quicker
            return [self._build(step, batch) for step, batch in places]
        for key in [key for key in self._ready if key[0] < stretches[0].step.number]:
            self._ready.pop(key).cancel()
        packed = [self._request(step, batch).result() for step, batch in places]
        self._look_ahead(stretches[-1].step, stretches[-1].end, packed[-1].nbytes)
        return packed

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def _look_ahead(self, step: Step, batch: int, nbytes: int) -> None:
        for _ in range(min(AHEAD_BATCHES, AHEAD_NBYTES // max(nbytes, 1))):
            if batch == step.batches:
                if step.number + 1 == self.steps:
                    break
                step, batch = self.schedule.step(step.number + 1), 0
            self._request(step, batch)
            batch += 1

    def _request(self, step: Step, batch: int) -> Future[Packed]:
        key = (step.number, batch)
        if key not in self._ready:
            self._ready[key] = self._thread.submit(self._build, step, batch)
        return self._ready[key]

    def _build(self, step: Step, batch: int) -> Packed:
        ids = self.schedule.ids(step, batch, batch + 1)
        seed = mix(self.schedule.seed, step.number, batch)
        here = Here(step.number, step.epoch, batch, self.steps)
        try:
            if self.samples.is_gathered:
                return pack(self.samples.batch(ids, seed, here))
            with generators:  # a collate may use its memory again: nobody else calls it before this is copied
                packed = pack(self.samples.batch(ids, seed, here))
                return packed._replace(buffers=[memoryview(bytes(raw)) for raw in packed.buffers])
        except TrainingFailed as error:
            where = f"step {step.number}, batch {batch}, coordinator: {error}"
            raise TrainingFailed(where, error.details) from None
