"""How to reach a pool, how to know it, and with what secret: one struct for everybody who dials. Knows addresses, TCP
and TLS.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import msgspec

from wide.config import Sockets
from wide.errors import ConnectionLost, ProtocolError, Refused, Unreachable, UsageError, WideError, WrongPool
from wide.transport.connection import Connection
from wide.transport.introduction import knock
from wide.transport.paced import Paced
from wide.transport.stream import Stream
from wide.transport.tcp import HERE, TcpStream, connect, shown
from wide.transport.tls import Handshake, client_context
from wide.wire.invite import PIN_NBYTES, Address, Invite
from wide.wire.proof import Credential, of_token

ANSWER_S = 10.0  # until somebody who took a call has answered


class Endpoint(msgspec.Struct, frozen=True):
    """A pool's addresses, the pin of its certificate (empty: not encrypted, so on this machine only), and what this
    side knows.
    """

    addresses: tuple[Address, ...]
    credential: Credential
    pin: bytes = b""
    sockets: Sockets = Sockets()
    most_bytes_per_s: float = 0.0  # 0: as many as there is room for
    is_insecure: bool = False  # may what is not encrypted leave this machine?

    def dial(self, silence_s: float | None = None) -> Connection:
        """A connection that blocks, to whichever address answers first; the coordinator may be silent for so long."""
        if len(self.addresses) == 1:
            return self._answered(self.addresses[0], silence_s)
        answers: queue.SimpleQueue[Connection | WideError] = queue.SimpleQueue()
        is_over = threading.Event()
        for address in self.addresses:
            threading.Thread(target=self._try, args=(address, silence_s, answers, is_over), daemon=True).start()
        problems: list[WideError] = []
        try:
            while len(problems) < len(self.addresses):
                answer = answers.get()
                if isinstance(answer, Connection):
                    return answer
                problems.append(answer)
        finally:
            is_over.set()
            _hang_up(answers)
        raise _gravest(problems)

    def _try(self, address: Address, silence_s: float | None, answers: Any, is_over: threading.Event) -> None:
        try:
            answers.put(self._answered(address, silence_s))
        except WideError as error:
            answers.put(error)
        if is_over.is_set():  # somebody else was quicker
            _hang_up(answers)

    def _answered(self, address: Address, silence_s: float | None) -> Connection:
        raw = connect(*address, self.sockets, ANSWER_S, ANSWER_S)
        try:
            connection = Connection(self._stream(raw, address))
            connection.address = shown(*address)
            knock(connection)
        except ConnectionLost as error:
            raw.close()
            raise Unreachable(f"somebody took the call at {shown(*address)}, and no pool answered: {error}") from None
        except ProtocolError as error:
            raw.close()
            raise Unreachable(f"what answers at {shown(*address)} is no pool: {error}") from None
        except BaseException:
            raw.close()
            raise
        raw.be_silent_for(silence_s)
        return connection

    def _stream(self, raw: TcpStream, address: Address) -> Stream:
        """Encrypted, whenever it is known how to know the other end: what seems to be this machine may be a tunnel."""
        paced: Stream = Paced(raw, self.most_bytes_per_s) if self.most_bytes_per_s else raw
        if not self.pin and (raw.is_own or self.is_insecure):
            return paced
        if not self.pin:
            raise Refused(
                f"{shown(*address)} is another machine, and a token alone does not say whether it is the right one: "
                "join with the pool's invite (wide1_…)"
            )
        handshake = Handshake(paced, client_context(), is_server=False)
        stream = handshake.advance(reads=False)
        while stream is None:
            stream = handshake.advance()
        if handshake.binding[:PIN_NBYTES] != self.pin:  # and nothing was said yet
            raise WrongPool(
                f"{shown(*address)} answers with another certificate than the invite's: it is another pool, or "
                "somebody in between; ask for a new invite if the pool was made anew"
            )
        return stream


def _hang_up(answers: queue.SimpleQueue[Connection | WideError]) -> None:
    """On all that nobody waits for any more."""
    while True:
        try:
            answer = answers.get_nowait()
        except queue.Empty:
            return
        if isinstance(answer, Connection):
            answer.close()


def _gravest(problems: list[WideError]) -> WideError:
    """A pool that does not want us says most. Where one address is somebody else's, another may be the pool's."""
    for problem in problems:
        if not isinstance(problem, Unreachable | WrongPool):
            return problem
    if all(isinstance(problem, WrongPool) for problem in problems):
        return problems[0]
    return Unreachable("; ".join(dict.fromkeys(map(str, problems))) or "the invite names no address")


def of_invite(invite: Invite, sockets: Sockets) -> Endpoint:
    return Endpoint(invite.addresses, Credential(f"invite {invite.id}", invite.secret), invite.pin, sockets)


def endpoint(address: str, token: str, sockets: Sockets, is_insecure: bool = False) -> Endpoint:
    """From HOST:PORT, of a pool on this machine or at the end of a tunnel."""
    place = host_and_port(address)
    if not token:
        raise UsageError("no token: set WIDE_TOKEN or give --token-file, with the token of `wide serve`")
    return Endpoint((place,), of_token(token), b"", sockets, is_insecure=is_insecure)


def host_and_port(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 65536) or host.startswith(HERE):
        raise UsageError(f"{text}: expected HOST:PORT, or an invite (wide1_…), as `wide serve` printed it")
    return host.strip("[]"), int(port)
