"""What hostile and broken peers send, and the reason it is refused for. Used against a live coordinator."""

from __future__ import annotations

import pickle
import struct
import zlib

import msgspec

from tests.greet import KNOCK, a_hello
from wide.wire import messages as say
from wide.wire.frames import FIXED, MAGIC, encode
from wide.wire.messages import CODES, PROTOCOL


def frame(kind=say.Knock, header=b"", header_nbytes=None, payload_nbytes=0, magic=MAGIC, protocol=PROTOCOL, **changes):
    code = changes.get("code", CODES[kind])
    checksum = changes.get("checksum", zlib.crc32(header, code))
    length = len(header) if header_nbytes is None else header_nbytes
    return FIXED.pack(magic, protocol, code, 0, length, payload_nbytes, checksum) + header


HELLO = a_hello("token", name="evil")

# From a caller that has not said who it is: its first bytes, and the counted reason.
STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\nHost: pool\r\n\r\n", "not wide"),
    "tls that is none": (b"\x16\x03\x01\x00\x05hello", "bad handshake"),
    "garbage": (bytes(range(256)), "not wide"),
    "pickle": (pickle.dumps(print), "not wide"),
    "payload of 2^63": (frame(header_nbytes=10, payload_nbytes=2**63), "payload too long"),
    "payload of 2^32-1": (frame(header_nbytes=10, payload_nbytes=2**32 - 1), "payload too long"),
    "header of 2^32-1": (frame(header_nbytes=2**32 - 1), "header too long"),
    "header of 0": (frame(header=b""), "bad header"),
    "bad checksum": (frame(say.Hello, header=msgspec.msgpack.encode(HELLO), checksum=1), "bad checksum"),
    "unknown type": (frame(code=250), "unknown type"),
    "another protocol": (frame(protocol=PROTOCOL + 1), "versionmismatch"),
    "pickle in a field": (frame(header=msgspec.msgpack.encode([pickle.dumps(print)] * 6)), "bad header"),
    "nested deeply": (frame(header=b"\x91" * 4000), "bad header"),
    "an update first": (encode(say.Update(1, [], b"", 0.0, 0.0, 0.0, 0)), "out of order"),
    "a part first": (encode(say.Part()), "out of order"),
    "ready first": (encode(say.Ready([], 83)), "out of order"),
    "a hello without a knock": (encode(HELLO), "refused"),
    "no proof": (encode(KNOCK) + encode(msgspec.structs.replace(HELLO, proof=b"")), "refused"),
    "wrong token": (encode(KNOCK) + encode(HELLO), "refused"),
    "two knocks": (encode(KNOCK) + encode(KNOCK), "out of order"),
    "a short nonce": (frame(say.Knock, msgspec.msgpack.encode([PROTOCOL, b"short"])), "bad header"),
    "an old knock": (encode(say.Knock(8, bytes(16))), "versionmismatch"),
    "an invite that nobody made": (encode(KNOCK) + encode(a_hello("x", credential="invite 0a0b0c0d")), "refused"),
    "a machine of another pool": (encode(KNOCK) + encode(a_hello("x", credential="machine 00")), "refused"),
    "a probe first": (encode(say.Probe()), "out of order"),
}


def said_after_hello():
    """From a caller with the right token, in place of an echo or of Ready."""
    huge = say.Tensor("0.weight", "torch.float32", (2**40, 2**40), (1, 1))
    nested = b"\x93\xc0\xc0" + b"\x91" * 100_000
    return {
        "a second hello": (encode(HELLO), "out of order"),
        "ready before the echo": (encode(say.Ready([], 83)), "out of order"),
        "another model": (encode(say.Ready([huge], 83)), "out of order"),
        "an update": (encode(say.Update(1, [1.0], b"", 0.0, 0.0, 0.0, 0)), "out of order"),
        "a part": (encode(say.Part(), 10) + bytes(10), "out of order"),
        "an echo with a payload that was not sent": (encode(say.Probe(), 77) + bytes(77), "wrong payload"),
        "leaving with a payload": (encode(say.Leaving("bye"), 10_000) + bytes(10_000), "wrong payload"),
        "metrics": (encode(say.Evaluated(1, 1, {"accuracy": 1.0})), "out of order"),
        "work": (encode(say.Work(1, [(0, 0, 1, 8)], [8], 0)), "out of order"),
        "nested 100,000 deep": (frame(say.Failed, nested), "bad header"),
        "a payload of 2^40": (frame(say.Update, header_nbytes=10, payload_nbytes=2**40), "payload too long"),
        "a header of 2 MB": (frame(say.Ready, header_nbytes=2 << 20), "header too long"),
    }


def bad_parts(whole):
    """In place of a correctly encoded piece: what decoders must refuse."""
    return {
        "nothing": b"",
        "too short": whole[: len(whole) // 2],
        "too long": whole + b"\0",
        "planes beyond the end": struct.pack("<4I", *[2**32 - 1] * 4) + whole[16:],
        "noise": bytes(range(256)) * (len(whole) // 256 + 1),
        "zeros": bytes(len(whole)),
    }
