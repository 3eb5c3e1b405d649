"""Two protocol ends back to back: a node and a scripted coordinator, over the in-memory twin of TCP."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
import torch

from tests.jobs import make
from wide.codec.batch import pack
from wide.codec.layout import Flat, bind
from wide.codec.pieces import cut, decode, encode
from wide.codec.shadow import publish
from wide.errors import ConnectionLost, Left, ProtocolError, Refused, UsageError
from wide.job.model import build_model
from wide.node.greeting import Identity, introduce
from wide.node.session import Session
from wide.node.workbench import Workbench
from wide.transport.connection import Connection
from wide.transport.listener import Listener
from wide.transport.memory import pair
from wide.wire import messages as say
from wide.wire.proof import of_token

CPU = torch.device("cpu")


class Buffers:
    """A sink that keeps every payload."""

    def __init__(self):
        self.last = bytearray()

    def __call__(self, message, nbytes):
        if not nbytes:
            return ()
        self.last = bytearray(nbytes)
        return [memoryview(self.last)]


def two_ends(**faults):
    left, right = pair(**faults)
    coordinator, sink = Connection(right), Buffers()
    coordinator.reader.allow(sink, 1 << 20, 1 << 30)
    return Connection(left), coordinator, sink


@pytest.mark.parametrize("most_nbytes", [1 << 30, 1000, 7, 1])
def test_messages_and_payloads_arrive_however_little_the_network_takes(most_nbytes):
    node, coordinator, sink = two_ends(most_nbytes=most_nbytes)
    node.send(say.Leaving("one"), memoryview(b"payload"), memoryview(b" and more"))
    node.send(say.Leaving("two"))
    assert coordinator.wait() == say.Leaving("one")
    assert bytes(sink.last) == b"payload and more"
    assert coordinator.wait() == say.Leaving("two")
    assert node.bytes_sent == coordinator.bytes_received


def test_a_line_that_breaks_mid_frame_is_a_lost_connection():
    node, coordinator, _ = two_ends(cut_after_nbytes=30)
    with pytest.raises(ConnectionLost):
        node.send(say.Leaving("this will not arrive whole"), memoryview(bytes(100)))
    with pytest.raises(ConnectionLost):
        coordinator.wait()


def test_a_refusal_carries_its_reason_and_exit_code():
    node, coordinator, _ = two_ends()
    coordinator.send(say.Stop("wrong token", 77))
    with pytest.raises(Refused, match="wrong token"):
        introduce(node, Identity(of_token("bad"), "atlas", 1, CPU), threads=1)


def a_node(job, data="auto"):
    """(session, what it has built, the coordinator's end, its payloads, what it said it has built)."""
    node, coordinator, sink = two_ends()
    bench = Workbench(job, say.Welcome(1, job.seed, data), CPU)
    return Session(node, bench), bench, coordinator, sink, coordinator.wait()


def work_for(bench, ids=None, batches=None):
    """The Work message for the first two batches of a step of 32 samples, with its payload."""
    weights = bench.trainer.weights.bytes
    payload = [weights, ids.numpy().data.cast("B")] if ids is not None else [weights, *batches.buffers]
    description = [batches.description] if batches is not None else None
    runs = [(batches.nbytes, batches.width)] if batches is not None else []
    sizes = [8] if batches else [8, 8]
    return say.Work(1, [(0, 0, len(sizes), 32)], sizes, len(weights), description, runs=runs), payload


def test_a_node_returns_the_sum_of_what_was_leased():
    job = make()
    session, bench, coordinator, sink, ready = a_node(job)
    assert (ready.samples, len(ready.tensors)) == (83, 4)
    work, payload = work_for(bench, ids=torch.arange(16))
    coordinator.send(work, *payload)
    session.serve_next()
    update = coordinator.wait()
    assert (update.lease, len(update.losses), update.touched) == (1, 2, b"\x0f")
    gradient = torch.frombuffer(sink.last, dtype=torch.float32)
    assert gradient.abs().sum() > 0
    assert len(sink.last) == bench.trainer.layout.live_nbytes


def test_streamed_batches_give_the_same_update_and_the_data_set_is_never_opened():
    def closed():
        raise AssertionError("a node that is streamed to must not call dataset()")

    session, bench, coordinator, sink, _ = a_node(make())
    work, payload = work_for(bench, ids=torch.arange(8))
    coordinator.send(say.Work(1, [(0, 0, 1, 32)], [8], work.weights_nbytes), payload[0], payload[1])
    session.serve_next()
    coordinator.wait()
    expected = bytes(sink.last)

    session, bench, coordinator, sink, ready = a_node(make(dataset=closed), data="stream")
    assert ready.samples is None
    data = make().dataset()
    work, payload = work_for(bench, batches=pack([tensor[:8] for tensor in data.tensors]))
    coordinator.send(work, *payload)
    session.serve_next()
    coordinator.wait()
    assert bytes(sink.last) == expected


def test_weights_are_received_straight_into_the_model():
    job = make()
    session, bench, coordinator, _, _ = a_node(job)
    other = build_model(job, seed=99)
    parameter = next(bench.trainer.model.parameters())
    weights = bench.trainer.weights
    assert parameter.data_ptr() == weights.raw.data_ptr()
    assert not torch.equal(parameter, next(other.parameters()))
    (destination, _ids) = session._inbox.place_for(
        say.Work(1, [(0, 0, 1, 8)], [8], len(weights.bytes)), len(weights.bytes) + 64
    )
    assert destination.obj is weights.bytes.obj


def test_an_error_in_the_users_code_is_reported_with_batch_file_and_line():
    def loss(model, batch):
        raise ValueError("bad batch")

    session, bench, coordinator, _, _ = a_node(make(loss=loss))
    work, payload = work_for(bench, ids=torch.arange(16))
    coordinator.send(work, *payload)
    session.serve_next()
    failed = coordinator.wait()
    assert (failed.lease, failed.batch) == (1, 0)
    assert "ValueError: bad batch (test_connection.py:" in failed.problem
    assert "Traceback" in failed.details


def test_a_node_whose_data_cannot_be_opened_says_so_and_can_still_be_streamed_to():
    def missing():
        raise FileNotFoundError("images.bin")

    *_, ready = a_node(make(dataset=missing))
    assert ready.samples is None
    assert "images.bin" in ready.data_problem


def test_weights_of_another_size_are_refused():
    session, *_ = a_node(make())
    with pytest.raises(ProtocolError):
        session._inbox.place_for(say.Work(1, [(0, 0, 1, 8)], [8], 1 << 40), 1 << 41)


def test_a_taken_port_is_explained():
    listener = Listener("127.0.0.1", 0)
    with pytest.raises(UsageError, match=f"port {listener.port} .*choose another with --port"):
        Listener("127.0.0.1", listener.port)
    listener.close()


class Parts:
    """A sink that keeps every payload, one by one: what a coordinator receives from a node that encodes."""

    def __init__(self):
        self.payloads = []

    def __call__(self, message, nbytes):
        self.payloads.append(bytearray(nbytes))
        return [memoryview(self.payloads[-1])] if nbytes else ()


def whole_update(coordinator, codec, layout):
    """Receive an update in parts, and decode it as a coordinator would."""
    sink = Parts()
    coordinator.reader.sink = sink
    update = coordinator.wait()
    assert update.codec == codec
    raw = torch.zeros(layout.live_nbytes, dtype=torch.uint8)
    for piece in cut(layout, only_live=True):
        assert isinstance(coordinator.wait(), say.Part)
        decode(piece, codec, memoryview(sink.payloads.pop()), raw)
    return update, raw


@pytest.mark.parametrize("codec", ["lz4", "zstd"])
def test_an_update_in_parts_is_the_same_update(codec):
    session, bench, coordinator, sink, _ = a_node(make())
    work, payload = work_for(bench, ids=torch.arange(16))
    coordinator.send(work, *payload)
    session.serve_next()
    coordinator.wait()
    expected = bytes(sink.last)
    coordinator.send(msgspec.structs.replace(work, lease=2, reply_codec=codec), *payload)
    session.serve_next()
    _, raw = whole_update(coordinator, codec, bench.trainer.layout)
    assert raw.numpy().tobytes() == expected


def test_lossy_updates_add_up_and_a_refused_one_is_made_good():
    session, bench, coordinator, sink, _ = a_node(make())
    layout = bench.trainer.layout
    work, payload = work_for(bench, ids=torch.arange(16))
    coordinator.send(work, *payload)
    session.serve_next()
    coordinator.wait()
    gradient = torch.frombuffer(bytearray(sink.last), dtype=torch.float32).double()
    received = []
    for refused in (0, 0, 1, 0):  # of four leases with the same gradient the second does not count
        coordinator.send(msgspec.structs.replace(work, reply_codec="int4", refused=refused), *payload)
        session.serve_next()
        received.append(whole_update(coordinator, "int4", layout)[1].view(torch.float32).double())
    coordinator.reader.sink = sink
    session.leave("enough")
    with pytest.raises(Left):
        session.work()
    assert coordinator.wait() == say.Leaving("enough")
    debt = torch.frombuffer(bytearray(sink.last), dtype=torch.float32).double()
    counted = received[0] + received[2] + received[3] + debt
    assert torch.allclose(counted, 3 * gradient, atol=1e-6)
    assert not torch.allclose(received[0], gradient, atol=1e-6)


def test_weights_come_whole_then_as_differences_and_forward_passes_do_not_disturb_them():
    job = make(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 3))
    )
    session, bench, coordinator, _, _ = a_node(job)
    trainer = bench.trainer
    layout, ids = trainer.layout, torch.arange(8).numpy().data.cast("B")
    versions = [Flat(layout, only_live=False) for _ in range(3)]
    for seed, version in enumerate(versions):
        bind(build_model(job, seed=seed), version, layout)

    def send(codecs, parts, is_whole):
        work = say.Work(1, [(0, 0, 1, 8)], [8], 0, weights_codecs=codecs, is_whole=is_whole)
        coordinator.send(work, ids)
        for part in parts:
            coordinator.send(say.Part(), *part)
        session.serve_next()
        coordinator.wait()

    send(["zstd"], [encode(piece, "zstd", versions[0].raw) for piece in cut(layout, only_live=False)], is_whole=True)
    assert trainer.weights.raw.equal(versions[0].raw)
    live = cut(layout, only_live=True)
    steps = [[publish(piece, "lz4", new.raw, old.raw) for piece in live] for old, new in pairwise(versions)]
    send(["lz4", "lz4"], [part for step in steps for part in step], is_whole=False)
    assert trainer.weights.raw.equal(versions[2].raw)
    assert not trainer.bound.buffers_raw.equal(versions[2].buffers_raw)  # BatchNorm has seen a batch


def test_a_stop_between_parts_ends_a_node():
    session, bench, coordinator, _, _ = a_node(make())
    coordinator.send(say.Work(1, [(0, 0, 1, 8)], [8], 0, weights_codecs=["zstd"], is_whole=True), bytes(64))
    coordinator.send(say.Stop("the run is over", 0))
    assert session.work() == say.Stop("the run is over", 0)


def test_a_difference_to_nothing_is_refused():
    session, bench, coordinator, _, _ = a_node(make())
    coordinator.send(say.Work(1, [(0, 0, 1, 8)], [8], 0, weights_codecs=["zstd"]), bytes(64))
    with pytest.raises(ProtocolError, match="never had"):
        session.work()


def test_a_small_message_leaves_in_one_system_call_and_a_large_payload_is_never_copied():
    node, coordinator, sink = two_ends()
    calls = []
    send = node.stream.send
    node.stream.send = lambda buffers: calls.append(buffers) or send(buffers)
    payload = torch.arange(1000)
    view = payload.numpy().data.cast("B")
    node.send(say.Leaving("now"), view)
    assert len(calls) == 1
    assert calls[0][1] is view
