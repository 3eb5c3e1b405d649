"""Pools on a real Slurm of three machines: nodes that it requeues and cancels, ends of every kind, scripts as written."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess

import psutil
import pytest

from tests.engines.slurm import UNSEEN, Slurm, why_not
from tests.processes import PATIENCE_S, ROOT, environment, result_of, started, until, wide
from wide.store import wishes

pytestmark = [pytest.mark.processes, pytest.mark.skipif(bool(why_not()), reason=why_not())]
EPOCHS = 150  # so that nothing here is over before it is disturbed
DIGITS = str(ROOT / "examples" / "digits.py")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


@pytest.fixture
def pool(slurm, tmp_path):
    """How `wide run --on slurm` is started, and that nothing stays in the queue."""
    homes = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    yield slurm.environment | homes
    assert until(lambda: queue(slurm) == [], 30), queue(slurm)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights of a plain loop over so many epochs."""
    known = {}

    def weights(epochs):
        if epochs not in known:
            words = ("run", DIGITS, "--nodes", "0", "--epochs", epochs)
            known[epochs] = result_of(*words, cwd=tmp_path_factory.mktemp("plain"))["weights_sha256"]
        return known[epochs]

    return weights


def queue(slurm):
    return slurm.ask("squeue", "--noheader", "--array", "--format=%i %T").splitlines()


def array_of(slurm, run):
    """The job array of the run in that folder."""
    name = re.search(r"--job-name=(\S+)", (run / "nodes.sbatch").read_text())[1]
    return slurm.ask("squeue", "--noheader", "--name", name, "--format=%F").split()[0]


def joined(run):
    """Names of all nodes that ever came."""
    try:
        with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
            return [name for (name,) in db.execute("SELECT name FROM nodes")]
    except sqlite3.Error:
        return []


def busy(run):
    """How many nodes have given something."""
    with sqlite3.connect(f"file:{run / 'run.db'}?mode=ro", uri=True) as db:
        return db.execute("SELECT count(DISTINCT node) FROM ledger").fetchone()[0]


def story(slurm, array):
    lines = slurm.ask("scontrol", "--oneliner", "show", "job", array).splitlines()
    return {line["ArrayTaskId"]: line for line in (dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines)}


def test_one_requeued_one_cancelled_and_one_out_of_time_give_the_bits_of_a_plain_loop(slurm, pool, plain, tmp_path):
    run = tmp_path / "a run"
    words = ("run", DIGITS, "--on", "slurm", "--nodes", 3, "--epochs", EPOCHS, "--out", run, "--json")
    with started(*words, cwd=tmp_path, **pool) as process:
        assert until(lambda: len(joined(run)) == 3 and busy(run) == 3), process.communicate()
        array = array_of(slurm, run)
        slurm.ask("scontrol", "requeue", f"{array}_1")
        slurm.ask("scancel", f"{array}_2")
        slurm.ask("scancel", "--batch", "--signal=USR1", f"{array}_3")  # as Slurm does near a time limit
        wishes.ask(run, "pause")
        for number in ("1", "3"):
            assert until(lambda number=number: story(slurm, array)[number]["JobState"] == "PENDING")
            slurm.ask("scontrol", "update", f"JobId={array}_{number}", "StartTime=now")  # or it waits for two minutes
        assert until(lambda: len(joined(run)) == 5)
        wishes.ask(run, "resume")
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert json.loads(out)["weights_sha256"] == plain(EPOCHS)
    assert sorted(name[-2:] for name in joined(run)) == ["-1", "-1", "-2", "-3", "-3"]
    tasks = story(slurm, array)
    assert {number: task["Restarts"] for number, task in tasks.items()} == {"1": "1", "2": "0", "3": "1"}
    assert tasks["2"]["JobState"] == "CANCELLED"
    for number in tasks:  # all were told, and handed in what they had
        assert "this node gave" in (run / "nodes" / f"{number}.log").read_text().partition("left the pool")[0]


def test_the_invite_is_nobody_elses_to_read(slurm, pool, tmp_path):
    run = tmp_path / "run"
    with started(
        "run", DIGITS, "--on", "slurm", "--nodes", 2, "--epochs", EPOCHS, "--out", run, cwd=tmp_path, **pool
    ) as process:
        assert until(lambda: joined(run)), process.communicate()
        array = array_of(slurm, run)
        invite = (run / "invite").read_text().strip()
        shown = slurm.ask("scontrol", "show", "job", array) + slurm.ask("scontrol", "write", "batch_script", array, "-")
        commands = [process.info["cmdline"] for process in psutil.process_iter(["cmdline"])]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert invite.startswith("wide1_")
    assert "wide1_" not in shown + err + "".join(log.read_text() for log in (run / "nodes").iterdir())
    assert not any(invite in word for command in commands for word in command or ())
    assert (run / "invite").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("moment", ["submitted", "joined"])
def test_whenever_the_coordinator_ends_the_array_is_gone(slurm, pool, tmp_path, number, moment):
    run = tmp_path / "run"
    with started(
        "run", DIGITS, "--on", "slurm", "--nodes", 2, "--epochs", EPOCHS, "--out", run, cwd=tmp_path, **pool
    ) as process:
        if moment == "submitted":
            while "Slurm is asked for 2 nodes" not in process.stderr.readline():
                assert process.poll() is None
        else:
            assert until(lambda: joined(run)), process.communicate()
        process.send_signal(number)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)


def test_a_coordinator_that_was_killed_goes_on_with_a_new_array(slurm, pool, plain, tmp_path):
    run = tmp_path / "run"
    words = ("run", DIGITS, "--on", "slurm", "--nodes", 2, "--epochs", EPOCHS, "--checkpoint-every", 1)
    with started(*words, "--out", run, cwd=tmp_path, **pool) as process:
        assert until(lambda: (run / "checkpoints" / "latest").exists()), process.communicate()
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    again = result_of("run", DIGITS, "--on", "slurm", "--nodes", 2, "--resume", run, cwd=tmp_path, **pool)
    assert again["weights_sha256"] == plain(EPOCHS)


def test_a_run_whose_array_was_cancelled_says_so(slurm, pool, tmp_path):
    run = tmp_path / "run"
    with started(
        "run", DIGITS, "--on", "slurm", "--nodes", 2, "--epochs", EPOCHS, "--out", run, cwd=tmp_path, **pool
    ) as process:
        assert until(lambda: joined(run)), process.communicate()
        slurm.ask("scancel", array_of(slurm, run))
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "Slurm will start no node any more (2 cancelled" in err


def test_a_folder_that_machines_do_not_see_is_named(slurm, pool, tmp_path):
    run = slurm.folder / UNSEEN / "run"
    code, _, err = wide("run", DIGITS, "--on", "slurm", "--nodes", 2, "--out", run, cwd=tmp_path, **pool)
    assert code == 1
    assert f"Slurm's machines do not see {run}" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--nodes", 5), "--nodes 5, each with 1 core: partition debug has room for 4"),
        (("--cpus-per-node", 9), "each with 9 cores: partition debug has room for 0"),
        (("--partition", "nope"), "--partition nope: this cluster has debug, two"),
    ],
)
def test_what_the_cluster_does_not_have_is_refused(pool, tmp_path, words, said):
    code, _, err = wide("run", DIGITS, "--on", "slurm", *words, cwd=tmp_path, **pool)
    assert (code, err.count("\n")) == (2, 1)
    assert said in err
    assert not (tmp_path / "runs").exists()


def test_a_cluster_that_does_not_answer_is_unreachable(slurm, tmp_path):
    configuration = re.sub(r"SlurmctldPort=\d+", "SlurmctldPort=9", (slurm.folder / "slurm.conf").read_text())
    (tmp_path / "slurm.conf").write_text(configuration)
    elsewhere = slurm.environment | {"SLURM_CONF": str(tmp_path / "slurm.conf")}
    code, _, err = wide("run", DIGITS, "--on", "slurm", cwd=tmp_path, **elsewhere)
    assert (code, err.count("\n")) == (69, 1)
    assert "Unable to contact slurm controller" in err


def test_the_scripts_that_launch_writes_train_to_the_same_bits(slurm, pool, plain, tmp_path):
    folder = tmp_path / "it's 100% fine"
    code, out, err = wide("launch", "slurm", DIGITS, "--nodes", 2, "--out", folder, cwd=tmp_path)
    assert code == 0, err
    subprocess.run([folder / "submit.sh"], env=environment(**pool), check=True, stdout=subprocess.DEVNULL)
    log = folder / "logs" / "coordinator.log"
    assert until(lambda: queue(slurm) == []), (queue(slurm), log.read_text())
    assert f"weights {plain(60)[:12]}" in log.read_text()
    assert len(joined(folder / "run")) >= 1
    logs = [log, *(folder / "logs" / "nodes").iterdir()]
    assert not any("wide1_" in one.read_text() for one in logs)
    assert os.stat(folder).st_mode & 0o777 == 0o700
