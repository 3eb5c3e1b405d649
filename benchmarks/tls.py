"""`tls`: what encryption costs: 1.13 M parameters, an update per 64 batches, two nodes behind 1 Gbit/s, encrypted and
not, taking turns; memory for each connection; and how long it takes from a pasted line to the first merged batch.
"""

from __future__ import annotations

import contextlib
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.namespaces import Host, hosts, why_not
from benchmarks.pools import WIDE, Served
from wide.config import Sockets
from wide.launch.keys import PoolKeys, keys_in
from wide.telemetry.process import rss_bytes
from wide.transport.endpoint import endpoint
from wide.transport.stream import Stream
from wide.transport.tcp import TcpStream
from wide.transport.tls import Handshake, client_context

MBIT = 1000.0
SECONDS = 15.0
JOB = "benchmarks/host_job.py:small_64"
CONNECTIONS, NBYTES = 50, 4 << 20


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    if problem := why_not():
        raise SystemExit(problem)
    say(f"about {repeats * 2 * (SECONDS + 8) / 60 + 1:.0f} minutes")
    rates: dict[bool, list[float]] = {True: [], False: []}
    with hosts([None, MBIT, MBIT]) as (here, *others):
        for i in range(repeats):
            for plain in (False, True):
                rates[plain].append(_steps_per_s(here, others, plain))
            say(f"round {i + 1}, steps/s: encrypted {rates[False][-1]:.3f}, plain {rates[True][-1]:.3f}")
        pasted_s, is_loopback_encrypted = _from_paste(here, others[0])
    import_s = _torch_s()
    memory_kb = _memory_kb()
    ratio = median(a / b for a, b in zip(rates[False], rates[True], strict=True))
    loopback = "encrypted" if is_loopback_encrypted else "plain"
    say(f"{memory_kb:.0f} KB for both ends of a connection; loopback is {loopback}")
    say(f"from paste to the first merged batch {pasted_s:.1f} s, of which torch's import takes {import_s:.1f} s")
    return {
        "mbit": MBIT,
        "ratio": ratio,
        "steps_per_s": {"encrypted": median(rates[False]), "plain": median(rates[True])},
        "kb_per_connection": memory_kb,
        "is_loopback_encrypted": is_loopback_encrypted,
        "paste_to_first_batch_s": pasted_s,
        "torch_import_s": import_s,
    }


def _steps_per_s(here: Host, others: list[Host], plain: bool) -> float:
    """Without the first step, in which nothing is known of the nodes."""
    options = ("--seconds", str(SECONDS), "--no-check")
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Served(folder, here, JOB, *options, plain=plain)) as served,
    ):
        for host in others:
            served.join(host, JOB)
        seconds = served.result()["step_seconds"][1:]
        return float(len(seconds) / sum(seconds))


def _from_paste(here: Host, there: Host) -> tuple[float, bool]:
    """The digits, with code that is sent; and does whoever dials on the pool's own machine encrypt?"""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Served(folder, here, "examples/digits.py")) as served,
    ):
        began = time.time()
        served.start([*there.prefix, *WIDE, "join", "--allow-code", "any"], WIDE_INVITE=served.invite)
        token = (served.folder / "run" / "token").read_text().strip()
        inside = [*here.prefix, sys.executable, "-m", "benchmarks.tls", served.address, token]
        asked = subprocess.run(inside, capture_output=True, text=True, check=True, env=served.environment)
        served.result()
        with contextlib.closing(sqlite3.connect(Path(folder) / "run" / "run.db")) as db:
            (first,) = db.execute("SELECT min(committed_at) FROM ledger").fetchone()
        return first - began, asked.stdout.strip() == "encrypted"


def _torch_s() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


def _memory_kb() -> float:
    """Of both ends, after some megabytes each way."""
    with tempfile.TemporaryDirectory() as folder:
        keys = keys_in(Path(folder))
        _exchange(_connected(keys))  # what is there once for all of them
        before = rss_bytes()
        held = [_connected(keys) for _ in range(CONNECTIONS)]
        for ends in held:
            _exchange(ends)
        return (rss_bytes() - before) / CONNECTIONS / 1e3


def _connected(keys: PoolKeys) -> tuple[Stream, Stream]:
    raw = [TcpStream(sock) for sock in socket.socketpair()]
    for stream in raw:
        stream.set_blocking(False)
    node = Handshake(raw[0], client_context(), is_server=False)
    pool = Handshake(raw[1], keys.tls.context, True, keys.binding)
    one: Stream | None = node.advance(reads=False)
    two: Stream | None = None
    while one is None or two is None:
        two = two or pool.advance()
        one = one or node.advance()
    return one, two


def _exchange(ends: tuple[Stream, Stream]) -> None:
    data, room = memoryview(bytes(NBYTES)), memoryview(bytearray(1 << 16))
    for sender, receiver in (ends, ends[::-1]):
        sent = received = 0
        while received < NBYTES:
            sent += sender.send([data[sent:]]) if sent < NBYTES else 0
            received += receiver.receive_into(room)


if __name__ == "__main__":  # within the pool's own host
    with contextlib.closing(endpoint(sys.argv[1], sys.argv[2], Sockets()).dial(5.0)) as line:
        print("encrypted" if line.stream.binding else "plain")
