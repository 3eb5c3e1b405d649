"""Socket options: what a user writes is what the kernel is told, and frames leave in as few calls as can be."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import closing

import pytest

from tests.processes import ROOT, wide
from wide.cli.main import main
from wide.config import Sockets, resolve
from wide.errors import ConnectionLost, Unreachable, UsageError
from wide.transport.connection import Connection
from wide.transport.listener import Listener
from wide.transport.tcp import IOV_MAX, TcpStream, address_here, connect
from wide.wire import messages as say


def two_ends(sockets=None):
    """A dialled stream and the accepted one: (blocking, non-blocking)."""
    sockets = sockets or Sockets()
    with closing(Listener("127.0.0.1", 0, sockets)) as listener:
        left = connect("127.0.0.1", listener.port, sockets)
        while (caller := listener.accept()) is None:
            pass
    return left, caller.stream


def option(stream, level, name):
    return stream._sock.getsockopt(level, getattr(socket, name))


@pytest.mark.parametrize("end", [0, 1], ids=["dialled", "accepted"])
def test_options_are_on_both_sockets(end):
    streams = two_ends(Sockets(buffer_nbytes=100_000, nodelay=False, keepalive_s=30))
    assert option(streams[end], socket.SOL_SOCKET, "SO_SNDBUF") in (100_000, 200_000)  # Linux doubles it
    assert option(streams[end], socket.SOL_SOCKET, "SO_RCVBUF") in (100_000, 200_000)
    assert not option(streams[end], socket.IPPROTO_TCP, "TCP_NODELAY")
    assert option(streams[end], socket.SOL_SOCKET, "SO_KEEPALIVE")
    expected = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 30, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 120_000}
    there = {name: value for name, value in expected.items() if hasattr(socket, name)}
    assert {name: option(streams[end], socket.IPPROTO_TCP, name) for name in there} == there


@pytest.mark.parametrize("end", [0, 1], ids=["dialled", "accepted"])
def test_by_default_small_messages_are_not_held_back_and_a_vanished_peer_is_noticed(end):
    stream = two_ends()[end]
    assert option(stream, socket.IPPROTO_TCP, "TCP_NODELAY")
    assert option(stream, socket.SOL_SOCKET, "SO_KEEPALIVE")


def test_without_keepalive_nothing_watches_the_peer():
    stream, _ = two_ends(Sockets(keepalive_s=0))
    assert not option(stream, socket.SOL_SOCKET, "SO_KEEPALIVE")
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        assert option(stream, socket.IPPROTO_TCP, "TCP_USER_TIMEOUT") == 0


def test_a_read_asks_for_no_more_than_it_may():
    left, right = two_ends(Sockets(read_nbytes=100))
    right.send([bytes(1000)])
    room = memoryview(bytearray(1000))
    assert left.receive_into(room) == 100
    assert left.receive_into(room[:30]) == 30


@pytest.mark.skipif(not hasattr(socket, "TCP_QUICKACK"), reason="only Linux has it")
@pytest.mark.parametrize("quickack", [True, False])
def test_quickack_is_asked_for_again_after_every_read(quickack):
    asked = []

    class Recording:
        def setsockopt(self, level, name, value):
            if name == socket.TCP_QUICKACK:
                asked.append(value)

        def recv_into(self, view, nbytes):
            return len(view)

    stream = TcpStream(Recording(), Sockets(quickack=quickack))
    for _ in range(3):
        stream.receive_into(memoryview(bytearray(1)))
    assert asked == [1, 1, 1] * quickack


class Counting:
    """A stream that counts its calls."""

    def __init__(self, stream):
        self._stream = stream
        self.calls = 0

    def send(self, buffers):
        self.calls += 1
        return self._stream.send(buffers)

    def __getattr__(self, name):
        return getattr(self._stream, name)


class Kept:
    """A sink that keeps every payload."""

    def __init__(self):
        self.payload = bytearray()

    def __call__(self, message, nbytes):
        self.payload = bytearray(nbytes)
        return [memoryview(self.payload)]


def test_a_small_message_and_its_payload_leave_in_one_call():
    left, right = two_ends()
    left = Counting(left)
    sender, receiver, kept = Connection(left), Connection(right), Kept()
    receiver.reader.allow(kept, 1 << 10, 1 << 20)
    sender.send(say.Leaving("x"), memoryview(b"header and"), memoryview(b" payload"))
    assert left.calls == 1
    right._sock.setblocking(True)
    assert receiver.wait() == say.Leaving("x")
    assert kept.payload == b"header and payload"


def test_more_buffers_than_one_call_takes_arrive_all_the_same():
    left, right = two_ends()
    left = Counting(left)
    sender, receiver, kept = Connection(left), Connection(right), Kept()
    receiver.reader.allow(kept, 1 << 10, 1 << 20)
    right._sock.setblocking(True)
    buffers = [memoryview(i.to_bytes(4, "little")) for i in range(2 * IOV_MAX + 7)]
    thread = threading.Thread(target=sender.send, args=(say.Leaving("x"), *buffers))
    thread.start()
    assert receiver.wait() == say.Leaving("x")
    thread.join()
    assert kept.payload == b"".join(buffers)
    assert left.calls == 3


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("buffer=8M,quickack=on,read=256k,keepalive=30,nodelay=off", Sockets(buffer_nbytes=8 << 20, quickack=True, read_nbytes=256 << 10, keepalive_s=30, nodelay=False)),
        ("buffer=0", Sockets()),
        ("buffer=1G", Sockets(buffer_nbytes=1 << 30)),
        ("read=1000, keepalive=0", Sockets(read_nbytes=1000, keepalive_s=0)),
    ],
)  # fmt: skip
def test_what_a_user_writes(text, expected):
    assert resolve({"socket": text}, {}).socket == expected
    assert resolve({}, {"WIDE_SOCKET": text}).socket == expected
    assert resolve({"socket": expected}, {"WIDE_SOCKET": "nodelay=off"}).socket == expected


@pytest.mark.parametrize(
    "text",
    ["", "buffer", "buffer=", "buffer=M", "buffer=-1", "buffer=2G", "buffer=٣", "buffer=1.5M", "windows=3",
     "nodelay=maybe", "nodelay=1", "keepalive=1K", "keepalive=40000", "quickack=on,", "buffer=" + "9" * 5000],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused_with_what_could_be(text):
    with pytest.raises(UsageError, match=r"--socket .*: expected buffer=SIZE .*keepalive=SECONDS") as error:
        resolve({"socket": text}, {})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("command", [("run", "x.py"), ("serve", "x.py"), ("join", "127.0.0.1:1", "--job", "x.py")])
def test_every_command_takes_the_option(command, capsys):
    assert main([*command, "--socket", "speed=fast"]) == 2
    assert "wide: --socket speed=fast: expected buffer=SIZE" in capsys.readouterr().err


def test_a_pool_trains_with_other_options(tmp_path):
    options = "buffer=64K,read=1K,quickack=on,nodelay=off,keepalive=0"
    code, _, err = wide(
        "run", ROOT / "examples" / "seed.py", "--nodes", 2, "--steps", 4, "--socket", options, cwd=tmp_path
    )
    assert code == 0, err


@pytest.mark.skipif(address_here() is None, reason="this system has no such sockets")
def test_a_socket_of_this_machine_carries_what_tcp_carries_and_has_no_options():
    address = address_here()
    with closing(Listener(address, 0, Sockets(quickack=True))) as listener:
        caller = connect(address, 0, Sockets(quickack=True))
        call = listener.accept()
        stream = call.answer()
        assert (call.host, call.is_own) == ("localhost", True)
        payload, kept = memoryview(bytes(range(256)) * 4096), Kept()
        sender, receiver = Connection(caller), Connection(stream)
        receiver.reader.allow(kept, 1 << 10, 1 << 21)
        thread = threading.Thread(target=sender.send, args=(say.Leaving("x"), payload))
        thread.start()
        stream.set_blocking(True)
        assert receiver.wait() == say.Leaving("x")
        thread.join()
        assert kept.payload == payload
    with pytest.raises(Unreachable):
        connect(address, 0)


def test_another_users_process_is_not_let_in_by_this_machines_socket(monkeypatch):
    address = address_here()
    if address is None:
        pytest.skip("this system has no such sockets")
    with closing(Listener(address, 0)) as listener:
        caller = connect(address, 0)
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert listener.accept() is None
        with pytest.raises(ConnectionLost):
            caller.receive_into(memoryview(bytearray(1)))


@pytest.mark.processes
@pytest.mark.skipif(address_here() is None, reason="this system has no such sockets")
def test_a_pool_of_this_machine_alone_listens_at_no_port(tmp_path):
    (tmp_path / "job.py").write_text(
        "import psutil, tests.jobs\n"
        "def data():\n"
        "    ports = [c.laddr for c in psutil.Process().net_connections('inet')]\n"
        "    open('ports', 'a').write(f'{ports}\\n')\n"
        "    return tests.jobs.points()\n"
        "job = tests.jobs.make(dataset=data, steps=2)\n"
    )
    code, _, err = wide("run", "job.py", "--nodes", 2, cwd=tmp_path)
    assert code == 0, err
    assert set((tmp_path / "ports").read_text().splitlines()) == {"[]"}
