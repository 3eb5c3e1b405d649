"""Where people already look: TensorBoard's own loader reads our files, and trackers cannot do a run any harm."""

from __future__ import annotations

import json
import logging
import math
import sys
import time

import pytest

from benchmarks.staged import Staged
from tests.processes import wide
from wide.errors import UsageError
from wide.launch import track
from wide.launch.track import Point, Points, check, tracking
from wide.store.lock import FolderLock
from wide.store.reading import Reading
from wide.store.tensorboard import EventFile, event, masked, record


def test_checksums_are_those_of_the_format():
    assert masked(b"") == 0xA282EAD8  # of nothing: only what is added
    crc = (masked(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF
    assert (crc << 15 | crc >> 17) & 0xFFFFFFFF == 0xE3069283  # CRC-32C's own check value


def test_tensorboards_own_loader_reads_our_files(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    told = []
    file = EventFile(tmp_path, lambda deed: deed(), told.append)
    values = {"loss": 0.25, "evaluate/accuracy": 1e-30, "größe": math.nan, "big": 1e300}
    file.write(3, 1234.5, values)
    file.write(2**40, 1235.5, {"loss": -1.5})
    file.close()
    (path,) = tmp_path.iterdir()
    events = list(loader.EventFileLoader(str(path)).Load())
    assert events[0].file_version == "brain.Event:2"
    found = [(e.step, e.wall_time, v.tag, v.tensor.float_val[0]) for e in events[1:] for v in e.summary.value]
    assert found[0] == (3, 1234.5, "loss", 0.25)
    assert found[1][2:] == ("evaluate/accuracy", pytest.approx(1e-30))
    assert found[2][2] == "größe"
    assert math.isnan(found[2][3])
    assert found[3][2:] == ("big", math.inf)
    assert found[4] == (2**40, 1235.5, "loss", -1.5)
    assert told == []


def test_a_disk_that_is_full_is_told_of_once(tmp_path):
    told = []
    file = EventFile(tmp_path / "gone", lambda deed: deed(), told.append)
    file.write(1, 1.0, {"loss": 1.0})
    file.write(2, 2.0, {"loss": 1.0})
    assert len(told) == 1
    assert "TensorBoard" in told[0]


def test_records_are_whole():
    data = event(1.0, 300, "x", 2.0)
    assert len(record(data)) == len(data) + 16


@pytest.mark.processes
def test_every_run_leaves_an_event_file(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    (tmp_path / "job.py").write_text(JOB)
    code, _, err = wide("run", "job.py", "--nodes", "2", "--steps", "40", "--out", "run", cwd=tmp_path)
    assert code == 0, err
    found = loader.EventAccumulator(str(tmp_path / "run")).Reload()
    assert "loss" in found.Tags()["scalars"]
    assert found.Scalars("evaluate/one")[-1].value == 1.0
    assert found.Scalars("loss")[-1].step <= 40


JOB = """
import torch, wide
from torch import nn
job = wide.Job(
    model=lambda: nn.Linear(4, 2),
    dataset=lambda: torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long)),
    loss=wide.supervised(nn.CrossEntropyLoss()), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batch_size=4,
    batches_per_step=4, evaluate=lambda model: {"one": 1.0}, steps=40,
)
"""

# ── trackers ─────────────────────────────────────────────────────────────────────────────────────────────────────────

LIBRARY = """
import json, sys, time
if {hangs}:
    while True: time.sleep(1)
def init(project, name, config):
    global file
    file = open({seen!r}, "a")
    print(json.dumps([project, name, config]), file=file, flush=True)
def log(values, step):
    if {fails}: raise RuntimeError("no network")
    print(json.dumps([step, values]), file=file, flush=True)
def finish():
    print(json.dumps("finished"), file=file, flush=True)
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that is not ours, in place of the real one: trackio, as far as it is used."""

    def put(hangs=False, fails=False):
        (tmp_path / "lib").mkdir()
        text = LIBRARY.format(hangs=hangs, fails=fails, seen=str(tmp_path / "seen"))
        (tmp_path / "lib" / "trackio.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))
        return tmp_path / "seen"

    return put


@pytest.fixture
def staged(tmp_path):
    run = Staged(tmp_path / "run", nodes=2, leases_per_s=20)
    run.run(200)
    run.close(state="running", job={"file": "digits.py"})
    return run.folder


def end(folder):
    told = json.loads((folder / "run.json").read_text())
    told["sessions"][-1]["state"] = "done"
    (folder / "run.json").write_text(json.dumps(told))


@pytest.mark.processes
def test_a_tracker_is_told_all(library, staged):
    seen = library()
    lock = FolderLock(staged)
    with tracking("trackio", staged):
        end(staged)
    lock.close()
    first, *points, last = [json.loads(line) for line in seen.read_text().splitlines()]
    assert first[:2] == ["digits", "run"]
    assert last == "finished"
    assert [step for step, _ in points] == sorted(step for step, _ in points)
    assert points[-1][0] == 25
    assert points[-1][1]["evaluate/accuracy"] == 0.5
    assert len(points) <= 12, "one a second"


@pytest.mark.processes
@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_a_tracker_that_hangs_or_fails_ends_with_the_run(library, staged, monkeypatch, caplog, how):
    monkeypatch.setattr(track, "GRACE_S", 0.5)
    library(**{how: True})
    lock = FolderLock(staged)
    monkeypatch.setattr(logging.getLogger("wide"), "propagate", True)
    with tracking("trackio", staged):
        time.sleep(0.1 if how == "hangs" else 0.0)
        end(staged)
    lock.close()
    assert "trackio has failed, and not all is tracked" in caplog.text
    assert ("did not finish" if how == "hangs" else "no network") in (staged / "track.log").read_text()


@pytest.mark.processes
def test_a_tracker_ends_when_its_run_is_killed(library, staged, monkeypatch):
    library(hangs=True)
    monkeypatch.setattr(track, "GRACE_S", 0.5)
    monkeypatch.setattr(track, "_end", lambda process, *_: process.wait(60.0))
    with tracking("trackio", staged):
        pass  # nobody holds the lock: the coordinator is gone, and the process ends by itself


def test_points_come_once_and_in_order(tmp_path):
    run = Staged(tmp_path / "run", nodes=2, leases_per_s=10)
    run.run(40)
    run.close()
    with Reading(run.folder) as reading:
        points = Points(reading)
        first = points.new()
        assert [point.step for point in first] == sorted({point.step for point in first})
        assert points.new() == []
    assert isinstance(first[0], Point)
    assert not any("nothing" in name for point in first for name in point.values), "what is not finite is left out"


def test_a_library_that_is_not_there_is_told_before_anything_begins(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    sys.modules.pop("mlflow", None)
    with pytest.raises(UsageError, match="pip install mlflow"):
        check("mlflow")
