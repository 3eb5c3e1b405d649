"""The chaos benchmark: a short run of it with every class of fault, and the parts that its verdict rests on."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing

import pytest

from faults.chaos_schedule import LEAST_MEASURED, PLANNED, schedule, why_void
from faults.chaos_verdict import Happened, read_ledger, recoveries
from faults.proxy import CUT, HEALTHY, Condition, Proxy
from tests.processes import ROOT, environment, until

pytestmark = pytest.mark.processes


def test_nothing_is_lost_doubled_or_wrong_under_faults_of_every_class():
    command = [sys.executable, "-m", "benchmarks", "chaos", "--json", "--seconds", "20", "--nodes", "4", "--seed", "2"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert not result["void"], result["why_void"]
    assert min(result["faults"].values()) >= 1
    assert (result["lost"], result["doubled"], result["hash_equal"]) == (0, 0, True)


# ── schedule and verdict ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_seed_gives_a_schedule_with_enough_of_every_class():
    assert schedule(3, 600) == schedule(3, 600) != schedule(4, 600)
    assert all(0 <= fault.at_s < 600 for fault in schedule(3, 600))
    assert why_void(Counter(fault.kind for fault in schedule(3, 600)), LEAST_MEASURED, 600) == []
    assert {fault.kind for fault in schedule(3, 20)} == set(PLANNED)


def test_a_class_that_did_not_happen_makes_the_run_void():
    faults = Counter(fault.kind for fault in schedule(3, 600))
    assert why_void(faults | {"cut": 9}, LEAST_MEASURED, 600) == ["cut: 9 faults of at least 10"]
    assert why_void(dict(faults), {"kill": 10, "cut": 5}, 600) == ["coordinator: 0 recoveries seen, of at least 5"]


def test_a_pause_belongs_to_the_fault_that_it_follows():
    merges = [i / 10 for i in range(100)] + [10.5 + i / 10 for i in range(100)]
    assert recoveries(merges, [Happened("kill", 10.0, 10.0)])["kill"] == [pytest.approx(0.6)]
    assert recoveries(merges, [Happened("kill", 3.0, 3.0)])["kill"] == [pytest.approx(0.1)]
    assert recoveries(merges, [Happened("coordinator", 9.95, 9.95)])["coordinator"] == [pytest.approx(0.55)]


def test_a_kill_beside_something_that_lasts_is_not_measured():
    merges = [i / 10 for i in range(100)] + [14.0 + i / 10 for i in range(100)]
    beside = [Happened("kill", 10.0, 10.0), Happened("cut", 9.9, 12.0)]
    found = recoveries(merges, beside)
    assert (found["kill"], found["cut"]) == ([], [pytest.approx(4.1)])


def test_a_pause_of_several_silent_nodes_counts_in_full_for_each():
    merges = [i / 10 for i in range(100)] + [16.0 + i / 10 for i in range(100)]
    found = recoveries(merges, [Happened("cut", 9.9, 20.0), Happened("pause", 12.0, 20.0)])
    assert found["cut"] == found["pause"] == [pytest.approx(6.1)]


def test_the_ledger_tells_what_was_lost_and_doubled(tmp_path):
    state = {"sha256": "abc", "position": {"strategy": "sync", "version": 2, "steps": 2, "front": 8, "holes": []}}
    checkpoint = tmp_path / "checkpoints" / "step-00000002"
    checkpoint.mkdir(parents=True)
    (checkpoint / "state.json").write_text(json.dumps(state))
    (tmp_path / "checkpoints" / "latest").write_text("step-00000002\n")
    rows = [(0, 0, 3, 1), (1, 0, 1, 2), (1, 1, 2, 2), (2, 0, 0, 3)]  # step 1: batch 1 twice, 3 never; step 2 is later
    with closing(sqlite3.connect(tmp_path / "run.db")) as db, db:
        db.execute("CREATE TABLE ledger(step, first_batch, last_batch, version)")
        db.executemany("INSERT INTO ledger VALUES (?, ?, ?, ?)", rows)
    assert read_ledger(tmp_path, 4, 16) == (2, 8, "abc", 1, 1)


# ── the proxy ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def linked():
    """A proxy with one link, a caller, and the end that was called."""
    with socket.create_server(("127.0.0.1", 0)) as server, Proxy(1, server.getsockname()) as proxy:
        caller = socket.create_connection(("127.0.0.1", proxy.ports[0]))
        callee, _ = server.accept()
        caller.settimeout(10)
        callee.settimeout(10)
        with caller, callee:
            yield proxy, caller, callee


def test_a_cut_link_holds_everything_back_and_loses_nothing(linked):
    proxy, caller, callee = linked
    sent = bytes(range(256)) * 20_000
    threading.Thread(target=lambda: (caller.sendall(sent), caller.close())).start()
    received = bytearray(callee.recv(1000))
    proxy.set(0, CUT)
    callee.settimeout(0.3)
    with contextlib.suppress(TimeoutError):
        while len(received) < len(sent):
            received += callee.recv(1 << 16)  # what was on its way
    assert len(received) < len(sent)
    proxy.set(0, HEALTHY)
    callee.settimeout(10)
    while data := callee.recv(1 << 16):
        received += data
    assert received == sent


def test_a_reset_link_ends_both_sides(linked):
    proxy, caller, callee = linked
    proxy.reset(0)
    for end in (caller, callee):
        with pytest.raises(ConnectionResetError):
            end.recv(1)


def test_a_slow_link_delays(linked):
    proxy, caller, callee = linked
    proxy.set(0, Condition(bytes_per_s=1000, delay_s=0.2))
    caller.sendall(b"slowly" * 50)
    callee.settimeout(0.3)
    with pytest.raises(TimeoutError):
        callee.recv(1)
    callee.settimeout(10)
    assert callee.recv(1000) == b"slowly" * 50


def test_nobody_behind_the_proxy_ends_a_call():
    threads = threading.active_count()
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = server.getsockname()
    with Proxy(1, target) as proxy, socket.create_connection(("127.0.0.1", proxy.ports[0])) as caller:
        caller.settimeout(10)
        with pytest.raises(ConnectionResetError):
            caller.recv(1)
    assert until(lambda: threading.active_count() == threads, seconds=5)
