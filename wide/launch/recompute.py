"""A run's steps once more, in this one process: what each row of the ledger should have been. Nothing is written.

Whoever computed which block, the tree's sums are the same; so the blocks that the ledger has are computed here, one
after the other, with the weights that follow from those before.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from wide.codec.batch import fingerprints
from wide.codec.digest import Digest
from wide.codec.layout import Flat
from wide.coordinator import events, resume
from wide.coordinator.checkpoints import Checkpoints
from wide.coordinator.events import Position
from wide.coordinator.judging import Judge
from wide.coordinator.master import Master
from wide.coordinator.record import Point, Record
from wide.coordinator.run import Run
from wide.coordinator.taken import Taken
from wide.errors import ParametersMoved, UsageError
from wide.job.definition import Job
from wide.job.here import Here
from wide.job.model import begun, build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.job.settings import build
from wide.launch.length import length, wanted
from wide.launch.past import Past, Row
from wide.node.greeting import pick_device
from wide.node.trainer import Place, Trainer
from wide.store.checkpoint import Checkpoint
from wide.store.state_dict import unpack
from wide.store.weights import state_sha256
from wide.strategy.catalogue import EXACT
from wide.strategy.policy import Made
from wide.strategy.tree import Block
from wide.telemetry.clock import REAL
from wide.telemetry.journey import Journey
from wide.telemetry.totals import Part

NO_JOURNEY = Journey(0.0, 0.0, 0.0, 0.0)


class Nowhere:
    """In run.db's place: a record is kept, and nobody reads it."""

    waiting = 0

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def insert_packed(self, table: str, at: float, count: int, words: str, data: bytes) -> None: ...
    def rewind(self, version: int, steps: int) -> None: ...
    def void(self, version: int) -> None: ...
    def keep_from(self, step: int) -> None: ...
    def beside(self, deed: Callable[[], None]) -> None: ...
    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return []

    def settle(self, timeout_s: float) -> bool:
        return True


class Recalled:
    """In evaluate()'s place: what it said then."""

    is_busy = is_full = False

    def __init__(self, job: Job, past: Past) -> None:
        self.is_wanted = job.evaluate is not None and job.is_judged
        self._past = past
        self.run: Run

    def copy(self, weights: Flat, live_nbytes: int) -> memoryview:
        return memoryview(b"")

    def ask(self, epoch: int, step: int, weights: memoryview) -> None:
        said = self._past.evaluated(step)
        if not said:
            raise UsageError(
                f"run.db does not have what evaluate() said after step {step}, which training went by: what follows "
                "cannot be computed again"
            )
        self.run.evaluated(epoch, step, said)

    def hurry(self) -> None: ...


class Kept:
    """In the disk's place: the last checkpoint."""

    took_s = 0.0
    last: Checkpoint

    def put(self, checkpoint: Checkpoint) -> None:
        self.last = checkpoint

    def name_best(self, step: int) -> None: ...


class Recompute:
    """`step` is the next one; it began from `saved`, or, if that is None, at the beginning."""

    def __init__(self, job: Job, past: Past, saved: Checkpoint | None, checks: bool = True) -> None:
        self._job, self._past, self._options = job, past, past.options(float("inf"))
        self._seed = past.seed if past.seed is not None else job.seed
        self._digest = Digest(past.key(), job.goes_by)
        self._device = pick_device(self._options.device)
        self._samples = Samples(job, self._seed)
        self._schedule = self._scheduled()
        self._steps: int | None = None  # of the run, as it was known then
        self._saved_as: dict[str, Any] = saved.state["judged"] if saved is not None else {}
        self.step = saved.step if saved is not None else 0
        self._record = Record(Nowhere(), self._schedule, REAL)
        self._recall()
        if checks:
            self._check_data()
        self._begin(saved, ())
        state = unpack(saved.state.get("stream"), saved.others) if saved is not None else None
        self._samples.go_on_from(self._schedule, self.step, state)

    def _scheduled(self) -> Schedule:
        job, samples = self._job, self._samples
        counts_epochs = wanted(self._options, job)[1] is not None
        samples.measure(counts_epochs, samples.batch_size * (job.batches_per_step or 1))
        kind = (samples.batch_size, job.batches_per_step, self._seed, samples.order, samples.drop_last)
        return Schedule(len(samples), *kind, job.evaluate_every)

    def _check_data(self) -> None:
        data = {str(number): digest for number, digest in fingerprints(self._samples.probes(self._seed))}
        data["build"] = build(torch.device("cpu"), self._job.threads)
        if differs := resume.differing(self._past.data, data):
            raise UsageError(
                f"sample {differs} is not what it was when {self._past.folder} was begun: put the data back, or say "
                "--force to compute with what is there now"
            )

    def _recall(self) -> None:
        """What a scheduler may go by, of the steps before."""
        losses = self._past.losses(self.step)
        self._record.losses.extend(losses + [float("nan")] * (self.step - len(losses)))
        for step, name, value, samples in self._past.logged(0, self.step) if self._job.is_judged else ():
            self._record.remember(name, Point(step, value, samples))

    def _begin(self, saved: Checkpoint | None, moved: Collection[str]) -> None:
        """Model, optimizer and all, as they were; with room for what is known to be moved."""
        job, seed = self._job, self._seed
        model = begun(build_model(job, seed), job.init)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        flags = {name: tensor.requires_grad for name, tensor in tensors}
        before: dict[str, bool] = saved.state.get("moved", {}) if saved is not None else {}
        moves = {name: flags[name] for name in moved if name in flags} | before
        self._master = master = Master(job, model, seed, moves, here=self._here)
        if saved is not None:
            start = resume.restore(saved, self._schedule, master, str(self._past.folder))
            if start.position.front != self._schedule.position(start.position.steps):
                raise UsageError(f"the checkpoint of step {saved.step} was saved in the middle of a step, not in sync")
        self._trainer = Trainer(job, seed, self._device, master.spare, master.moves)
        self._has_weights = False
        self._judge = Judge(job, master.descent, self._saved_as or None) if job.is_judged else None
        evaluation = Recalled(job, self._past)
        self._run = Run(master, self._record, evaluation, None, EXACT.name, judge=self._judge)
        self._run.tell_to(lambda event: None)
        self._run.when_merged = lambda step: self._samples.merged(self._schedule, step)
        evaluation.run = self._run

    def _here(self, step: int) -> Here:
        return Here(step, self._schedule.step(step).epoch, 0, self._steps)

    @property
    def _known(self) -> set[str]:
        return set(self._master.moves)

    # ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────

    def compare(self, rows: Sequence[Row]) -> list[Row]:
        """Which of these rows of the next step are not what their batches give. The step itself is not made."""
        self._steps = length(self._past.options(rows[0].at), self._job, self._schedule)
        while True:
            try:
                differ = [row for row in rows if not self._is_right(row)]
            except ParametersMoved as error:
                self._widen(error.names)
                continue
            more = self._past.moved - self._known
            if not differ or not more:
                return differ
            self._widen(more)  # the run may have known of them here

    def make(self, rows: Sequence[Row]) -> None:
        """The version that these rows, which are all of the step, give."""
        step = self._schedule.step(self.step)
        covered = [batch for row in rows for batch in range(row.first, row.last + 1)]
        if covered != list(range(step.batches)):
            raise UsageError(f"the ledger does not have each batch of step {self.step} once: it is not whole")
        try:
            self._run.make_version(events.MakeVersion(self.step, Made(1.0), self.step + 1))
        except ParametersMoved as error:
            names = ", ".join(error.names[:3])
            raise UsageError(
                f"step {self.step} moves {names} beside the optimizer, and no checkpoint knows of that: it cannot be "
                "computed again"
            ) from None
        is_evaluated = self._schedule.is_evaluated(step)
        self._run.performers[events.CloseStep](events.CloseStep(self.step, is_evaluated))
        self._record.flush()
        self._has_weights = False
        self.step += 1

    def batches(self, step: int) -> int:
        return self._schedule.step(step).batches

    def sha256(self) -> str:
        """Of the weights, as a checkpoint would have them now."""
        with self._master.at_rest():
            state = self._master.model.state_dict()
            return state_sha256({k: v.detach() for k, v in state.items() if isinstance(v, torch.Tensor)})

    def _is_right(self, row: Row) -> bool:
        start = self._schedule.position(self.step)
        block = Block(start + row.first, start + row.last + 1)
        flat, losses, sizes = self._computed(block)
        is_right = row.digest is None or self._digest.of(flat, losses) == row.digest
        self._record.parts.setdefault(row.node, Part("", 0))
        self._run.take(block.first, Taken(self._own(flat), sizes, losses, NO_JOURNEY))
        self._run.performers[events.MergeUpdate](events.MergeUpdate(row.node, block.first, block, self.step + 1))
        return is_right

    def _computed(self, block: Block) -> tuple[Flat, list[float], list[int]]:
        """As whoever was granted the block would have (alone.py)."""
        schedule, trainer = self._schedule, self._trainer
        trainer.steps = self._steps
        if not self._has_weights:
            nbytes = trainer.layout.nbytes if trainer.expects_all else trainer.layout.live_nbytes
            trainer.weights.raw[:nbytes].copy_(self._master.weights.raw[:nbytes])
            trainer.weights_changed()
            trainer.take_what_never_changes()
            self._has_weights = True
        ((step, first, end),) = schedule.stretches(*block)
        sizes = schedule.sizes(step, first, end)
        numbers = range(first, end)
        places = [
            Place(step.number, batch, size, size / step.samples, step.epoch)
            for batch, size in zip(numbers, sizes, strict=True)
        ]

        def batch_at(i: int) -> Any:
            ids, seed = schedule.ids(step, numbers[i], numbers[i] + 1), trainer.seed_of(step.number, numbers[i])
            return self._samples.batch(ids, seed, trainer.here(places[i]))

        flat, losses = trainer.compute(places, batch_at)
        return flat, losses, sizes

    def _own(self, flat: Flat) -> Flat:
        """In memory of the master's: on a CPU it is that already."""
        if self._trainer.is_on_cpu:
            return flat
        mine = self._master.spare.take()
        mine.raw.copy_(flat.raw)
        mine.touched, mine.weights, mine.logged = flat.touched, flat.weights, flat.logged
        return mine

    def _widen(self, names: Collection[str]) -> None:
        """The same version again, with room for what moves."""
        kept, judged = Kept(), self._judge.state if self._judge is not None else dict
        saving = Checkpoints(self._master, self._record, list, {}, kept, {}, None, judged)
        front = self._schedule.position(self.step)
        copy = saving.prepare(Position(EXACT.name, self.step, self.step, float(self.step), front), None)
        assert copy is not None
        copy()
        self._saved_as = kept.last.state["judged"]
        saved = kept.last._replace(state=json.loads(json.dumps(kept.last.state)))
        self._begin(saved, self._known | set(names))
