"""The exchange: everybody who is connected, behind one front. Downwards it is given work to send; upwards it leaves
what happened in `happenings`, for whoever coordinates to take. It calls nobody back, and knows no pool, record or
checkpoints.

One thread. `turn` serves whoever has something to say; `tick`, now and then, sees to those who do not.
"""

from __future__ import annotations

import functools
import logging
import math
import traceback
from collections import deque
from collections.abc import Callable
from typing import Any

from wide.codec.choose import Role
from wide.codec.speeds import Trial, measure
from wide.errors import (
    ConnectionLost,
    NotRepeatable,
    NotYet,
    OtherProgram,
    OtherSet,
    ProtocolError,
    Refused,
    TrainingFailed,
    VersionMismatch,
    WideError,
)
from wide.exchange import happenings as happened
from wide.exchange.complaints import Complaints, reason_of
from wide.exchange.delivery import Assignment, Delivery
from wide.exchange.door import Door
from wide.exchange.goods import Goods
from wide.exchange.happenings import Happening
from wide.exchange.inspection import Inspection, Unseen
from wide.exchange.intake import Intake, Whole
from wide.exchange.link_codecs import LinkCodecs
from wide.exchange.peer import Peer
from wide.exchange.reception import EVALUATOR, SENT_AWAY, Reception
from wide.exchange.switchboard import Switchboard
from wide.exchange.versions import Versions
from wide.telemetry.clock import Clock
from wide.telemetry.log import log
from wide.telemetry.snapshot import LinkView
from wide.telemetry.totals import Traffic
from wide.transport.hub import CALLERS, RUNG, Hub
from wide.wire import messages as say
from wide.wire import words

TOLD_EVERY_S = 1.0
LOOKED_AT, ROUND = 64, 16  # so many peers are looked at in one tick; if there are more, all of them in so many ticks


class Exchange:
    """`happenings` are for whoever coordinates; `traffic` is what each node's connections have carried."""

    def __init__(
        self,
        hub: Hub,
        door: Door,
        goods: Goods,
        clock: Clock,
        traffic: dict[int, Traffic] | None = None,
        try_codecs: Trial = measure,
    ) -> None:
        self.happenings: deque[Happening] = deque()
        self._guests, self._complaints = door.guests, Complaints(self.happenings.append, clock.now)
        self.traffic = traffic if traffic is not None else {}
        self._hub, self._now, self._goods = hub, clock.now, goods
        self._board = board = Switchboard(hub, self._lost, self._complaints.of, clock.now)
        tell = self.happenings.append
        self._codecs = LinkCodecs(door.compress, goods.layout.live_nbytes, goods.encoders, tell, try_codecs)
        self._intake = Intake(goods.layout, goods.spare, self._codecs, clock.now, lambda: hub.idle_s)
        versions = Versions(goods.weights, goods.layout, goods.encoders, goods.common.allocate)
        self._delivery = Delivery(versions, goods.feed, self._codecs, goods.encoders, board, goods.spare)
        self._reception = Reception(
            door, board, goods.layout, goods.weights, goods.feed, goods.common, self.traffic, clock
        )
        self._overlaps, self._version = False, 0
        self._inspection = Inspection(goods.encoders, hub.ring, tell, goods.digest)
        self._told_at = -math.inf
        self._to_look_at: list[Peer] = []
        self._at_once = LOOKED_AT

    @property
    def idle_s(self) -> float:
        """How long the loop has waited for something to do, all in all."""
        return self._hub.idle_s

    @property
    def nodes(self) -> list[int]:
        """All that were let in and are here."""
        return [node for node in self._board.peers if node > 0]

    @property
    def is_checking(self) -> bool:
        """Is the job being tried, and nobody has said yet that it can be trained?"""
        return self._reception.is_checking

    @property
    def member_count(self) -> int:
        return sum(1 for _ in self._board.members)

    def number_from(self, last_node: int) -> None:
        """Newcomers get higher numbers than this."""
        self._reception.last_node = max(self._reception.last_node, last_node)

    def follow(self, update_role: Role, overlaps: bool) -> None:
        """From now on updates are of this kind; if they overlap with computing, nodes keep versions apart."""
        self._codecs.update_role, self._overlaps = update_role, overlaps
        self._delivery.begin_anew(overlaps)

    def version_made(self, version: int) -> None:
        """The weights are this version now, or will be in a moment."""
        self._version = version

    def release(self) -> None:
        """It is made: whoever has work for it may begin."""
        self._delivery.release(self._version)

    def room_for_version(self, version: int) -> Callable[[], None] | None:
        """What copies the weights for those who are sent them, once they are that version; None: nobody is."""
        return self._delivery.room_for_version(version)

    # ── downwards ────────────────────────────────────────────────────────────────────────────────────────────────

    def send_work(self, node: int, assignment: Assignment) -> None:
        """To a node that may have left a moment ago: that was, or will be, told of."""
        peer = self._board.peers.get(node)
        if peer is not None and peer.is_ready:  # or it has come back by another connection, and begins anew
            self._delivery.deliver(peer, assignment, is_ahead=assignment.version > self._version)

    def refused(self, node: int, lease: int) -> None:
        """What this node sent for the lease does not count."""
        peer = self._board.peers.get(node)
        if peer is not None and peer.is_ready:
            self._delivery.refused(peer, lease)

    def evaluate(self, epoch: int, step: int, weights: memoryview) -> None:
        """`weights` are what changes."""
        if (peer := self._board.peers.get(EVALUATOR)) is not None:
            self._delivery.to_evaluate(peer, say.Evaluate(epoch, step), weights)

    def tell(self, node: int, progress: say.Progress) -> None:
        peer = self._board.peers.get(node)
        if peer is not None and peer.is_ready:
            self._board.send(peer, progress)

    def answer_plan(self, peer: Peer, plan: str) -> None:
        if not peer.is_closed:
            self._board.send(peer, say.Planned(plan))

    def dismiss_node(self, node: int, error: WideError) -> None:
        peer = self._board.peers.get(node)
        if peer is not None and (peer.is_ready or peer.is_evaluator):
            self.dismiss(peer, error)

    def send_away(self, node: int, why: str = SENT_AWAY) -> None:
        """For good: should it not hear that, because it is computing, it hears it when it comes back."""
        self._reception.sent_away[node] = why
        self.dismiss_node(node, Refused(why))

    def send_machine_away(self, node: int, why: str) -> None:
        """Whatever else comes from there, too, if it is known as a machine; even if it left a moment ago."""
        if machine := self._reception.machine_of(node):
            self._reception.machines_sent_away[machine] = why
        self.send_away(node, why)

    def why_other_bits(self, build: str) -> str:
        """Why a node with this build may compute other bits than the pool."""
        return self._reception.why_other_bits(build)

    def dismiss(self, peer: Peer, error: WideError) -> None:
        """This peer cannot be used: say why, count it, forget it."""
        if peer.is_closed:
            return
        why = words.line(str(error))
        if isinstance(error, OtherSet):
            pass  # it comes again in a moment
        elif not peer.node:
            self._complaints.of(peer.host, peer.address, error)
        elif not isinstance(error, TrainingFailed | NotYet):
            self.happenings.append(happened.Rejected(peer.node, reason_of(error), f"{peer.address}: {why}"))
        if peer.node:  # what strangers say is nobody's reason
            self.happenings.append(happened.Dismissed(why))
        is_news = not peer.node and self._now() - self._told_at > TOLD_EVERY_S  # of nodes we will hear that they left
        self._told_at = self._now()
        log.log(logging.INFO if is_news else logging.DEBUG, "dropped %s: %s", peer.name or peer.address, why)
        isa = error.isa if isinstance(error, OtherSet) else ""
        self._board.say_goodbye(peer, why, error.exit_code, isinstance(error, OtherProgram), isa)
        self._lost(peer, why, died=False)

    def close(self, why: str, code: int, comes_back: bool = False) -> None:
        """Say goodbye to everybody, and let go of the sockets; but for the listening one, if it is needed again."""
        self._complaints.sum_up(is_last=True)
        for peer in self._board.members:
            peer.count_bytes()
        self._board.close(why, code, comes_back)

    # ── upwards ──────────────────────────────────────────────────────────────────────────────────────────────────

    def turn(self, timeout_s: float) -> None:
        """Wait until something happens, but not for long; then serve whoever it happened to."""
        for key, reads, writes in self._hub.wait(timeout_s):
            if key is CALLERS:
                self._board.accept()
            elif key is RUNG:
                self._inspection.tell_done()
                for peer in list(self._board.members):
                    self._delivery.pump(peer)
            elif not isinstance(key, Peer):
                self._board.answer(key)
            else:
                if writes and not key.is_closed:
                    self._board.flush(key)
                if reads and not key.is_closed:
                    self._listen(key)

    def tick(self, now: float) -> None:
        """Who is late, or silent, or owed a sign of life; and which codec suits each link by now."""
        self._hub.listen(True)
        self._complaints.sum_up()
        for peer in self._board.late(now):
            self.dismiss(peer, Refused("you did not say hello in time"))
        if revoked := self._guests.look(now):
            for peer in [peer for peer in self._board.everybody if peer.machine_id in revoked]:
                self.dismiss(peer, Refused("this machine was sent away: whoever runs the pool has revoked it"))
        for peer in self._next_to_look_at():
            if (error := self._look_at(peer, now)) is not None:
                self.dismiss(peer, error)

    def _next_to_look_at(self) -> list[Peer]:
        if not self._to_look_at:
            self._to_look_at = list(self._board.peers.values())
            self._at_once = max(LOOKED_AT, -(-len(self._to_look_at) // ROUND))
        now, self._to_look_at = self._to_look_at[: self._at_once], self._to_look_at[self._at_once :]
        return [peer for peer in now if not peer.is_closed]

    def transfers_s(self) -> list[tuple[int, float]]:
        """How long new weights and an update travel, as things are, for each node."""
        return [(peer.node, self._codecs.transfer_s(peer)) for peer in self._board.members]

    @property
    def is_lossless(self) -> bool:
        return self._codecs.is_lossless

    def link_view(self, node: int) -> LinkView | None:
        peer = self._board.peers.get(node)
        return self._codecs.view(peer) if peer is not None else None

    def _look_at(self, peer: Peer, now: float) -> WideError | None:
        connection, outgoing, patience = peer.connection, peer.outgoing, peer.patience
        is_speaking = connection.reader.is_amid_frame or bool(peer.incoming.arriving)
        has_unsent = connection.has_unsent
        patience.look(connection.bytes_received, connection.bytes_sent, is_speaking, has_unsent, now)
        error = patience.exhausted(peer.is_ready and not peer.is_evaluator, peer.incoming.batches_per_s, now)
        if error is not None or not peer.is_ready or peer.is_evaluator:
            return error
        peer.count_bytes()
        if patience.has_fallen_silent(now) != patience.is_silent:
            patience.is_silent = not patience.is_silent
            kind = happened.Silent if patience.is_silent else happened.Heard
            self.happenings.append(kind(peer.node, peer.name))
        self._codecs.decide(peer, self._delivery.batch_nbytes, now)
        if patience.owes_a_beat(now) and not (outgoing.is_at_work or outgoing.pending or has_unsent):
            self._board.send(peer, say.Alive())
        return None

    def _listen(self, peer: Peer) -> None:
        """What one peer says can end its own connection, and nothing else."""
        try:
            for message in peer.connection.receive():
                if peer.is_closed:
                    break  # forgotten over the message before
                hear = HEARERS.get(type(message))
                if hear is None or not (peer.node or isinstance(message, FROM_OTHERS[peer.has_asked])):
                    raise ProtocolError("out of order", f"{type(message).__name__} is not for now")
                hear(self, peer, message)
        except ConnectionLost as error:
            self._lost(peer, str(error))
        except (ProtocolError, Refused, NotYet, VersionMismatch) as error:
            self.dismiss(peer, error)
        except Exception as error:  # ours, most likely: but the others' training is not to end with it
            log.error("serving %r failed: %s", peer, words.details(traceback.format_exc()))
            self.dismiss(peer, ProtocolError("served badly", f"{type(error).__name__} while its message was served"))

    def _lost(self, peer: Peer, why: str, died: bool = True) -> None:
        """Its connection is over."""
        if peer.is_closed:
            return
        self._inspection.finish(peer.node)
        peer.count_bytes()
        self._board.let_go(peer)
        self._delivery.forget(peer)
        self._intake.forget(peer)
        self._codecs.forget(peer)
        self._reception.forget(peer)
        if peer.is_evaluator:
            self.happenings.append(happened.EvaluatorLost(why))
        elif peer.node:
            self.happenings.append(happened.Left(peer.node, peer.name, why, peer.is_ready, died))
            self._make_room()

    def _make_room(self) -> None:
        self._goods.spare.keep(self.member_count + 1)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _heard_knock(self, peer: Peer, knock: say.Knock) -> None:
        self._reception.knock(peer, knock)

    def _heard_hello(self, peer: Peer, hello: say.Hello) -> None:
        sink = functools.partial(self._intake.place_for, peer)
        self.happenings += self._reception.hello(peer, hello, sink, self.dismiss)
        if peer.node and not peer.is_closed:
            self._reception.greet(peer, self._now())

    def _heard_probe(self, peer: Peer, probe: say.Probe) -> None:
        if not peer.node:
            self._reception.echo(peer, probe)
        elif self._reception.echoed(peer, self._now()):
            assert peer.probing is not None
            self._codecs.probed(peer, peer.probing.link)

    def _heard_ready(self, peer: Peer, ready: say.Ready) -> None:
        try:
            news = self._reception.ready(peer, ready)
        except NotRepeatable as error:
            self.happenings.append(happened.JobRefused(str(error), error.details))
            raise Refused(str(error)) from None
        if not peer.is_evaluator:
            if self._version == 0 and self._reception.has_first_weights(ready):
                self._delivery.has_built(peer, 0, self._overlaps)
            self._codecs.decide(peer, self._delivery.batch_nbytes, self._now())
            self._make_room()
        self.happenings.append(news)

    def _heard_update(self, peer: Peer, update: say.Update) -> None:
        if (whole := self._intake.update(peer, update)) is not None:
            self._updated(peer, whole)

    def _heard_part(self, peer: Peer, _: say.Part) -> None:
        if (whole := self._intake.part(peer)) is not None:
            self._updated(peer, whole)

    def _updated(self, peer: Peer, whole: Whole) -> None:
        update, flat, journey = whole
        sent = self._delivery.answered(peer, update.lease)
        sizes = sent.sizes if sent is not None else []
        said = None
        if sent is not None and sent.room is flat:  # who can write there can do as it likes: it is believed
            said = update.norm if update.is_finite else math.nan
        unseen = Unseen(peer.node, update.lease, flat, sizes, update.losses, journey)
        self._inspection.look_through(unseen, self._goods.layout.live_nbytes, said)

    def _heard_failed(self, peer: Peer, failed: say.Failed) -> None:
        problem, details = words.line(failed.problem), words.details(failed.details)
        if peer.is_evaluator:
            self.happenings.append(happened.EvaluationFailed(problem, details))
        elif failed.moved:
            if not self._goods.layout.fixed.issuperset(failed.moved):
                raise ProtocolError("wrong names", "parameters that the model has not, or that are known to move")
            self.happenings.append(happened.ParametersMoved(failed.moved))
        elif not peer.is_ready or failed.is_everywhere:  # it could not even build the model or the data
            if failed.is_everywhere:
                self.happenings.append(happened.JobRefused(problem, details))
            raise Refused(problem, details)
        else:
            self.happenings.append(happened.Failed(peer.node, failed.lease, failed.batch, problem, details))

    def _heard_leaving(self, peer: Peer, leaving: say.Leaving) -> None:
        if (flat := self._intake.debt(peer)) is not None:
            self.happenings.append(happened.Owed(flat))
        self._lost(peer, words.line(leaving.why), died=False)

    def _heard_evaluated(self, peer: Peer, evaluated: say.Evaluated) -> None:
        if not peer.is_evaluator:
            raise ProtocolError("out of order", "only the evaluator evaluates")
        metrics = {words.name(key): value for key, value in evaluated.metrics.items()}
        self.happenings.append(happened.Evaluated(evaluated.epoch, evaluated.step, metrics))

    def _heard_alive(self, peer: Peer, _: say.Alive) -> None:
        """It was counted as it came."""


FROM_OTHERS = {False: (say.Knock, say.Hello), True: (say.Hello, say.Probe)}  # strangers, visitors
HEARERS: dict[type[say.Message], Callable[[Exchange, Peer, Any], None]] = {
    say.Knock: Exchange._heard_knock,
    say.Hello: Exchange._heard_hello,
    say.Probe: Exchange._heard_probe,
    say.Ready: Exchange._heard_ready,
    say.Update: Exchange._heard_update,
    say.Part: Exchange._heard_part,
    say.Failed: Exchange._heard_failed,
    say.Leaving: Exchange._heard_leaving,
    say.Evaluated: Exchange._heard_evaluated,
    say.Alive: Exchange._heard_alive,
}
assert set(HEARERS) == set(say.TO_COORDINATOR)
