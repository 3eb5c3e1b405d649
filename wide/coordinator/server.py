"""The coordinator's shell: what happens at the exchange becomes events, decisions become work to send. One thread.

    exchange.happenings ─► events ─► pool ─► actions ─► run (model, ledger, checkpoints) and exchange (work, goodbyes)

An action that fails because a peer is gone leaves another happening behind; nothing here is ever entered twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wide.coordinator import events
from wide.coordinator.aside import Pending, afterwards
from wide.coordinator.evaluation import Evaluation
from wide.coordinator.gatekeeper import Gatekeeper, Seen
from wide.coordinator.leases import Lease
from wide.coordinator.picture import Home, Painter, Shell
from wide.coordinator.planning import Planner
from wide.coordinator.queue import EventQueue
from wide.coordinator.run import Run
from wide.coordinator.state import Pool
from wide.coordinator.steering import Asked, Steering
from wide.coordinator.taken import Taken
from wide.errors import NotYet, ParametersMoved, TrainingFailed
from wide.exchange import happenings as happened
from wide.exchange.delivery import Assignment
from wide.exchange.exchange import Exchange
from wide.exchange.reception import EVALUATOR
from wide.telemetry.clock import Clock
from wide.telemetry.contributions import TELL_S, Contributions
from wide.telemetry.log import log
from wide.telemetry.process import rss_bytes
from wide.telemetry.snapshot import Snapshot, Window
from wide.telemetry.totals import NodeTotals, totals_of
from wide.wire import messages as say

TICK_S = 0.05
AWAY_S = 1.0  # a loop that was away for so long was busy itself: nobody else was silent
LINKS_S = 1.0
SNAPSHOT_S, LARGE = 0.25, 64  # of a larger pool a picture is made four times less often


class Server:
    """Serves one run from the first node's hello to the last evaluation."""

    def __init__(
        self,
        exchange: Exchange,
        pool: Pool,
        run: Run,
        evaluation: Evaluation,
        clock: Clock,
        window: Window,
        planner: Planner | None = None,
        name: str = "",
        asked: Asked | None = None,
        stop: Callable[[], None] = lambda: None,
        gate: Gatekeeper | None = None,
    ) -> None:
        self.exchange, self.pool, self.run, self._gate = exchange, pool, run, gate or Gatekeeper()
        self._evaluation, self._now, self._window, self._planner = evaluation, clock.now, window, planner
        self._queue = EventQueue(
            pool,
            {
                **run.performers,
                events.GrantLease: self._grant,
                events.MergeUpdate: self._merge,
                events.DropNode: self._drop,
                events.NameNode: self._name_node,
                events.RejectUpdate: self._reject,
                events.MakeVersion: self._make_version,
                events.ChangeStrategy: self._change_strategy,
                events.CloseStep: self._close_step,
            },
            clock.now,
        )
        journal, post = run.record.journal, self._queue.post
        run.tell_to(post)
        self._steering = None
        if asked is not None:
            self._steering = Steering(asked, pool, journal, post, stop, exchange.send_away)
        self._phases = run.master.descent.phases
        self._name, self._contributions, self._shares = name, Contributions(), Contributions(TELL_S)
        self._painter = Painter(pool, run.record, exchange)
        self._suspicion = ""  # that was told
        self._is_alone_told = False
        self._full_since: float | None = None  # of snapshots to be evaluated, so that everybody waits
        self._evaluating_s = 0.0  # that they have waited before
        self._dropped: set[int] = set()  # nodes whose work failed
        self._begins_anew = False  # with a layout in which parameters may move
        self.last_trouble = ""  # why the last peer was dropped
        self._is_evaluator_gone: Callable[[], bool] = lambda: False
        self._waiting: dict[int, events.NodeJoined] = {}  # nodes that are ready, while the job is being tried
        self._ticked_at = self._linked_at = self._pictured_at = -1e9
        self._first_at = self._idle_before_s = 0.0  # when the first update came
        self._updates = 0
        self._longest_s = 0.0  # in which nobody was listened to, since it was last written down
        exchange.follow(run.strategy.update_role, run.strategy.overlaps)
        exchange.version_made(pool.version)
        exchange.number_from(run.record.last_node)

    def serve(self, watch: Callable[[], str], is_evaluator_gone: Callable[[], bool] = lambda: False) -> None:
        """Until the run is over. `watch` is asked now and then whether there is a reason to give up, and the other one
        whether the process that should evaluate has ended.
        """
        self._is_evaluator_gone = is_evaluator_gone
        try:
            while self.run.ended is None or (self._evaluation.is_busy and not self.run.stop_reason):
                began, idle_s = self._now(), self.exchange.idle_s
                self.exchange.turn(TICK_S)
                self._take_happenings()
                now = self._now()
                self._longest_s = max(self._longest_s, now - began - (self.exchange.idle_s - idle_s))
                if now - self._ticked_at >= AWAY_S and self._ticked_at > 0:
                    self.exchange.turn(0.0)  # we were busy, not they silent: first hear what they have said meanwhile
                    self._take_happenings()
                    self._tick(self._now(), watch)
                elif now - self._ticked_at >= TICK_S:
                    self._tick(now, watch)
        except TrainingFailed as error:
            self._queue.finish()
            if self.run.is_between_versions:
                self._queue.post(events.RunFailed(str(error), error.details))  # what was trained until then is kept
                self._queue.wait()
            self.run.ended = self.run.ended or events.EndRun("failed", str(error))
            self._begins_anew = isinstance(error, ParametersMoved)
            raise

    def close(self) -> None:
        """Say goodbye to everybody."""
        self.run.close()
        self.run.record.flush(force=True)
        self.run.record.journal.show(self._painter.paint(now := self._now(), self._shell(now)))  # as it was at its end
        end, stop = self.run.ended, self.run.stop_reason
        for node in self.exchange.nodes:
            self.run.record.journal.node_left(
                node, "the run failed" if end is not None and end.failure else "the run is over"
            )
        if self._begins_anew:
            self.exchange.close("the pool begins anew", NotYet.exit_code, comes_back=True)
        elif end is None or (self.pool.is_open and end.why == stop):
            self.exchange.close("the coordinator was stopped, and may come back", NotYet.exit_code)
        else:
            self.exchange.close(f"the run is over: {end.failure or end.why}", int(bool(end.failure)))
        self.run.record.flush(force=True)
        self.run.record.journal.series(self.totals(), self._now(), force=True)

    @property
    def plan_words(self) -> str:
        """The plan as JSON, if that is all that was wanted."""
        return self._planner.words if self._planner is not None else ""

    def totals(self) -> list[NodeTotals]:
        """What every node has done, those that have left included."""
        traffic, parts = self.exchange.traffic, self.run.record.parts
        return [totals_of(node, part, traffic.get(node)) for node, part in parts.items()]

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _tick(self, now: float, watch: Callable[[], str]) -> None:
        self._ticked_at = now
        self.exchange.tick(now)
        self._take_happenings()
        record, run = self.run.record, self.run
        if self._waiting:
            self._admit()
        record.flush()
        if self._steering is not None:
            self._steering.look(now)
        if run.stop_reason:
            self._decide(events.StopRequested(run.stop_reason))
        elif run.ended is None and (problem := watch()):
            raise TrainingFailed(self.last_trouble or f"{problem}{self.pool.deadly.last_words}")
        if record.divergence.problem:
            self._decide(events.RunFailed(record.divergence.problem))
        if self._evaluation.is_awaited and self._is_evaluator_gone():
            self._evaluator_lost(happened.EvaluatorLost("before it was ready"))
        if self._evaluation.is_late:
            limit_s = self._evaluation.limit_s
            self.exchange.dismiss_node(EVALUATOR, NotYet(f"evaluate() takes more than {limit_s:.0f} s"))
        if now - self._linked_at >= LINKS_S:
            self._linked_at = now
            for node, transfer_s in self.exchange.transfers_s():
                self._queue.post(events.LinkMeasured(node, transfer_s))
        if now - self._pictured_at >= SNAPSHOT_S * (4 if len(self.pool.members) > LARGE else 1):
            self._look(now)
        self._decide(events.Ticked())

    def _look(self, now: float) -> None:
        """Make a picture of the run, for whoever wants to see it; and act on what the planner sees in it."""
        self._pictured_at = now
        snapshot = self._window.latest = self._painter.paint(now, self._shell(now))
        journal, parts, traffic = self.run.record.journal, self.run.record.parts, self.exchange.traffic
        gone = [totals_of(node, parts[node], traffic.get(node)) for node in set(journal.left_lately) if node in parts]
        present = [view.totals for view in snapshot.nodes]
        loop_max_ms, busy = 1000 * self._longest_s, snapshot.busy
        everybody = [*present, *gone]
        if journal.series(everybody, now, loop_max_ms=loop_max_ms, loop_busy=busy, coordinator_rss_bytes=rss_bytes()):
            self._longest_s = 0.0
            journal.show(snapshot)
        self._tell(snapshot)
        if self._planner is not None and (event := self._planner.look(snapshot, now)) is not None:
            self._queue.post(event)

    def _shell(self, now: float) -> Shell:
        busy_s = now - self._first_at - (self.exchange.idle_s - self._idle_before_s) if self._updates else 0.0
        waited_s = now - self._full_since if self._full_since is not None else 0.0
        return Shell(
            self._name,
            self.exchange.is_lossless,
            busy_s,
            busy_s / max(self._updates, 1),
            self._evaluating_s + waited_s,
            self._evaluation.longest_s,
            self.run.checkpoint_s,
        )

    def _tell(self, run: Snapshot) -> None:
        """Now and then: each node how it is doing, and this side which one is of no use."""
        _, useless = self._contributions.look(run)
        contributions, _ = self._shares.look(run)
        for node, batches, per_s in contributions:
            self.exchange.tell(node, say.Progress(run.step, run.steps, run.left_s, run.batches, batches, per_s))
        if self.pool.deadly.suspicion != self._suspicion:
            useless.append(suspicion := self.pool.deadly.suspicion)
            self._suspicion = suspicion
        if not self._is_alone_told and run.batches:
            self._is_alone_told = True
            if self.pool.trust.is_alone:
                useless.append("a pool of one: nobody can check what it computes until a second node joins (--audit)")
        for words in useless:
            log.warning("%s", words)

    # ── happenings ───────────────────────────────────────────────────────────────────────────────────────────────

    def _take_happenings(self) -> None:
        happenings = self.exchange.happenings
        while happenings:
            happening = happenings.popleft()
            HEARERS[type(happening)](self, happening)
            self._queue.work_off()
        if self._queue.is_waiting:
            self._queue.work_off()  # something that was done aside may be done

    def _updated(self, it: happened.Updated) -> None:
        if not self._updates:
            self._first_at, self._idle_before_s = self._now(), self.exchange.idle_s
        self._updates += 1
        member = self.pool.members.get(it.node)
        lease = member.leases.get(it.lease) if member is not None else None
        what = (it.node, it.lease, it.problem, it.journey.compute_s, len(it.losses), it.digest)
        taken = Taken(it.flat, it.sizes, it.losses, it.journey, it.digest)
        if lease is not None and lease.pair and it.node in self._painter.homes:
            taken = taken._replace(is_on_cpu=" cpu," in self._painter.homes[it.node].build)
        if lease is None:  # the pool will say so; and what is at hand for that lease is another's, or counted already
            self.run.master.release(it.flat)
            self._queue.post(events.UpdateArrived(*what))
        elif self.pool.is_over or not self.run.take(it.lease, taken):
            self.run.master.release(it.flat)
        else:
            distance = self.run.distance(lease.pair, it.lease) if lease.pair else None
            self._queue.post(events.UpdateArrived(*what, distance, self._doubt(it, lease)))

    def _doubt(self, it: happened.Updated, lease: Lease) -> str:
        """What is odd about an update that is sound, if anything."""
        if lease.is_check or it.problem:
            return ""
        sizes, losses, counts, first = it.sizes, it.losses, it.flat.weights, lease.block.first
        batches = len(losses)
        share = self.run.schedule.share(first, sizes if len(sizes) == batches else sizes[:batches])
        amount = -(-batches // lease.group) if lease.group else sum(counts) if counts else share
        per_sample = sum(counts) / share if counts else None
        phase = self.run.schedule.step_at(first).number % self._phases if self._phases > 1 and not lease.group else 0
        seen = Seen(it.node, self.run.strategy.update_role, it.norm, amount, losses, per_sample, phase)
        return self._gate.doubt(it.lease, seen)

    def _enrolled(self, it: happened.Enrolled) -> None:
        self.run.record.journal.enrolled(it.machine, it.name, it.address, it.invite)
        log.info(
            "%s (%s) came by invite %s, and is machine %s of this pool", it.name, it.address, it.invite, it.machine
        )

    def _joined(self, it: happened.Joined) -> None:
        self.run.record.node_joined(it.node, it.name, it.host, it.pid, it.machine, it.address)
        self._painter.homes[it.node] = Home(it.host, build=it.build)

    def _ready(self, it: happened.Ready) -> None:
        name = self.run.record.parts[it.node].name
        why = f" ({it.data_problem})" if it.data_problem else ""
        streamed = "" if it.has_data else f", batches are streamed to it{why}"
        log.info("node %d (%s) joined%s", it.node, name, streamed)
        self.run.record.journal.tell("joined", it.node, f"{name}{streamed}")
        homes = self._painter.homes
        homes[it.node] = homes[it.node]._replace(machine=it.machine, cores=it.cores)
        self._waiting[it.node] = events.NodeJoined(it.node, it.machine, it.cores, it.known_as)
        self._admit()
        if self.exchange.member_count == self.run.schedule.batches_per_step + 1:
            log.warning(
                "there are more nodes than batches in a step (%d): in sync and async some will be idle, in local "
                "a step takes more batches than the job says; raise batches_per_step",
                self.run.schedule.batches_per_step,
            )

    def _admit(self) -> None:
        """Nobody is given work before somebody has tried the job."""
        if not self.exchange.is_checking:
            for event in self._waiting.values():
                self._queue.post(event)
            self._waiting.clear()

    def _left(self, it: happened.Left) -> None:
        self.run.record.journal.node_left(it.node, it.why)
        why = "it failed, and another one tries its work" if it.node in self._dropped else it.why
        self._dropped.discard(it.node)
        log.info("node %d (%s) left: %s", it.node, it.name, why)
        self.run.record.journal.tell("left", it.node, f"{it.name}: {why}")
        self._painter.homes.pop(it.node, None)
        if self._waiting.pop(it.node, None) is None and it.was_ready:
            self._queue.post(events.NodeLeft(it.node, it.why, it.died))
        self._admit()

    def _silent(self, it: happened.Silent) -> None:
        log.info("node %d (%s) is silent", it.node, it.name)
        self.run.record.journal.tell("silent", it.node, it.name)
        self._queue.post(events.NodeSilent(it.node))

    def _heard(self, it: happened.Heard) -> None:
        log.info("node %d (%s) is back", it.node, it.name)
        self.run.record.journal.tell("back", it.node, it.name)
        self._queue.post(events.NodeHeard(it.node))

    def _failed(self, it: happened.Failed) -> None:
        self._queue.post(events.WorkFailed(it.node, it.lease, it.batch, it.problem, it.details))

    def _parameters_moved(self, it: happened.ParametersMoved) -> None:
        raise ParametersMoved(it.names)

    def _job_refused(self, it: happened.JobRefused) -> None:
        """Our own nodes are believed; of an open pool's, only that they do not want to train it."""
        if not self.pool.is_open:
            raise TrainingFailed(it.problem, it.details)

    def _owed(self, it: happened.Owed) -> None:
        """Where a version is a mean of its updates, a debt is only a part of one, too."""
        weight = 1 / max(1, self.exchange.member_count) if self.run.strategy.is_mean else 1.0
        self._queue.post(lambda: self.run.master.owe(it.flat, weight))

    def _rejected(self, it: happened.Rejected) -> None:
        self.run.record.journal.rejected(it.node, it.reason, it.detail)

    def _dismissed(self, it: happened.Dismissed) -> None:
        self.last_trouble = it.why

    def _chose(self, it: happened.Chose) -> None:
        self.run.record.journal.chose(it.node, it.role, it.codec, it.reason)

    def _plan_asked(self, it: happened.PlanAsked) -> None:
        self._look(self._now())
        try:
            nbytes = self.run.master.layout.live_nbytes
            self.exchange.answer_plan(it.peer, Planner.answer(self._window.latest, self.run.schedule, nbytes))
        except NotYet as error:
            self.exchange.dismiss(it.peer, error)

    def _evaluator_ready(self, it: happened.EvaluatorReady) -> None:
        self._evaluation.ready()
        self._watch_evaluation()

    def _evaluator_lost(self, it: happened.EvaluatorLost) -> None:
        if self.run.is_judged:
            raise TrainingFailed(
                f"the evaluating process ended ({it.why}), and training depends on what it says: "
                "go on with --resume auto"
            )
        log.error("the evaluating process ended (%s): training goes on, and is not evaluated any more", it.why)
        self._evaluation.give_up()
        self._watch_evaluation()

    def _evaluation_failed(self, it: happened.EvaluationFailed) -> None:
        self.run.record.evaluation_failed(it.problem, it.details)
        self.run.not_evaluated()
        self._evaluation.answered()
        self._watch_evaluation()

    def _evaluated(self, it: happened.Evaluated) -> None:
        self.run.evaluated(it.epoch, it.step, it.metrics)
        self._evaluation.answered()
        self._watch_evaluation()

    # ── actions ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _decide(self, event: events.Event | Callable[[], None]) -> None:
        self._queue.post(event)
        self._queue.work_off()

    def _grant(self, grant: events.GrantLease) -> None:
        if self.run.record.started_at is None:
            self.run.record.started(self._now())
        assignment = Assignment(grant.lease, *grant.block, grant.group, grant.version, grant.strategy, grant.core)
        assignment = assignment._replace(is_check=True) if grant.is_check else assignment
        assignment = assignment._replace(rates=rates) if (rates := self.run.rates) else assignment
        self.exchange.send_work(grant.node, assignment)

    def _merge(self, merge: events.MergeUpdate) -> Pending | None:
        self._gate.merged(merge.lease)
        return self.run.performers[events.MergeUpdate](merge)

    def _drop(self, drop: events.DropNode) -> None:
        self._dropped.add(drop.node)
        self.exchange.dismiss_node(drop.node, TrainingFailed(drop.why))

    def _name_node(self, it: events.NameNode) -> None:
        """It is told what is known of the reason."""
        self.run.performers[events.NameNode](it)
        home = self._painter.homes.get(it.node)
        why = self.exchange.why_other_bits(home.build if home else "")
        self.exchange.send_machine_away(it.node, f"{it.words}{why}")

    def _reject(self, reject: events.RejectUpdate) -> None:
        self._gate.forget(reject.lease)
        self.run.performers[events.RejectUpdate](reject)
        self.exchange.refused(reject.node, reject.lease)

    def _make_version(self, make: events.MakeVersion) -> Pending | None:
        self.exchange.version_made(make.version + 1)
        copy = self.exchange.room_for_version(make.version + 1) if self.run.aside.is_used else None
        return afterwards(self.run.make_version(make, copy), self.exchange.release)

    def _change_strategy(self, change: events.ChangeStrategy) -> None:
        self.run.performers[events.ChangeStrategy](change)
        self.exchange.follow(self.run.strategy.update_role, self.run.strategy.overlaps)
        log.info("strategy: %s", change.strategy)
        self.run.record.journal.tell("strategy", None, change.strategy)

    def _close_step(self, close: events.CloseStep) -> Pending | None:
        return afterwards(self.run.performers[events.CloseStep](close), self._watch_evaluation)

    def _watch_evaluation(self) -> None:
        """Every epoch is evaluated, and snapshots do not pile up without end."""
        if (is_full := self._evaluation.is_full) == (self._full_since is not None):
            return
        now = self._now()
        if self._full_since is not None:
            self._evaluating_s += now - self._full_since
        self._full_since = now if is_full else None
        self._queue.post(events.EvaluationFull() if is_full else events.EvaluationCaughtUp())


HEARERS: dict[type[happened.Happening], Callable[[Server, Any], None]] = {
    happened.Updated: Server._updated,
    happened.Enrolled: Server._enrolled,
    happened.Joined: Server._joined,
    happened.Ready: Server._ready,
    happened.Left: Server._left,
    happened.Silent: Server._silent,
    happened.Heard: Server._heard,
    happened.Failed: Server._failed,
    happened.ParametersMoved: Server._parameters_moved,
    happened.JobRefused: Server._job_refused,
    happened.Owed: Server._owed,
    happened.Rejected: Server._rejected,
    happened.Dismissed: Server._dismissed,
    happened.Chose: Server._chose,
    happened.PlanAsked: Server._plan_asked,
    happened.EvaluatorReady: Server._evaluator_ready,
    happened.EvaluatorLost: Server._evaluator_lost,
    happened.EvaluationFailed: Server._evaluation_failed,
    happened.Evaluated: Server._evaluated,
}
assert set(HEARERS) == set(happened.HAPPENINGS)
