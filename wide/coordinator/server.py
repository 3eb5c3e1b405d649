"""The coordinator's shell: sockets, clock and tensors around the decisions of state.py. One thread, one selector.

A message becomes an event, the event becomes actions, the actions are carried out here in their order.
"""

from __future__ import annotations

import functools
import logging
import math
import selectors
import time
from collections.abc import Callable

from wide.codec.encoders import Encoders
from wide.codec.layout import Flat
from wide.codec.pieces import MOST_PART_NBYTES
from wide.coordinator import events
from wide.coordinator.bell import Bell
from wide.coordinator.choices import Choices
from wide.coordinator.delivery import Delivery
from wide.coordinator.door import Door, printable
from wide.coordinator.evaluation import Evaluation
from wide.coordinator.feed import Feed
from wide.coordinator.intake import Intake
from wide.coordinator.master import Master
from wide.coordinator.patience import exhausted
from wide.coordinator.peer import Peer
from wide.coordinator.probe import Probing
from wide.coordinator.record import Record
from wide.coordinator.state import Pool
from wide.coordinator.versions import Versions
from wide.errors import ConnectionLost, ProtocolError, Refused, TrainingFailed, VersionMismatch, WideError
from wide.telemetry.log import log
from wide.transport.connection import Connection
from wide.transport.tcp import Listener, TcpStream
from wide.wire import messages as say

TICK_S = 0.05
GOODBYE_S = 1.0
TOLD_EVERY_S = 1.0
MOST_STRANGERS = 4096  # callers that have not said who they are; the oldest go first
EVALUATOR = -1  # its place among the nodes
HEADER_LIMIT = 1 << 20  # a model of 10,000 tensors describes itself in less


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
    ) -> None:
        self.listener, self.door, self.pool = listener, door, pool
        self.master, self.feed, self.record, self.evaluation = master, feed, record, evaluation
        self._encoders = Encoders()
        self.choices = Choices(door.compress, master.layout.live_nbytes, record, self._encoders)
        self.intake = Intake(master, self.choices)
        versions = Versions(master.weights, master.layout, self._encoders)
        self._bell = Bell()
        self.delivery = Delivery(
            versions, feed, self.choices, self._encoders, self._send, self._bell.ring, self._members
        )
        self.stop_reason = ""  # set from outside (a signal) to end the run
        self.ended: events.EndRun | None = None
        self.last_trouble = ""  # why the last peer was dropped
        self._tensors = master.layout.describe()
        self._all_touched = (1 << len(master.layout.trainable)) - 1
        self._peers: dict[int, Peer] = {}  # by node
        self._strangers: set[Peer] = set()
        self._nodes = 0
        self._held: list[events.GrantLease] = []
        self._ticked_at = self._told_at = 0.0
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._bell, selectors.EVENT_READ, self._part_is_ready)
        self._perform: dict[type[events.Action], Callable[..., None]] = {
            events.GrantLease: self._grant_lease,
            events.MergeUpdate: lambda action: None,  # done where the update is at hand
            events.CloseStep: self._close_step,
            events.RejectUpdate: self._reject_update,
            events.DropNode: lambda action: self._dismiss(self._peers[action.node], TrainingFailed(action.why)),
            events.EndRun: self._end_run,
        }
        self._hear: dict[type[say.Message], Callable[..., None]] = {
            say.Hello: self._heard_hello,
            say.Ready: self._heard_ready,
            say.Probe: lambda peer, _: self.intake.echoed(peer, functools.partial(self._send, peer)),
            say.Update: self._heard_update,
            say.Part: self._heard_part,
            say.Failed: self._heard_failed,
            say.Leaving: self._heard_leaving,
            say.Evaluated: self._heard_evaluated,
        }

    def serve(self, watch: Callable[[], str]) -> None:
        """Until the run is over. `watch` is asked now and then whether there is a reason to give up."""
        self.master.begin(self.pool.step.batches)
        while self.ended is None or (self.evaluation.is_busy and not self.stop_reason):
            began = time.monotonic()
            ready = self._selector.select(TICK_S)
            self.intake.idle_s += time.monotonic() - began
            for key, mask in ready:
                if isinstance(key.data, Peer):
                    self._serve_peer(key.data, mask)
                else:
                    key.data()
            now = time.monotonic()
            if now - self._ticked_at >= TICK_S:
                self._tick(now, watch)

    def close(self) -> None:
        """Say goodbye to everybody, wait a moment until they have heard it, and let go of the sockets."""
        code = 0 if self.ended is not None and not self.ended.failure else 1
        for peer in [*self._peers.values(), *self._strangers]:
            self._part(peer, "the run is over", code)
        self._selector.unregister(self.listener)
        self._selector.unregister(self._bell)
        self.listener.close()
        self._encoders.close()
        self._bell.close()
        deadline, scratch = time.monotonic() + GOODBYE_S, memoryview(bytearray(1 << 16))
        while self._selector.get_map() and time.monotonic() < deadline:
            for key, _ in self._selector.select(TICK_S):
                try:
                    key.data.connection.flush()
                    key.data.connection.stream.receive_into(scratch)
                except ConnectionLost:
                    self._selector.unregister(key.fileobj)
        for peer in [*self._peers.values(), *self._strangers]:
            peer.connection.close()
            self.record.node_left(peer.node, "the run is over")
        self._selector.close()

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, now: float, watch: Callable[[], str]) -> None:
        self._ticked_at = now
        for peer in [*self._peers.values(), *self._strangers]:
            if error := exhausted(peer, now):
                self._dismiss(peer, error)
            elif peer.is_working:
                peer.count_bytes()
                self.choices.decide(peer, self.delivery.batch_nbytes, now)
        if self.stop_reason:
            self._decide(events.StopRequested(self.stop_reason))
        elif self.ended is None and (problem := watch()):
            raise TrainingFailed(self.last_trouble or problem)
        self._decide(events.Ticked())
        self.record.flush(now)

    # ── connections ──────────────────────────────────────────────────────────────────────────────────────────────

    def _accept(self) -> None:
        while (caller := self._next_caller()) is not None:
            if len(self._strangers) == MOST_STRANGERS:
                self._send_away_oldest()
            peer = Peer(Connection(caller[0]), caller[1], time.monotonic())
            self._strangers.add(peer)
            self._selector.register(peer.connection.stream, selectors.EVENT_READ, peer)

    def _next_caller(self) -> tuple[TcpStream, str] | None:
        """Who has not said hello yet makes room for the next one. If there is nobody such, callers wait outside."""
        while True:
            try:
                return self.listener.accept()
            except ConnectionLost:
                if not self._strangers:
                    time.sleep(TICK_S)  # or this loop would spin until somebody leaves
                    return None
                self._send_away_oldest()

    def _send_away_oldest(self) -> None:
        self._dismiss(min(self._strangers, key=lambda peer: peer.connected_at), Refused("too many callers at once"))

    def _serve_peer(self, peer: Peer, mask: int) -> None:
        if peer.connection.stream.fileno() < 0:
            return  # forgotten a moment ago, while others were served
        try:
            if mask & selectors.EVENT_WRITE:
                peer.connection.flush()
                self._watch_writing(peer)
            if mask & selectors.EVENT_READ:
                for message in peer.connection.receive():
                    if peer.connection.stream.fileno() < 0:
                        break  # forgotten over the message before
                    hear = self._hear.get(type(message))
                    if hear is None or not (peer.node or isinstance(message, say.Hello)):
                        raise ProtocolError("out of order", f"{type(message).__name__} is not for now")
                    hear(peer, message)
        except ConnectionLost as error:
            self._forget(peer, str(error))
        except (ProtocolError, Refused, VersionMismatch) as error:
            self._dismiss(peer, error)

    def _members(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer.is_working]

    def _part_is_ready(self) -> None:
        self._bell.hush()
        for peer in self._members():
            if peer.pending:
                self.delivery.pump(peer)

    def _send(self, peer: Peer, message: say.Message, *payload: memoryview) -> None:
        try:
            peer.connection.send(message, *payload)
        except ConnectionLost as error:
            self._forget(peer, str(error))
        else:
            self._watch_writing(peer)

    def _watch_writing(self, peer: Peer) -> None:
        wants = peer.connection.has_unsent
        if wants != peer.wants_write:
            peer.wants_write = wants
            mask = selectors.EVENT_READ | selectors.EVENT_WRITE if wants else selectors.EVENT_READ
            self._selector.modify(peer.connection.stream, mask, peer)

    def _dismiss(self, peer: Peer, error: WideError) -> None:
        """This peer cannot be used: say why, count it, forget it."""
        if not isinstance(error, TrainingFailed):
            reason = error.reason if isinstance(error, ProtocolError) else type(error).__name__.lower()
            self.record.rejected(peer.node or None, reason, f"{peer.address}: {error}")
        self.last_trouble = str(error)
        is_news = peer.node or time.monotonic() - self._told_at > TOLD_EVERY_S  # a crowd of callers is told of once
        self._told_at = time.monotonic()
        log.log(logging.INFO if is_news else logging.DEBUG, "dropped %s: %s", peer.name or peer.address, error)
        self._part(peer, str(error), error.exit_code)
        self._forget(peer, str(error))

    def _part(self, peer: Peer, why: str, code: int) -> None:
        try:
            peer.connection.send(say.Stop(why, code))
        except ConnectionLost:
            log.debug("%r was gone before goodbye", peer)

    def _forget(self, peer: Peer, why: str) -> None:
        if peer.connection.stream.fileno() < 0:
            return
        self._selector.unregister(peer.connection.stream)
        peer.count_bytes()
        peer.connection.close()
        self._strangers.discard(peer)
        self._peers.pop(peer.node, None)
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
        if peer.node:
            raise ProtocolError("out of order", "a second hello")
        is_evaluator = peer.is_evaluator = self.door.admit(hello)
        self._nodes += not is_evaluator
        peer.node = EVALUATOR if is_evaluator else self._nodes
        peer.name = printable(hello.name)
        peer.is_on_this_machine = self.door.is_here(hello, peer.address)
        self._strangers.discard(peer)
        self._peers[peer.node] = peer
        sink = functools.partial(self.intake.place_for, peer)
        peer.connection.reader.allow(sink, HEADER_LIMIT, max(self.master.layout.live_nbytes, MOST_PART_NBYTES))
        if not peer.is_evaluator:
            if hello.build != self.door.build:
                log.warning(
                    "node %s runs on %s, this coordinator on %s: bits may differ",
                    peer.name,
                    hello.build,
                    self.door.build,
                )
            peer.totals = self.record.node_joined(peer.node, peer.name, printable(hello.host), hello.pid)
        self._send(peer, say.Welcome(peer.node, self.door.seed, self.door.data))
        if not is_evaluator:
            peer.probing = Probing()
            peer.probing.next(functools.partial(self._send, peer))

    def _heard_ready(self, peer: Peer, ready: say.Ready) -> None:
        if peer.is_working:
            raise ProtocolError("out of order", "a second ready")
        if peer.up is None and not peer.is_evaluator:
            raise ProtocolError("out of order", "ready before the probe was said back")
        self.door.check_model(ready, self._tensors)
        if peer.is_evaluator:
            self.evaluation.joined(lambda message, *payload: self._send(peer, message, *payload))
            return
        peer.has_data = self.door.has_data(ready, self.feed.schedule.samples)
        peer.is_working = True
        log.info("node %d (%s) joined%s", peer.node, peer.name, "" if peer.has_data else ", batches are streamed to it")
        self.choices.decide(peer, self.delivery.batch_nbytes, time.monotonic())
        self._decide(events.NodeJoined(peer.node))

    def _heard_update(self, peer: Peer, update: say.Update) -> None:
        if (flat := self.intake.update(peer, update)) is not None:
            self._updated(peer, update, flat)

    def _heard_part(self, peer: Peer, part: say.Part) -> None:
        if (whole := self.intake.part(peer)) is not None:
            self._updated(peer, *whole)

    def _updated(self, peer: Peer, update: say.Update, flat: Flat) -> None:
        totals = peer.totals
        assert totals is not None
        flat.touched = int.from_bytes(update.touched, "little") & self._all_touched
        totals.compute_s += update.compute_s
        totals.codec_s += update.codec_s
        totals.network_s += update.network_s
        totals.rss_bytes = update.rss_bytes
        problem = "" if flat.is_finite() else "the gradient is not finite: lower the learning rate or set clip_norm"
        if len(update.losses) != len(peer.sizes) or not all(map(math.isfinite, update.losses)):
            problem = "its losses are not one finite number for each batch"
        actions = self.pool.handle(events.UpdateArrived(peer.node, update.lease, problem), time.monotonic())
        if actions and isinstance(merge := actions[0], events.MergeUpdate):
            self.master.add(merge.block, flat)
            self.record.merged(merge.step, merge.block, peer.node, peer.sizes, update.losses)
        else:
            self.master.release(flat)
        self._do(actions)

    def _heard_failed(self, peer: Peer, failed: say.Failed) -> None:
        if peer.is_evaluator:
            raise TrainingFailed(failed.problem, failed.details)
        if not peer.is_working:  # it could not even build the model or the data
            raise Refused(failed.problem, failed.details)
        self._decide(events.WorkFailed(peer.node, failed.lease, failed.batch, failed.problem, failed.details))

    def _heard_leaving(self, peer: Peer, leaving: say.Leaving) -> None:
        self.intake.debt(peer)
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

    def _grant_lease(self, grant: events.GrantLease) -> None:
        peer = self._peers.get(grant.node)
        if peer is None:
            return
        if self.evaluation.is_full:  # every epoch is evaluated, and snapshots do not pile up without end
            self._held.append(grant)
            return
        if not self.record.started_at:
            self.record.started()
        step, block, version = self.pool.step, grant.block, self.pool.version
        if step.number != grant.step:
            step = self.pool.schedule.step(grant.step)  # held back, and overtaken meanwhile
        log.debug("node %d gets lease %d: step %d %s", peer.node, grant.lease, step.number, block)
        self.delivery.deliver(peer, grant, step, version)

    def _reject_update(self, reject: events.RejectUpdate) -> None:
        self.record.rejected(reject.node, reject.reason, reject.detail)
        if reject.node in self._peers:
            self._peers[reject.node].is_refused = True

    def _close_step(self, close: events.CloseStep) -> None:
        step = self.pool.schedule.step(close.step)
        self.master.update(step.number)
        self.record.step_closed(step)
        self.master.begin(self.pool.step.batches)
        if step.is_last_of_epoch:
            self.evaluation.ask(step.epoch, step.number + 1, self.master.weights)

    def _end_run(self, end: events.EndRun) -> None:
        self.ended = end
        last = self.pool.version - 1
        is_complete = not end.failure and not self.stop_reason
        if is_complete and last >= 0 and not self.pool.schedule.step(last).is_last_of_epoch:
            self.evaluation.ask(self.pool.schedule.step(last).epoch, last + 1, self.master.weights)
        if self.pool.seconds is not None:
            self.evaluation.hurry()
        if self.evaluation.is_busy and not self.stop_reason:
            log.info("training is over, evaluation goes on")
