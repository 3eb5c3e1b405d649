"""What a run needs to go on, kept beside training: copied between two versions, written by a thread. Knows the master,
the record and the checkpoint's files. How a run goes on from one is resume.py's.

The ledger is on disk before the checkpoint that contains it. So whoever goes on from a checkpoint finds all of its
rows, and drops those of later versions, whose batches are computed again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from wide.coordinator.events import Position
from wide.coordinator.master import Master
from wide.coordinator.record import Db, Record
from wide.errors import TrainingFailed
from wide.store.checkpoint import Checkpoint, name_best, oldest_step, write
from wide.store.state_dict import Packing, Unwritable
from wide.store.weights import state_sha256
from wide.telemetry.clock import REAL
from wide.telemetry.log import log
from wide.telemetry.process import give_back_free_memory
from wide.telemetry.totals import NodeTotals

SETTLE_S = 10.0  # for the ledger
RETRY_S = 2.0
CLOSING_S = 30.0  # how long the last checkpoint is tried
LARGE_NBYTES = 32 << 20  # what never changes, and is so much, stands once in a run's folder


class Writer(Protocol):
    """Takes a checkpoint over and writes it, now or soon."""

    took_s: float  # the last one

    def put(self, checkpoint: Checkpoint) -> None: ...
    def name_best(self, step: int) -> None: ...  # the checkpoint of this step, which it was given


class Checkpoints:
    """`save` copies and returns. `asked` are the options that a run keeps when it is resumed, `data` fingerprints of
    some samples, `version` the last that is on disk already.
    """

    def __init__(
        self,
        master: Master,
        record: Record,
        nodes: Callable[[], list[NodeTotals]],
        asked: dict[str, Any],
        writer: Writer,
        data: dict[str, str],
        version: int | None = None,
        judged: Callable[[], dict[str, Any]] = dict,
        stream: Callable[[int], Any] = lambda steps: None,
    ) -> None:
        self._master, self._record, self._nodes, self._asked, self._writer = master, record, nodes, asked, writer
        self._data, self._judged, self._stream = data, judged, stream
        self._version = version
        self._has_told = False
        layout = master.layout
        self._is_split = layout.nbytes - layout.live_nbytes >= LARGE_NBYTES
        self._unchanging = {slot.name for slot in (*layout.frozen, *layout.constant)}
        self._is_first = True

    @property
    def took_s(self) -> float:
        """To write the last one."""
        return self._writer.took_s

    def prepare(self, position: Position, fold_state: Any) -> Callable[[], None] | None:
        """What copies and hands over all of it: between two versions, wherever. None: that was done before."""
        if position.version == self._version:
            return None
        self._version, record = position.version, self._record
        record.flush(force=True)
        numbers = {
            "position": msgspec.to_builtins(position),
            "asked": self._asked,
            "schedule": record.schedule.given,
            "batches": record.batches,
            "samples": record.samples,
            "seconds": record.seconds,
            "epochs": record.batches / record.schedule.batches_per_epoch,
            "nodes": [asdict(totals) for totals in self._nodes()],
            "data": self._data,
            "judged": self._judged(),
        }
        numbers["stream"] = self._stream(position.steps)
        return lambda: self._writer.put(self._copy(position.steps, numbers, fold_state))

    def name_best(self, steps: int) -> None:
        self._writer.name_best(steps)

    def _copy(self, steps: int, numbers: dict[str, Any], fold_state: Any) -> Checkpoint:
        """Where an optimizer trains with other weights than those that are to be used, both are kept."""
        master, packing = self._master, Packing()
        if master.descent.switches:
            for name, view in master.named_views:
                packing.tensors[f"model.{name}"] = view.detach().clone(memory_format=torch.contiguous_format)
        numbers["descent"] = packing.pack(master.descent.state(), "descent")
        with master.at_rest():
            return self._copy_of_all(packing, steps, numbers, fold_state)

    def _packed_stream(self, packing: Packing, state: Any) -> Any:
        """Without it, the stream is read again until where it was."""
        try:
            return packing.pack(state, "stream")
        except Unwritable as kind:
            if not self._has_told:
                log.warning("where the data set is cannot be written (%s): a run that is resumed reads it again", kind)
            self._has_told = True
            return None

    def _copy_of_all(self, packing: Packing, steps: int, numbers: dict[str, Any], fold_state: Any) -> Checkpoint:
        master = self._master
        tensors = {k: v.detach() for k, v in master.model.state_dict().items() if isinstance(v, torch.Tensor)}
        frozen = {key: tensors.pop(key) for key in self._unchanging & tensors.keys()} if self._is_split else {}
        model = {key: value.clone(memory_format=torch.contiguous_format) for key, value in tensors.items()}
        constant = {slot.name for slot in master.layout.constant}
        for name, view in master.named_views:
            kept = frozen.get(name, model.get(name))
            if kept is None and name in constant:
                continue  # model() makes it as it is
            if kept is None or kept.shape != view.shape or kept.dtype != view.dtype:
                packing.tensors[f"model.{name}"] = view.detach().clone(memory_format=torch.contiguous_format)
        state = {
            **numbers,
            "fold": packing.pack(fold_state, "fold"),
            "stream": self._packed_stream(packing, numbers["stream"]),
            "moved": master.moves,
        }
        if packing.left_out and not self._has_told:
            self._has_told = True
            log.warning("a run that is resumed begins without %s: it cannot be written", ", ".join(packing.left_out))
        if self._is_first:  # this one will be written; later ones, most likely, are the same file
            frozen = {key: value.clone(memory_format=torch.contiguous_format) for key, value in frozen.items()}
            self._is_first = False
        return Checkpoint(steps, model, packing.tensors, state, frozen)


class FileWriter:
    """A thread that writes the newest checkpoint, again and again if the disk fails."""

    def __init__(self, folder: Path, keep: int, db: Db) -> None:
        self._folder, self._keep, self._db = folder, keep, db
        self._changed = threading.Condition()
        self._waiting: list[Checkpoint] = []
        self._best: int | None = None  # which is to be named so
        self._frozen = ""  # a fingerprint of the weights that never change
        self._problem = ""
        self.took_s = 0.0
        self._is_writing = self._is_closed = self._has_given_up = False
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def put(self, checkpoint: Checkpoint) -> None:
        """One that waits is of no use any more, unless it is the best."""
        with self._changed:
            self._waiting = [one for one in self._waiting if one.step == self._best] + [checkpoint]
            self._changed.notify_all()

    def name_best(self, step: int) -> None:
        with self._changed:
            self._best = step
            self._changed.notify_all()

    def close(self) -> None:
        """When all is written; or not, and then it says so."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_written = self._changed.wait_for(lambda: not self._has_work and not self._is_writing, CLOSING_S)
            self._has_given_up = not is_written
            self._changed.notify_all()
        self._thread.join(CLOSING_S)  # a thread that is still inside torch when Python ends would abort the process
        if not is_written:
            raise TrainingFailed(
                f"the last checkpoint could not be written ({self._problem or 'the disk is too slow'}): free some "
                f"room, then go on from the one before with --resume {self._folder.parent}"
            )

    @property
    def _has_work(self) -> bool:
        return bool(self._waiting) or self._best is not None

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_work or self._is_closed)
                if not self._has_work:
                    return
                checkpoint = self._waiting.pop(0) if self._waiting else None
                best, self._is_writing = self._best, True
            problem = self._write(checkpoint) if checkpoint is not None else ""
            if not problem and best is not None and (checkpoint is None or checkpoint.step == best):
                problem = name_best(self._folder, best)
            if problem and problem != self._problem:
                step = checkpoint.step if checkpoint is not None else best
                log.error("the checkpoint of step %d is not written: %s; trying again", step, problem)
            elif not problem and self._problem:
                log.warning("checkpoints can be written again")
            with self._changed:
                self._problem, self._is_writing = problem, False
                if problem and checkpoint is not None and (not self._waiting or checkpoint.step == best):
                    self._waiting.insert(0, checkpoint)
                is_named = not problem and (checkpoint is None or checkpoint.step == best)
                self._best = None if is_named and self._best == best else self._best
                del checkpoint  # until the next one its memory is free
                self._changed.notify_all()
                if problem and self._changed.wait_for(lambda: self._has_given_up, RETRY_S):
                    return

    def _write(self, checkpoint: Checkpoint) -> str:
        """The problem, if there was one."""
        if not self._db.settle(SETTLE_S):
            return "run.db comes first, and cannot be written"
        if checkpoint.frozen:
            self._frozen = self._frozen or state_sha256(checkpoint.frozen)
            checkpoint.state["frozen"] = self._frozen
        else:  # of all the weights; with a large part that never changes that would take long
            checkpoint.state["sha256"] = state_sha256(checkpoint.model)
        began = REAL.now()
        try:
            write(self._folder, checkpoint, self._keep)
        except OSError as error:
            return str(error)
        self.took_s = REAL.now() - began
        self._db.insert("samples", [(REAL.wall(), None, "checkpoint_s", self.took_s)])
        self._db.keep_from(oldest_step(self._folder))
        if checkpoint.frozen:  # will not be copied again
            checkpoint.frozen.clear()
            give_back_free_memory()
        return ""
