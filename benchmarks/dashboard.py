"""`dashboard`: what the page costs training, and how quick it is: the seeds' workload with 20 readers, and with 1,000
who never read, against none, alternating; a timeline of 1,000,000 leases in Chromium; how soon a loss is seen.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.staged import Staged

JOB = Path(__file__).with_name("seed_job.py")
NODES, READERS, SLEEPERS = 10, 20, 1000
SECONDS = 8.0
LEASES = 1_000_000
FIRST_S, PAN_S = 30.0, 4.0
SIDES = ("none", "readers", "sleepers")
STREAM = b"GET /api/stream HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def run(repeats: int, say: Callable[[str], None], seconds: float = SECONDS) -> dict[str, Any]:
    say(f"about {repeats * 3 * (seconds + 3) / 60 + 2:.0f} minutes")
    return _browser(say) | _readers(repeats, say, seconds)


# ── readers ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _readers(repeats: int, say: Callable[[str], None], seconds: float) -> dict[str, Any]:
    """Steps/s with each kind of company ÷ those without any, in one training in which they take turns: runs differ by
    more than what is to be measured.
    """
    rounds: list[dict[str, float]] = []
    most = [0.0]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:ten", "--nodes", str(NODES)]
        command += ["--seconds", "100000", "--out", str(out), "--log", "silent", "--dashboard", "0"]
        done = threading.Event()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            try:
                port = _port(out)
                threading.Thread(target=_watch, args=(process.pid, most, done), daemon=True).start()
                time.sleep(10.0)
                orders = [SIDES[i % 3 :] + SIDES[: i % 3] for i in range(repeats)]
                turns = [[(side, *_turn(port, side, seconds)) for side in order] for order in orders]
                time.sleep(1.0)  # until all is written
                for found in turns:
                    rounds.append({side: _steps_per_s(out, start, end) for side, start, end in found})
                    words = ", ".join(f"{side} {rounds[-1][side]:.0f}" for side in SIDES)
                    say(f"round {len(rounds)}: {words} steps/s")
            finally:
                done.set()
                process.terminate()
    result: dict[str, Any] = {"dashboard_mb": most[0]}
    for side in SIDES[1:]:
        ratios = sorted(found[side] / found["none"] for found in rounds)
        result |= {f"{side}_ratio": median(ratios), f"{side}_ratios": ratios}
        say(f"{side}: {median(ratios):.3f} of none ({', '.join(f'{r:.3f}' for r in ratios)})")
    return result


def _turn(port: int, side: str, seconds: float) -> tuple[float, float]:
    """From when to when they were there, by the wall's clock; how they come and go is not a part of it."""
    done = threading.Event()
    count = {"none": 0, "readers": READERS, "sleepers": SLEEPERS}[side]
    company = threading.Thread(target=_read, args=(port, count, side == "readers", done))
    company.start()
    time.sleep(2.0)
    start = time.time()
    time.sleep(seconds)
    end = time.time()
    done.set()
    company.join()
    return start, end


def _steps_per_s(out: Path, start: float, end: float) -> float:
    with sqlite3.connect(out / "run.db") as db:
        query = "SELECT count(*) FROM steps WHERE merged_at >= ? AND merged_at < ?"
        count: int = db.execute(query, (start, end)).fetchone()[0]
    return count / (end - start)


def _port(out: Path) -> int:
    while not (out / "dashboard").exists():
        time.sleep(0.02)
    found = re.search(r":(\d+)/", (out / "dashboard").read_text())
    assert found is not None
    return int(found[1])


def _read(port: int, count: int, reads: bool, done: threading.Event) -> None:
    """Pages that listen; or callers who ask and never read."""
    lines: list[socket.socket] = []
    while len(lines) < count and not done.is_set():
        try:
            line = socket.create_connection(("127.0.0.1", port), 5.0)
            line.sendall(STREAM)
            line.setblocking(False)
            lines.append(line)
        except OSError:
            time.sleep(0.05)
    while not done.wait(0.2):
        for line in lines if reads else []:
            with contextlib.suppress(OSError):
                line.recv(1 << 20)
    for line in lines:
        line.close()


def _watch(pid: int, most: list[float], done: threading.Event) -> None:
    while not done.wait(0.5):
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(pid).children(recursive=True):
                if "wide.launch.dashboard" in child.cmdline():
                    most[0] = max(most[0], child.memory_info().rss / 1e6)


# ── in a browser ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _browser(say: Callable[[str], None]) -> dict[str, Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        say("playwright is not installed: nothing is measured in a browser")
        return {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        with contextlib.closing(browser):
            return _timeline(browser, say) | _soon(browser, say)


def _timeline(browser: Any, say: Callable[[str], None]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        staged = Staged(Path(folder) / "run")
        staged.run(LEASES)
        staged.close()
        with _served(Path(folder) / "run") as link:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            began = time.monotonic()
            page.goto(f"{link}#/timeline")
            drawn = "document.querySelector('#timeline canvas')?.timeline?.lanes.tile ? performance.now() : 0"
            while not (picture_ms := page.evaluate(drawn)):
                assert time.monotonic() - began < FIRST_S
            paint_ms = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0")
            frames = page.evaluate(PAN, PAN_S * 1000)
            near = page.evaluate("document.querySelector('#timeline canvas').timeline.look(400, 401)") or page.evaluate(
                "new Promise((done) => setTimeout(done, 1500))"
            )
            assert near is None
            near = page.evaluate(PAN, PAN_S * 1000)
            page.close()
    found = {"first_picture_s": picture_ms / 1000, "first_paint_s": paint_ms / 1000}
    found |= {"pan_frames_per_s": frames, "pan_near_frames_per_s": near}
    say(", ".join(f"{name} {value:.2f}" for name, value in found.items()))
    return found


PAN = """(ms) => new Promise((done) => {
    const timeline = document.querySelector('#timeline canvas').timeline;
    const before = timeline.lanes.frames, began = performance.now();
    const width = timeline.view.to - timeline.view.from;
    timeline.look(timeline.view.from + width / 4, timeline.view.to - width / 4);
    const step = () => {
        const spent = performance.now() - began;
        if (spent > ms) { done((timeline.lanes.frames - before) / spent * 1000); return; }
        timeline.pan(0.004);
        requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
})"""


@contextlib.contextmanager
def _served(folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "wide", "dashboard", str(folder)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            found = re.search(r"dashboard: (\S+)", process.stderr.readline())
            assert found is not None
            port = int(found[1].rsplit(":", 1)[1].strip("/"))
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                    break
            yield found[1]
        finally:
            process.terminate()


def _soon(browser: Any, say: Callable[[str], None]) -> dict[str, Any]:
    """Seconds from a step's merge until the page shows it, or a later one; from a join until its row."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:ten", "--nodes", "2", "--seconds", "15"]
        command += ["--out", str(out), "--dashboard", "0"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            port = _port(out)
            page = browser.new_page()
            seen: list[tuple[float, int]] = []
            joined = 0.0
            while process.poll() is None and len(seen) < 400:
                with contextlib.suppress(Exception):
                    if page.url == "about:blank":
                        page.goto(f"http://127.0.0.1:{port}/#/overview")
                    step, nodes = page.evaluate(SHOWN)
                    joined = joined or (time.time() if nodes >= 2 else 0.0)
                    if step and (not seen or seen[-1][1] != step):
                        seen.append((time.time(), step))
                time.sleep(0.02)
            page.close()
            process.wait()
        with sqlite3.connect(out / "run.db") as db:
            merged = dict(db.execute("SELECT step, merged_at FROM steps"))
            (came,) = db.execute("SELECT max(joined_at) FROM nodes").fetchone()
    late = [at - merged[step - 1] for at, step in seen[1:] if step - 1 in merged]
    found = {"loss_seen_s": median(late) if late else None, "loss_seen_most_s": max(late, default=None)}
    found["join_seen_s"] = joined - came if joined else None
    say(", ".join(f"{name} {value}" for name, value in found.items()))
    return found


SHOWN = """[Number((document.querySelector('#overview .figure')?.firstChild?.textContent || '0').replace(/,/g, '')),
    Number(document.querySelectorAll('#overview .figure')[3]?.firstChild?.textContent || 0)]"""

os.environ.setdefault("PYTHONPATH", str(JOB.parents[1]))
