"""A live coordinator among hostile peers: refused before anything is allocated, counted, dropped; nobody else notices."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct

import lz4.block
import psutil
import pytest
import torch

from tests import evil
from tests.greet import a_hello, introduced
from tests.processes import python, started, until
from tests.test_run import SLOW_LOSS, a_job
from tests.test_serve import address_of, query, rejects, token_of
from wide.codec.layout import Layout
from wide.codec.pieces import cut, encode
from wide.errors import ConnectionLost, Refused, Unreachable
from wide.job.loading import load
from wide.node.greeting import Identity, introduce
from wide.transport.connection import Connection
from wide.transport.introduction import knock
from wide.transport.tcp import connect
from wide.wire import messages as say
from wide.wire.proof import of_token

pytestmark = pytest.mark.processes

CAP_NBYTES = 64 << 20  # how much a coordinator may grow while it is attacked


class Pool:
    """A `wide serve` in its own process, one honest node in another, and what can be known of both."""

    def __init__(self, process, address, job, folder):
        self.process, self.job, self.folder = process, job, folder
        self.host, port = address.split(":")
        self.port = int(port)
        self.token = token_of(folder)
        self.address = address

    def call(self):
        return socket.create_connection((self.host, self.port))

    def line(self):
        """A connection over which nothing was said."""
        connection = Connection(connect(self.host, self.port))
        connection.reader.allow(lambda m, n: [memoryview(bytearray(n))] if n else [], 1 << 20, 1 << 30)
        return connection

    def member(self):
        """A peer with the right token that has said its probes back."""
        connection = self.line()
        introduce(connection, Identity(of_token(self.token), "evil", 1, torch.device("cpu")), threads=1)
        connection.reader.allow(lambda m, n: [memoryview(bytearray(n))] if n else [], 1 << 20, 1 << 30)
        return connection

    def worker(self):
        """A member that has been given work: (connection, work)."""
        connection = self.member()
        connection.send(say.Ready(Layout(load(str(self.job)).model()).describe(), 83))
        while isinstance(word := connection.wait(), say.Alive):
            pass  # it may take a while
        return connection, word

    def counted(self, reason, more_than=0):
        return until(lambda: rejects(self.folder).count(reason) > more_than, seconds=10)

    def rss(self):
        return psutil.Process(self.process.pid).memory_info().rss

    def steps(self):
        return len(query(self.folder, "SELECT step FROM steps"))


@contextlib.contextmanager
def serving(tmp_path, *options):
    job = a_job(tmp_path, "steps=400, loss=loss", SLOW_LOSS)
    with started("serve", job, "--port", 0, "--out", "here", "--json", *options, cwd=tmp_path) as process:
        pool = Pool(process, address_of(process, tmp_path), job, tmp_path)
        yield pool
        assert process.poll() is None, "the coordinator ended"
        process.terminate()


@pytest.fixture
def pool(tmp_path):
    with serving(tmp_path) as pool:
        yield pool


@contextlib.contextmanager
def harmless(pool):
    """What happens inside neither slows an honest node to a halt nor makes the coordinator grow."""
    with started("join", pool.address, "--job", pool.job, cwd=pool.folder, WIDE_TOKEN=pool.token) as honest:
        assert until(lambda: pool.steps() > 0)
        before = pool.rss()
        yield
        grown = pool.rss() - before
        steps = pool.steps()
        assert until(lambda: pool.steps() > steps or honest.poll() is not None), "training stands still"
        assert grown < CAP_NBYTES
        honest.kill()


def test_strangers_are_refused_with_a_counted_reason(pool):
    with harmless(pool):
        for name, (data, reason) in evil.STRANGERS.items():
            before = rejects(pool.folder).count(reason)
            caller = pool.call()
            caller.sendall(data)
            assert pool.counted(reason, before), name
            assert until(lambda caller=caller: is_closed(caller), seconds=10), name
            caller.close()


def test_members_are_refused_with_a_counted_reason(pool):
    with harmless(pool):
        for name, (data, reason) in evil.said_after_hello().items():
            before = rejects(pool.folder).count(reason)
            caller = introduced(pool.line(), token=pool.token, name="evil")
            assert isinstance(caller.wait(), say.Known)
            caller.stream.send([data])
            assert pool.counted(reason, before), name
            caller.close()


def test_what_is_said_in_one_breath_with_a_hello_is_refused_too(pool):
    with harmless(pool):
        for name, (data, _) in evil.said_after_hello().items():
            before = len(rejects(pool.folder))
            caller = pool.line()
            knock(caller)
            caller.stream.send([evil.encode(a_hello(pool.token, name="evil", nonces=caller.nonces)), data])
            assert until(lambda before=before: len(rejects(pool.folder)) > before, seconds=10), name
            caller.close()


def test_updates_that_are_not_what_was_leased_are_refused(pool):
    with harmless(pool):
        for name, update, payload, reason in (
            ("of another size", dict(), bytes(8), "wrong payload"),
            ("for work that it was not given", dict(lease=10**9), b"", "out of order"),
            ("in a codec that nobody asked for", dict(codec="zstd"), b"", "unknown codec"),
            ("in a codec that does not exist", dict(codec="snappy"), b"", "unknown codec"),
            ("that is not finite", dict(), None, "failed"),
        ):
            member, work = pool.worker()
            before = rejects(pool.folder).count(reason)
            nan = struct.pack("<f", float("nan")) * (work.weights_nbytes // 4)
            fields = dict(lease=work.lease, losses=[1.0] * len(work.sizes), touched=b"\xff", compute_s=0.0)
            fields |= dict(codec_s=0.0, network_s=0.0, rss_bytes=0) | update
            member.send(say.Update(**fields), memoryview(nan if payload is None else payload))
            assert pool.counted(reason, before), name
            member.close()


def test_a_model_that_is_not_the_pools_is_refused(pool):
    tensors = Layout(load(str(pool.job)).model()).describe()
    for changed in (
        say.Tensor(tensors[0].name, tensors[0].dtype, (2**62, 2**62), tensors[0].stride),
        say.Tensor("other", tensors[0].dtype, tensors[0].shape, tensors[0].stride),
        say.Tensor(tensors[0].name, "torch.int64", tensors[0].shape, tensors[0].stride),
    ):
        member = pool.member()
        member.send(say.Ready([changed, *tensors[1:]], 83))
        stop = member.wait()
        assert (type(stop), stop.exit_code, "your model is not the pool's" in stop.why) == (say.Stop, 77, True)
        member.close()


@pytest.mark.parametrize("codec", ["lz4", "zstd", "bf16", "int8", "int4", "topk"])
def test_bombs_and_broken_parts_are_refused(tmp_path, codec):
    with serving(tmp_path, "--compress", codec) as pool, harmless(pool):
        layout = Layout(load(str(pool.job)).model())
        piece = cut(layout, only_live=True)[0]
        whole = b"".join(encode(piece, codec, torch.zeros(layout.live_nbytes, dtype=torch.uint8)))
        bomb = lz4.block.compress(bytes(100 << 20), store_size=False)
        parts = evil.bad_parts(whole) | {"a bomb": struct.pack("<4I", 10, 10, 10, 10) + bomb[:200_000]}
        for name, data in parts.items():
            member, work = pool.worker()
            assert work.reply_codec == codec
            refused = len(rejects(pool.folder))
            losses = [1.0] * len(work.sizes)
            member.send(say.Update(work.lease, losses, b"\xff", 0.0, 0.0, 0.0, 0, codec=codec))
            member.send(say.Part(), data)
            if name == "zeros" or (name == "noise" and len(data) == len(whole)):
                continue  # some numbers, or none: decoders need only survive
            assert until(lambda refused=refused: len(rejects(pool.folder)) > refused, seconds=10), name
            member.close()


def test_resets_and_truncated_frames_harm_nobody(pool):
    with harmless(pool):
        for part in (0.1, 0.5, 0.9):
            for is_reset in (False, True):
                caller = pool.line()
                knock(caller)
                hello = evil.encode(a_hello(pool.token, name="evil", nonces=caller.nonces))
                caller.stream.send([hello[: int(part * len(hello))]])
                if is_reset:
                    caller.stream._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                caller.close()
        member, work = pool.worker()  # and one that goes in the middle of its update
        head = evil.encode(say.Update(work.lease, [1.0], b"\xff", 0.0, 0.0, 0.0, 0), work.weights_nbytes)
        member.stream.send([head, bytes(100)])
        member.close()
    assert until(lambda: any("evil" in name for (name,) in query(pool.folder, "SELECT name FROM nodes")))


def test_a_crowd_of_silent_callers_keeps_no_node_out_and_is_sent_away(pool):
    raise_file_limit()
    callers = []
    with contextlib.ExitStack() as crowd:
        with harmless(pool):
            for _ in range(4000):
                callers.append(crowd.enter_context(pool.call()))
        with started("join", pool.address, "--job", pool.job, cwd=pool.folder, WIDE_TOKEN=pool.token) as newcomer:
            assert until(lambda: len(query(pool.folder, "SELECT node FROM nodes")) == 2)
            newcomer.kill()
        assert until(lambda: all(map(is_closed, callers)), seconds=60), "they may stay for ever"
    assert 0 < rejects(pool.folder).count("refused") < 100, "one row for a flood, not for each caller"


def raise_file_limit():
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4200:
        pytest.skip(f"this machine allows {hard} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1 << 16), hard))


def is_closed(caller):
    caller.settimeout(0.01)
    try:
        while caller.recv(4096):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_part_too_many_is_out_of_order(tmp_path):
    with serving(tmp_path, "--compress", "int8") as pool:
        member, work = pool.worker()
        layout = Layout(load(str(pool.job)).model())
        zeros = torch.zeros(layout.live_nbytes, dtype=torch.uint8)
        parts = [b"".join(encode(piece, "int8", zeros)) for piece in cut(layout, only_live=True)]
        update = say.Update(work.lease, [1.0] * len(work.sizes), b"\xff", 0.0, 0.0, 0.0, 0, codec="int8")
        member.send(update)
        with contextlib.suppress(ConnectionLost):  # it may be sent away while it still speaks
            for part in [*parts, parts[0]]:
                member.send(say.Part(), part)
        assert pool.counted("out of order")


def test_mutated_frames_neither_crash_nor_hang_nor_fill_memory(tmp_path):
    """In a process of its own, so that a crash would be seen. `python -m tests.fuzz --frames 1000000` does more."""
    seed = random.randrange(10**6)
    done = python("-m", "tests.fuzz", "--frames", 40000, "--seed", seed, PYTHONFAULTHANDLER="1")
    assert done.returncode == 0, done.stdout + done.stderr
    reasons = json.loads(done.stdout)["reasons"]
    assert set(reasons) >= {
        "ledger",  # some of it is harmless, and is merged
        "bad header",
        "bad checksum",
        "bad encoding",
        "payload too long",
        "unknown type",
    }


def test_the_atheris_target_runs():
    pytest.importorskip("atheris")
    done = python("-m", "tests.fuzz", "--atheris", "-runs=2000", "-seed=1")
    assert done.returncode == 0, done.stderr


def test_numbers_that_no_machine_has_are_refused(pool):
    with harmless(pool):
        for field, value, reason in (
            ("rss_bytes", 2**63, "bad header"),
            ("rss_bytes", -1, "bad header"),
            ("received_s", float("nan"), "bad header"),
            ("compute_s", float("inf"), "bad header"),
            ("losses", [float("nan")], "bad header"),
            ("losses", [], "bad numbers"),
            ("losses", [1.0] * 1000, "bad numbers"),
            ("touched", b"", "bad numbers"),
            ("touched", b"\xff" * 1000, "bad numbers"),
        ):
            member, work = pool.worker()
            before = rejects(pool.folder).count(reason)
            fields = dict(lease=work.lease, losses=[1.0] * len(work.sizes), touched=b"\xff")
            fields |= dict(compute_s=0.0, codec_s=0.0, network_s=0.0, rss_bytes=0) | {field: value}
            update = say.Update(**fields)
            member.send(update, memoryview(bytes(work.weights_nbytes)))
            assert pool.counted(reason, before), field
            member.close()


def test_a_debt_where_none_can_be_is_refused_and_changes_no_bit(pool):
    member, work = pool.worker()
    member.send(say.Leaving("bye"), memoryview(struct.pack("<f", 1.0) * (work.weights_nbytes // 4)))
    assert pool.counted("wrong payload")


def test_a_peer_that_answers_without_reading_is_dropped(tmp_path):
    body = SLOW_LOSS + "\nclass Big(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    body += "        self.big = nn.Linear(6, 3)\n        self.more = nn.Parameter(torch.zeros(4_000_000))\n"
    body += "    def forward(self, x):\n        return self.big(x) + self.more[0]\n"
    job = a_job(tmp_path, "steps=400, loss=loss, model=Big", body, name="big.py")
    with started("serve", job, "--port", 0, "--out", "here", cwd=tmp_path) as process:
        pool = Pool(process, address_of(process, tmp_path), job, tmp_path)
        deaf = pool.member()
        deaf.send(say.Ready(Layout(load(str(job)).model()).describe(), 83))
        assert until(lambda: query(tmp_path, "SELECT * FROM choices"))  # it has been sent 16 MB of weights
        update = say.Update(1, [1.0], b"\xff", 0.0, 0.0, 0.0, 0)
        deaf.stream.send([evil.encode(update, 16_000_128)])
        assert pool.counted("out of order")
        process.terminate()


def test_two_goodbyes_in_one_breath_are_one(tmp_path):
    with serving(tmp_path, "--compress", "int8") as pool, harmless(pool):
        member, work = pool.worker()
        nbytes = Layout(load(str(pool.job)).model()).live_nbytes
        goodbye = evil.encode(say.Leaving("bye"), nbytes) + bytes(nbytes)
        member.stream.send([goodbye + goodbye])
        assert until(lambda: ("bye",) in query(pool.folder, "SELECT why FROM nodes"))


def test_what_was_said_on_one_connection_proves_nothing_on_another(pool):
    honest = pool.line()
    knock(honest)
    hello = a_hello(pool.token, name="evil", nonces=honest.nonces)
    replayed = pool.line()
    replayed.send(say.Knock(say.PROTOCOL, honest.nonces[0]))
    assert isinstance(replayed.wait(), say.Challenge)
    replayed.send(hello)
    stop = replayed.wait()
    assert (type(stop), stop.exit_code, "wrong token" in stop.why) == (say.Stop, 77, True)
    honest.send(hello)
    assert isinstance(honest.wait(), say.Known)
    assert isinstance(honest.wait(), say.Welcome)


def test_guesses_let_nobody_in_and_fill_no_table(pool):
    with harmless(pool):
        for i in range(600):
            with contextlib.suppress(ConnectionLost, Refused, Unreachable):
                introduce(pool.line(), Identity(of_token(f"guess {i}"), "evil", 1, torch.device("cpu")), threads=1)
                raise AssertionError("it was let in")
    assert 0 < rejects(pool.folder).count("refused") < 100
    assert all(name != "evil" for (name,) in query(pool.folder, "SELECT name FROM nodes"))
