"""What stays on disk: whole or not at all, found again, and written by one coordinator only."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections import Counter, OrderedDict, deque

import pytest
import torch

from tests.processes import ROOT
from wide import failpoint
from wide.errors import TrainingFailed, UsageError
from wide.store import checkpoint
from wide.store.checkpoint import Checkpoint
from wide.store.lock import FolderLock
from wide.store.rundb import RunDb
from wide.store.state_dict import Packing, unpack


@pytest.fixture(autouse=True)
def disarmed():
    yield
    failpoint.arm("")


def a_checkpoint(step, value=1.0):
    return Checkpoint(step, {"w": torch.full((3,), value)}, {"m": torch.zeros(2)}, {"note": step})


def test_any_nest_of_plain_values_and_tensors_comes_back_as_it_was():
    nest = {
        0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)},
        "betas": (0.9, 0.999),
        "best": float("inf"),
        "milestones": Counter({30: 1, 60: 2}),
        "last": deque([1, 2]),
        "seen": {1, 2},
        "order": OrderedDict(a=None, b=True),
        "huge": 2**70,
        "nested": [{"x": ["y", {}]}],
    }
    packing = Packing()
    text = json.dumps(packing.pack(nest, "all"), allow_nan=False)
    back = unpack(json.loads(text), packing.tensors)
    assert torch.equal(back[0].pop("exp_avg"), nest[0].pop("exp_avg"))
    assert torch.equal(back[0].pop("step"), nest[0].pop("step"))
    assert back == nest
    assert [type(back[key]) for key in back] == [type(nest[key]) for key in nest]


def test_what_cannot_be_written_is_left_out_and_named_and_nothing_else_is():
    packing = Packing()
    packed = packing.pack({"kept": 1, "function": print, "inner": {"object": object(), "too": 2}}, "all")
    assert unpack(packed, {}) == {"kept": 1, "inner": {"too": 2}}
    assert packing.left_out == ["all.function (builtin_function_or_method)", "all.inner.object (object)"]


def test_the_newest_checkpoint_is_named_and_older_ones_go(tmp_path):
    for step in (3, 5, 8, 13):
        checkpoint.write(tmp_path, a_checkpoint(step, step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000008", "step-00000013"]
    path, newest, problems = checkpoint.newest(tmp_path)
    assert (path.name, newest.step, newest.state["note"], problems) == ("step-00000013", 13, 13, [])
    assert newest.model["w"].tolist() == [13.0] * 3


def test_two_checkpoints_of_one_step_do_not_touch_each_other(tmp_path):
    checkpoint.write(tmp_path, a_checkpoint(3, 1.0), keep=2)
    checkpoint.write(tmp_path, a_checkpoint(3, 2.0), keep=2)
    assert checkpoint.newest(tmp_path)[1].model["w"][0] == 2.0
    assert checkpoint.read(tmp_path / "step-00000003").model["w"][0] == 1.0


def damaged(path, how):
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
    elif how == "cut short":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("how", ["missing", "cut short", "empty", "one bit"])
def test_a_damaged_checkpoint_is_told_of_and_the_one_before_it_is_used(tmp_path, name, how):
    checkpoint.write(tmp_path, a_checkpoint(3), keep=3)
    damaged(checkpoint.write(tmp_path, a_checkpoint(5), keep=3) / name, how)
    path, newest, problems = checkpoint.newest(tmp_path)
    assert newest.step == 3
    assert len(problems) == 1
    assert "step-00000005 cannot be used" in problems[0]
    checkpoint.forget_after(tmp_path, path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]


@pytest.mark.parametrize("pointer", ["../../elsewhere", "step-99999999", "", "\x00"])
def test_a_pointer_to_nowhere_is_not_followed(tmp_path, pointer):
    checkpoint.write(tmp_path, a_checkpoint(3), keep=3)
    (tmp_path / "latest").write_text(pointer)
    assert checkpoint.newest(tmp_path)[1].step == 3


def test_without_any_whole_checkpoint_there_is_one_clear_line(tmp_path):
    damaged(checkpoint.write(tmp_path, a_checkpoint(3), keep=1) / "state.json", "missing")
    with pytest.raises(TrainingFailed, match="holds no whole checkpoint"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("moment", ["write", "after_model", "after_optimizer", "before_rename"])
def test_a_full_disk_leaves_the_checkpoint_before_and_no_rubbish(tmp_path, moment):
    checkpoint.write(tmp_path, a_checkpoint(3), keep=1)
    failpoint.arm(f"checkpoint.{moment}=full")
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path, a_checkpoint(5), keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-00000003"]
    assert checkpoint.newest(tmp_path)[1].step == 3


HOLD = "import sys; from pathlib import Path; from wide.store.lock import FolderLock; lock = FolderLock(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"


def test_a_folder_has_one_writer_until_that_one_ends_however_it_ends(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UsageError, match=f"in use by process {holder.pid} on .*: one run folder has one coord"):
            FolderLock(tmp_path)
    finally:
        holder.kill()
        holder.communicate()
    FolderLock(tmp_path).close()


def test_one_process_has_a_folder_once(tmp_path):
    lock = FolderLock(tmp_path)
    with pytest.raises(UsageError, match="in use by this process"):
        FolderLock(tmp_path)
    lock.close()
    FolderLock(tmp_path).close()


def test_a_checkpoint_that_cannot_be_named_is_not_left_lying_about(tmp_path):
    (tmp_path / "latest").mkdir(parents=True)
    for _ in range(3):
        with pytest.raises(OSError, match="latest"):
            checkpoint.write(tmp_path, a_checkpoint(3), keep=3)
    assert [path.name for path in tmp_path.glob("step-*")] == []


def test_tensors_of_like_paths_are_kept_apart():
    nest = {"a.b": torch.tensor(1.0), "a": {"b": torch.tensor(2.0)}, 1: torch.tensor(3.0), "1": torch.tensor(4.0)}
    packing = Packing()
    back = unpack(packing.pack(nest, "all"), packing.tensors)
    assert [float(back["a.b"]), float(back["a"]["b"]), float(back[1]), float(back["1"])] == [1.0, 2.0, 3.0, 4.0]


def test_a_write_that_fails_is_told_of_and_tried_again(tmp_path):
    told = []
    failpoint.arm("run.db.commit=full:1")
    db = RunDb(tmp_path / "run.db", told.append)
    db.insert("rejects", [(1.0, 2, "late", "words")])
    assert db.settle(30.0)
    db.close()
    assert ["No space left" in told[0], "can be written again" in told[1], len(told)] == [True, True, 2]
    assert sqlite3.connect(tmp_path / "run.db").execute("SELECT count(*) FROM rejects").fetchone() == (1,)
