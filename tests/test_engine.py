"""The same job on torch.distributed, under torchrun: losses as in `sync`, the same folder and result, and every bad end."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import sys

import pytest

import wide as package
from tests.jobs import EVERYTHING
from tests.processes import ROOT, python, relatives, result_of, started, until, wide
from tests.ranks import KINDS
from tests.test_run import SLOW_LOSS, a_job
from wide.cli.main import main
from wide.config import Options
from wide.engine.__main__ import _check_alike
from wide.engine.share import parts
from wide.errors import Refused, UsageError, VersionMismatch
from wide.job.program import program_of
from wide.launch.kept import versions
from wide.launch.on_torchrun import check, words
from wide.store.weights import state_sha256
from wide.telemetry.snapshot import decoded

DIGITS = ROOT / "examples" / "digits.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)


def on_torchrun(*arguments, cwd, **changes):
    return wide("run", *arguments, "--on", "torchrun", "--nodes", 2, cwd=cwd, **changes)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """Digits on two ranks, and in a plain loop."""
    cwd = tmp_path_factory.mktemp("digits")
    steps = ("--steps", 40)
    ddp = result_of("run", DIGITS, *steps, "--on", "torchrun", "--nodes", 2, "--out", "ddp", cwd=cwd)
    return cwd / "ddp", ddp, result_of("run", DIGITS, *steps, "--nodes", 0, cwd=cwd)


@pytest.mark.processes
def test_loss_is_that_of_sync(both):
    _, ddp, sync = both
    assert ddp["loss_last"] == pytest.approx(sync["loss_last"], rel=0.01)
    assert ddp["loss_first"] == pytest.approx(sync["loss_first"], rel=0.01)
    assert ddp["metrics"]["accuracy"] == pytest.approx(sync["metrics"]["accuracy"], abs=0.02)


@pytest.mark.processes
def test_result_has_the_same_keys(both):
    _, ddp, sync = both
    assert ddp.keys() == sync.keys()
    assert ddp["nodes"][0].keys() == sync["nodes"][0].keys()
    assert (ddp["strategy"], ddp["steps"], ddp["batches"], ddp["samples"]) == ("ddp", 40, *_amounts(sync))
    assert [node["name"] for node in ddp["nodes"]] == ["rank-0", "rank-1"]


def _amounts(result):
    return result["batches"], result["samples"]


@pytest.mark.processes
def test_ledger_has_every_batch_once(both):
    folder, _, _ = both
    with sqlite3.connect(folder / "run.db") as db:
        rows = db.execute("SELECT step, first_batch, last_batch, node FROM ledger").fetchall()
    assert {node for *_, node in rows} == {0, 1}
    for step in range(40):
        batches = [batch for at, first, last, _ in rows if at == step for batch in range(first, last + 1)]
        assert sorted(batches) == list(range(13 if step % 3 == 2 else 16))


@pytest.mark.processes
def test_folder_is_that_of_any_run(both, capsys):
    folder, ddp, _ = both
    run = package.load(folder)
    assert (run.strategy, run.weights_sha256) == ("ddp", ddp["weights_sha256"])
    assert state_sha256(run.model.state_dict()) == ddp["weights_sha256"]
    assert main(["show", str(folder)]) == 0
    assert "digits: ddp, done" in capsys.readouterr().out
    assert main(["export", str(folder), str(folder / "weights.safetensors")]) == 0


@pytest.mark.processes
def test_a_pool_goes_on_with_it(both):
    folder, _, sync = both
    more = result_of("run", DIGITS, "--resume", folder, "--steps", 43, "--nodes", 0, cwd=folder.parent)
    assert more["steps"] == 43
    assert more["loss_last"] < sync["loss_first"]


@pytest.mark.processes
def test_every_kind_of_job_learns_as_in_a_plain_loop():
    found = python(*TORCHRUN, "-m", "tests.ranks", OMP_NUM_THREADS="1")
    assert found.returncode == 0, found.stderr
    far = json.loads(found.stdout)
    assert far.keys() == {kind for kind, job in KINDS.items() if len(job.turns) == 1}
    rounded = {kind: far.pop(kind) for kind in ("odd parameters and buffers", "mixed dtypes")}
    assert max(far.values()) < 1e-6
    assert max(rounded.values()) < 0.02  # its buffers are rank 0's, as DDP has it; and one layer is in bf16


@pytest.mark.processes
def test_an_error_is_told_once_and_ends_all(tmp_path):
    body = "def loss(model, batch):\n    import wide\n    if wide.here().step == 1 and wide.here().batch == 3:\n"
    body += "        raise ValueError('no such connection')\n    return nn.functional.cross_entropy(model(batch[0]), batch[1])"
    code, _, err = on_torchrun(a_job(tmp_path, "loss=loss", body), "--out", "run", cwd=tmp_path)
    assert code == 1
    assert err.count("no such connection") == 1
    assert "step 1, batch 3, rank 1: computing the loss" in err
    assert package.load(tmp_path / "run", EVERYTHING["mlp"]).steps == 1


@pytest.mark.processes
@pytest.mark.parametrize("victim", ["rank-0", "rank-1"])
def test_a_rank_that_is_killed_ends_the_run(tmp_path, victim):
    job = a_job(tmp_path, "loss=loss, steps=100000", SLOW_LOSS)
    with started("run", job, "--on", "torchrun", "--nodes", 2, "--out", "run", cwd=tmp_path) as process:
        assert until(lambda: _pids(tmp_path / "run").get(victim))
        os.kill(_pids(tmp_path / "run")[victim], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("wide: ")
    assert "--resume" in err or "another process of this run ended" in err


@pytest.mark.processes
def test_ctrl_c_ends_all_with_a_checkpoint(tmp_path):
    job = a_job(tmp_path, "loss=loss, steps=100000", SLOW_LOSS)
    with started("run", job, "--on", "torchrun", "--nodes", 2, "--out", "run", cwd=tmp_path) as process:
        assert until(lambda: _steps(tmp_path / "run"))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert until(lambda: not relatives(process.mark), seconds=20)
    assert process.returncode == 130
    assert "go on with --resume run" in err
    assert package.load(tmp_path / "run", EVERYTHING["mlp"]).steps > 0


def _pids(folder):
    try:
        with sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True) as db:
            (words,) = db.execute("SELECT snapshot FROM live").fetchone()
        return {view.totals.name: view.totals.pid for view in decoded(words).nodes}
    except (sqlite3.Error, TypeError):
        return {}


def _steps(folder):
    try:
        with sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True) as db:
            return db.execute("SELECT count(*) FROM steps").fetchone()[0]
    except sqlite3.Error:
        return 0


@pytest.mark.processes
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("model=Rivals, phases=RIVALS, loss=None, optimizer=None", "Job(phases=…)"),
        ("dataset=Stream, steps=3", "a data set without a length"),
    ],
)
def test_what_only_a_pool_can_do_is_refused(tmp_path, changes, words):
    body = "from tests.jobs import Rivals, RIVALS\nclass Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        return iter(points())"
    code, _, err = on_torchrun(a_job(tmp_path, changes, body), cwd=tmp_path)
    assert code == 2
    assert words in err.splitlines()[-1]


def test_without_torchrun_it_says_how_to_start():
    found = python("-m", "wide.engine", DIGITS)
    assert found.returncode == 2
    assert "start it with torchrun" in found.stderr.splitlines()[-1]


@pytest.mark.processes
def test_a_folder_that_holds_a_run_is_refused_in_one_line(both):
    folder, _, _ = both
    code, _, err = on_torchrun(DIGITS, "--out", folder, cwd=folder.parent)
    assert code == 2
    assert err.count("already holds a run") == 1
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "options",
    [
        dict(strategy="async"),
        dict(compress="int8"),
        dict(data="stream"),
        dict(workers=2),
        dict(control=True),
        dict(partition="a"),
        dict(gpus_per_node=1),
    ],
)
def test_options_that_mean_nothing_there_are_refused(options):
    with pytest.raises(UsageError, match="torch.distributed|pool"):
        check(Options(**options))


def test_options_are_passed_on():
    found = words(f"{DIGITS}", Options(steps=3, seed=7, log="silent"))
    assert found[:2] == [str(DIGITS), "--answer"]
    assert {"--steps=3", "--seed=7", "--log=silent"} <= set(found)


def test_a_rank_with_another_file_or_version_is_refused(tmp_path):
    job = a_job(tmp_path)
    program, mine = program_of(str(job)), list(versions())
    _check_alike(str(job), program, mine)
    with pytest.raises(VersionMismatch, match="torch 1.0"):
        _check_alike(str(job), program, [*mine[:2], "1.0", mine[3]])
    a_job(tmp_path, "batch_size=2")
    with pytest.raises(Refused, match="not rank 0's: line"):
        _check_alike(str(job), program, mine)


def test_batches_are_shared_out_evenly():
    assert parts(16, 3) == [(0, 5), (5, 10), (10, 16)]
    assert parts(1, 4) == [(0, 0), (0, 0), (0, 0), (0, 1)]
    assert all(parts(n, w)[-1][1] == n for n in range(20) for w in range(1, 9))


def test_nothing_of_torch_is_loaded_by_whoever_only_starts_it():
    found = python("-c", "import wide.launch.on_torchrun, sys; sys.exit('torch' in sys.modules)")
    assert found.returncode == 0, sys.version
