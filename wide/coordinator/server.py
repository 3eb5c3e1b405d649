"""The coordinator's shell: messages and tensors around the decisions of state.py. One thread.

A message becomes an event, the event becomes actions, the actions are carried out here in their order.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable
from typing import Any

from wide.codec.choose import Role
from wide.codec.encoders import Encoders
from wide.codec.layout import Flat
from wide.coordinator import events
from wide.coordinator.choices import Choices
from wide.coordinator.delivery import Delivery
from wide.coordinator.door import Door, printable
from wide.coordinator.evaluation import Evaluation
from wide.coordinator.feed import Feed
from wide.coordinator.folds import FOLDS, Fold
from wide.coordinator.intake import Intake
from wide.coordinator.keeper import Keeper
from wide.coordinator.master import Master
from wide.coordinator.patience import exhausted, is_silent, owes_a_beat
from wide.coordinator.peer import Peer
from wide.coordinator.planning import Planner, is_better
from wide.coordinator.reception import Reception
from wide.coordinator.record import Record
from wide.coordinator.state import Pool
from wide.coordinator.switchboard import TICK_S, Switchboard
from wide.coordinator.versions import Versions
from wide.errors import (
    Absent,
    ConnectionLost,
    NotYet,
    ProtocolError,
    Refused,
    TrainingFailed,
    VersionMismatch,
    WideError,
)
from wide.failpoint import reach
from wide.strategy.plan import Plan
from wide.telemetry.log import log
from wide.transport.tcp import Listener
from wide.wire import messages as say

LINKS_S = 1.0
TOLD_EVERY_S = 1.0
AWAY_S = 1.0


class Server:
    """Serves one run from the first node's hello to the last evaluation."""

    def __init__(
        self,
        listener: Listener,
        door: Door,
        pool: Pool,
        master: Master,
        feed: Feed,
        record: Record,
        evaluation: Evaluation,
        keeper: Keeper | None = None,
    ) -> None:
        self.door, self.pool, self.keeper = door, pool, keeper
        self.master, self.feed, self.record, self.evaluation = master, feed, record, evaluation
        self.board = Switchboard(listener, self._listen, self._forget, self._dismiss, self._part_is_ready)
        self._encoders = Encoders()
        self.choices = Choices(door.compress, master.layout.live_nbytes, record, self._encoders)
        self.intake = Intake(master, self.choices, lambda: self.board.idle_s)
        versions = Versions(master.weights, master.layout, self._encoders)
        self.delivery = Delivery(versions, feed, self.choices, self._encoders, self.board)
        self.planner = Planner(self.choices, record, self._busy)
        self.chooses_strategy = False
        self.only_plans = False
        self.plan_words = ""  # the plan, if that is all that is wanted
        self.stop_reason = ""  # set from outside (a signal) to end the run
        self.ended: events.EndRun | None = None
        self.last_trouble = ""  # why the last peer was dropped
        self._fold: Fold
        self._use(pool.course.name)
        self.reception = Reception(door, self.board, record, self.intake, master)
        self._all_touched = (1 << len(master.layout.trainable)) - 1
        self._held: list[events.GrantLease] = []
        self._is_between_versions = True
        self._ticked_at = self._told_at = self._links_at = 0.0
        self._first_at = self._idle_before_s = 0.0  # when the first update came
        self._updates = 0
        self._perform: dict[type[events.Action], Callable[..., None]] = {
            events.GrantLease: self._grant_lease,
            events.MergeUpdate: lambda action: None,  # done where the update is at hand
            events.MakeVersion: self._make_version,
            events.SaveCheckpoint: self._save_checkpoint,
            events.CloseStep: self._close_step,
            events.RejectUpdate: self._reject_update,
            events.ChangeStrategy: self._change_strategy,
            events.DropNode: lambda action: self._dismiss(self.board.peers[action.node], TrainingFailed(action.why)),
            events.EndRun: self._end_run,
        }
        self._hear: dict[type[say.Message], Callable[..., None]] = {
            say.Hello: self._heard_hello,
            say.Ready: self._heard_ready,
            say.Probe: lambda peer, _: self.intake.echoed(peer, functools.partial(self.board.send, peer)),
            say.Update: self._heard_update,
            say.Part: self._heard_part,
            say.Failed: self._heard_failed,
            say.Leaving: self._heard_leaving,
            say.Alive: lambda peer, _: None,  # it was counted as it came
            say.Evaluated: self._heard_evaluated,
        }

    def serve(self, watch: Callable[[], str]) -> None:
        """Until the run is over. `watch` is asked now and then whether there is a reason to give up."""
        try:
            while self.ended is None or (self.evaluation.is_busy and not self.stop_reason):
                self.board.wait()
                now = time.monotonic()
                if self._ticked_at and now - self._ticked_at >= AWAY_S:
                    self.board.wait()  # we were busy, not they silent: first hear what they have said meanwhile
                    self._tick(time.monotonic(), watch)
                elif now - self._ticked_at >= TICK_S:
                    self._tick(now, watch)
        except TrainingFailed as error:
            if self._is_between_versions:
                self._decide(events.RunFailed(str(error), error.details))  # what was trained until then is kept
            self.ended = self.ended or events.EndRun("failed", str(error))
            raise

    def resume(self, start: events.Position, fold_state: Any) -> None:
        """Go on from there: what the fold remembered, and an evaluation that was not finished."""
        if self.pool.course.name == start.strategy and fold_state is not None:
            self._fold.resume(fold_state)
        last = start.steps - 1
        is_due = last >= 0 and (self.pool.schedule.step(last).is_last_of_epoch or start.steps == self.pool.last_step)
        if is_due and not self.record.is_evaluated(start.steps):
            self.evaluation.ask(self.pool.schedule.step(last).epoch, start.steps, self.master.weights)

    def close(self) -> None:
        """Say goodbye to everybody, and let go of sockets and threads."""
        self._encoders.close()
        self._fold.settle()
        for peer in self.board.peers.values():
            if not peer.is_evaluator:
                peer.count_bytes()
                self.record.node_left(peer.node, "the run is over")
        if self.ended is None or (self.pool.is_open and self.ended.why == self.stop_reason):
            self.board.close("the coordinator was stopped, and may come back", NotYet.exit_code)
        else:
            self.board.close(f"the run is over: {self.ended.failure or self.ended.why}", int(bool(self.ended.failure)))

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, now: float, watch: Callable[[], str]) -> None:
        self._ticked_at = now
        for peer in self.board.everybody:
            if error := exhausted(peer, now):
                self._dismiss(peer, error)
            elif peer.is_working:
                peer.count_bytes()
                self._keep_in_touch(peer, now)
                self.choices.decide(peer, self.delivery.batch_nbytes, now)
        self.record.flush(now)
        if self.stop_reason:
            self._decide(events.StopRequested(self.stop_reason))
        elif self.ended is None and (problem := watch()):
            raise TrainingFailed(self.last_trouble or problem)
        if self.record.divergence.problem:
            self._decide(events.RunFailed(self.record.divergence.problem))
        if now - self._links_at >= LINKS_S:
            self._links_at = now
            for peer in self.board.members:
                self._decide(events.LinkMeasured(peer.node, self.choices.transfer_s(peer)))
        if self.chooses_strategy and (found := self.planner.due(self.board.members, now)):
            self._planned(found)
        self._decide(events.Ticked())

    def _keep_in_touch(self, peer: Peer, now: float) -> None:
        """Both ends know within seconds if the other one does not answer any more."""
        if is_silent(peer, now) != peer.is_silent:
            peer.is_silent = not peer.is_silent
            log.info("node %d (%s) %s", peer.node, peer.name, "is silent" if peer.is_silent else "is back")
            self._decide((events.NodeSilent if peer.is_silent else events.NodeHeard)(peer.node))
        if owes_a_beat(peer, now):
            self.board.send(peer, say.Alive())

    def _planned(self, found: Plan) -> None:
        """Tell what was found if it is news, and change if it is worth it."""
        self.planner.tell(found)
        if self.only_plans:
            self.plan_words = self.planner.words(found, self.board.members)
            self._decide(events.StopRequested("planned"))
        elif is_better(found, self.pool.course.name):
            self._decide(events.StrategyChosen(found.strategy))

    def _busy(self) -> tuple[float, int]:
        """How long this loop has been busy since the first update, and with how many of them."""
        return time.monotonic() - self._first_at - (self.board.idle_s - self._idle_before_s), self._updates

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _listen(self, peer: Peer) -> None:
        try:
            for message in peer.connection.receive():
                if peer.connection.stream.fileno() < 0:
                    break  # forgotten over the message before
                hear = self._hear.get(type(message))
                if hear is None or not (peer.node or isinstance(message, say.Hello)):
                    raise ProtocolError("out of order", f"{type(message).__name__} is not for now")
                hear(peer, message)
        except ConnectionLost as error:
            self._forget(peer, str(error))
        except (ProtocolError, Refused, NotYet, VersionMismatch) as error:
            self._dismiss(peer, error)

    def _part_is_ready(self) -> None:
        for peer in self.board.members:
            if peer.pending:
                self.delivery.pump(peer)

    def _dismiss(self, peer: Peer, error: WideError) -> None:
        """This peer cannot be used: say why, count it, forget it."""
        if not isinstance(error, TrainingFailed | NotYet):
            reason = error.reason if isinstance(error, ProtocolError) else type(error).__name__.lower()
            self.record.rejected(peer.node or None, reason, f"{peer.address}: {error}")
        self.last_trouble = str(error)
        is_news = peer.node or time.monotonic() - self._told_at > TOLD_EVERY_S  # a crowd of callers is told of once
        self._told_at = time.monotonic()
        log.log(logging.INFO if is_news else logging.DEBUG, "dropped %s: %s", peer.name or peer.address, error)
        self.board.say_goodbye(peer, str(error), error.exit_code)
        self._forget(peer, str(error))

    def _forget(self, peer: Peer, why: str) -> None:
        if peer.connection.stream.fileno() < 0:
            return
        peer.count_bytes()
        self.board.let_go(peer)
        peer.pending.clear()
        self.intake.forget(peer)
        if peer.is_evaluator:
            self.evaluation.lost(why)
        elif peer.node:
            self.record.node_left(peer.node, why)
            log.info("node %d (%s) left: %s", peer.node, peer.name, why)
            if peer.is_working:
                self._decide(events.NodeLeft(peer.node, why))

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _heard_hello(self, peer: Peer, hello: say.Hello) -> None:
        if peer.node or peer.has_asked:
            raise ProtocolError("out of order", "a second hello")
        is_evaluator = self.door.admit(hello)
        if hello.role == "planner":
            peer.has_asked = True
            self.board.send(peer, say.Planned(self.planner.answer(self.board.members)))
            return
        if (former := self.reception.former(hello)) is not None:
            self._dismiss(former, Absent("came back", "it came back by another connection"))
        self.reception.welcome(peer, hello, is_evaluator)

    def _heard_ready(self, peer: Peer, ready: say.Ready) -> None:
        self.reception.check(peer, ready)
        if peer.is_evaluator:
            self.evaluation.joined(lambda message, *payload: self.board.send(peer, message, *payload))
            return
        peer.has_data = self.door.has_data(ready, self.feed.schedule.samples)
        peer.is_working = True
        if self.pool.version == 0 and ready.weights == self.reception.first_weights:
            peer.version, peer.keeps_versions = 0, self.pool.course.name != "sync"
        log.info("node %d (%s) joined%s", peer.node, peer.name, "" if peer.has_data else ", batches are streamed to it")
        self.choices.decide(peer, self.delivery.batch_nbytes, time.monotonic())
        self._decide(events.NodeJoined(peer.node))
        if len(self.board.members) == self.feed.schedule.batches_per_step + 1:
            log.warning(
                "there are more nodes than batches in a step (%d): in sync and async some will be idle, in local "
                "a step takes more batches than the job says; raise batches_per_step",
                self.feed.schedule.batches_per_step,
            )

    def _heard_update(self, peer: Peer, update: say.Update) -> None:
        if (flat := self.intake.update(peer, update)) is not None:
            self._updated(peer, update, flat)

    def _heard_part(self, peer: Peer, part: say.Part) -> None:
        if (whole := self.intake.part(peer)) is not None:
            self._updated(peer, *whole)

    def _updated(self, peer: Peer, update: say.Update, flat: Flat) -> None:
        sent = peer.sent.pop(update.lease, None)
        sizes = sent.sizes if sent is not None else []
        flat.touched = int.from_bytes(update.touched, "little") & self._all_touched
        peer.count_update(update)
        if not self._updates:
            self._first_at, self._idle_before_s = time.monotonic(), self.board.idle_s
        self._updates += 1
        problem = "" if flat.is_finite() else "the gradient is not finite: lower the learning rate or set clip_norm"
        if not 0 < len(update.losses) <= len(sizes) or not all(map(math.isfinite, update.losses)):
            problem = "its losses are not one finite number for each batch"
        is_sync = self.pool.course.name == "sync"
        arrived = events.UpdateArrived(peer.node, update.lease, problem, update.compute_s, len(update.losses))
        actions = self.pool.handle(arrived, time.monotonic())
        if actions and isinstance(merge := actions[0], events.MergeUpdate):
            self._fold.merge(merge, flat)
            self.record.merged(merge, is_sync, sizes[: len(update.losses)], update.losses)
            reach("merge.before_answer")
        else:
            self.master.release(flat)
            peer.refused = update.lease
        self._do(actions)

    def _heard_failed(self, peer: Peer, failed: say.Failed) -> None:
        if peer.is_evaluator:
            raise TrainingFailed(failed.problem, failed.details)
        if not peer.is_working:  # it could not even build the model or the data
            raise Refused(failed.problem, failed.details)
        self._decide(events.WorkFailed(peer.node, failed.lease, failed.batch, failed.problem, failed.details))

    def _heard_leaving(self, peer: Peer, leaving: say.Leaving) -> None:
        is_mean = self.pool.course.name == "local"  # of all nodes: then its debt is only a part, too
        self.intake.debt(peer, 1 / max(1, len(self.board.members)) if is_mean else 1.0)
        self._forget(peer, printable(leaving.why))

    def _heard_evaluated(self, peer: Peer, evaluated: say.Evaluated) -> None:
        if not peer.is_evaluator:
            raise ProtocolError("out of order", "only the evaluator evaluates")
        self.evaluation.heard(evaluated)
        if not self.evaluation.is_full:
            held, self._held = self._held, []
            self._do([*held])

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _decide(self, event: events.Event) -> None:
        self._do(self.pool.handle(event, time.monotonic()))

    def _do(self, actions: list[events.Action]) -> None:
        for action in actions:
            self._perform[type(action)](action)

    def _use(self, strategy: str) -> None:
        role: Role = "delta" if strategy == "local" else "gradient"
        if role != self.choices.update_role:
            self.master.forget_debts()  # they are not in the same units
            self.choices.update_role = role
        self._fold = FOLDS[strategy](self.master, self.feed.schedule)

    def _change_strategy(self, change: events.ChangeStrategy) -> None:
        self._fold.settle()
        self._use(change.strategy)
        log.info("strategy: %s", change.strategy)

    def _grant_lease(self, grant: events.GrantLease) -> None:
        peer = self.board.peers.get(grant.node)
        if peer is None:
            return
        if self.evaluation.is_full:  # every epoch is evaluated, and snapshots do not pile up without end
            self._held.append(grant)
            return
        if not self.record.started_at:
            self.record.started()
        log.debug("node %d gets lease %d: %s", peer.node, grant.lease, grant.block)
        self.delivery.deliver(peer, grant, self.pool.version, self.pool.course.name)

    def _make_version(self, make: events.MakeVersion) -> None:
        self._is_between_versions = False
        self._fold.make(make)
        self._is_between_versions = True
        reach("version.made")

    def _save_checkpoint(self, save: events.SaveCheckpoint) -> None:
        if self.keeper is not None:
            self.keeper.save(save.position, self._fold)

    def _reject_update(self, reject: events.RejectUpdate) -> None:
        self.record.rejected(reject.node, reject.reason, reject.detail)

    def _close_step(self, close: events.CloseStep) -> None:
        step = self.pool.schedule.step(close.step)
        self.record.step_closed(step, close.is_sync)
        if step.is_last_of_epoch:
            self._fold.settle()
            self.evaluation.ask(step.epoch, step.number + 1, self.master.weights)

    def _end_run(self, end: events.EndRun) -> None:
        self.ended = end
        self._fold.settle()
        last = self.pool.steps - 1
        is_complete = not end.failure and not self.stop_reason and self.record.started_at
        if is_complete and last >= 0 and not self.pool.schedule.step(last).is_last_of_epoch:
            self.evaluation.ask(self.pool.schedule.step(last).epoch, last + 1, self.master.weights)
        if self.pool.seconds is not None:
            self.evaluation.hurry()
        if self.evaluation.is_busy and not self.stop_reason:
            log.info("training is over, evaluation goes on")
