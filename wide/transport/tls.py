"""Encryption between machines: TLS 1.3, and a certificate that is known beforehand. Knows OpenSSL and streams; knows no
invites and no messages.

An SSLObject works on memory, so that no lock is held while a socket waits: on a node one thread reads while another one
says that it is alive. What was sealed and not taken by the network yet counts as not taken, and the caller offers it
again (stream.py); it is sealed once.
"""

from __future__ import annotations

import hashlib
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from wide.errors import ConnectionLost, ProtocolError
from wide.transport.stream import Stream
from wide.wire.messages import OLDEST, PROTOCOL

FIRST_BYTE = 0x16  # of a TLS connection; ours begins with a W
SLICE_NBYTES = 128 << 10  # sealed at once, and
READ_NBYTES = 256 << 10  # opened at most in one call
SMALL_NBYTES = 8 << 10  # a head and its payload go into one record if they are so small
MOST_NBYTES = 256 << 30  # one key should not seal more (AES-GCM), and Python cannot ask for the next one
ALPN = [f"wide/{number}" for number in range(PROTOCOL, OLDEST - 1, -1)]

_own = threading.local()  # of each thread: room for what comes in


def server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = _only_13(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.load_cert_chain(certificate, key)
    context.num_tickets = 0  # who comes back proves itself anew
    return context


def client_context() -> ssl.SSLContext:
    """Names and dates in a certificate mean nothing here: it is the one that the invite names, or it is not."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _only_13(context)


def _only_13(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols(ALPN)
    return context


def fingerprint(certificate: bytes) -> bytes:
    """What both ends bind their proofs to; the pin of an invite is its beginning."""
    return hashlib.sha256(certificate).digest()


class Handshake:
    """Until both ends have agreed on keys. `binding` is the hash of the pool's certificate, once it is known."""

    def __init__(self, raw: Stream, context: ssl.SSLContext, is_server: bool, binding: bytes = b"") -> None:
        self._raw, self.binding = raw, binding
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)

    def advance(self, reads: bool = True) -> TlsStream | None:
        """One read; None: there is more to come. Who dials speaks first, and `reads` nothing before that. Raises
        ConnectionLost, or ProtocolError where this is no TLS 1.3.
        """
        if reads and (nbytes := self._raw.receive_into(_scratch())):
            self._incoming.write(_scratch()[:nbytes])
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._say()
            return None
        except ssl.SSLError as error:
            self._say()  # the alert, which tells the other end
            raise ProtocolError("bad handshake", f"the TLS handshake failed ({_words(error)})") from None
        self._say()
        if not self.binding:
            self.binding = fingerprint(self._tls.getpeercert(binary_form=True) or b"")
        return TlsStream(self._raw, self._tls, self._incoming, self._outgoing, self.binding)

    def _say(self) -> None:
        """Less than an empty socket takes at once."""
        data = memoryview(self._outgoing.read())
        while data:
            if not (sent := self._raw.send((data,))):
                raise ConnectionLost("the peer does not read")
            data = data[sent:]


def _words(error: ssl.SSLError) -> str:
    return str(getattr(error, "reason", None) or error.args[-1]).lower().replace("_", " ")


class TlsStream:
    """An encrypted stream over another one. One thread sends at a time, one receives."""

    def __init__(
        self, raw: Stream, tls: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, binding: bytes
    ) -> None:
        self.binding = binding
        self.on_rest: Callable[[], None] = lambda: None  # told when there is more that no selector will tell of
        self._raw, self._tls, self._incoming, self._outgoing = raw, tls, incoming, outgoing
        self._lock = threading.Lock()  # around what is done in memory, never around the network
        self._opened = memoryview(b"")  # but not asked for yet
        self._has_rest = incoming.pending > 0
        self._sealed, self._held_nbytes = memoryview(b""), 0  # on its way; how much of what the caller offers it is
        self._nbytes, self._broken = 0, ""  # why nothing more can be read

    @property
    def is_closed(self) -> bool:
        return self._raw.is_closed

    def fileno(self) -> int:
        number: int = self._raw.fileno()  # type: ignore[attr-defined]
        return number

    def set_blocking(self, is_blocking: bool) -> None:
        self._raw.set_blocking(is_blocking)

    def close(self) -> None:
        self._raw.close()

    def has_input(self) -> bool:
        """Part of a record is no input yet."""
        if not self._opened:
            try:
                if self._raw.has_input():
                    self._fetch()
                room = memoryview(bytearray(SMALL_NBYTES))
                self._opened = room[: self._open(room)]
            except ConnectionLost:
                return True
        return bool(self._opened)

    def wait(self, reading: bool, writing: bool, timeout_s: float | None = None) -> None:
        if not (reading and (self._opened or self._has_rest)):
            self._raw.wait(reading, writing, timeout_s)

    def receive_into(self, view: memoryview) -> int:
        if self._opened:
            nbytes = min(len(view), len(self._opened))
            view[:nbytes] = self._opened[:nbytes]
            self._opened = self._opened[nbytes:]
        else:
            most = view[:READ_NBYTES]
            while not (nbytes := self._open(most)):
                if not self._fetch():
                    return 0
        if self._opened or self._has_rest:
            self.on_rest()
        return nbytes

    def _fetch(self) -> int:
        """From the network: the only place where this may wait."""
        scratch = _scratch()
        if nbytes := self._raw.receive_into(scratch):
            with self._lock:
                self._incoming.write(scratch[:nbytes])
        return nbytes

    def _open(self, room: memoryview) -> int:
        """As much as is here and fits."""
        done = 0
        with self._lock:
            self._has_rest = False
            try:
                if self._broken:
                    raise ssl.SSLError(0, self._broken)
                while done < len(room):
                    if not (nbytes := int(self._tls.read(len(room) - done, room[done:]))):
                        raise ssl.SSLZeroReturnError(0, "closed")
                    done += nbytes
                self._has_rest = self._tls.pending() > 0 or self._incoming.pending > 0
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self._broken = _words(error)  # what came before it is handed over first
                if not done:
                    raise ConnectionLost(f"the connection broke: {self._broken}") from None
                self._has_rest = True
        self._count(done)
        return done

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        taken = 0
        if self._sealed:
            if not self._push():
                return 0
            taken = self._held_nbytes
        for data in _slices(buffers, taken):
            self._sealed = self._seal(data)
            self._held_nbytes = len(data)
            self._count(len(data))
            if not self._push():
                break
            taken += len(data)
        return taken

    def _seal(self, data: bytes | memoryview) -> memoryview:
        with self._lock:
            try:
                self._tls.write(data)
            except ssl.SSLError as error:
                raise ConnectionLost(f"the connection broke: {_words(error)}") from None
            return memoryview(self._outgoing.read())

    def _push(self) -> bool:
        """Is all of it on its way?"""
        while self._sealed:
            if not (sent := self._raw.send((self._sealed,))):
                return False
            self._sealed = self._sealed[sent:]
        return True

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes > MOST_NBYTES:
            raise ConnectionLost("this connection's keys are worn out, and the next one has new ones")


def _slices(buffers: Sequence[bytes | memoryview], skipped: int) -> Iterator[bytes | memoryview]:
    """All of it but for the first `skipped` bytes, in pieces that are sealed at once."""
    small: list[bytes | memoryview] = []
    nbytes = 0
    for buffer in buffers:
        if skipped >= len(buffer):
            skipped -= len(buffer)
            continue
        rest = memoryview(buffer)[skipped:]
        skipped = 0
        if nbytes + len(rest) <= SMALL_NBYTES:
            small.append(rest)
            nbytes += len(rest)
            continue
        if small:
            yield b"".join(small)
            small, nbytes = [], 0
        for start in range(0, len(rest), SLICE_NBYTES):
            yield rest[start : start + SLICE_NBYTES]
    if small:
        yield b"".join(small)


def _scratch() -> memoryview:
    if not hasattr(_own, "scratch"):
        _own.scratch = memoryview(bytearray(SLICE_NBYTES))
    scratch: memoryview = _own.scratch
    return scratch
