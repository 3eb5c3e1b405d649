"""The whole server over the in-memory twin: real messages, frames, intake, delivery and nodes; no socket, no waiting."""

from __future__ import annotations

import dataclasses
import logging
import re

import msgspec
import numpy as np
import pytest
import torch

from faults.disk import Disk
from tests import plain
from tests.greet import introduced
from tests.jobs import EVERYTHING, make, normed, points
from tests.twin import ELSEWHERE, TOKEN, Twin
from wide.errors import ConnectionLost
from wide.exchange import happenings as happened
from wide.exchange.delivery import Delivery
from wide.exchange.intake import Intake
from wide.job.settings import build
from wide.store.weights import weights_sha256
from wide.telemetry.journey import Journey
from wide.telemetry.log import log
from wide.wire import messages as say
from wide.wire.frames import encode

EVIL = {"token": TOKEN, "name": "evil", "host": "there"}


@pytest.mark.parametrize("name", ["mlp", "batch norm, clipping, schedule", "odd parameters and buffers"])
@pytest.mark.parametrize("compress", ["lossless", "lz4"])
def test_a_pool_over_the_twin_gives_the_bits_of_the_plain_program(name, compress):
    job = EVERYTHING[name]
    twin = Twin(job, compress=compress)
    model = twin.train(*(twin.join(f"n{i}") for i in range(3)))
    assert weights_sha256(model) == weights_sha256(plain.train(job, 5))


@pytest.mark.parametrize("name", ["mlp", "batch norm, clipping, schedule", "odd parameters and buffers"])
@pytest.mark.parametrize("data", ["local", "stream"])
@pytest.mark.parametrize("shares", [True, False])
def test_work_ahead_gives_the_bits_of_the_plain_program(name, data, shares, monkeypatch):
    given = []
    deliver = Delivery.deliver
    monkeypatch.setattr(
        Delivery,
        "deliver",
        lambda self, peer, it, is_ahead: given.append(is_ahead) or deliver(self, peer, it, is_ahead),
    )
    job = EVERYTHING[name]
    twin = Twin(job, steps=12, data=data, shares=shares)
    first, second = (twin.join(f"n{i}", is_beside=True) for i in range(2))
    while twin.run.ended is None:
        first.work()
        twin.turn()
        second.work()
    assert sum(given) > 3
    assert weights_sha256(twin.master.model) == weights_sha256(plain.train(job, 12))


def test_work_that_could_not_be_begun_cannot_be_answered():
    twin = Twin(make(batches_per_step=2), steps=9)
    quick, slow = ready(twin), ready(twin)
    works = {line: line.wait() for line in (quick, slow)}
    while not works[quick].is_ahead:
        answer(twin, quick, works[quick])
        twin.turn()
        if any(isinstance(said, say.Work) for said in quick.look()):
            works[quick] = quick.wait()
            continue
        answer(twin, slow, works[slow])
        works = {line: line.wait() for line in (quick, slow)}
    answer(twin, quick, works[quick])
    assert twin.rejects()[-1][1:] == ("out of order", f"{ELSEWHERE}: an update for work that could not be begun")


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_who_answers_for_another_is_sent_away_and_the_other_ones_answer_counts(strategy):
    twin = Twin(make(), strategy=strategy, steps=4)
    honest, thief = ready(twin), ready(twin)
    work = honest.wait()
    thief.send(say.Alive())
    twin.turn()
    answer(twin, thief, work)
    assert twin.rejects()[-1][1:] == ("out of order", f"{ELSEWHERE}: an update for work that it was not given")
    answer(twin, honest, work)
    assert len(twin.rejects()) == 1
    assert isinstance(honest.wait(), say.Work), "and it is given something else"


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_what_is_said_of_anothers_lease_leaves_that_and_its_pair_alone(strategy):
    twin = Twin(make(), strategy=strategy, steps=4)
    nodes = [twin.join(), twin.join()]
    for _ in range(100):
        for node in nodes:
            node.work()
        for lease in [lease for held in twin.pool.leases.by_node.values() for lease in held.values()]:
            flat, journey = twin.master.spare.take(), Journey(0.1, 0.0, 0.0, 0.0)
            twin.exchange.happenings.append(happened.Updated(77, lease.number, flat, [1], [0.5], journey))
        twin.turn()
    assert twin.run.ended.failure == ""
    assert twin.pool.trust.canaries.verified.keys() == {node.number for node in nodes}
    assert {reason for _, reason, _ in twin.rejects()} == {"unknown lease"}


def test_an_answer_that_comes_twice_is_heard_and_one_that_comes_thrice_is_not():
    twin = Twin(make(), steps=9)
    line = ready(twin)
    work = line.wait()
    for _ in range(3):
        answer(twin, line, work)
    assert [reason for _, reason, _ in twin.rejects()] == ["duplicate", "out of order"]


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_the_other_strategies_merge_every_batch_once(strategy):
    twin = Twin(make(), strategy=strategy, steps=6)
    twin.train(*(twin.join(f"n{i}") for i in range(3)))
    batches = [(step // 3, at) for step, first, last, _ in twin.ledger() for at in range(first, last + 1)]
    assert sorted(batches) == [(epoch, at) for epoch in range(2) for at in range(11)]


def test_a_run_goes_on_from_its_checkpoint_to_the_same_bits():
    job, disk = make(), Disk()
    first = Twin(job, disk, steps=5, checkpoint_every=0.01)
    node = first.join()
    while first.pool.version < 3:
        node.work()
        first.turn()
    first.writer.settle()  # and that was its end
    model = (again := Twin(job, disk, steps=5)).train(again.join())
    assert weights_sha256(model) == weights_sha256(plain.train(job, 5))


def test_when_all_members_are_reset_at_once_the_coordinator_goes_on():
    twin = Twin(make(batches_per_step=64), steps=3)
    lines = [introduced(twin.call(), **EVIL) for _ in range(200)]
    twin.turn()
    for line in lines:
        line.stream.close()
    node = twin.join()
    twin.train(node)
    assert twin.run.ended.failure == ""


def greeted(twin, **changes):
    """Somebody who was let in, and has built nothing yet."""
    line = twin.call()
    introduced(line, **EVIL | changes)
    assert isinstance(line.wait(), say.Known)
    assert isinstance(line.wait(), say.Welcome)
    while not (probe := line.wait()).is_last:
        line.send(probe, line.sink.last)
    return line


def ready(twin, check="", **changes):
    """A member that speaks for itself."""
    line = greeted(twin, **changes)
    line.send(say.Ready(twin.master.layout.describe(), 83, check=check))
    return line


def answer(twin, line, work, **changes):
    """An update for this work; its numbers are sound but for the changes."""
    nbytes = twin.master.layout.live_nbytes
    touched = bytes(len(twin.master.layout.trainable) // 8 + 1)
    update = say.Update(work.lease, [0.5] * len(work.sizes), touched, 0.1, 0.0, 0.0, 1000)
    payload = changes.pop("payload", memoryview(bytes(nbytes)))
    line.send(msgspec.structs.replace(update, **changes), payload)
    twin.turn()


@pytest.mark.parametrize(
    "lies",
    [
        {"received_s": 5e-324, "received_nbytes": 2**62},
        {"compute_s": 0.0},
        {"compute_s": 5e-324},
        {"compute_s": 1e9, "network_s": 1e9},
        {"speeds": {"zstd": (1e-300, 1e300, 0.0, -1.0, 5e-324)}},
        {"losses": [1e100]},
        {"rss_bytes": 2**63 - 1},
        {"weights": [1e100]},
        {"logged": {"acc": (float("nan"), 1e100), "\x1b[31m": (1.7e308, 5e-324)}},
    ],
)
def test_no_number_of_a_peer_ends_the_coordinator(lies):
    twin = Twin(make(batches_per_step=1), steps=50)
    line = ready(twin)
    for _ in range(4):
        answer(twin, line, line.wait(), **lies)
    asking = twin.call()
    introduced(asking, **EVIL | {"role": "planner"})
    assert isinstance(asking.wait(), say.Known)
    assert isinstance(asking.wait(), say.Planned | say.Stop)
    for _ in range(50):
        twin.turn(0.3)
    assert twin.run.ended is None or "diverges" in twin.run.ended.failure


@pytest.mark.parametrize(
    "wrong",
    [
        {"losses": [float("nan")]},
        {"losses": [1.7e308]},
        {"losses": [0.5] * 7},
        {"losses": []},
        {"touched": b""},
        {"compute_s": float("inf")},
        {"received_s": -1.0},
        {"codec": "zstd"},
        {"weights": [-1.0]},
        {"weights": [float("nan")]},
        {"weights": [1.0] * 7},
        {"logged": {"acc": (1.0, -1.0)}},
        {"logged": {"a" * 65: (1.0, 1.0)}},
        {"logged": {f"m{i}": (1.0, 1.0) for i in range(65)}},
    ],
)
def test_a_peer_whose_numbers_cannot_be_is_sent_away_and_its_work_is_done_by_others(wrong):
    twin = Twin(make(), steps=3)
    line, good = ready(twin), twin.join()
    answer(twin, line, line.wait(), **wrong)
    stop = line.wait()
    assert isinstance(stop, say.Stop)
    assert stop.exit_code == 1
    model = twin.train(good)
    assert weights_sha256(model) == weights_sha256(plain.train(make(), 3))
    assert twin.rejects()[0][1] in ("bad header", "bad numbers", "unknown codec")


def test_a_buffer_that_is_not_finite_is_never_merged():
    job = make(model=normed)
    twin = Twin(job, steps=3)
    line, good = ready(twin), twin.join()
    flat = torch.zeros(twin.master.layout.live_nbytes, dtype=torch.uint8)
    slot = twin.master.layout.averaged[0]
    flat[slot.offset : slot.offset + slot.nbytes].view(torch.float32)[0] = float("nan")
    answer(twin, line, line.wait(), payload=flat.numpy().data)
    assert twin.rejects()[0][1] == "failed"
    assert "not finite" in twin.rejects()[0][2]
    model = twin.train(good)
    assert weights_sha256(model) == weights_sha256(plain.train(job, 3))


def test_what_peers_say_is_printable_before_anybody_reads_it(caplog):
    twin = Twin(make(), steps=3)
    with logged() as said:
        line = ready(twin, name="x\x1b[2J\n", build="\x1b]0;mine\x07", host="\u202eevil")
        line.send(say.Failed(line.wait().lease, 0, "boom\x1b[31m\nsecond line", "a\x1b\ntrace"))
        other = ready(twin)
        other.send(say.Leaving("\x07bye\r\n"))
        third = twin.call()
        introduced(third, **EVIL | {"role": "\x1b[2J"})
        twin.turn()
    twin.run.record.db.settle()
    words = [*said, *(text for row in twin.disk.read("SELECT name, host, why FROM nodes") for text in row if text)]
    words += [detail for _, _, detail in twin.rejects()]
    assert len(words) > 6
    assert all(text.isprintable() for text in words), words


def test_an_exception_while_one_peer_is_served_dismisses_that_peer_by_name_and_is_logged(monkeypatch):
    twin = Twin(make(), steps=3)
    bad, good = twin.join("unlucky"), twin.join("lucky")
    real = Intake.update

    def broken(self, peer, update):
        if peer.name == "unlucky":
            raise ZeroDivisionError("ours")
        return real(self, peer, update)

    monkeypatch.setattr(Intake, "update", broken)
    with logged() as said:
        model = twin.train(bad, good)
    assert weights_sha256(model) == weights_sha256(plain.train(make(), 3))
    assert any("unlucky" in text and "ZeroDivisionError" in text and "Traceback" in text for text in said)
    assert "served badly" in {reason for _, reason, _ in twin.rejects()}
    assert bad.stop.exit_code == 1


def test_memory_for_updates_is_given_back_when_nodes_have_left(monkeypatch):
    monkeypatch.setattr("wide.codec.spare.SMALL_NBYTES", 0)  # as if the model were large
    twin = Twin(make(batches_per_step=64), steps=2)
    nodes = [twin.join(f"n{i}") for i in range(12)]
    for node in nodes:
        node.work()
    twin.turn()
    assert len(twin.master.spare._free) + twin.master.spare.in_use >= 3
    for node in nodes[1:]:
        node.hang_up()
    twin.turn()
    twin.train(nodes[0])
    assert len(twin.master.spare._free) <= 2
    assert twin.master.spare.in_use == 0


def evaluating(twin):
    """The line of a process that could evaluate."""
    evaluator = twin.call()
    introduced(evaluator, token="evaluator's", role="evaluator")
    assert isinstance(evaluator.wait(), say.Known)
    evaluator.wait()
    evaluator.send(say.Ready(twin.master.layout.describe(), None))
    return evaluator


def test_while_evaluation_is_full_no_lease_is_granted_and_no_clock_runs(monkeypatch):
    monkeypatch.setattr("wide.coordinator.evaluation.BACKLOG_NBYTES", 0)
    job = make(evaluate=lambda model: {"accuracy": 1.0})
    twin = Twin(job, steps=9, evaluates=True)
    evaluator = evaluating(twin)
    node = twin.join()
    done = []
    for _ in range(2):
        for _ in range(200):
            node.work()
            twin.turn()
        done.append(twin.pool.steps)
    assert done[0] == done[1] in (6, 7), "one epoch is being evaluated, another one waits; a lease was out already"
    assert not twin.pool.members[node.number].leases
    for _ in range(2000):
        if evaluator.stream.has_input():
            asked = evaluator.wait()
            evaluator.send(say.Evaluated(asked.epoch, asked.step, {"accuracy": 0.5}))
        node.work()
        twin.turn()
    assert twin.run.ended is not None
    assert weights_sha256(twin.master.model) == weights_sha256(plain.train(job, 9))


def test_an_evaluator_that_is_late_finds_a_pool_that_waits_and_lets_it_go_on(monkeypatch):
    job = make(evaluate=lambda model: {"accuracy": 1.0})
    twin = Twin(job, steps=12, evaluates=True)
    monkeypatch.setattr("wide.coordinator.evaluation.BACKLOG_NBYTES", 1.5 * len(twin.master.weights.bytes))
    node = twin.join()
    for _ in range(300):
        node.work()
        twin.turn()
    assert twin.pool.steps < 9, "two epochs wait, and there is no room for a third"
    evaluator = evaluating(twin)
    for _ in range(2000):
        if evaluator.stream.has_input():
            asked = evaluator.wait()
            evaluator.send(say.Evaluated(asked.epoch, asked.step, {"accuracy": 0.5}))
        node.work()
        twin.turn()
    assert twin.run.ended is not None
    assert not twin.server._evaluation.is_busy


def test_an_evaluator_that_died_before_it_was_ready_is_not_waited_for():
    job = make(evaluate=lambda model: {"accuracy": 1.0})
    twin = Twin(job, steps=3, evaluates=True)
    twin.server._is_evaluator_gone = lambda: True
    assert weights_sha256(twin.train(twin.join())) == weights_sha256(plain.train(job, 3))


def test_a_node_that_comes_back_is_given_nothing_before_it_is_ready_again():
    twin = Twin(make(batches_per_step=2), steps=9)
    one, two = ready(twin, key="one"), ready(twin, key="two")
    works = {1: one.wait(), 2: two.wait()}
    answer(twin, two, works[2])  # it waits for the next step now
    again = twin.call()
    introduced(again, **EVIL | {"key": "two"})  # in one turn: it comes back, and
    update = say.Update(works[1].lease, [0.5], bytes(1), 0.1, 0.0, 0.0, 1000)
    one.send(update, memoryview(bytes(twin.master.layout.live_nbytes)))  # the step is made whole
    assert isinstance(again.wait(), say.Known)
    assert isinstance(again.wait(), say.Welcome)
    assert isinstance(again.wait(), say.Probe)


def test_one_peer_alone_cannot_end_a_run_however_often_it_fails():
    twin = Twin(make(), steps=3)
    good = twin.join()
    for _ in range(3):
        liar = ready(twin, key="liar")
        liar.send(say.Failed(liar.wait().lease, 0, "I lie", ""))
        twin.turn()
    assert twin.run.ended is None
    assert weights_sha256(twin.train(good)) == weights_sha256(plain.train(make(), 3))


def test_what_a_stranger_says_is_not_the_reason_that_a_run_failed():
    twin = Twin(make(), steps=3)
    twin.call().stream.send([b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n"])
    twin.turn()  # it is accepted, and then
    twin.turn()  # listened to
    assert twin.server.last_trouble == ""
    assert [reason for _, reason, _ in twin.rejects()] == ["not wide"]


def test_an_evaluation_that_never_ends_is_given_up_and_training_is_not(monkeypatch):
    monkeypatch.setattr("wide.coordinator.evaluation.FIRST_LIMIT_S", 5.0)
    job = make(evaluate=lambda model: {"accuracy": 1.0})
    twin = Twin(job, steps=7, evaluates=True)
    evaluating(twin)
    with logged() as said:
        model = twin.train(twin.join())
    assert weights_sha256(model) == weights_sha256(plain.train(job, 7))
    assert any("evaluate() takes more than 5 s" in text for text in said)


def test_a_member_that_comes_back_is_the_same_node_and_its_old_line_counts_no_more():
    twin = Twin(make(), steps=3)
    old = ready(twin, key="mine")
    work = old.wait()
    new = ready(twin, key="mine")
    assert twin.exchange.nodes == [1]
    with pytest.raises(ConnectionLost):
        answer(twin, old, work)
    assert twin.ledger() == []
    assert isinstance(new.wait(), say.Work)


def shifted(samples=83):
    x, y = points(samples).tensors
    return torch.utils.data.TensorDataset(x, (y + 1) % 3)


def test_a_node_with_other_data_of_the_same_length_is_refused_and_the_sample_is_named():
    twin = Twin(make(), steps=3)
    twin.exchange._reception._door = of_this_machine(twin.exchange._reception._door)
    good = twin.join()
    bad = twin.join("stale", job=make(dataset=shifted))
    bad.work()
    assert bad.stop.exit_code == 77
    assert re.search(r"your data set is not the pool's: sample \d+ differs", bad.stop.why)
    assert weights_sha256(twin.train(good)) == weights_sha256(plain.train(make(), 3))


def test_a_machine_with_data_of_its_own_is_sent_the_pools():
    twin = Twin(make(), steps=3)
    door = dataclasses.replace(of_this_machine(twin.exchange._reception._door), is_open=True)
    twin.exchange._reception._door = door
    with logged() as said:
        node = twin.join("stale", job=make(dataset=shifted))
        assert weights_sha256(twin.train(node)) == weights_sha256(plain.train(make(), 3))
    assert any(re.search(r"batches are streamed to it \(sample \d+ differs\)", line) for line in said), said
    assert any("streams its data to this machine: what it has itself is not the pool's" in line for line in said)


def test_a_data_set_that_is_another_one_in_every_process_is_refused():
    class Own(torch.utils.data.Dataset):
        def __init__(self):
            self.salt = np.random.default_rng().random()

        def __len__(self):
            return 83

        def __getitem__(self, index):
            return torch.full((6,), self.salt, dtype=torch.float32), index % 3

    job = make(dataset=Own)
    twin = Twin(job, steps=3)
    twin.exchange._reception._door = of_this_machine(twin.exchange._reception._door)
    node = twin.join()
    node.work()
    assert node.stop.exit_code == 77
    assert "random numbers from torch's, numpy's or random's own generator" in node.stop.why


def test_two_processes_that_find_other_numbers_are_not_both_let_in():
    twin = Twin(make(), steps=3)
    twin.exchange._reception._door = dataclasses.replace(of_this_machine(twin.exchange._reception._door), checks=True)
    first = ready(twin, build=build(torch.device("cpu"), 1), check="a")
    assert isinstance(first.wait(), say.Work)
    second = ready(twin, build=build(torch.device("cpu"), 1), check="b")
    stop = second.wait()
    assert (stop.exit_code, "other numbers for the same batch" in stop.why) == (77, True)


def test_nobody_is_given_work_before_somebody_has_tried_the_job():
    twin = Twin(make(), steps=3)
    twin.exchange._reception._door = dataclasses.replace(of_this_machine(twin.exchange._reception._door), checks=True)
    checkers = [greeted(twin), greeted(twin)]
    third = ready(twin)
    twin.turn()
    assert not twin.pool.members
    checkers[0].send(say.Ready(twin.master.layout.describe(), 83))
    assert isinstance(third.wait(), say.Work)


def test_nobody_waits_for_ever_for_those_who_try_the_job():
    twin = Twin(make(), steps=3)
    twin.exchange._reception._door = dataclasses.replace(of_this_machine(twin.exchange._reception._door), checks=True)
    checkers = [greeted(twin), greeted(twin)]
    third = ready(twin)
    for _ in range(70):
        for checker in checkers:
            checker.send(say.Alive())
        third.send(say.Alive())
        twin.turn(1.0)
    assert isinstance(third.wait(), say.Work | say.Alive)
    assert twin.pool.members


def test_if_those_who_try_the_job_die_the_others_are_not_kept_waiting():
    twin = Twin(make(), steps=3)
    twin.exchange._reception._door = dataclasses.replace(of_this_machine(twin.exchange._reception._door), checks=True)
    checkers = [greeted(twin), greeted(twin)]
    third = ready(twin)
    for line in checkers:
        line.close()
    assert isinstance(third.wait(), say.Work)


def of_this_machine(door):
    """The same door, on a machine that rounds as the nodes of this test do."""
    return dataclasses.replace(door, build=build(torch.device("cpu"), 1))


def test_half_a_message_is_no_message():
    twin = Twin(make(batches_per_step=1), steps=3)
    line = ready(twin)
    work = line.wait()
    nbytes = twin.master.layout.live_nbytes
    update = encode(say.Update(work.lease, [0.5], b"\x00", 0.1, 0.0, 0.0, 1000), nbytes)
    line.stream.send([update, bytes(nbytes - 1)])
    twin.turn()
    assert twin.pool.version == 0
    line.stream.send([b"\0"])
    twin.turn()
    assert twin.pool.version == 1


def test_the_picture_of_a_run_tells_who_is_there_and_how_far_it_is():
    twin = Twin(make(), steps=30)
    nodes = [twin.join("a"), twin.join("b")]
    for _ in range(60):
        for node in nodes:
            node.work()
        twin.turn()
    seen = twin.server._window.latest
    assert [view.totals.name for view in seen.nodes] == ["a", "b"]
    assert all(view.totals.batches and view.link.updates and not view.is_silent for view in seen.nodes)
    assert 0 < seen.step <= twin.pool.steps
    assert seen.strategy == "sync"
    assert "of 4 batches of step" in seen.waits_for or "of 3 batches of step" in seen.waits_for
    with pytest.raises(AttributeError):
        seen.step = 0


class logged:  # noqa: N801
    """What the log says meanwhile, line by line."""

    def __enter__(self):
        self._said, self._handler = [], logging.Handler()
        self._handler.emit = lambda record: self._said.append(record.getMessage())
        self._level = log.level
        log.addHandler(self._handler)
        log.setLevel(logging.DEBUG)
        return self._said

    def __exit__(self, *_):
        log.removeHandler(self._handler)
        log.setLevel(self._level)


def test_more_than_one_machine_worth_of_nodes_take_turns():
    twin = Twin(make(batches_per_step=8), steps=300)
    nodes = [twin.join(f"n{i}") for i in range(6)]  # all in this process, so on one machine
    held = set()
    for _ in range(400):
        for node in nodes:
            node.work()
        twin.turn()
        busy = [node for node, leases in twin.pool.leases.by_node.items() if leases]
        held.update(busy)
        if twin.run.ended is not None:
            break
    assert held == {node.number for node in nodes}, "each has had its turn"
