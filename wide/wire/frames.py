"""Frames: messages to buffers and back. Knows struct layouts; knows nothing of sockets, tensors or time.

    magic "WIDE" · protocol u8 · type u8 · flags u16 · header length u32 · payload length u64 · checksum u32
    header: the message as MessagePack · payload: raw bytes, never looked at here

All numbers are little-endian. The checksum covers type and header; the payload is left to TCP's and TLS's own. Every
length is held against a limit before a byte is allocated for it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from typing import NoReturn

import msgspec

from wide.errors import ProtocolError, VersionMismatch
from wide.wire.messages import CODES, OLDEST, PROTOCOL, TYPES, Message

MAGIC = b"WIDE"
FIXED = struct.Struct("<4sBBHIQI")
FIXED_NBYTES = FIXED.size
STRANGER_NBYTES = 8 * 1024  # thousands of callers may connect and say nothing
SCRATCH_NBYTES = 64 * 1024  # a small frame, payload included, arrives whole in one read

Destinations = Sequence[memoryview]
Sink = Callable[[Message, int], Destinations]

_pack, _unpack_from = FIXED.pack, FIXED.unpack_from
_encode = msgspec.msgpack.Encoder().encode
_decoders = {code: msgspec.msgpack.Decoder(kind).decode for code, kind in TYPES.items()}


def encode(message: Message, payload_nbytes: int = 0, protocol: int = OLDEST) -> bytes:
    """The two headers of a frame; the sender puts the payload's own buffers behind them. Until both ends have agreed on
    a protocol, they speak the oldest.
    """
    header = _encode(message)
    code = CODES[type(message)]
    return _pack(MAGIC, protocol, code, 0, len(header), payload_nbytes, zlib.crc32(header, code)) + header


def no_payload(message: Message, payload_nbytes: int) -> Destinations:
    """A sink for conversations in which no message may carry a payload."""
    if payload_nbytes:
        raise ProtocolError("unexpected payload", f"{type(message).__name__} must not carry a payload")
    return ()


class Reader:
    """Bytes in, messages out. Ask `space()` where the next bytes should go, then tell `fed(n)` how many came.

    `sink(message, payload_nbytes)` is asked where a payload should go: it checks what is expected and returns
    buffers of that total length, so that large payloads are read straight into the tensor that will be used.
    """

    def __init__(self, sink: Sink, header_limit: int = 4096, payload_limit: int = 0) -> None:
        self.sink = sink
        self.header_limit = header_limit
        self.payload_limit = payload_limit
        self._scratch = memoryview(bytearray(STRANGER_NBYTES))
        self._start = 0  # unread bytes are scratch[start:end]
        self._end = 0
        self._rest: list[memoryview] = []  # what the current payload has yet to fill; then no byte is unread
        self._awaiting: list[Message] = []  # whose payload that is

    def allow(self, sink: Sink, header_limit: int, payload_limit: int) -> None:
        """From now on the peer is known: longer headers, and payloads, may come."""
        self.sink, self.header_limit, self.payload_limit = sink, header_limit, payload_limit
        self._make_room(SCRATCH_NBYTES)

    @property
    def is_amid_frame(self) -> bool:
        """Has a message begun that is not whole yet?"""
        return bool(self._rest) or self._end > self._start

    def space(self) -> memoryview:
        if self._rest:
            return self._rest[0]
        return self._scratch[self._end :] if self._end else self._scratch

    def fed(self, nbytes: int) -> list[Message]:
        """Take note of `nbytes` written into `space()`; return the messages that are now complete."""
        if self._rest:
            if nbytes < len(self._rest[0]):
                self._rest[0] = self._rest[0][nbytes:]
                return []
            del self._rest[0]
            return [] if self._rest else self._awaiting
        self._end += nbytes
        done: list[Message] = []
        while self._start < self._end:
            message = self._read_frame()
            if message is None:
                break
            done.append(message)
        return done

    def _read_frame(self) -> Message | None:
        """The next message, if all of it is here."""
        scratch, start = self._scratch, self._start
        available = self._end - start
        if available < FIXED_NBYTES:
            self._make_room(FIXED_NBYTES)
            return None
        magic, protocol, code, _, header_nbytes, payload_nbytes, checksum = _unpack_from(scratch, start)
        if not (
            magic == MAGIC
            and OLDEST <= protocol <= PROTOCOL
            and code in TYPES
            and header_nbytes <= self.header_limit
            and payload_nbytes <= self.payload_limit
        ):
            self._refuse(magic, protocol, code, header_nbytes, payload_nbytes)
        whole = FIXED_NBYTES + header_nbytes
        if available < whole:
            self._make_room(whole)
            return None
        header = scratch[start + FIXED_NBYTES : start + whole]
        if zlib.crc32(header, code) != checksum:
            raise ProtocolError("bad checksum", "a frame's header does not match its checksum")
        try:
            message: Message = _decoders[code](header)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # text that is no UTF-8 is a ValueError
            raise ProtocolError("bad header", f"{TYPES[code].__name__} cannot be read: {error}") from None
        self._start = start + whole
        for view in self.sink(message, payload_nbytes):
            self._fill(view)
        if self._start == self._end:  # as a rule: whoever sends waits for an answer
            self._start = self._end = 0
        if not self._rest:
            return message
        self._awaiting = [message]
        return None

    def _fill(self, view: memoryview) -> None:
        """Copy what has come already; the rest will be read straight into its place."""
        start, nbytes = self._start, len(view)
        if start + nbytes > self._end:
            nbytes = self._end - start
            self._rest.append(view[nbytes:])
        if nbytes:
            view[:nbytes] = self._scratch[start : start + nbytes]
            self._start = start + nbytes

    def _refuse(self, magic: bytes, protocol: int, code: int, header_nbytes: int, payload_nbytes: int) -> NoReturn:
        if magic != MAGIC:
            raise ProtocolError("not wide", f"the peer does not speak this protocol (it began with {magic!r})")
        if not OLDEST <= protocol <= PROTOCOL:
            ours = f"{PROTOCOL}" if OLDEST == PROTOCOL else f"{OLDEST} and {PROTOCOL}"
            raise VersionMismatch(f"the peer speaks protocol {protocol}, this side {ours}: update the older one")
        if code not in TYPES:
            raise ProtocolError("unknown type", f"message type {code} does not exist")
        if header_nbytes > self.header_limit:
            raise ProtocolError("header too long", f"a header of {header_nbytes} bytes, allowed {self.header_limit}")
        raise ProtocolError("payload too long", f"{payload_nbytes} bytes of payload, allowed {self.payload_limit}")

    def _make_room(self, whole_nbytes: int) -> None:
        """Move the unread bytes to the front, of a larger scratch if the header itself needs one."""
        unread = bytes(self._scratch[self._start : self._end])
        if whole_nbytes > len(self._scratch):
            self._scratch = memoryview(bytearray(whole_nbytes))
        self._scratch[: len(unread)] = unread
        self._start, self._end = 0, len(unread)
