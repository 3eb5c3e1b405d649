"""`wide run` with real processes on real sockets: the same bits, a complete ledger, and every kind of bad input."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests import plain
from tests.processes import ROOT, environment, python, result_of, wide
from wide.cli.main import main
from wide.exchange.probe import ECHOES, PROBE_NBYTES
from wide.job.loading import load
from wide.store.weights import weights_sha256

pytestmark = pytest.mark.processes

DIGITS = ROOT / "examples" / "digits.py"
CONVNET = ROOT / "examples" / "convnet.py"

SMALL = """
import os, signal, time
import torch
from torch import nn
from tests.jobs import make, points

{body}

job = make({changes})
"""

SLOW_LOSS = (
    "def loss(model, batch):\n    time.sleep(0.01)\n    return nn.functional.cross_entropy(model(batch[0]), batch[1])"
)


def a_job(folder: Path, changes: str = "", body: str = "", name: str = "small.py") -> Path:
    path = folder / name
    path.write_text(SMALL.format(body=body, changes=changes))
    return path


@pytest.fixture(scope="module")
def digits_alone(tmp_path_factory):
    return result_of("run", DIGITS, "--steps", 40, "--nodes", 0, cwd=tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize(
    "options",
    [
        ("--nodes", 1),
        ("--nodes", 3),
        ("--nodes", 7),
        ("--nodes", 3, "--data", "stream"),
        ("--nodes", 3, "--compress", "lz4"),
        ("--nodes", 3, "--compress", "zstd", "--data", "stream"),
    ],
)
def test_any_number_of_nodes_gives_the_same_bits(digits_alone, tmp_path, options):
    result = result_of("run", DIGITS, "--steps", 40, *options, cwd=tmp_path)
    for key in ("weights_sha256", "loss_first", "loss_last", "metrics", "steps", "batches", "samples"):
        assert result[key] == digits_alone[key], key


def test_the_plain_program_gives_them_too(digits_alone):
    assert weights_sha256(plain.train(load(str(DIGITS)), 40)) == digits_alone["weights_sha256"]


def test_a_node_ten_times_slower_changes_nothing(digits_alone, tmp_path):
    slow = tmp_path / "slow_digits.py"
    slow.write_text(
        f"""
import sys, time, os
sys.path.insert(0, {str(DIGITS.parent)!r})
import digits, msgspec

def loss(model, batch):
    try:
        os.close(os.open("the slow one", os.O_CREAT | os.O_EXCL)); loss.is_slow = True
    except FileExistsError:
        pass
    if getattr(loss, "is_slow", False):
        time.sleep(0.02)
    return digits.job.loss(model, batch)

job = msgspec.structs.replace(digits.job, loss=loss)
"""
    )
    result = result_of("run", slow, "--steps", 40, "--nodes", 3, cwd=tmp_path)
    assert result["weights_sha256"] == digits_alone["weights_sha256"]
    batches = sorted(node["batches"] for node in result["nodes"])
    assert batches[0] < batches[1] / 3


@pytest.mark.parametrize("options", [("--nodes", 4), ("--nodes", 2, "--data", "stream")])
def test_batch_norm_dropout_and_augmentation_are_exact_too(tmp_path, options):
    expected = weights_sha256(plain.train(load(str(CONVNET)), 20))
    assert result_of("run", CONVNET, "--steps", 20, *options, cwd=tmp_path)["weights_sha256"] == expected


def test_the_folder_of_a_run(tmp_path):
    result = result_of("run", DIGITS, "--steps", 7, "--nodes", 3, "--out", "here", cwd=tmp_path)
    assert result["run_dir"] == "here"
    db = sqlite3.connect(tmp_path / "here" / "run.db")
    twice = """
        WITH RECURSIVE batches(step, batch, last) AS (
            SELECT step, first_batch, last_batch FROM ledger
            UNION ALL SELECT step, batch + 1, last FROM batches WHERE batch < last)
        SELECT step, count(*), count(DISTINCT batch), min(batch), max(batch) FROM batches GROUP BY step"""
    per_step = db.execute(twice).fetchall()
    assert per_step == [(step, n, n, 0, n - 1) for step, n in enumerate([16, 16, 13, 16, 16, 13, 16])]
    samples = dict(db.execute("SELECT step, sum(samples) FROM ledger GROUP BY step"))
    steps = db.execute("SELECT step, epoch, samples FROM steps ORDER BY step").fetchall()
    assert [(step, step // 3, samples[step]) for step in range(7)] == steps
    assert db.execute("SELECT count(*) FROM nodes WHERE joined_at > 0 AND left_at > 0").fetchone() == (3,)
    assert {row[0] for row in db.execute("SELECT DISTINCT metric FROM samples")} >= {"batches", "rss_bytes"}
    evaluated = db.execute("SELECT epoch, step FROM evaluations WHERE metric = 'accuracy'").fetchall()
    assert evaluated == [(0, 3), (1, 6), (2, 7)]
    assert (tmp_path / "here/checkpoints/latest").read_text().strip() == "step-00000007"
    assert all("text" in json.loads(line) for line in (tmp_path / "here/log.jsonl").read_text().splitlines())


def test_the_result_has_every_key_of_the_contract(digits_alone):
    assert digits_alone["schema"] == "wide.result/1"
    keys = "run_dir strategy steps epochs batches samples seconds batches_per_s samples_per_s loss_first loss_last"
    assert set(digits_alone) >= {*keys.split(), "weights_sha256", "metrics", "nodes"}
    node = "node name pid batches samples bytes_sent bytes_received raw_bytes compute_s codec_s network_s"
    assert set(digits_alone["nodes"][0]) >= {*node.split(), "compression_ratio", "rss_bytes"}


def test_digits_are_learned(tmp_path):
    result = result_of("run", DIGITS, "--nodes", 2, "--seconds", 60, cwd=tmp_path)
    assert result["metrics"]["accuracy"] >= 0.95


@pytest.mark.parametrize(("codec", "least_ratio"), [("bf16", 1.9), ("int8", 3.5), ("int4", 5.5)])
def test_digits_are_learned_with_less_precision(tmp_path, codec, least_ratio):
    options = ("--nodes", 3, "--epochs", 120, "--compress", codec)
    result = result_of("run", DIGITS, *options, "--out", "o", cwd=tmp_path)
    assert result["metrics"]["accuracy"] >= 0.95
    busy = [node for node in result["nodes"] if node["batches"] > 500]  # on a busy machine one may come late
    assert busy
    probe = ECHOES * PROBE_NBYTES  # the echoes of a node that joins travel as they are
    assert all((node["raw_bytes"] - probe) / (node["bytes_sent"] - probe) >= least_ratio for node in busy)
    assert all(node["compression_ratio"] == node["raw_bytes"] / node["bytes_sent"] for node in busy)
    assert all(node["raw_bytes"] > node["bytes_sent"] and node["codec_s"] > 0 for node in busy)
    db = sqlite3.connect(tmp_path / "o" / "run.db")
    assert set(db.execute("SELECT codec, reason FROM choices")) == {(codec, f"--compress {codec}")}


def test_stdout_carries_the_result_alone_whatever_the_job_prints(tmp_path):
    job = a_job(tmp_path, "steps=2, model=lambda: print('hello') or nn.Linear(6, 3)", "print('hi')")
    for nodes in (0, 2):
        result = result_of("run", job, "--nodes", nodes, cwd=tmp_path)
        assert result["steps"] == 2


def test_from_a_script_the_job_is_trained_as_it_is_and_the_script_runs_once(tmp_path):
    """Guarded or not, with caches, with a job that was changed or made in a function: it travels by value."""
    (tmp_path / "script.py").write_text(
        "import functools, wide, torch\nfrom tests.jobs import make, points\n"
        "@functools.cache\ndef data(): return points()\n"
        "print('once')\njob = make(seed=9)\njob = make(dataset=lambda: data())\n"
        "if True:\n"
        "    one = wide.run(job, nodes=2, steps=3, log='silent', out='one')\n"
        "    two = wide.run(make(loss=lambda m, b: job.loss(m, b)), nodes=0, steps=3, log='silent', out='two')\n"
        "    three = wide.run(make(loss=lambda m, b: job.loss(m, b)), nodes=1, steps=3, log='silent', out='three')\n"
        "    assert one.weights_sha256 == two.weights_sha256 == three.weights_sha256\n"
        "    from wide.store.weights import weights_sha256\n"
        "    assert {weights_sha256(r.model) for r in (one, two, three)} == {one.weights_sha256}\n"
        "    print(one.steps, sum(node.batches for node in one.nodes) > 0, one.run_dir)\n"
    )
    done = python("script.py", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("once\n3 True one\n", 0), done.stderr


def test_a_metric_that_is_not_a_number_is_null_and_harms_nothing(tmp_path):
    job = a_job(tmp_path, "steps=2, evaluate=lambda model: {'n': float('nan'), 'x': 1}")
    assert result_of("run", job, "--nodes", 1, cwd=tmp_path)["metrics"] == {"n": None, "x": 1.0}


@pytest.mark.parametrize("nodes", [0, 2])
@pytest.mark.parametrize(
    ("evaluate", "words"),
    [("lambda model: {'a': []}", "evaluate() failed"), ("lambda model: os._exit(3)", "the evaluating process ended")],
)
def test_an_evaluate_that_fails_does_not_end_training(tmp_path, nodes, evaluate, words):
    if nodes == 0 and "_exit" in evaluate:
        pytest.skip("without nodes it is this very process that ends")
    job = a_job(tmp_path, f"steps=7, evaluate={evaluate}")
    code, out, err = wide("run", job, "--nodes", nodes, "--json", cwd=tmp_path)
    assert code == 0, err
    result = json.loads(out)
    assert (result["steps"], result["metrics"]) == (7, {})
    assert words in err
    assert "training goes on" in err
    assert err.count("Traceback") == 0


def test_a_metric_that_is_no_number_survives_a_resume(tmp_path):
    job = a_job(tmp_path, "steps=3, evaluate=lambda model: {'n': float('nan'), 'x': 1}")
    result_of("run", job, "--nodes", 0, "--out", "r", cwd=tmp_path)
    again = result_of("run", job, "--nodes", 1, "--resume", "r", "--steps", 3, cwd=tmp_path)
    assert again["metrics"] == {"n": None, "x": 1.0}


def test_slow_evaluations_do_not_outlast_a_time_limit(tmp_path):
    job = a_job(tmp_path, "epochs=200, evaluate=lambda model: time.sleep(1) or {'x': 1}")
    result = result_of("run", job, "--nodes", 1, "--seconds", 1, "--out", "here", cwd=tmp_path)
    db = sqlite3.connect(tmp_path / "here" / "run.db")
    assert db.execute("SELECT count(*) <= 4, max(step) FROM evaluations").fetchone() == (1, result["steps"])


def test_closed_streams_do_no_harm(tmp_path):
    job = a_job(tmp_path, "steps=2")
    command = f"{sys.executable} -m wide run {job} --nodes 1 --json --out"
    for redirection in ("2>&-", ">&-", ">&- 2>&- <&-"):
        line = f"{command} {uuid.uuid4().hex} {redirection}"
        assert subprocess.run(line, shell=True, cwd=tmp_path, env=environment(), timeout=60).returncode == 0


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────

BAD_JOBS = {
    "raises at import": ("", "1 / 0", 2, ["small.py:7", "ZeroDivisionError"]),
    "a data set that raises at one index": (
        "dataset=Holed",
        "class Holed:\n    def __len__(self): return 64\n    def __getitem__(self, i):\n        if i == 7: raise OSError('no image')\n"
        "        return torch.ones(6), 0",
        1,
        ["sample 7", "no image", "small.py:10", "batch", "step", "node"],
    ),
    "a data set that cannot be opened": ("dataset=lambda: open('nothing')", "", 1, ["dataset() failed", "nothing"]),
    "a loss that is not a scalar": ("loss=lambda m, b: m(b[0])", "", 1, ["not a scalar", "step 0, batch"]),
    "a loss that turns NaN": (
        "loss=lambda m, b: m(b[0]).mean() * float('nan')",
        "",
        1,
        ["the loss is nan", "learning rate", "step 0, batch"],
    ),
    "a gradient that is not finite": (
        "loss=lambda m, b: (m(b[0]) * 0).abs().sqrt().mean()",
        "",
        1,
        ["the gradient", "is not finite", "step 0, batch"],
    ),
    "shapes that do not fit": (
        "model=lambda: nn.Linear(5, 3)",
        "",
        1,
        ["shapes cannot be multiplied", "step 0, batch"],
    ),
    "a model that raises": ("model=lambda: nn.Linear(1, 'x')", "", 1, ["model() failed", "small.py:9"]),
    "an optimizer that raises": (
        "optimizer=lambda params: torch.optim.SGD(params, lr=-1)",
        "",
        1,
        ["Invalid learning rate", "small.py:9"],
    ),
    "an optimizer that needs a closure": (
        "optimizer=lambda params: torch.optim.LBFGS(params)",
        "",
        1,
        ["LBFGS", "closure"],
    ),
}


@pytest.mark.parametrize("name", BAD_JOBS)
def test_a_bad_job_ends_in_one_clear_line(tmp_path, monkeypatch, capsys, name):
    changes, body, exit_code, words = BAD_JOBS[name]
    job = a_job(tmp_path, changes, body)
    code, out, err = wide("run", job, "--nodes", 2, "--log", "silent", "--steps", 3, cwd=tmp_path)
    assert code == exit_code, err
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("wide: ")
    for word in words:
        assert word in line
    with monkeypatch.context() as here:
        here.chdir(tmp_path)
        assert main(["run", str(job), "--nodes", "0", "--log", "silent", "--steps", "3"]) == exit_code
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith("wide: ")
    for word in words:
        assert word in line


def test_verbose_shows_the_traceback(tmp_path):
    job = a_job(tmp_path, "loss=loss", "def loss(model, batch):\n    raise KeyError('label')")
    code, _, err = wide("run", job, "--nodes", 1, "--log", "verbose", cwd=tmp_path)
    assert code == 1
    assert "Traceback" in err
    assert "step 0, batch 0, node 1" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("run", "nowhere.py"), "nowhere.py: no such file"),
        (("run", "empty.py"), "no wide.Job called 'job'"),
        (("run", "small.py", "--nodes", "-1"), "--nodes -1: must be at least 0"),
        (("run", "small.py", "--strategy", "warp"), "--strategy warp: expected sync"),
        (("run", "small.py", "--device", "cuda:0", "--nodes", "1"), "--device cuda:0: there is no such device"),
        (("run", "small.py", "--out", "small.py"), "small.py is a file"),
        (("run", "small.py", "--out", "/proc/nowhere"), "/proc/nowhere cannot be written"),
        (("run", "small.py", "--quick"), "unrecognized arguments: --quick"),
        (("run",), "the following arguments are required: JOB"),
        (("fly",), "invalid choice: 'fly'"),
        (("join", "somewhere", "--job", "small.py"), "somewhere: expected HOST:PORT"),
        (("join", "127.0.0.1:9", "--job", "small.py"), "no token"),
        (("join", "127.0.0.1:9", "--job", "small.py", "--token-file", "none"), "--token-file none"),
    ],
)
def test_wrong_usage_ends_with_2_and_one_line(tmp_path, arguments, words):
    a_job(tmp_path)
    (tmp_path / "empty.py").write_text("")
    code, out, err = wide(*arguments, cwd=tmp_path)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert words in line


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    job = a_job(tmp_path, "steps=1")
    assert wide("run", job, "--nodes", 0, "--out", "here", cwd=tmp_path)[0] == 0
    code, _, err = wide("run", job, "--nodes", 0, "--out", "here", cwd=tmp_path)
    assert code == 2
    assert "already holds a run" in err
