"""The run itself: model, ledger, checkpoints, evaluation. Carries out what the pool decides about them; knows no
network, and nodes only by their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from wide.codec.layout import Flat
from wide.coordinator import events
from wide.coordinator.aside import Aside, Pending, afterwards
from wide.coordinator.events import Action, ChangeStrategy, CloseStep, EndRun, MakeVersion, MergeUpdate, RejectUpdate
from wide.coordinator.judging import Judge
from wide.coordinator.master import Master
from wide.coordinator.record import Record
from wide.coordinator.taken import Comparison, Taken
from wide.failpoint import reach
from wide.job.schedule import Schedule, Step
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.description import Strategy
from wide.strategy.fold import Fold
from wide.strategy.gather import Gathering, Sum


class Evaluation(Protocol):
    """Where the user's evaluate() is asked: in a process of its own (evaluation.py), or right here."""

    @property
    def is_wanted(self) -> bool: ...
    @property
    def is_busy(self) -> bool: ...
    @property
    def is_full(self) -> bool: ...
    def copy(self, weights: Flat, live_nbytes: int) -> memoryview: ...  # of what changes; may take a while
    def ask(self, epoch: int, step: int, weights: memoryview) -> None: ...
    def hurry(self) -> None: ...


class Saving(Protocol):
    """Where checkpoints go (checkpoints.py)."""

    @property
    def took_s(self) -> float: ...  # the last one
    def prepare(self, position: events.Position, fold_state: Any) -> Callable[[], None] | None: ...  # what saves it
    def name_best(self, steps: int) -> None: ...  # the one after so many steps


class Run:
    """`ended` says how, once it has. `is_between_versions`: the weights are whole, and could be kept."""

    def __init__(
        self,
        master: Master,
        record: Record,
        evaluation: Evaluation,
        saving: Saving | None,
        strategy: str,
        fold_state: Any = None,
        aside: Aside | None = None,
        judge: Judge | None = None,
        gathering: Gathering = Sum,
    ) -> None:
        self.aside = aside or Aside()
        self._judge = judge
        self._untold: list[events.Event] = []
        self._tell: Callable[[events.Event], None] = self._untold.append
        self.when_merged: Callable[[Step], None] = lambda step: None  # is told of every step that is
        self._evaluated_step = -1  # the last that was, or will be
        self.master, self.record, self.evaluation, self._saving = master, record, evaluation, saving
        self.schedule: Schedule = record.schedule
        self.ended: EndRun | None = None
        self.is_between_versions = True
        self.stop_reason = ""  # set from outside (a signal) to end the run
        self._at_hand: dict[int, Taken] = {}  # by lease
        self._compare = Comparison(master.release, judge.goes_by if judge is not None else None)
        self.strategy: Strategy = STRATEGIES[strategy]
        self._gathering = gathering
        self._fold: Fold[Flat] = self.strategy.fold(master, self.schedule, fold_state, gathering)
        self.performers: Mapping[type[Action], Callable[[Any], Pending | None]] = {
            MergeUpdate: self._merge,
            RejectUpdate: self._reject,
            events.CompareUpdate: self._compared,
            events.Confirm: self._confirm,
            events.TellOf: self._tell_of,
            events.NameNode: self._name_node,
            events.VoidVersion: self._void,
            MakeVersion: self.make_version,
            CloseStep: self._close_step,
            ChangeStrategy: self._change_strategy,
            events.SaveCheckpoint: self._save_checkpoint,
            events.NameBest: self._name_best,
            EndRun: self._end,
        }

    def take(self, lease: int, taken: Taken) -> bool:
        """An update is here; what is to be done with it is for the pool to decide. Not, if there is one for this lease
        already, about which nothing was decided yet.
        """
        if lease in self._at_hand:
            return False
        self._at_hand[lease] = taken
        return True

    def distance(self, pair: int, lease: int) -> float | None:
        """From the other answer of this pair, in units of what is allowed; None: that has not come."""
        return self._compare.distance(pair, self._at_hand[lease])

    def finish_evaluation(self, steps: int, last_step: int | None) -> None:
        """If the last evaluation before this process was not finished."""
        last = steps - 1
        is_due = last >= 0 and (self.schedule.is_evaluated(self.schedule.step(last)) or steps == last_step)
        is_done = self.record.is_evaluated(steps) if self._judge is None else self._judge.steps >= steps
        if is_due and not is_done:
            self._evaluate(last)
        elif self._judge is not None and (why := self._judge.why_stop()):
            self._tell(events.Judged(why))  # it was over before

    def tell_to(self, post: Callable[[events.Event], None]) -> None:
        """What follows from evaluations is told there."""
        self._tell = post
        for event in self._untold:
            post(event)

    def evaluated(self, epoch: int, steps: int, metrics: dict[str, float]) -> None:
        """evaluate() said this of the model after so many steps."""
        self.record.evaluated(epoch, steps, metrics)
        self._judged(epoch, steps, metrics)

    @property
    def is_judged(self) -> bool:
        """Does training depend on what evaluate() says?"""
        return self._judge is not None and self._judge.wants_metrics

    def not_evaluated(self) -> None:
        """It failed."""
        if self._judge is not None:
            self._tell(events.Judged())

    def _judged(self, epoch: int, steps: int, metrics: dict[str, float]) -> None:
        if self._judge is not None:
            self.record.flush(force=True)
            lately = self.record.lately(self._judge.steps, steps)
            is_last = not self.schedule.is_evaluated(self.schedule.step(steps - 1))
            verdict = self._judge.hear(steps, epoch, lately | metrics, is_last)
            self._tell(events.Judged(*verdict))

    @property
    def rates(self) -> list[float]:
        """The learning rates of all groups, where nodes cannot know them by themselves."""
        descent = self.master.descent
        return descent.group_rates if descent.metric and self.strategy.update_role == "delta" else []

    @property
    def checkpoint_s(self) -> float:
        return self._saving.took_s if self._saving is not None else 0.0

    def close(self) -> None:
        self.aside.close()
        self._fold.bring_back()

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _merge(self, merge: MergeUpdate) -> Pending | None:
        flat, sizes, losses, journey, digest, _ = self._at_hand.pop(merge.lease)
        self.record.merged(merge, self.strategy, sizes[: merge.block.size], losses, journey, flat.weights, digest)
        return self.aside.do(lambda: self._fold.merge(merge, flat), lambda: reach("merge.before_answer"))

    def _reject(self, reject: RejectUpdate) -> None:
        if (taken := self._at_hand.pop(reject.lease, None)) is not None:
            self.master.release(taken.flat)
        self.record.refused(reject, taken.journey if taken is not None else None)

    def _compared(self, compare: events.CompareUpdate) -> None:
        taken = self._at_hand.pop(compare.lease)
        self._compare.done(compare.pair, compare.is_kept, taken)
        self.record.compared(compare, taken.journey)

    def _confirm(self, confirm: events.Confirm) -> None:
        self.record.confirmed(confirm.node, confirm.block, confirm.by)

    def _tell_of(self, it: events.TellOf) -> None:
        self.record.decided(it.node, it.kind, it.words)

    def _name_node(self, it: events.NameNode) -> None:
        self.record.decided(it.node, "named", f"{it.words}{self.record.given_by(it.node)}")

    def _void(self, void: events.VoidVersion) -> Pending | None:
        self.record.void(void.version)
        return self.aside.do(self._fold.void)

    def make_version(self, make: MakeVersion, copy: Callable[[], None] | None = None) -> Pending | None:
        """And then, if a copy is wanted, that."""
        self.is_between_versions = False

        def work() -> None:
            self._fold.make(make.made, make.steps)
            if copy is not None:
                copy()

        return self.aside.do(work, lambda: self._version_made(make.steps - 1))

    def _version_made(self, step: int) -> None:
        self.is_between_versions = True
        if self.master.logged:
            self.record.logged(step, self.master.logged)
        reach("version.made")

    def _close_step(self, close: CloseStep) -> Pending | None:
        step = self.schedule.step(close.step)
        self.record.step_closed(step, self.strategy)
        self.when_merged(step)
        return self._evaluate(step.number) if close.is_evaluated else None

    def _change_strategy(self, change: ChangeStrategy) -> None:
        self._fold.bring_back()
        before, self.strategy = self.strategy, STRATEGIES[change.strategy]
        if before.update_role != self.strategy.update_role:
            self.master.forget_debts()  # they are not in the same units
        self._fold = self.strategy.fold(self.master, self.schedule, None, self._gathering)

    def _save_checkpoint(self, save: events.SaveCheckpoint) -> Pending | None:
        if self._saving is None:
            return None
        self._fold.bring_back()
        copy = self._saving.prepare(save.position, self._fold.state())
        if copy is None:
            return None
        self.record.journal.tell("checkpoint", None, f"of step {save.position.steps}")
        return self.aside.do(copy)

    def _name_best(self, best: events.NameBest) -> None:
        if self._saving is not None:
            self._saving.name_best(best.steps)

    def _end(self, end: EndRun) -> Pending | None:
        self._fold.bring_back()
        self.record.flush(force=True)
        last = len(self.record.losses) - 1
        is_complete = not end.failure and not self.stop_reason and self.record.started_at is not None
        is_due = is_complete and last >= 0 and last != self._evaluated_step
        return afterwards(self._evaluate(last) if is_due else None, lambda: self._ended(end))

    def _ended(self, end: EndRun) -> None:
        self.ended = end
        if end.hurries:
            self.evaluation.hurry()

    def _evaluate(self, step: int) -> Pending | None:
        self._fold.bring_back()
        self._evaluated_step = step
        epoch, weights, nbytes = self.schedule.step(step).epoch, self.master.weights, self.master.layout.live_nbytes
        if not self.evaluation.is_wanted:
            if self._judge is not None and not self._judge.wants_metrics:
                self._judged(epoch, step + 1, {})  # of what training itself says
            else:
                self.not_evaluated()
            return None
        copies: list[memoryview] = []

        def copy() -> None:
            with self.master.at_rest():
                copies.append(self.evaluation.copy(weights, nbytes))

        return self.aside.do(copy, lambda: self.evaluation.ask(epoch, step + 1, copies[0]))
