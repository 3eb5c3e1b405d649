"""Encrypted streams: the same promises as a plain one, and nobody in between."""

from __future__ import annotations

import random
import socket
import ssl
import threading
from contextlib import closing, contextmanager, suppress

import pytest

from tests.processes import until
from wide.config import Sockets
from wide.errors import ConnectionLost, ProtocolError, Refused, Unreachable, VersionMismatch, WrongPool
from wide.launch.keys import keys_in
from wide.transport import tls
from wide.transport.connection import Connection
from wide.transport.endpoint import Endpoint
from wide.transport.hub import TcpHub
from wide.transport.introduction import knock
from wide.transport.listener import Listener, Tls
from wide.transport.memory import pair
from wide.transport.paced import Paced
from wide.transport.tcp import connect
from wide.transport.tls import Handshake, client_context
from wide.wire import messages as say
from wide.wire.proof import of_token


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return keys_in(tmp_path_factory.mktemp("pool"))


def two_ends(keys, most_nbytes=1 << 30):
    """Both ends of an encrypted line in memory."""
    left, right = pair(most_nbytes)
    node = Handshake(left, client_context(), is_server=False)
    pool = Handshake(right, keys.tls.context, True, keys.binding)
    ends = [node.advance(reads=False), None]
    while None in ends:
        ends = [ends[0] or node.advance(), ends[1] or pool.advance()]
    return ends


def carried(sender, receiver, data):
    """All of it, however the streams cut it."""
    got, sent, room = bytearray(), 0, memoryview(bytearray(50_000))
    while len(got) < len(data):
        sent += sender.send([memoryview(data)[sent : sent + 1000], memoryview(data)[sent + 1000 :]])
        while n := receiver.receive_into(room):
            got += room[:n]
    assert sent == len(data)
    return bytes(got)


@pytest.mark.parametrize("most_nbytes", [1 << 30, 1000, 37], ids=["whole", "torn", "shredded"])
def test_what_is_sent_arrives_both_ways(keys, most_nbytes):
    node, pool = two_ends(keys, most_nbytes)
    data = random.Random(1).randbytes(300_000 if most_nbytes > 100 else 20_000)
    assert carried(node, pool, data) == data
    assert carried(pool, node, data) == data
    assert node.binding == pool.binding == keys.binding


def test_nothing_of_it_can_be_read_on_the_way(keys):
    node, pool = two_ends(keys)
    seen = bytearray()
    carry = node._raw.carry
    node._raw.carry = lambda data: (seen.extend(data), carry(data))
    carried(node, pool, b"a secret that nobody should see" * 100)
    assert seen
    assert b"secret" not in seen


def test_messages_with_payloads_pass_as_over_a_plain_stream(keys):
    node, pool = (Connection(stream) for stream in two_ends(keys, 5000))
    room = memoryview(bytearray(100_000))
    pool.reader.allow(lambda message, nbytes: [room[:nbytes]] if nbytes else [], 1 << 20, 1 << 20)
    payload = random.Random(2).randbytes(100_000)
    node.send(say.Leaving("one"), payload)
    node.send(say.Leaving("two"))
    heard = []
    while len(heard) < 2:
        node.flush()
        heard += pool.poll()
    assert heard == [say.Leaving("one"), say.Leaving("two")]
    assert room == payload
    assert not node.has_unsent


def test_a_part_of_a_record_is_no_input(keys):
    node, pool = two_ends(keys)
    held = []
    node._raw.carry = held.append
    node.send([b"hello"])
    pool._raw.arrive(held[0][:-3])
    assert not pool.has_input()
    pool._raw.arrive(held[0][-3:])
    assert pool.has_input()
    assert pool.receive_into(room := memoryview(bytearray(9))) == 5
    assert room[:5] == b"hello"


def test_what_was_changed_on_the_way_ends_the_connection(keys):
    node, pool = two_ends(keys)
    held = []
    node._raw.carry = held.append
    node.send([b"pay 10"])
    pool._raw.arrive(held[0][:-1] + bytes([held[0][-1] ^ 1]))
    with pytest.raises(ConnectionLost):
        pool.receive_into(memoryview(bytearray(9)))


def test_what_came_before_a_broken_record_is_read_and_then_it_is_over(keys):
    node, pool = two_ends(keys)
    node.send([b"knock"])
    pool._raw.arrive(bytes.fromhex("1703030020") + bytes(32))
    room = memoryview(bytearray(99))
    assert pool.receive_into(room) == 5
    with pytest.raises(ConnectionLost):
        pool.receive_into(room)
    with pytest.raises(ConnectionLost):
        pool.send([b"an answer"])


def test_a_goodbye_of_tls_itself_ends_the_connection_in_words(keys):
    node, pool = two_ends(keys)
    with suppress(ssl.SSLWantReadError):
        node._tls.unwrap()
    node._raw.send([node._outgoing.read()])
    with pytest.raises(ConnectionLost, match="closed"):
        pool.receive_into(memoryview(bytearray(9)))


def test_what_the_network_does_not_take_is_sealed_once_and_offered_again(keys):
    node, pool = two_ends(keys)
    node._raw.most_nbytes = 0
    assert node.send([b"first", b"second"]) == 0
    node._raw.most_nbytes = 1 << 30
    assert node.send([b"first", b"second", b"third"]) == len(b"firstsecondthird")
    room = memoryview(bytearray(99))
    assert bytes(room[: pool.receive_into(room)]) == b"firstsecondthird"


def test_keys_that_are_worn_out_end_the_connection(keys, monkeypatch):
    monkeypatch.setattr(tls, "MOST_NBYTES", 1000)
    node, _ = two_ends(keys)
    node.send([bytes(500)])
    node.send([bytes(500)])
    with pytest.raises(ConnectionLost, match="worn out"):
        node.send([bytes(500)])


def test_a_peer_that_closes_is_noticed(keys):
    node, pool = two_ends(keys)
    node.send([b"bye"])
    node.close()
    room = memoryview(bytearray(9))
    assert pool.receive_into(room) == 3
    assert pool.has_input()
    with pytest.raises(ConnectionLost):
        pool.receive_into(room)


# ── over real sockets ────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def listening(keys, monkeypatch, is_own=False, is_insecure=False):
    """A coordinator's listener, whose callers seem to be elsewhere; it answers knocks until the end."""
    monkeypatch.setattr("wide.transport.tcp.is_own", lambda sock: is_own)
    listener = Listener("127.0.0.1", 0, Sockets(), keys.tls if keys else None, is_insecure)
    hub, is_over, problems = TcpHub(listener), threading.Event(), []

    def serve():
        lines = {}
        while not is_over.is_set():
            for key, reads, _ in hub.wait(0.02):
                if key == "callers":
                    if (call := listener.accept()) is not None:
                        hub.register(call.stream, call)
                elif reads and not key.stream.is_closed:
                    react(key, lines)

    def react(key, lines):
        try:
            if key in lines:
                for message in lines[key].receive():
                    if isinstance(message, say.Knock):
                        lines[key].send(say.Challenge(say.PROTOCOL, bytes(16)))
                    else:
                        lines[key].send(message)
            elif (stream := key.answer()) is not None:
                hub.unregister(key.stream)
                lines[key] = Connection(stream)
                hub.register(stream, key)
        except ProtocolError as error:
            problems.append(error.reason)
            if error.reason == "not encrypted":
                Connection(key.stream).send(say.Stop(str(error), 77))
            hub.unregister(key.stream)
            key.close()
        except ConnectionLost:
            hub.unregister(key.stream)
            key.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield listener.port, problems
    finally:
        is_over.set()
        thread.join()
        hub.stop_listening()
        hub.close()


def an_endpoint(port, keys=None, *others, **changes):
    addresses = (("127.0.0.1", port), *others)
    return Endpoint(addresses, of_token("token"), keys.pin if keys else b"", **changes)


def test_another_machine_is_answered_over_tls_and_only_so(keys, monkeypatch):
    with listening(keys, monkeypatch) as (port, problems):
        with closing(an_endpoint(port, keys).dial(5.0)) as connection:
            assert connection.stream.binding == keys.binding
            connection.send(say.Leaving("x" * 3000))
            assert connection.wait() == say.Leaving("x" * 3000)
        with pytest.raises(Refused, match="use its invite"):
            knock(Connection(connect("127.0.0.1", port)))
        assert until(lambda: problems == ["not encrypted"])


def test_this_machines_own_callers_may_be_plain_but_not_with_an_invite(keys, monkeypatch):
    with listening(keys, monkeypatch, is_own=True) as (port, problems):
        with closing(an_endpoint(port).dial(5.0)) as connection:
            assert connection.stream.binding == b""
        with closing(an_endpoint(port, keys).dial(5.0)) as connection:
            assert connection.stream.binding == keys.binding, "what seems to be this machine may be a tunnel"
        assert not problems


def test_another_certificate_than_the_invites_is_told_nothing(keys, monkeypatch, tmp_path):
    said = []
    send = Connection.send
    monkeypatch.setattr(Connection, "send", lambda self, *words: said.append(words) or send(self, *words))
    with listening(keys_in(tmp_path), monkeypatch) as (port, _), pytest.raises(Refused, match="another certificate"):
        an_endpoint(port, keys).dial(5.0)
    assert not said


def test_dates_in_a_certificate_do_not_matter_the_pin_does(monkeypatch, tmp_path):
    monkeypatch.setattr("wide.launch.keys.VALID_DAYS", -1)
    expired = keys_in(tmp_path)
    with listening(expired, monkeypatch) as (port, _), closing(an_endpoint(port, expired).dial(5.0)) as connection:
        assert connection.stream.binding == expired.binding


def test_a_token_alone_does_not_leave_this_machine_unless_that_was_asked_for(keys, monkeypatch):
    with listening(keys, monkeypatch, is_insecure=True) as (port, _):
        with pytest.raises(Refused, match="join with the pool's invite"):
            an_endpoint(port).dial(5.0)
        with closing(an_endpoint(port, is_insecure=True).dial(5.0)) as connection:
            assert connection.stream.binding == b""


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_only_tls_13_is_spoken(keys, monkeypatch, version):
    context = client_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = version
    with listening(keys, monkeypatch) as (port, problems):
        with socket.create_connection(("127.0.0.1", port)) as sock:
            if version == ssl.TLSVersion.TLSv1_3:
                with context.wrap_socket(sock) as wrapped:
                    assert (wrapped.version(), wrapped.selected_alpn_protocol()) == ("TLSv1.3", f"wide/{say.PROTOCOL}")
                return
            with pytest.raises(OSError, match=r"(?i)version|reset|eof"):
                context.wrap_socket(sock)
        assert until(lambda: problems == ["bad handshake"])


def test_of_several_addresses_the_one_that_answers_is_taken(keys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as gone:
        nobody = ("127.0.0.1", gone.getsockname()[1])
        gone.close()
        with listening(keys, monkeypatch) as (port, _):
            others = (nobody, ("127.0.0.1", silent.getsockname()[1]), ("no.such.host.invalid", 1))
            with closing(an_endpoint(port, keys, *others).dial(5.0)) as connection:
                assert connection.stream.binding == keys.binding


def test_an_address_that_is_another_pools_is_passed_over(keys, monkeypatch, tmp_path):
    other = keys_in(tmp_path)
    with listening(other, monkeypatch) as (wrong, _):
        with pytest.raises(WrongPool):
            an_endpoint(wrong, keys).dial(5.0)
        with socket.create_server(("127.0.0.1", 0)) as gone:
            nobody = ("127.0.0.1", gone.getsockname()[1])
        with pytest.raises(Unreachable):
            an_endpoint(wrong, keys, nobody).dial(5.0)  # the pool may come back there
        with listening(keys, monkeypatch) as (right, _):
            connection = an_endpoint(wrong, keys, ("127.0.0.1", right)).dial(5.0)
            assert connection.stream.binding == keys.binding
            connection.close()


def test_if_nobody_answers_every_address_is_named(keys):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(Unreachable, match="(?s)127.0.0.1.*no.such.host"):
        an_endpoint(port, keys, ("no.such.host.invalid", 1)).dial(5.0)


def test_somebody_who_is_no_pool_is_called_so(keys):
    def answer(server):
        sock, _ = server.accept()
        sock.recv(100)
        sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
        sock.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        with pytest.raises(Unreachable, match="is no pool|no pool answered"):
            an_endpoint(server.getsockname()[1], keys).dial(5.0)
        thread.join()


def test_ipv6_is_dialled_and_listened_on(keys, monkeypatch):
    if not socket.has_ipv6:
        pytest.skip("this machine has no IPv6")
    try:
        listener = Listener("::1", 0, Sockets(), keys.tls)
    except Exception:
        pytest.skip("this machine has no IPv6")
    with closing(listener):
        stream = connect("::1", listener.port)
        while (call := listener.accept()) is None:
            pass
        assert (call.host, call.is_own, call.address.startswith("[::1]:")) == ("::1", True, True)
        stream.close()
        call.close()


def test_a_stream_that_is_paced_takes_its_time_and_loses_nothing():
    left, right = pair()
    paced = Paced(left, bytes_per_s=200_000)
    data = random.Random(3).randbytes(60_000)
    got, sent, room = bytearray(), 0, memoryview(bytearray(100_000))
    calls = 0
    while sent < len(data):
        sent += paced.send([data[sent:]])
        calls += 1
        got += room[: right.receive_into(room)]
    assert bytes(got) == data
    assert calls > 2, "not all at once"
    paced.set_blocking(False)
    while paced.send([data]):
        pass
    assert paced.send([data]) == 0, "what does not block takes nothing for now"


def test_encrypted_and_paced_go_together(keys, monkeypatch):
    with listening(keys, monkeypatch) as (port, _):
        endpoint = an_endpoint(port, keys, most_bytes_per_s=2e6)
        with closing(endpoint.dial(5.0)) as connection:
            connection.send(say.Leaving("y" * 3000))
            assert connection.wait() == say.Leaving("y" * 3000)


# ── one protocol behind ──────────────────────────────────────────────────────────────────────────────────────────


def test_neighbouring_protocols_agree_on_the_older_one(monkeypatch):
    from wide.wire import frames

    node, pool = (Connection(stream) for stream in pair())
    monkeypatch.setattr(frames, "PROTOCOL", say.PROTOCOL + 1)  # both ends can read the next one
    pool.send(say.Challenge(say.PROTOCOL, bytes(16)))
    knock(node)
    assert node.protocol == say.PROTOCOL
    assert isinstance(pool.wait(), say.Knock)
    node.protocol = say.PROTOCOL + 1
    node.send(say.Alive())
    assert pool.wait() == say.Alive()


def test_a_protocol_further_off_is_told_both_versions():
    node, pool = (Connection(stream) for stream in pair())
    pool.send(say.Challenge(say.PROTOCOL + 2, bytes(16)))
    with pytest.raises(VersionMismatch, match=f"protocol {say.PROTOCOL + 2}, this side {say.PROTOCOL}"):
        knock(node)


def test_a_pools_keys_are_for_its_owner_alone_and_are_kept(tmp_path):
    first = keys_in(tmp_path)
    again = keys_in(tmp_path)
    assert (first.root, first.binding) == (again.root, again.binding)
    assert isinstance(first.tls, Tls)
    for name in ("secret", "key.pem", "certificate.pem"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["certificate.pem", "key.pem", "secret"]
