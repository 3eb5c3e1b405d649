"""Frames: whole, byte by byte, with bytes to spare, and everything a hostile peer may send."""

from __future__ import annotations

import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wide.errors import ProtocolError, VersionMismatch
from wide.wire.frames import FIXED, MAGIC, Reader, encode, no_payload
from wide.wire.messages import (
    CODES,
    MOST_LOSS,
    MOST_S,
    PROTOCOL,
    TYPES,
    Evaluated,
    Hello,
    Leaving,
    Stop,
    Update,
    Welcome,
)

HELLO = Hello("token", b"proof", "node", "atlas", "lab", 1, "torch")
SECONDS = ("compute_s", "codec_s", "network_s", "received_s", "distracted_s")


def read(reader, data, step):
    """Feed `data` in pieces of at most `step` bytes, as a network would."""
    messages = []
    while data:
        space = reader.space()
        piece = data[: min(step, len(space))]
        space[: len(piece)] = piece
        messages += reader.fed(len(piece))
        data = data[len(piece) :]
    return messages


class Sink:
    """Makes room for each payload, and keeps it."""

    def __init__(self):
        self.buffers = []

    def __call__(self, message, nbytes):
        self.buffers.append(bytearray(nbytes))
        return [memoryview(self.buffers[-1])]


def raw_frame(
    code=CODES[Hello], magic=MAGIC, protocol=PROTOCOL, header=None, header_nbytes=None, payload_nbytes=0, checksum=None
):
    header = msgspec.msgpack.encode(HELLO) if header is None else header
    length = len(header) if header_nbytes is None else header_nbytes
    return FIXED.pack(magic, protocol, code, 0, length, payload_nbytes, checksum or zlib.crc32(header, code)) + header


@given(st.lists(st.tuples(st.text(max_size=20), st.binary(max_size=200_000)), max_size=4), st.integers(1, 100_000))
def test_messages_come_out_as_they_went_in_however_they_are_torn(conversation, step):
    data = b"".join(encode(Leaving(why), len(payload)) + payload for why, payload in conversation)
    sink = Sink()
    messages = read(Reader(sink, payload_limit=1 << 20), data, step)
    assert [message.why for message in messages] == [why for why, _ in conversation]
    assert [bytes(buffer) for buffer in sink.buffers] == [payload for _, payload in conversation]


def test_byte_by_byte():
    update = Update(7, [0.5, 0.25], b"\x03", 1.0, 0.0, 0.5, 1 << 33)
    data = encode(HELLO) + encode(update, 5) + b"12345" + encode(Stop("done", 0))
    assert read(Reader(Sink(), payload_limit=5), data, 1) == [HELLO, update, Stop("done", 0)]


def test_a_large_payload_is_read_straight_into_its_destination():
    destination = memoryview(bytearray(1 << 20))
    reader = Reader(lambda message, nbytes: [destination], payload_limit=1 << 20)
    head = encode(Leaving("now"), 1 << 20)
    reader.space()[: len(head)] = head
    assert reader.fed(len(head)) == []
    assert reader.space().obj is destination.obj


def test_a_payload_may_fill_several_destinations_one_after_the_other():
    first, second = bytearray(3), bytearray(4)
    reader = Reader(lambda message, nbytes: [memoryview(first), memoryview(b""), memoryview(second)], payload_limit=7)
    assert read(reader, encode(Leaving(""), 7) + b"abcdefg", 2) == [Leaving("")]
    assert (bytes(first), bytes(second)) == (b"abc", b"defg")


def test_a_header_longer_than_the_scratch_is_read_when_it_is_allowed():
    long = Evaluated(1, 2, {f"metric {i}": float(i) for i in range(5000)})
    assert read(Reader(no_payload, header_limit=1 << 20), encode(long), 1000) == [long]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n", "not wide"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), "not wide"),
        (raw_frame(code=0), "unknown type"),
        (raw_frame(code=200), "unknown type"),
        (raw_frame(header_nbytes=2**32 - 1), "header too long"),
        (raw_frame(header_nbytes=4097), "header too long"),
        (raw_frame(payload_nbytes=2**63), "payload too long"),
        (raw_frame(payload_nbytes=2**32 - 1), "payload too long"),
        (raw_frame(payload_nbytes=1), "payload too long"),
        (raw_frame(checksum=1), "bad checksum"),
        (raw_frame(header=b""), "bad header"),
        (raw_frame(header=b"\x91" * 4000), "bad header"),
        (raw_frame(header=msgspec.msgpack.encode(["token"])), "bad header"),
        (raw_frame(header=msgspec.msgpack.encode([1, 2, 3, 4, 5, 6])), "bad header"),
        (raw_frame(header=b"\x80\x04\x95\x0b\x00\x00\x00cos\nsystem\n"), "bad header"),
    ],
)
def test_what_is_not_allowed_is_refused_with_a_reason(data, reason):
    with pytest.raises(ProtocolError) as caught:
        read(Reader(no_payload), data, len(data))
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((field, value) for field in SECONDS for value in (float("nan"), float("inf"), -1.0, 2 * MOST_S)),
        *(("losses", [1.0, value]) for value in (float("nan"), float("inf"), float("-inf"), 2 * MOST_LOSS)),
        *((field, value) for field in ("rss_bytes", "received_nbytes") for value in (-1, 2**63)),
    ],
)
def test_numbers_that_no_machine_has_are_refused_where_they_are_read(field, value):
    update = Update(7, [0.5, 0.25], b"\x03", 1.0, 0.0, 0.5, 1 << 33)
    assert read(Reader(no_payload), encode(update), 100) == [update]
    with pytest.raises(ProtocolError) as caught:
        read(Reader(no_payload), encode(msgspec.structs.replace(update, **{field: value})), 100)
    assert caught.value.reason == "bad header"


def test_a_deeply_nested_header_is_refused_not_followed():
    nested = raw_frame(code=CODES[Evaluated], header=b"\x93\x01\x02" + b"\x91" * 100_000)
    with pytest.raises(ProtocolError):
        read(Reader(no_payload, header_limit=1 << 20), nested, 1 << 20)


def test_another_protocol_version_is_told_apart():
    with pytest.raises(VersionMismatch, match=f"protocol {PROTOCOL + 1}"):
        read(Reader(no_payload), raw_frame(protocol=PROTOCOL + 1), 100)


def test_a_payload_is_refused_where_none_is_due():
    with pytest.raises(ProtocolError, match="must not carry a payload"):
        read(Reader(no_payload, payload_limit=10), encode(Welcome(1, 0, "auto"), 3), 100)


@given(st.binary(min_size=1, max_size=300))
def test_garbage_is_refused_or_waited_for_but_never_crashes(data):
    try:
        assert read(Reader(no_payload), data, 7) == []
    except (ProtocolError, VersionMismatch):
        pass


@given(st.integers(0, 200), st.integers(0, 255))
def test_one_wrong_byte_is_refused_or_waited_for(place, value):
    data = bytearray(encode(HELLO))
    place %= len(data)
    is_changed = data[place] != value
    data[place] = value
    try:
        messages = read(Reader(no_payload), bytes(data), 50)
    except (ProtocolError, VersionMismatch):
        assert is_changed
    else:
        assert messages == [] or not is_changed or place in range(6, 8)  # the flags are for later


def test_every_message_has_a_code_and_a_docstring():
    assert all(kind.__doc__ for kind in TYPES.values())
    assert len(CODES) == len(TYPES)
