"""Which codec a link gets, and why: pure functions of what was measured."""

from __future__ import annotations

import socket

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from wide.codec.choose import STAY, candidates, choose, seconds
from wide.codec.encoders import Encoders
from wide.codec.ladder import LADDER, LOSSLESS, RAW
from wide.codec.layout import Flat, Layout
from wide.codec.pieces import cut, decode
from wide.codec.speeds import Cpu, measure
from wide.coordinator.record import Record
from wide.exchange.door import Door
from wide.exchange.guests import Guests
from wide.exchange.link_codecs import LinkCodecs
from wide.exchange.peer import Peer
from wide.exchange.probe import PROBE_NBYTES, Probing
from wide.exchange.versions import Versions
from wide.job.schedule import Schedule
from wide.store.rundb import RunDb
from wide.telemetry.clock import REAL
from wide.telemetry.link import Link
from wide.transport.connection import Connection
from wide.transport.memory import pair
from wide.wire.messages import Hello, Update

MB = 1_000_000
SLOW, FAST = Link(20e6 / 8), Link(100e9 / 8)


def test_a_slow_link_is_worth_a_codec_and_a_fast_one_is_not():
    assert choose("gradient", 4 * MB, SLOW, Cpu(), lossless=True)[0] == "zstd"
    assert choose("gradient", 4 * MB, SLOW, Cpu(), lossless=False)[0] == "int4"
    assert choose("gradient", 4 * MB, FAST, Cpu(), lossless=True)[0] == RAW
    assert choose("gradient", 4 * MB, FAST, Cpu(), lossless=False)[0] == RAW


def test_the_reason_tells_times_size_and_speed():
    _, reason = choose("weights", 4 * MB, SLOW, Cpu(), lossless=True)
    assert "4 MB of weights at 20 Mbit/s" in reason
    assert "would take" in reason


@given(st.floats(1e5, 1e10), st.integers(1, 10**9), st.booleans())
def test_small_messages_stay_raw_because_of_what_a_call_costs_not_of_a_fixed_size(bytes_per_s, nbytes, lossless):
    link = Link(bytes_per_s)
    chosen, _ = choose("gradient", nbytes, link, Cpu(), lossless)
    least = min(seconds(name, nbytes, link, Cpu()) for name in candidates("gradient", lossless))
    assert seconds(chosen, nbytes, link, Cpu()) <= 1.05 * least
    if nbytes / bytes_per_s < 2e-6:
        assert chosen == RAW


def test_a_more_faithful_codec_wins_when_it_costs_hardly_more():
    cpu = Cpu()
    cpu.speeds["int8"] = cpu.speeds["int4"]._replace(ratio=7.4)
    assert choose("gradient", 4 * MB, SLOW, cpu, lossless=False)[0] == "int8"


def test_the_present_codec_is_kept_until_another_is_clearly_better():
    cpu = Cpu()
    wide_link = next(
        Link(mbit * 1e6 / 8)
        for mbit in range(100, 100_000, 10)
        if choose("gradient", 4 * MB, Link(mbit * 1e6 / 8), cpu, lossless=True)[0] == RAW
    )
    assert choose("gradient", 4 * MB, wide_link, cpu, lossless=True, current="lz4")[0] == "lz4"
    much_wider = Link(wide_link.bytes_per_s * 4)
    assert seconds("lz4", 4 * MB, much_wider, cpu) > STAY * seconds(RAW, 4 * MB, much_wider, cpu)
    assert choose("gradient", 4 * MB, much_wider, cpu, lossless=True, current="lz4")[0] == RAW


def test_data_is_never_falsified_and_nothing_is_thinned_out_unasked():
    assert candidates("batch", lossless=False) == LOSSLESS
    for role in ("weights", "gradient", "delta"):
        assert candidates(role, lossless=False) == tuple(name for name in LADDER if name != "topk")


def test_speeds_are_measured_on_the_data_at_hand():
    zeros, noise = torch.zeros(100_000), torch.randn(100_000)
    names = tuple(LADDER)
    flat, rough = (measure(names, data.view(torch.uint8).numpy(), 4, data.numpy()) for data in (zeros, noise))
    assert set(flat) == set(LADDER) - {RAW}
    assert flat["zstd"].ratio > 50 > 2 > rough["zstd"].ratio
    assert rough["int8"].ratio == pytest.approx(3.99, abs=0.02)
    assert all(number > 0 for speed in rough.values() for number in speed)
    half = measure(names, noise.bfloat16().view(torch.uint8).numpy(), 2, noise.numpy())
    assert half["bf16"].ratio == pytest.approx(1.0)
    assert half["int8"].ratio == pytest.approx(2.0, abs=0.02)
    assert measure(names, torch.empty(0, dtype=torch.uint8).numpy(), 4, torch.empty(0).numpy()) == {}


def test_a_link_is_measured_by_traffic_that_the_link_held_up():
    link = Link(bytes_per_s=10e6)
    link.observe(nbytes=1 * MB, seconds=1.0, busy_s=0.1)
    assert link.bytes_per_s < 10e6
    before = link.bytes_per_s
    link.observe(nbytes=1 * MB, seconds=1.0, busy_s=0.9)  # the encoder was slow, the link may be wider
    assert link.bytes_per_s == before
    link.observe(nbytes=100 * MB, seconds=1.0, busy_s=0.9)  # but it cannot be narrower than what went through
    assert link.bytes_per_s == 100e6
    link.observe(nbytes=100, seconds=1.0, busy_s=0.0)  # too little to tell
    assert link.bytes_per_s == 100e6


def test_a_probe_finds_delay_and_bandwidth_and_asks_a_slow_link_only_once():
    quick, said = Probing(), []
    while not quick.is_over:
        said.append(sum(map(len, quick.next_load(now=7.0))))
        quick.echoed(7.0 + 0.001 + 2 * said[-1] / 10e6)
    assert (said.count(0), said.count(PROBE_NBYTES)) == (4, 4)
    assert quick.link.delay_s == pytest.approx(0.0005)
    assert quick.link.bytes_per_s == pytest.approx(10e6)
    assert quick.next_load(now=8.0) == (), "the last one is empty"
    slow, said = Probing(), []
    while not slow.is_over:
        said.append(sum(map(len, slow.next_load(now=7.0))))
        slow.echoed(7.0 + 0.2 + 2 * said[-1] / 1e5)
    assert said == [0, PROBE_NBYTES]


def a_peer(link, node=1):
    peer = Peer(Connection(pair()[0]), "here", 0.0, node=node, is_ready=True, has_data=True)
    peer.link.up, peer.link.down = Link(link.bytes_per_s), Link(link.bytes_per_s)
    return peer


def untold(compress):
    """For whom nobody listens."""
    return LinkCodecs(compress, 4 * MB, Encoders(), tell=lambda choice: None)


def chosen(tmp_path):
    import sqlite3

    return sqlite3.connect(tmp_path / "run.db").execute("SELECT node, role, codec FROM choices").fetchall()


def test_every_link_has_a_codec_of_its_own_and_changes_are_written_down(tmp_path):
    db = RunDb(tmp_path / "run.db")
    record = Record(db, Schedule(9, 1, 1, 0), REAL)
    codecs = LinkCodecs(
        "lossless", 4 * MB, Encoders(), lambda it: record.journal.chose(it.node, it.role, it.codec, it.reason)
    )
    near, far = a_peer(FAST, 1), a_peer(SLOW, 2)
    for now in (1.0, 1.5, 3.0):
        codecs.decide(near, 0, now)
        codecs.decide(far, 0, now)
    assert (near.link.codecs["gradient"], far.link.codecs["gradient"]) == (RAW, "zstd")
    assert codecs.for_differences([near, far]) == far.link.codecs["weights"] == "zstd"
    assert codecs.for_differences([near]) == RAW
    far.link.up.bytes_per_s = FAST.bytes_per_s
    codecs.decide(far, 0, 3.5)
    assert far.link.codecs["gradient"] == "zstd"  # decided again once a second
    codecs.decide(far, 0, 10.0)
    assert far.link.codecs["gradient"] == RAW
    db.close()
    assert chosen(tmp_path) == [
        (1, "gradient", "raw"),
        (1, "weights", "raw"),
        (2, "gradient", "zstd"),
        (2, "weights", "zstd"),
        (2, "gradient", "raw"),
    ]


@pytest.mark.parametrize(
    ("wish", "gradient", "weights"),
    [("none", RAW, RAW), ("lz4", "lz4", "lz4"), ("int8", "int8", "int8"), ("topk", "topk", "int4")],
)
def test_a_fixed_codec_is_used_on_every_link(wish, gradient, weights):
    codecs = untold(wish)
    for link in (FAST, SLOW):
        peer = a_peer(link)
        codecs.decide(peer, 0, 1.0)
        assert (peer.link.codecs["gradient"], peer.link.codecs["weights"]) == (gradient, weights)
        assert peer.link.wants_speeds == ()


def test_a_node_on_this_machine_is_sent_raw_data_unless_a_codec_was_asked_for():
    for wish, codec in (("lossless", RAW), ("auto", RAW), ("int8", "int8")):
        peer = a_peer(SLOW)
        peer.is_on_this_machine = True
        untold(wish).decide(peer, 0, 1.0)
        assert (peer.link.codecs["gradient"], peer.link.wants_speeds) == (codec, ())


def test_a_tunnel_is_not_this_machine():
    door = Door(Guests("t", "e"), 0, "auto", "lossless", "build")
    here = Hello("token", b"", "node", "name", socket.gethostname(), 1, "build")
    assert door.is_here(here, is_own=True)
    assert not door.is_here(here, is_own=False)
    assert not door.is_here(msgspec.structs.replace(here, host="elsewhere"), is_own=True)


def test_nodes_are_asked_for_their_speeds_where_it_matters_and_lies_are_ignored():
    codecs = untold("auto")
    near, far = a_peer(FAST, 1), a_peer(SLOW, 2)
    for peer in (near, far):
        codecs.decide(peer, 0, 1.0)
    assert near.link.wants_speeds == ()
    assert set(far.link.wants_speeds) == set(candidates("gradient", lossless=False)) - {RAW}
    assert codecs.take_wish(far)
    assert codecs.take_wish(far) == (), "they are asked once"
    before = far.link.cpu.speeds["zstd"]
    speeds = {"zstd": (0.0, 1.0, 1.0, 1.0, 1.0), "int4": (8.0, 1e9, 1e9, 1e-5, 1e-5), "odd": (1.0,) * 5}
    update = Update(1, [1.0], b"\x0f", 0.0, 0.0, 0.0, 0, speeds=speeds)
    codecs.observe(far, update, nbytes=0, elapsed_s=0.0, busy_s=0.0)
    assert far.link.cpu.speeds["zstd"] == before
    assert far.link.cpu.speeds["int4"].ratio == 8.0
    assert "odd" not in far.link.cpu.speeds


@pytest.mark.parametrize("codec", ["lz4", "zstd", "bf16", "int8", "int4"])
def test_versions_lead_from_any_recent_one_to_the_newest(codec):
    torch.manual_seed(0)
    layout = Layout(nn.Sequential(nn.Linear(300, 300), nn.BatchNorm1d(300)))
    weights, encoders = Flat(layout, only_live=False), Encoders()
    versions = Versions(weights, layout, encoders)
    live = cut(layout, only_live=True)
    nodes: dict[int, torch.Tensor] = {}
    for version in range(5):
        for view in weights.trainable:
            view.add_(torch.randn(view.shape) * 0.01)
        versions.open(version, codec, in_flight=set)
        nodes[version] = torch.frombuffer(bytearray(b"".join(versions.raw(only_live=False))), dtype=torch.uint8)
    assert versions.since(3)
    assert bool(versions.since(0)) == (codec in ("int8", "int4"))  # else the way is longer than all of it
    assert len(versions._steps) <= 5
    for start, node in nodes.items():
        if start < 4 and not versions.since(start):
            continue
        for step in versions.since(start):
            for piece, part in zip(live, step.parts, strict=True):
                decode(piece, step.codec, memoryview(b"".join(part.result())), node, is_difference=True)
        assert node.equal(nodes[4]), f"from version {start}"
    if codec in LOSSLESS:
        assert nodes[4].equal(weights.raw)
    versions.open(5, RAW, in_flight=set)
    assert versions.since(4) == []  # nobody wanted a difference: all of it, exactly
    assert b"".join(versions.raw(only_live=False)) == weights.raw.numpy().tobytes()
    encoders.close()


def test_a_version_that_is_being_sent_does_not_change():
    layout = Layout(nn.Linear(3, 3))
    weights = Flat(layout, only_live=False)
    versions = Versions(weights, layout, Encoders())
    versions.open(0, RAW, in_flight=set)
    (sending,) = versions.raw(only_live=False)
    before = bytes(sending)
    weights.raw.add_(1)
    versions.open(1, RAW, in_flight=lambda: {0})
    assert bytes(sending) == before
    assert b"".join(versions.raw(only_live=False)) != before
