"""What a run has merged is computed again: it follows, to the bit, or it is said what does not, and whose it was."""

from __future__ import annotations

import json
import shutil
import sqlite3

import pytest

from tests import stateful, test_unchanging
from tests.jobs import EVERYTHING
from tests.processes import started, until, wide
from wide.cli.main import main
from wide.errors import UsageError
from wide.launch.keys import DIGESTS
from wide.launch.replay import blame, replay

FILE = """
import torch, wide
from torch import nn
from torch.utils.data import IterableDataset
from tests import stateful
from tests.jobs import EVERYTHING, make, mlp, points
from tests.test_unchanging import MOVING, job_with
{body}
job = {job}
"""

STREAM = """
class Numbers(IterableDataset):
    def __iter__(self):
        for x, y in points():
            yield x + torch.rand(6), y
"""
ODD = {
    "dropout": ("make(model=lambda: nn.Sequential(nn.Dropout(0.3), mlp()))", ""),
    "here": ("make(loss=loss)", "def loss(m, b):\n    return m(b[0]).square().mean() * wide.here().progress"),
    "threads": ("make(threads=2)", ""),
    "drop_last": ("make(drop_last=True, order=wide.order.sequential())", ""),
    "a large frozen part": ("job_with(None)", ""),
    "a plateau of the training loss": (
        "make(scheduler=wide.on_metric('loss', lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau("
        "o, patience=0, factor=0.5, threshold=1.0)))",
        "",
    ),
    "a plateau of what evaluate says": (
        "make(evaluate=lambda m: {'up': float(next(m.parameters()).sum())}, evaluate_every=1, scheduler=wide.on_metric("
        "'up', lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5, threshold=1.0)))",
        "",
    ),
    "early stopping": ("make(evaluate=lambda m: {'a': 1.0}, evaluate_every=1, stop_when=lambda all: len(all) > 5)", ""),
    "a stream": ("make(dataset=Numbers)", STREAM),
    "what the loss logs": ("make(loss=lambda m, b: (m(b[0]).square().mean(), {'n': 1.0}))", ""),
}
ODD |= {f"a table: {name}": (f"job_with(MOVING[{name!r}])", "") for name in test_unchanging.MOVING}
ODD |= {f"touched: {name}": (f"stateful.EXACT[{name!r}]", "") for name in stateful.EXACT}


def trained(folder, job, body="", steps=(4, 7)):
    """A run of one process, which was gone on with; there is a checkpoint where it was."""
    path, run = folder / "job.py", folder / "run"
    path.write_text(FILE.format(job=job, body=body))
    for count in steps:
        where = ("--resume", run) if run.exists() else ("--out", run)
        words = ["run", path, "--nodes", 0, "--keep", 99, "--log", "silent", "--steps", count, *where]
        assert main(list(map(str, words))) == 0
    return run


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"), "make()")


@pytest.fixture
def run(plain_run, tmp_path):
    """A copy of it, to be tampered with."""
    return shutil.copytree(plain_run, tmp_path / "run")


def changed(run, statement, *values):
    with sqlite3.connect(run / "run.db") as db:
        return db.execute(statement, values).fetchall()


@pytest.mark.parametrize("name", [*EVERYTHING, *ODD])
def test_whatever_was_trained_follows(tmp_path, name):
    run = trained(tmp_path, *ODD.get(name, (f"EVERYTHING[{name!r}]", "")))
    found = blame(run)
    assert found.follows and found.from_step == 0 and found.to_step >= 5, found.words
    later = blame(run, since=5)
    assert later.follows and 0 < later.from_step <= 5 and later.rows < found.rows, later.words
    assert replay(run, 4).follows
    assert replay(run, 2).follows


def test_an_update_that_is_not_what_its_batches_give_is_its_nodes(run):
    changed(run, "UPDATE ledger SET digest = digest + 1 WHERE step = 2 AND first_batch = 0")
    changed(run, "INSERT INTO ledger SELECT 9, 0, 0, 0, 0, 0, 9, 0, 1 WHERE 0")
    found = blame(run)
    assert (found.follows, found.step, found.rows) == (False, 2, 5 if found.kind == "update" else found.rows)
    assert [one.node for one in found.differs] == [0]
    assert "alone" in found.words[0] and "of step 2: its update is not what these batches give" in found.words[0]
    assert found.good == "" and "begin again" in found.words[-1]
    assert replay(run, 1).follows and not replay(run, 3).follows
    assert replay(run, 6).follows, "the checkpoint of step 4 is from after it, and what came then follows from that"
