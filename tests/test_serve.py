"""`wide serve` and `wide join`: a coordinator and nodes that were started apart, and callers that should not get in."""

from __future__ import annotations

import json
import re
import signal
import socket
import sqlite3
import threading
from contextlib import closing

import pytest

from tests.processes import result_of, started, until, wide
from tests.test_run import SLOW_LOSS, a_job

pytestmark = pytest.mark.processes


def address_of(process, run_dir):
    """Read what serve prints before it begins."""
    return invited(process)[0]


def invited(process):
    """Where the pool is, and the line to paste on other machines."""
    where = invite = ""
    for line in process.stderr:
        if found := re.match(r"pool \S+ at (\S+), TLS", line):
            where = found[1]
        if found := re.match(r" +wide join (wide1_\w+)$", line):
            invite = found[1]
        if line.startswith("Also in "):
            return where, invite
    raise AssertionError("serve ended without a join line")


@pytest.fixture
def serving(tmp_path):
    """A pool that waits for nodes, and how to reach it."""
    data = "dataset=lambda: 1 / 0 if os.environ.get('NO_DATA') else points()"
    job = a_job(tmp_path, f"steps=120, loss=loss, {data}", SLOW_LOSS)
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
    with (
        started("join", address, "--job", job, "--token-file", "here/token", cwd=tmp_path) as one,
        started("join", address, "--job", job, "--name", "far <b>", cwd=tmp_path, NO_DATA="1", **token) as two,
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
    stale = tmp_path / "stale.py"
    stale.write_text((tmp_path / job).read_text().replace("0.01", "0.02"))
    code, _, err = wide("join", address, "--job", stale, cwd=tmp_path, WIDE_TOKEN=token_of(tmp_path))
    assert code == 77
    assert re.search(r"your job's file is not the pool's: line \d+ differs; copy the pool's files", err)
    assert until(lambda: rejects(tmp_path) == ["refused", "refused", "refused"], seconds=10)
    assert process.poll() is None


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


def test_a_leaving_node_hands_in_what_its_codec_owes(tmp_path):
    job = a_job(tmp_path, "steps=120, loss=loss", SLOW_LOSS)
    options = ("--port", 0, "--out", "here", "--compress", "int4", "--log", "verbose")
    with started("serve", job, *options, cwd=tmp_path) as process:
        address = address_of(process, tmp_path)
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        token = {"WIDE_TOKEN": token_of(tmp_path)}
        with started("join", address, "--job", job, cwd=tmp_path, **token) as leaver:
            assert until(lambda: query(tmp_path, "SELECT * FROM ledger"))
            leaver.send_signal(signal.SIGTERM)
            assert leaver.wait(20) == 143
        assert until(lambda: query(tmp_path, "SELECT why FROM nodes") == [("it was told to leave",)])
        with started("join", address, "--job", job, cwd=tmp_path, **token) as successor:
            assert process.wait(60) == 0
            assert successor.wait(20) == 0


def test_nobody_at_the_address_ends_with_69(tmp_path):
    job = a_job(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _, err = wide("join", f"127.0.0.1:{port}", "--job", job, "--retry", 0, cwd=tmp_path, WIDE_TOKEN="t")
    assert code == 69
    assert "no coordinator answers" in err


def test_a_port_that_is_taken_is_explained(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = wide("serve", a_job(tmp_path), "--port", port, cwd=tmp_path)
    assert code == 2
    assert f"port {port}" in err
    assert "choose another with --port" in err
