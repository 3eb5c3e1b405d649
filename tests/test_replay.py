"""What a run has merged is computed again: it follows, to the bit, or it is said what does not, and whose it was."""

from __future__ import annotations

import json
import shutil
import sqlite3

import pytest

from tests import stateful, test_unchanging
from tests.jobs import EVERYTHING
from tests.processes import wide
from tests.test_run import SLOW_LOSS, a_job
from wide.cli.main import main
from wide.errors import UsageError
from wide.launch.keys import DIGESTS
from wide.launch.past import Row
from wide.launch.replay import blame, kind_of, replay

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
    "early stopping by what the loss logs": (
        "make(loss=lambda m, b: (m(b[0]).square().mean(), {'z\\n': float(b[0].sum()), 'a': 1.0}), evaluate_every=1, "
        "stop_when=lambda all: len(all) > 5)",
        "",
    ),
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
    assert (found.follows, found.from_step) == (True, 0), found.words
    assert found.to_step >= 5
    later = blame(run, since=5)
    assert later.follows, later.words
    assert 0 < later.from_step <= 5
    assert later.rows < found.rows
    assert replay(run, 4).follows
    assert replay(run, 2).follows


def test_an_update_that_is_not_what_its_batches_give_is_its_nodes(run):
    changed(run, "UPDATE ledger SET digest = digest + 1 WHERE step = 0 AND first_batch = 0")
    found = blame(run)
    assert (found.follows, found.step, found.kind) == (False, 0, "update")
    assert [one.node for one in found.differs] == [0]
    assert found.words[0].startswith("node 0 (alone, ")
    assert found.words[0].endswith(") merged batch 0 of step 0: its update is not what these batches give")
    assert found.good == ""
    assert "begin again" in found.words[-1]
    assert not replay(run, 3).follows
    assert replay(run, 6).follows, "the checkpoint of step 4 is from after it, and what came then follows from that"


def test_it_says_from_where_to_go_on_and_that_works(run):
    changed(run, "UPDATE ledger SET digest = 1 WHERE step = 5")
    found = blame(run)
    assert (found.step, found.kind, found.good) == (5, "unclear", str(run / "checkpoints" / "step-00000004"))
    assert "all of that step is its own" in found.words[-2]
    command = found.words[-1].partition("to go on from there: ")[2]
    first, _, second = command.partition(" && ")
    assert first == f"echo step-00000004 > {run}/checkpoints/latest"
    (run / "checkpoints" / "latest").write_text("step-00000004\n")
    words = second.split()[1:]
    assert words[:1] == ["run"]
    assert words[2:] == ["--resume", str(run)]
    assert main([*words, "--nodes", "0", "--log", "silent"]) == 0
    assert blame(run).follows


def row(node, first=0):
    return Row(5, first, first, node, 1, 0.0)


@pytest.mark.parametrize(
    ("differ", "rows", "is_first", "kind"),
    [
        ([row(1)], [row(1), row(2, 1)], False, "update"),
        ([row(1), row(2, 1)], [row(1), row(2, 1), row(1, 2)], False, "update"),
        ([row(1), row(2, 1)], [row(1), row(2, 1)], False, "weights"),
        ([row(1), row(1, 1)], [row(1), row(1, 1)], False, "unclear"),
        ([row(1), row(2, 1)], [row(1), row(2, 1)], True, "unclear"),
    ],
)
def test_what_all_have_in_common_is_not_blamed_on_one(differ, rows, is_first, kind):
    assert kind_of(differ, rows, is_first) == kind


def test_a_first_step_of_which_nothing_follows_tells_of_this_machine_not_of_a_node(run):
    changed(run, "UPDATE ledger SET digest = 1 WHERE step = 4")
    found = blame(run, since=4)
    assert (found.step, found.kind) == (4, "unclear")
    assert "it may be this machine, the job's modules or its data" in found.words[-2]


def test_a_checkpoint_that_does_not_follow_is_the_coordinators(run):
    state = run / "checkpoints" / "step-00000004" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"sha256": "0" * 64}))
    found = blame(run)
    assert (found.step, found.kind, found.differs) == (3, "weights", [])
    assert found.words[0].startswith("the checkpoint after step 3 does not have the weights that the updates give")


def test_a_run_in_the_middle_of_a_step_is_compared_as_far_as_it_has_come(run):
    changed(run, "DELETE FROM ledger WHERE step > 0 OR first_batch > 0")
    found = blame(run)
    assert (found.follows, found.rows, found.to_step) == (True, 1, 0)


def edited(run, **options):
    file = run / "run.json"
    story = json.loads(file.read_text())
    for session in story["sessions"]:
        session["options"] |= options
    file.write_text(json.dumps(story))


def no_digests(run):
    changed(run, "UPDATE ledger SET digest = NULL")


BAD = {
    "no run": (lambda run: (run / "run.db").unlink(), "there is no run in it"),
    "an older version's": (
        lambda run: changed(run, "ALTER TABLE ledger DROP COLUMN digest"),
        "an older version of wide",
    ),
    "no key": (lambda run: (run / DIGESTS).unlink(), "has no digests.key"),
    "a key that is none": (lambda run: (run / DIGESTS).write_text("secret"), "cannot be read"),
    "folded": (no_digests, "folded to keep run.db small"),
    "async": (lambda run: (no_digests(run), edited(run, strategy="async")), "--strategy async keeps none"),
    "torchrun": (lambda run: (no_digests(run), edited(run, on="torchrun")), "--on torchrun keeps none"),
    "lossy": (lambda run: edited(run, compress="int8"), "--compress int8, which loses precision"),
    "a hole": (lambda run: changed(run, "DELETE FROM ledger WHERE step = 2"), "step 2 is not in the ledger"),
    "half a step": (
        lambda run: changed(run, "DELETE FROM ledger WHERE step = 0 AND first_batch = 0"),
        "of step 0 once",
    ),
    "not a story": (lambda run: (run / "run.json").unlink(), "does not say which file its job is in"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compared_is_explained_in_one_line(run, name, capsys):
    spoil, words = BAD[name]
    spoil(run)
    assert main(["blame", str(run)]) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert not said.out
    if name not in ("a hole", "half a step"):
        assert main(["replay", str(run), "--step", "5"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["replay", "RUN", "--step", "7"], "has steps 0 to 6"),
        (["replay", "RUN", "--step", "-1"], "expected a step's number"),
        (["replay", "RUN", "--step", "soon"], "expected a step's number"),
        (["replay", "RUN"], "--step"),
        (["blame", "RUN", "--from", "x"], "expected a step's number"),
        (["blame", "nowhere"], "there is no run in it"),
    ],
)
def test_wrong_words_are_explained(plain_run, words, said, capsys):
    assert main([str(plain_run) if word == "RUN" else word for word in words]) == 2
    assert said in capsys.readouterr().err


def test_both_commands_print_one_object_and_exit_by_what_they_found(run, capsys):
    assert main(["replay", str(run), "--step", "3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) | {"words": []} == {
        "schema": "wide.replay/1",
        "run_dir": str(run),
        "from_step": 0,
        "to_step": 3,
        "rows": 6,
        "follows": True,
        "kind": "",
        "step": None,
        "differs": [],
        "good": "",
        "words": [],
    }
    changed(run, "UPDATE ledger SET digest = 1 WHERE step = 0 AND first_batch = 0")
    assert main(["blame", str(run), "--json"]) == 1
    (differs,) = json.loads(capsys.readouterr().out)["differs"]
    assert (differs["step"], differs["first_batch"], differs["last_batch"], differs["node"]) == (0, 0, 0, 0)


def test_a_program_that_has_changed_is_not_blamed_on_anybody(tmp_path, capsys):
    run = trained(tmp_path, "make()", steps=(3,))
    file = tmp_path / "job.py"
    file.write_text(file.read_text() + "\n# mended\n")
    assert main(["blame", str(run)]) == 2
    assert "line 10, is not as it was" in capsys.readouterr().err
    assert main(["blame", str(run), "--force"]) == 0
    file.unlink()
    assert main(["blame", str(run)]) == 2


def test_another_build_is_told_of_before_its_bits_are(run, capsys):
    for state in run.glob("checkpoints/*/state.json"):
        told = json.loads(state.read_text())
        told["data"]["build"] = told["data"]["build"].replace("1 threads", "64 threads")
        state.write_text(json.dumps(told))
    assert main(["blame", str(run)]) == 2
    assert "64 threads" in capsys.readouterr().err
    assert main(["blame", str(run), "--force"]) == 0


def test_data_that_has_changed_is_told_of(tmp_path, capsys):
    body = "from pathlib import Path\ndef data():\n    data = points()\n"
    body += "    data.tensors[0].mul_(float(Path(__file__).with_name('factor').read_text()))\n    return data\n"
    (tmp_path / "factor").write_text("1")
    run = trained(tmp_path, "make(dataset=data)", body)
    (tmp_path / "factor").write_text("2")
    assert main(["blame", str(run)]) == 2
    assert "is not what it was when" in capsys.readouterr().err


def test_without_what_evaluate_said_then_nothing_is_guessed(tmp_path):
    run = trained(tmp_path, *ODD["a plateau of what evaluate says"])
    changed(run, "DELETE FROM evaluations WHERE step = 2")
    with pytest.raises(UsageError, match="does not have what evaluate"):
        blame(run)


def test_nothing_is_written_into_the_runs_folder(run):
    def seen():
        own = ("run.db-shm", "run.db-wal")  # SQLite's files come and go, and so the folder's time
        return {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name not in own}

    before = seen()
    assert blame(run).follows
    assert seen() == before


def test_a_lost_key_makes_its_digests_worthless_and_they_are_forgotten(tmp_path):
    run = trained(tmp_path, "make()", steps=(3,))
    (run / DIGESTS).unlink()
    assert (run / "run.json").exists()
    trained(tmp_path, "make()", steps=(6,))
    assert changed(run, "SELECT DISTINCT digest IS NULL FROM ledger WHERE step < 3") == [(1,)]
    found = blame(run)
    assert found.follows
    assert found.from_step == 3
    assert (run / DIGESTS).stat().st_mode & 0o777 == 0o600


@pytest.mark.processes
def test_what_a_pool_has_merged_follows_and_whose_update_did_not_is_named(tmp_path):
    job = a_job(tmp_path, "steps=40, loss=loss", SLOW_LOSS)
    assert wide("run", job, "--nodes", 2, "--out", "pool", "--log", "silent", cwd=tmp_path)[0] == 0
    assert len({one for (one,) in changed(tmp_path / "pool", "SELECT node FROM ledger")}) == 2
    code, out, err = wide("blame", "pool", cwd=tmp_path)
    assert (code, "steps 0 to 39 follow" in out) == (0, True), err
    rows = "SELECT step FROM ledger GROUP BY step HAVING count(DISTINCT node) = 2 ORDER BY step DESC"
    (step,), *_ = changed(tmp_path / "pool", rows)
    changed(tmp_path / "pool", "UPDATE ledger SET digest = 1 WHERE step = ?", step)
    code, out, err = wide("blame", "pool", cwd=tmp_path)
    assert code == 1
    assert f"step {step}: none of the updates follows" in out
    assert "the weights in between are not what the updates give" in out
