"""Memory that a coordinator shares with the nodes on its machine: who sees it, who does not, and what is left of it."""

from __future__ import annotations

import math
import os
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from torch import nn

from tests import plain
from tests.jobs import EVERYTHING, make
from tests.processes import python, result_of, started, until, wide
from tests.test_ends import has_steps
from tests.test_run import DIGITS, SLOW_LOSS, a_job
from tests.test_serve import invited
from tests.twin import Twin
from wide import failpoint
from wide.codec.encoders import Encoders
from wide.codec.ladder import RAW
from wide.codec.layout import Flat, Layout
from wide.codec.spare import Spare
from wide.errors import NotShared
from wide.exchange.common import Common
from wide.exchange.happenings import Rejected, Updated
from wide.exchange.versions import Versions
from wide.store.weights import weights_sha256
from wide.transport.shared import Neighbour, Segment
from wide.wire import messages as say

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere everything is sent")
processes = pytest.mark.processes


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoint.arm("")


def names_of_shared_memory():
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}  # other tests' semaphores


# ── segments ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_another_process_sees_it_and_writes_into_it():
    before = names_of_shared_memory()
    segment = Segment(4096)
    segment.raw[:3] = torch.tensor([1, 2, 3], dtype=torch.uint8)
    code = (
        "from wide.transport.shared import Neighbour\n"
        f"found = Neighbour({os.getpid()}).tensor({segment.name}, 4096)\n"
        "assert found[:4].tolist() == [1, 2, 3, 0]\nfound[4095] = 7"
    )
    assert names_of_shared_memory() == before, "it has no name in any file system"
    done = python("-c", code)
    assert (done.returncode, segment.raw[4095].item()) == (0, 7), done.stderr


def test_nobody_can_make_it_shorter():
    segment = Segment(4096)
    file = os.open(f"/proc/self/fd/{segment.name[0]}", os.O_RDWR)
    for nbytes in (0, 100, 10**6):
        with pytest.raises(PermissionError):
            os.ftruncate(file, nbytes)
    os.close(file)


def test_what_is_closed_cannot_be_found_but_stays_where_it_is_mapped():
    segment = Segment(100)
    seen = (neighbour := Neighbour(os.getpid())).tensor(segment.name, 100)
    name = segment.name
    segment.close()
    segment.close()
    segment.raw[0] = 5
    assert seen[0] == 5
    assert neighbour.tensor(name, 100)[0] == 5
    with pytest.raises(NotShared, match=r"cannot be mapped \(No such file"):
        Neighbour(os.getpid()).tensor(name, 100)


def test_what_is_no_memory_or_too_little_of_it_is_refused():
    reading, writing = os.pipe()
    segment = Segment(100)
    for name, words in (
        ((writing, 1), "it is no memory"),
        ((10**6, 1), "No such file"),
        (segment.name, "100 bytes of the coordinator's memory where 101 were promised"),
    ):
        with pytest.raises(NotShared, match=words):
            Neighbour(os.getpid()).tensor(name, 101)
    with pytest.raises(NotShared, match="No such file"):
        Neighbour(2**22 + 1).tensor(segment.name, 100)
    os.close(reading), os.close(writing)


def test_an_empty_model_has_an_empty_segment():
    assert Segment(0).raw.numel() == 0


def test_where_no_memory_can_be_had_it_is_said_once_and_everything_is_private(caplog):
    failpoint.arm("memory.share=full:3")  # the greeting and one more
    common = Common(smallest=64)
    first, second, third = (common.allocate(64) for _ in range(3))
    assert first.name is not None
    assert (second.name, third.name, common.greeting(64)) == (None, None, None)
    assert len(third.raw) == 64


def test_what_is_small_is_not_worth_it():
    common = Common(smallest=100)
    assert (common.allocate(99).name, common.greeting(99)) == (None, None)
    assert common.allocate(100).name is not None
    assert common.greeting(100) is not None


def test_what_somebody_may_still_write_into_is_nobody_elses():
    spare = Spare(Layout(nn.Linear(6, 3)), allocate=Segment)
    flat = spare.take()
    name = flat.memory.name
    spare.lose(flat)
    others = [spare.take() for _ in range(3)]
    assert (spare.in_use, name in [other.memory.name for other in others]) == (3, False)


# ── a whole pool ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["mlp", "batch norm, clipping, schedule", "odd parameters and buffers"])
@pytest.mark.parametrize("beside", [(True, True, True), (True, False, True), (False, False)])
def test_with_shared_memory_without_and_mixed_the_bits_are_those_of_the_plain_program(name, beside):
    job = EVERYTHING[name]
    twin = Twin(job, shares=True)
    model = twin.train(*(twin.join(f"n{i}", is_beside=is_beside) for i, is_beside in enumerate(beside)))
    assert weights_sha256(model) == weights_sha256(plain.train(job, 5))


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_the_other_strategies_share_memory_too(strategy):
    twin = Twin(make(), shares=True, strategy=strategy, steps=6)
    nodes = [twin.join(f"n{i}", is_beside=True) for i in range(3)]
    peers = list(twin.exchange._board.members)
    twin.train(*nodes)
    batches = [(step // 3, at) for step, first, last, _ in twin.ledger() for at in range(first, last + 1)]
    assert sorted(batches) == [(epoch, at) for epoch in range(2) for at in range(11)]
    assert all(peer.shares_memory for peer in peers)
    assert len(twin.exchange._delivery.versions._copies) <= 3


def test_room_for_a_version_that_nobody_was_sent_is_used_for_the_next_one():
    layout = Layout(nn.Linear(6, 3))
    weights, made = Flat(layout, only_live=False), []
    versions = Versions(weights, layout, Encoders(0), lambda nbytes: made.append(Segment(nbytes)) or made[-1])
    for version in range(1, 6):
        weights.raw.fill_(version)
        versions.reserve(version, set())()
    versions.open(5, RAW, in_flight=set)
    assert (len(made), versions.raw(only_live=True)[0][0]) == (1, 5)
    versions.reserve(6, set())()
    versions.forget()  # another strategy: what was copied is not what will be sent
    weights.raw.fill_(60)
    versions.open(6, RAW, in_flight=set)
    assert versions.raw(only_live=True)[0][0] == 60


def test_an_empty_file_is_no_memory():
    with tempfile.TemporaryFile() as file, pytest.raises(NotShared, match="cannot be mapped"):
        Neighbour(os.getpid()).tensor((file.fileno(), 1), 1)


@pytest.mark.parametrize("is_beside", [True, False])
def test_neither_weights_nor_updates_are_sent_to_who_sees_them(is_beside):
    wider = make(model=lambda: nn.Sequential(nn.Linear(6, 300), nn.ReLU(), nn.Linear(300, 3)))
    twin = Twin(wider, shares=True, steps=9)
    node = twin.join(is_beside=is_beside)
    line = twin.exchange._board.peers[node.number].connection
    before = line.bytes_received + line.bytes_sent
    twin.train(node)
    carried, live = line.bytes_received + line.bytes_sent - before, twin.master.layout.live_nbytes
    assert carried < live if is_beside else carried > 9 * 2 * live - live  # of its first weights it knows itself


def test_who_says_something_else_than_what_is_there_is_sent_everything():
    twin = Twin(make(), shares=True, steps=3)
    connection = twin.call("127.0.0.1:9")
    node = twin.join("honest")
    liar = twin.join("liar", is_beside=True)  # by its address it is here, and so it is told where to look
    peer = twin.exchange._board.peers[liar.number]
    assert peer.shares_memory
    peer.is_ready = False
    ready = liar.session._bench.describe("00" * 16)
    twin.exchange._reception.ready(peer, ready)
    assert not peer.shares_memory
    assert not twin.exchange._board.peers[node.number].shares_memory
    connection.close()


def test_a_node_from_elsewhere_that_has_heard_the_word_is_sent_everything_all_the_same():
    twin = Twin(make(), shares=True)
    node = twin.join("far")
    peer = twin.exchange._board.peers[node.number]
    peer.is_ready = False
    twin.exchange._reception.ready(peer, node.session._bench.describe(twin.common._sharing.proof))
    assert not peer.shares_memory


def test_an_update_that_should_lie_in_memory_and_is_sent_is_refused():
    twin = Twin(make(), shares=True)
    node = twin.join(is_beside=True)
    work = node.connection.wait()
    assert work.update_at is not None
    touched = bytes(len(twin.master.layout.trainable) // 8 + 1)
    update = say.Update(work.lease, [1.0] * len(work.sizes), touched, 1.0, 0.0, 0.0, 1)
    node.connection.send(update, bytes(twin.master.layout.live_nbytes))
    twin.exchange.turn(0.0)
    (rejected,) = [it for it in twin.exchange.happenings if isinstance(it, Rejected)]
    assert rejected.reason == "wrong payload"


class Infinite(torch.autograd.Function):
    """Its gradient is, and its value is not."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient * math.inf


def test_a_gradient_that_is_not_finite_is_told_by_who_made_it():
    twin = Twin(make(loss=lambda model, batch: Infinite.apply(model(batch[0])).sum()), shares=True, is_open=False)
    node = twin.join(is_beside=True)
    node.work()
    twin.turn()
    assert "not finite: lower the learning rate" in twin.run.ended.failure


def test_memory_of_a_node_that_hangs_up_amid_its_work_is_not_used_again():
    twin = Twin(make(), shares=True, steps=4)
    node = twin.join(is_beside=True)
    peer = twin.exchange._board.peers[node.number]
    (sent,) = peer.outgoing.leases.values()
    ghost = node.session._beside.room(sent.room.memory.name)  # what it still has in its hands
    node.hang_up()
    other = twin.join("other", is_beside=True)

    def scribble():
        ghost.raw.fill_(255)
        other.work()
        twin.turn()

    while twin.run.ended is None:
        scribble()
    assert weights_sha256(twin.master.model) == weights_sha256(plain.train(make(), 4))


def test_an_update_that_comes_while_its_node_leaves_counts_once():
    twin = Twin(make(), shares=True, steps=4)
    node = twin.join(is_beside=True)
    node.session.serve_next()
    twin.exchange.turn(0.0)
    node.hang_up()
    assert len([it for it in twin.exchange.happenings if isinstance(it, Updated)]) == 1
    model = twin.train(twin.join("other", is_beside=True))
    assert weights_sha256(model) == weights_sha256(plain.train(make(), 4))


def test_memory_that_cannot_be_mapped_later_ends_the_session_not_the_node():
    twin = Twin(make(), shares=True)
    node = twin.join(is_beside=True)
    failpoint.arm("node.maps_memory=full")
    with pytest.raises(NotShared, match="No space left"):
        node.session.serve_next()


# ── real processes ───────────────────────────────────────────────────────────────────────────────────────────────


@processes
def test_processes_that_cannot_share_memory_send_and_give_the_same_bits(tmp_path):
    arguments = ("run", DIGITS, "--nodes", 2, "--steps", 6)
    shared = result_of(*arguments, cwd=tmp_path)
    for moment in ("memory.share", "node.maps_memory"):
        sent = result_of(*arguments, cwd=tmp_path, WIDE_FAILPOINTS=f"{moment}=full")
        assert sent["weights_sha256"] == shared["weights_sha256"]
        counted = [sum(node["bytes_sent"] for node in result["nodes"]) for result in (sent, shared)]
        assert counted[0] - counted[1] > 2 * 6 * 30_000, "two updates a step"


@processes
@pytest.mark.parametrize("moment", ["node.before_send=kill:3", "merge.before_answer=kill:3", "version.made=kill:3"])
def test_whoever_is_killed_leaves_no_memory_behind(tmp_path, moment):
    before = names_of_shared_memory()
    whole = result_of("run", DIGITS, "--nodes", 0, "--steps", 8, cwd=tmp_path)
    options = ("--steps", 8, "--nodes", 2, "--out", "here", "--json")
    code, _, err = wide("run", DIGITS, *options, cwd=tmp_path, WIDE_FAILPOINTS=moment)
    assert code != 0, err
    assert names_of_shared_memory() == before
    again = result_of("run", DIGITS, "--steps", 8, "--nodes", 2, "--resume", "here", cwd=tmp_path)
    assert again["weights_sha256"] == whole["weights_sha256"]


@processes
def test_a_node_that_joins_on_the_same_machine_shares_memory_too(tmp_path):
    job = a_job(tmp_path, "steps=30, loss=loss", SLOW_LOSS)
    whole = result_of("run", job, "--nodes", 0, cwd=tmp_path)
    token = Path(tmp_path, "token")
    token.write_text("a secret of ours")
    serve = ("serve", job, "--port", 0, "--out", "here", "--token-file", token, "--json", "--log", "verbose")
    with started(*serve, cwd=tmp_path) as pool:
        address, _ = invited(pool)
        code, _, err = wide("join", address, "--job", job, "--token-file", token, cwd=tmp_path)
        assert code == 0, err
        assert until(lambda: has_steps(tmp_path))
        out, _ = pool.communicate(timeout=60)
    assert whole["weights_sha256"] in out
