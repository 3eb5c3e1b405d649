"""What a run needs to go on, kept beside training: copied between two versions, written by a thread. Knows the master,
the record and the checkpoint's files.

The ledger is on disk before the checkpoint that contains it. So whoever goes on from a checkpoint finds all of its
rows, and drops those of later versions, whose batches are computed again.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch

from wide.codec.layout import Flat
from wide.coordinator.events import Position
from wide.coordinator.folds import Fold
from wide.coordinator.master import Master
from wide.coordinator.record import Record
from wide.errors import TrainingFailed
from wide.job.schedule import Schedule
from wide.store.checkpoint import Checkpoint, write
from wide.store.nest import Packing, unpack
from wide.store.weights import state_sha256
from wide.telemetry.log import log

SETTLE_S = 10.0  # for the ledger
RETRY_S = 2.0
CLOSING_S = 30.0  # how long the last checkpoint is tried


class Keeper:
    """`save` copies and returns; the newest copy is written, again and again if the disk fails."""

    def __init__(
        self, folder: Path, keep: int, master: Master, record: Record, asked: dict[str, Any], version: int | None
    ) -> None:
        self._folder, self._keep, self._master, self._record = folder, keep, master, record
        self._asked = asked  # the options that a run keeps when it is resumed
        self._version = version  # the last that was saved
        self._changed = threading.Condition()
        self._waiting: Checkpoint | None = None
        self._problem = ""
        self._is_writing = self._is_closed = self._has_told = self._has_given_up = False
        self._thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        self._thread.start()

    def save(self, position: Position, fold: Fold) -> None:
        if position.version == self._version:
            return  # it is there
        self._version = position.version
        fold.settle()
        self._record.flush(time.monotonic(), force=True)
        copy = self._copy(position, fold)
        with self._changed:
            self._waiting = copy
            self._changed.notify_all()

    def close(self) -> None:
        """When all is written; or not, and then it says so."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            is_written = self._changed.wait_for(lambda: self._waiting is None and not self._is_writing, CLOSING_S)
            self._has_given_up = not is_written
            self._changed.notify_all()
        self._thread.join(CLOSING_S)  # a thread that is still inside torch when Python ends would abort the process
        if not is_written:
            raise TrainingFailed(
                f"the last checkpoint could not be written ({self._problem or 'the disk is too slow'}): free some "
                f"room, then go on from the one before with --resume {self._folder.parent}"
            )

    def _copy(self, position: Position, fold: Fold) -> Checkpoint:
        master, packing = self._master, Packing()
        model = {
            key: value.detach().clone(memory_format=torch.contiguous_format)
            for key, value in master.model.state_dict().items()
            if isinstance(value, torch.Tensor)
        }
        for name, view in _named(master.weights, master):
            if name not in model or model[name].shape != view.shape or model[name].dtype != view.dtype:
                packing.tensors[f"model.{name}"] = view.detach().clone(memory_format=torch.contiguous_format)
        state = {
            "position": msgspec.to_builtins(position),
            "asked": self._asked,
            "schedule": schedule_of(self._record.schedule),
            "batches": self._record.batches,
            "samples": self._record.samples,
            "epochs": self._record.batches / self._record.schedule.batches_per_epoch,
            "nodes": [asdict(totals) for totals in self._record.nodes.values()],
            "descent": packing.pack(master.descent.state(), "descent"),
            "fold": packing.pack(fold.state(), "fold"),
        }
        if packing.left_out and not self._has_told:
            self._has_told = True
            log.warning("a run that is resumed begins without %s: it cannot be written", ", ".join(packing.left_out))
        return Checkpoint(position.steps, model, packing.tensors, state)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting is not None or self._is_closed)
                if self._waiting is None:
                    return
                checkpoint, self._waiting, self._is_writing = self._waiting, None, True
            problem = self._write(checkpoint)
            if problem and problem != self._problem:
                log.error("the checkpoint of step %d is not written: %s; trying again", checkpoint.step, problem)
            elif not problem and self._problem:
                log.warning("checkpoints can be written again")
            with self._changed:
                self._problem, self._is_writing = problem, False
                if problem and self._waiting is None:
                    self._waiting = checkpoint
                self._changed.notify_all()
                if problem and self._changed.wait_for(lambda: self._has_given_up, RETRY_S):
                    return

    def _write(self, checkpoint: Checkpoint) -> str:
        """The problem, if there was one."""
        if not self._record.db.settle(SETTLE_S):
            return "run.db comes first, and cannot be written"
        checkpoint.state["sha256"] = state_sha256(checkpoint.model)
        try:
            write(self._folder, checkpoint, self._keep)
        except OSError as error:
            return str(error)
        return ""


def schedule_of(schedule: Schedule) -> dict[str, int]:
    """What a position in a run depends on."""
    names = ("samples", "batch_size", "batches_per_step")
    return {name: getattr(schedule, name) for name in names}


def restore(master: Master, checkpoint: Checkpoint) -> tuple[Position, Any]:
    """Put the weights and the optimizer where they were. Where the run is, and what its fold remembered."""
    try:
        position = msgspec.convert(checkpoint.state["position"], Position)
        with torch.no_grad():
            for name, view in _named(master.weights, master):
                saved = checkpoint.others.get(f"model.{name}", checkpoint.model.get(name))
                if saved is None or saved.shape != view.shape or saved.dtype != view.dtype:
                    raise TrainingFailed(f"this job's model is not the one that was saved: {name} differs")
                view.copy_(saved)
        if changed := master.descent.resume(unpack(checkpoint.state["descent"], checkpoint.others)):
            log.warning("the optimizer goes on as it was (%s): begin a new run to change that", changed)
        return position, unpack(checkpoint.state["fold"], checkpoint.others)
    except (KeyError, ValueError, msgspec.ValidationError) as error:
        raise TrainingFailed(f"the checkpoint of step {checkpoint.step} cannot be understood: {error!r}") from None


def _named(weights: Flat, master: Master) -> list[tuple[str, torch.Tensor]]:
    views = [*weights.trainable, *weights.averaged, *weights.kept, *weights.frozen]
    return [(slot.name, view) for slot, view in zip(master.layout.slots, views, strict=True)]
