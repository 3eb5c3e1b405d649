"""The dashboard in a real Chromium: it fills while a real pool trains, steers it, and shows nothing but text."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import sqlite3

import pytest

from benchmarks.staged import Staged
from tests.browser import chromium, hard_to_use, overflow, turn, when
from tests.processes import started, until
from tests.test_ends import has_steps
from wide.store.wishes import ask

pytestmark = pytest.mark.processes

JOB = """
import time, torch, wide
from torch import nn

def points():
    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :4].argmax(1))

def slow(model, batch):
    time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

job = wide.Job(
    model=lambda: nn.Linear(8, 4), dataset=points, loss=slow,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1), batch_size=16, batches_per_step=8, epochs=100000,
    evaluate=lambda model: {"<b>norm</b>": float(model.weight.norm())},
)
"""
PAGES = ("overview", "nodes", "timeline", "network", "events")
EVIL = "<img src=x onerror=alert(1)>"
UNFILLED = "Array.from(document.querySelectorAll('section:not([hidden]) .chart')).filter((c) => !c.querySelector('canvas')).length"
BUSY = "document.querySelector('section:not([hidden]) .chart canvas') !== null"


def links_of(folder):
    """To look, and to steer."""
    assert until(lambda: (folder / "dashboard").exists())
    return [line.split()[0] for line in (folder / "dashboard").read_text().splitlines()]


def rows(folder, query):
    with sqlite3.connect(folder / "run.db") as db:
        return db.execute(query).fetchall()


@pytest.fixture
def pool(tmp_path):
    """A real one, which others may join."""
    (tmp_path / "job.py").write_text(JOB)
    arguments = ("serve", "job.py", "--port", "0", "--nodes", 2, "--out", "here", "--dashboard", "0", "--control")
    with started(*arguments, cwd=tmp_path) as process:
        try:
            assert until(lambda: has_steps(tmp_path))
            yield tmp_path / "here", process
        finally:
            process.terminate()
            process.wait(30)


def test_the_page_fills_while_a_real_pool_trains(pool):
    folder, process = pool
    looking, steering = links_of(folder)
    join = ("join", f"@{folder}/invite", "--allow-code", "any", "--name", EVIL)
    with chromium() as pages, started(*join, cwd=folder.parent, HOME=str(folder.parent)) as joined:
        page = pages.open(looking)
        when(page, "document.querySelector('#state').textContent === 'running'")
        step = "Number(document.querySelector('#overview .figure').firstChild.textContent.replace(/,/g, ''))"
        before = page.evaluate(step)
        when(page, f"{step} > {before} + 2")  # it lives
        for name in PAGES:
            turn(page, name)
            when(page, f"{UNFILLED} === 0")
            assert overflow(page) <= 0, name
            assert hard_to_use(page) == [], name
        turn(page, "nodes")
        page.wait_for_selector(f"text={EVIL}")  # a join is seen, and its name is text
        page.locator("#nodes button.link", has_text=EVIL).first.click()
        page.wait_for_selector("#nodes article:has-text('Where its time goes') canvas")
        turn(page, "events")
        page.wait_for_selector(f"#events td:has-text('{EVIL}')")
        page.get_by_label("Words to look for").fill("node 1 ")
        when(
            page,
            "Array.from(document.querySelectorAll('#events tbody tr')).every((r) => r.children[2].textContent === '1')",
        )
        assert page.locator("img[src=x]").count() == 0
        assert page.locator("#control").is_hidden()  # who only looks has nothing to press
        steer(pages, folder, steering)
        assert pages.complaints == []
        joined.terminate()


def steer(pages, folder, link):
    page = pages.open(link)
    page.get_by_role("button", name="Pause").click()
    when(page, "document.querySelector('#state').textContent === 'paused'")
    when(page, "/^paused by its owner/.test(document.querySelector('.why').lastChild.textContent)")
    done = rows(folder, "SELECT max(step) FROM steps")
    page.get_by_role("button", name="Resume").click()
    when(page, "document.querySelector('#state').textContent === 'running'")
    assert until(lambda: rows(folder, "SELECT max(step) FROM steps") > done)
    page.get_by_role("button", name="Checkpoint").click()
    assert until(lambda: (folder / "checkpoints" / "latest").exists())
    when(page, "/^weights /.test(document.querySelector('#sha').textContent)")
    page.get_by_role("button", name="Invite").click()
    page.wait_for_selector("dialog pre:has-text('wide join wide1_')")
    assert page.locator("dialog img").evaluate("img => img.naturalWidth") > 50
    assert hard_to_use(page) == []
    page.get_by_role("button", name="Close").click()
    turn(page, "nodes")
    page.get_by_role("button", name="Drop node 1").click()
    page.get_by_role("button", name="Send it away").click()
    page.wait_for_selector("#said:has-text('node 1 is sent away')")
    page.wait_for_selector("article:has-text('Who has left') td:has-text('sent this node away')")


@pytest.mark.parametrize(("scheme", "width"), [("dark", 1280), ("light", 390), ("dark", 390)])
def test_no_page_is_too_wide_or_hard_to_use(tmp_path, scheme, width):
    a_run(tmp_path / "run", name=lambda node: f"a rather long name {EVIL} {node}", nodes=30)
    with started("dashboard", "run", cwd=tmp_path) as process, chromium() as pages:
        page = pages.open(link_said(process), width, color_scheme=scheme)
        for name in PAGES:
            turn(page, name)
            when(
                page,
                f"{UNFILLED} === 0 || document.querySelector('section:not([hidden]) table, section:not([hidden]) .lanes')",
            )
            assert overflow(page) <= 0, name
            assert hard_to_use(page) == [], name
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(17, 22, 28)" if scheme == "dark" else "rgb(246, 247, 249)"
        )
        assert pages.complaints == []
        process.terminate()


def a_run(folder, leases=6000, **given):
    run = Staged(folder, **({"nodes": 4, "leases_per_s": 300.0} | given))
    run.run(leases)
    run.close()
    return folder


def link_said(process):
    for line in process.stderr:
        if found := re.search(r"dashboard: (\S+)", line):
            return found[1]
    raise AssertionError("it did not say where it is")


def test_bars_on_the_timeline_are_those_of_run_db(tmp_path):
    folder = a_run(tmp_path / "run")
    with started("dashboard", "run", cwd=tmp_path) as process, chromium() as pages:
        page = pages.open(link_said(process))
        turn(page, "timeline")
        canvas = page.locator("#timeline canvas")
        when(page, "document.querySelector('#timeline canvas').dataset.mode === 'picture'")
        canvas.focus()
        for _ in range(6):
            canvas.press("+")
        when(page, "document.querySelector('#timeline canvas').dataset.mode === 'bars'")
        when(page, "document.querySelector('#timeline canvas').timeline.lanes.drawn?.length > 3")
        drawn = page.evaluate(
            """() => { const { tile, view, lanes } = document.querySelector('#timeline canvas').timeline;
            return { from: view.from, to: view.to, origin: tile.origin,
                     bars: lanes.drawn.map((i) => [tile.bars.lease[i], tile.bars.node[i], tile.bars.at_s[i]]) }; }"""
        )
        ledger = rows(folder, "SELECT node, committed_at FROM ledger")
        ends = sorted((node, round(at - drawn["origin"], 3)) for node, at in ledger)
        for _, node, at in drawn["bars"]:
            assert any(abs(end - at[6]) < 0.002 for whose, end in ends if whose == node)
        inside = [end for _, end in ends if drawn["from"] + 0.1 < end < drawn["to"] - 0.1]
        assert len(inside) <= len(drawn["bars"])
        canvas.press(".")
        assert re.search(r"node \d+, lease \d+: step \d+, batch \d+", page.locator(".lease strong").inner_text())
        assert "loss" in page.locator(".lease dl").inner_text()
        process.terminate()


def test_runs_are_compared_side_by_side(tmp_path):
    for name in ("one", "two"):
        a_run(tmp_path / "runs" / name)
    with started("dashboard", "one", "two", cwd=tmp_path) as process, chromium() as pages:
        page = pages.open(link_said(process))
        page.get_by_label("two", exact=True).check()
        when(page, "document.querySelectorAll('#overview .u-legend')[0]?.textContent.includes('two')")
        page.get_by_label("Run").select_option("two")
        when(page, "document.querySelector('#overview td.words')?.textContent.includes('two')")
        for button in ("samples", "time", "log"):
            page.get_by_role("button", name=button, exact=True).click()
        assert pages.complaints == []
        process.terminate()


def test_a_run_that_ends_is_resumed_or_deleted_while_the_page_is_open(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    run = ("run", "job.py", "--nodes", 1, "--out", "run", "--resume", "auto")
    state = "document.querySelector('#state').textContent"
    with chromium() as pages:
        with started(*run, "--steps", 3, cwd=tmp_path) as first:
            first.communicate(timeout=60)
        with started("dashboard", "run", cwd=tmp_path) as dashboard:
            page = pages.open(link_said(dashboard))
            when(page, f"{state} === 'done'")
            with started(*run, "--steps", 100000, cwd=tmp_path) as second:
                when(page, f"{state} === 'running'")
                assert until(lambda: rows(tmp_path / "run", "SELECT max(step) FROM steps")[0][0] > 10)
                assert ask(tmp_path / "run", "stop") == "the run stops, with a checkpoint"
                second.wait(60)
                assert second.returncode == 143
            when(page, f"{state} === 'interrupted'")
            assert json.loads((tmp_path / "run" / "run.json").read_text())["sessions"][-1]["state"] == "interrupted"
            assert until(lambda: shutil.rmtree(tmp_path / "run", True) or not (tmp_path / "run").exists())
            when(page, f"{state} === 'cannot be read'")
            dashboard.terminate()
            page.wait_for_selector("#trouble:not([hidden])")
            assert dashboard.wait(30) == 0


def stop_between_two_looks(process, path):
    """And not while it holds a lock, which would keep others out."""
    while True:
        process.send_signal(signal.SIGSTOP)
        with contextlib.suppress(sqlite3.OperationalError), contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("SELECT max(step) FROM steps").fetchone()
            return
        process.send_signal(signal.SIGCONT)


def test_a_browser_that_slept_is_told_what_it_missed(tmp_path):
    a_run(tmp_path / "run")
    with started("dashboard", "run", cwd=tmp_path) as process, chromium() as pages:
        page = pages.open(link_said(process))
        when(page, BUSY)
        stop_between_two_looks(process, tmp_path / "run" / "run.db")  # for a page the same as a sleep of its own
        page.wait_for_selector("#trouble:not([hidden])")
        with sqlite3.connect(tmp_path / "run" / "run.db") as db:
            (last,) = db.execute("SELECT max(step) FROM steps").fetchone()
            db.execute("INSERT INTO steps VALUES (?, 9, 320, 0.125, 1.0, 0.0)", (last + 1,))
        process.send_signal(signal.SIGCONT)
        page.wait_for_selector("#trouble", state="hidden")
        when(page, f"document.querySelectorAll('.chart')[0].dataset.last === '{last + 2}'")
        process.terminate()
