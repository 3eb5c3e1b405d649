"""`wide serve` and `wide join`: a coordinator and nodes that were started apart, and callers that should not get in."""

from __future__ import annotations

import json
import re
import signal
import socket
import sqlite3
import struct
from contextlib import closing

import pytest

from tests.processes import result_of, started, until, wide
from tests.test_run import SLOW_LOSS, a_job
from wide.transport.connection import Connection
from wide.transport.tcp import connect
from wide.wire import messages as say
from wide.wire.frames import FIXED, encode


def address_of(process, run_dir):
    """Read the `wide join` line that serve prints."""
    for line in process.stderr:
        if found := re.search(r"wide join (\S+) ", line):
            return found[1]
    raise AssertionError("serve ended without a join line")


@pytest.fixture
def serving(tmp_path):
    """A pool that waits for nodes, and how to reach it."""
    job = a_job(tmp_path, "steps=120, loss=loss", SLOW_LOSS)
    with started("serve", job, "--port", 0, "--out", "here", "--json", cwd=tmp_path) as process:
        yield process, address_of(process, tmp_path), job
        process.terminate()


def token_of(tmp_path):
    return (tmp_path / "here" / "token").read_text().strip()


def rejects(tmp_path):
    return [reason for (reason,) in query(tmp_path, "SELECT reason FROM rejects")]


def query(tmp_path, statement):
    """What run.db says now; nothing, while it is still being made."""
    try:
        with closing(sqlite3.connect(f"file:{tmp_path / 'here' / 'run.db'}?mode=ro", uri=True)) as db:
            return db.execute(statement).fetchall()
    except sqlite3.OperationalError:
        return []


def test_nodes_from_elsewhere_give_the_same_bits(serving, tmp_path):
    process, address, job = serving
    token = {"WIDE_TOKEN": token_of(tmp_path)}
    streamed = a_job(tmp_path, "steps=120, loss=loss, dataset=lambda: 1 / 0", SLOW_LOSS, name="without_data.py")
    with (
        started("join", address, "--job", job, "--token-file", "here/token", cwd=tmp_path) as one,
        started("join", address, "--job", streamed, "--name", "far <b>", cwd=tmp_path, **token) as two,
    ):
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert one.wait(20) == 0
        assert two.wait(20) == 0
    result = json.loads(out)
    assert {node["name"] for node in result["nodes"]} >= {"far <b>"}
    assert "batches are streamed to it" in err
    assert result["weights_sha256"] == result_of("run", job, "--nodes", 0, cwd=tmp_path)["weights_sha256"]
    assert (tmp_path / "here" / "token").stat().st_mode & 0o077 == 0


def test_who_may_not_come_in_is_told_why_and_counted(serving, tmp_path):
    process, address, job = serving
    other = a_job(tmp_path, "model=lambda: nn.Linear(6, 4)", name="other.py")
    code, _, err = wide("join", address, "--job", job, cwd=tmp_path, WIDE_TOKEN="wrong")
    assert (code, "wrong token" in err) == (77, True)
    code, _, err = wide("join", address, "--job", other, cwd=tmp_path, WIDE_TOKEN=token_of(tmp_path))
    assert (code, "your model is not the pool's" in err) == (77, True)
    assert until(lambda: rejects(tmp_path) == ["refused", "refused"], seconds=10)
    assert process.poll() is None


def test_what_is_no_node_is_dropped_and_harms_nobody(serving, tmp_path):
    process, address, job = serving
    host, port = address.split(":")
    token = token_of(tmp_path)
    hello = say.Hello(token, "node", "evil", "h", 1, "b")
    evil = {
        "not wide": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "payload too long": FIXED.pack(b"WIDE", 1, 1, 0, 10, 2**63, 0),
        "header too long": FIXED.pack(b"WIDE", 1, 1, 0, 2**32 - 1, 0, 0),
        "versionmismatch": FIXED.pack(b"WIDE", 9, 1, 0, 10, 0, 0),
        "out of order": encode(say.Update(1, [], b"", 0.0, 0.0, 0.0, 0)),
        "refused": encode(say.Hello(token, "evaluator", "evil", "h", 1, "b")),
    }
    silent = socket.create_connection((host, int(port)))
    for reason, data in evil.items():
        caller = socket.create_connection((host, int(port)))
        caller.sendall(data)
        assert until(lambda reason=reason: reason in rejects(tmp_path), seconds=10), reason
        caller.close()
    liar = Connection(connect(host, int(port)))
    liar.send(hello)
    assert isinstance(liar.wait(), say.Welcome)
    liar.send(say.Update(1, [1.0], b"", 0.0, 0.0, 0.0, 0), memoryview(bytes(8)))
    assert isinstance(liar.wait(), say.Stop)
    assert until(lambda: "wrong payload" in rejects(tmp_path), seconds=10)
    resetting = socket.create_connection((host, int(port)))
    resetting.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    resetting.sendall(encode(hello)[:30])
    resetting.close()
    with started("join", address, "--job", job, cwd=tmp_path, WIDE_TOKEN=token) as good:
        assert process.wait(60) == 0
        assert good.wait(20) == 0
    silent.close()


def test_numbers_that_are_not_finite_are_refused_and_the_run_goes_on(serving, tmp_path):
    process, address, job = serving
    host, port = address.split(":")
    with started("join", address, "--job", job, cwd=tmp_path, WIDE_TOKEN=token_of(tmp_path)) as good:
        evil = Connection(connect(host, int(port)))
        evil.send(say.Hello(token_of(tmp_path), "node", "evil", "h", 1, "b"))
        evil.wait()
        evil.reader.allow(lambda message, nbytes: [memoryview(bytearray(nbytes))] if nbytes else [], 1 << 20, 1 << 30)
        evil.send(say.Ready(tensors_of(job), 83))
        work = evil.wait()
        live_nbytes = work.weights_nbytes
        poison = memoryview(struct.pack("<f", float("nan")) * (live_nbytes // 4))
        evil.send(say.Update(work.lease, [1.0] * len(work.sizes), b"\xff", 0.0, 0.0, 0.0, 0), poison)
        assert isinstance(evil.wait(), say.Stop)
        assert process.wait(60) == 0
        assert good.wait(20) == 0
    assert "failed" in rejects(tmp_path)


def tensors_of(job):
    from wide.codec.layout import Layout
    from wide.job.loading import load

    return Layout(load(str(job)).model()).describe()


def test_a_leaving_node_is_noticed_and_the_pool_waits(serving, tmp_path):
    process, address, job = serving
    token = {"WIDE_TOKEN": token_of(tmp_path)}
    with started("join", address, "--job", job, cwd=tmp_path, **token) as leaver:
        assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
        leaver.send_signal(signal.SIGINT)
        _, err = leaver.communicate(timeout=20)
    assert (leaver.returncode, "left the pool" in err, "Traceback" in err) == (130, True, False)
    assert process.poll() is None
    with started("join", address, "--job", job, cwd=tmp_path, **token) as successor:
        assert process.wait(60) == 0
        assert successor.wait(20) == 0


def test_nobody_at_the_address_ends_with_69(tmp_path):
    job = a_job(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _, err = wide("join", f"127.0.0.1:{port}", "--job", job, cwd=tmp_path, WIDE_TOKEN="t")
    assert code == 69
    assert "no coordinator answers" in err


def test_a_port_that_is_taken_is_explained(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = wide("serve", a_job(tmp_path), "--port", port, cwd=tmp_path)
    assert code == 2
    assert f"port {port}" in err
    assert "choose another with --port" in err
