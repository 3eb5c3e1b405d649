"""The first quarter of an hour: getting a model out, going on, machines in any order, files that are not quite jobs."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import torch

import wide as package
from tests.jobs import make
from tests.processes import ROOT, python, result_of, started, until, wide
from tests.test_ends import has_steps
from tests.test_run import SLOW_LOSS, a_job
from wide.cli.main import main
from wide.launch.addresses import addresses
from wide.launch.folder import RunFolder
from wide.store.weights import weights_sha256

processes = pytest.mark.processes


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def quietly(job, **options):
    return package.run(job, nodes=0, log="silent", **options)


# ── getting it out ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_loaded_with_model_history_and_metrics():
    job = make(evaluate=lambda model: {"one": 1.0}, epochs=2)
    result = quietly(job)
    run = package.load(result.run_dir, job)
    assert (run.steps, len(run.history), run.metrics) == (result.steps, result.steps, {"one": 1.0})
    assert [step for step, _ in run.evaluations] == [3, 6]
    assert run.weights_sha256 == weights_sha256(run.model) == result.weights_sha256
    assert not run.model.training


@processes
def test_the_job_is_found_by_the_file_that_the_run_was_begun_with(tmp_path):
    job = a_job(tmp_path, "steps=3", name="named.py")
    result = result_of("run", f"{job}:job", "--nodes", 0, cwd=tmp_path)
    assert weights_sha256(package.load(result["run_dir"]).model) == result["weights_sha256"]
    job.unlink()
    with pytest.raises(package.UsageError, match=r"no such file.*or say wide.load"):
        _ = package.load(result["run_dir"]).model


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(package.UsageError, match="there is no run in it"):
        package.load(tmp_path)


# ── going on ─────────────────────────────────────────────────────────────────────────────────────────────────────


def begun(job, folder=None, is_finished=True):
    """A run of that file, as `wide run` begins it."""
    options = ("--out", folder) if folder else ()
    result = result_of("run", job, "--nodes", 0, "--steps", 2, *options, cwd=job.parent)
    if not is_finished:
        story = job.parent / result["run_dir"] / "run.json"
        story.write_text(story.read_text().replace('"state": "done"', '"state": "interrupted"'))
    return result["run_dir"]


def found(job):
    folder = RunFolder(None, "auto", job.stem, job)
    folder.close()
    return str(folder.path) if folder.holds_run else None


@processes
def test_resume_auto_finds_a_folder_that_was_named(tmp_path):
    job = a_job(tmp_path)
    assert found(job) is None
    shutil.rmtree(tmp_path / "runs")
    begun(job, "mine")
    assert found(job) == "mine"
    begun(a_job(tmp_path, name="other.py"), "theirs")
    assert found(job) == "mine"


@processes
def test_of_several_it_takes_the_one_that_is_not_finished_or_asks(tmp_path):
    job = a_job(tmp_path)
    begun(job)
    begun(job, "deep/mine")
    with pytest.raises(
        package.UsageError, match=r"several runs of this job; say which one: --resume runs/\S+, --resume"
    ):
        found(job)
    begun(job, "half", is_finished=False)
    assert found(job) == "half"


def test_a_run_of_a_newer_version_is_not_touched():
    result = quietly(make(), steps=2)
    (state,) = Path(result.run_dir, "checkpoints").glob("step-*/state.json")
    state.write_text(state.read_text().replace('"format": 1', '"format": 3'))
    with pytest.raises(package.UsageError, match=r"newer version of wide \(format 3, this one knows 2\): update"):
        quietly(make(), steps=4, resume=result.run_dir)
    with pytest.raises(package.UsageError, match="newer version"):
        package.load(result.run_dir)


# ── machines in any order ────────────────────────────────────────────────────────────────────────────────────────


@processes
def test_a_node_that_comes_before_its_pool_waits_for_it(tmp_path):
    job = a_job(tmp_path, "steps=6")
    with started("join", f"127.0.0.1:{9000 + os.getpid() % 900}", "--job", job, cwd=tmp_path, WIDE_TOKEN="t") as early:
        assert until(lambda: "waiting for it" in early.stderr.readline())
        port = 9000 + os.getpid() % 900
        result = result_of("serve", job, "--port", port, cwd=tmp_path, WIDE_TOKEN="t")
        assert early.wait(timeout=60) == 0
    assert result["steps"] == 6


@processes
def test_serve_computes_too_if_it_is_told_to(tmp_path):
    job = a_job(tmp_path, "steps=6")
    alone = result_of("run", job, "--nodes", 0, cwd=tmp_path)
    served = result_of("serve", job, "--port", 0, "--nodes", 2, cwd=tmp_path)
    assert served["weights_sha256"] == alone["weights_sha256"]


def test_addresses_are_such_as_others_can_use():
    assert addresses("127.0.0.1") == ["127.0.0.1"]
    assert addresses("::1") == ["::1"]
    assert all(re.fullmatch(r"[\d.]+", address) and address != "0.0.0.0" for address in addresses("0.0.0.0"))
    assert "::" not in addresses("::")


@processes
def test_a_data_set_that_takes_its_time_is_waited_for(tmp_path):
    body = "def slow():\n    time.sleep(4)\n    return points()"
    result = result_of("run", a_job(tmp_path, "steps=3, dataset=slow", body), "--nodes", 2, cwd=tmp_path)
    assert result["steps"] == 3


# ── files that are not quite jobs ────────────────────────────────────────────────────────────────────────────────


@processes
@pytest.mark.parametrize("nodes", [0, 2])
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import wide\nfrom tests.jobs import make\njob = make()\nwide.run(job)", "half.py:4: it calls wide.run while"),
        ("import sys\nsys.exit('bye')", "it ended Python while it was imported (SystemExit: bye (half.py:2"),
        (
            "import argparse\np = argparse.ArgumentParser()\np.add_argument('--x', required=True)\np.parse_args()",
            "under if __name__ ==",
        ),
    ],
)
def test_a_file_that_does_more_than_define_is_told_the_line_to_add(tmp_path, nodes, source, words):
    (tmp_path / "half.py").write_text(source)
    code, out, err = wide("run", "half.py", "--nodes", nodes, cwd=tmp_path)
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]
    assert "Traceback" not in err


@processes
def test_a_none_in_a_sample_is_named_once(tmp_path):
    body = (
        "class Holes(torch.utils.data.Dataset):\n    def __len__(self): return 40\n"
        "    def __getitem__(self, i): return torch.zeros(6), None if i == 17 else 1"
    )
    code, _, err = wide("run", a_job(tmp_path, "dataset=Holes", body), "--nodes", 2, "--steps", 9, cwd=tmp_path)
    assert code == 1
    assert err.count("sample 17 is, or has, a None") == 1


def test_what_the_file_draws_while_it_is_imported_is_the_same_everywhere(tmp_path):
    body = "import numpy as np, random\nDATA = torch.randn(40, 6)\nNOISE = np.random.rand() + random.random()"
    changes = "dataset=lambda: DATA * NOISE, loss=lambda model, x: model(x).square().mean(), steps=3"
    from wide.job.loading import load

    one, two = (quietly(load(str(a_job(tmp_path, changes, body, f"{name}.py")))) for name in ("one", "two"))
    assert one.weights_sha256 == two.weights_sha256


@processes
def test_the_job_of_the_readme_runs_when_it_is_pasted(tmp_path):
    text = (ROOT / "README.md").read_text()
    (tmp_path / "job.py").write_text(re.search(r"```python\n(.*?)```", text, re.S)[1])
    assert result_of("run", "job.py", "--nodes", 2, cwd=tmp_path)["steps"] == 24
    done = python("job.py", cwd=tmp_path)
    assert (done.returncode, "tensor(" in done.stdout) == (0, True), done.stderr


# ── stopping ─────────────────────────────────────────────────────────────────────────────────────────────────────


@processes
@pytest.mark.parametrize("nodes", [0, 2])
def test_the_last_line_speaks_the_callers_language(tmp_path, nodes):
    a_job(tmp_path, "steps=10**9, loss=loss", SLOW_LOSS, "endless.py")
    script = (
        "import os, signal, sqlite3, threading, time, wide\nfrom endless import job\n"
        "def has_begun():\n"
        "    try: return sqlite3.connect('file:here/run.db?mode=ro', uri=True).execute('SELECT 1 FROM steps').fetchone()\n"
        "    except sqlite3.Error: return None\n"  # not there, or still without its tables
        "def stop():\n"
        "    while not has_begun(): time.sleep(0.05)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=stop, daemon=True).start()\n"
        f"try:\n    wide.run(job, nodes={nodes}, out='here', log='silent')\n"
        "except wide.Interrupted as error:\n    print(error)\n"
    )
    (tmp_path / "script.py").write_text(script)
    done = python("script.py", cwd=tmp_path)
    assert re.fullmatch(r'interrupted after step \d+; go on with wide\.run\(job, resume="here"\)\n', done.stdout), (
        done.stderr
    )


@processes
@pytest.mark.parametrize("nodes", [0, 2])
def test_several_signals_are_as_good_as_one(tmp_path, nodes):
    job = a_job(tmp_path, "steps=40, loss=loss", SLOW_LOSS)
    whole = result_of("run", job, "--nodes", 0, cwd=tmp_path)
    with started("run", job, "--nodes", nodes, "--out", "here", cwd=tmp_path) as process:
        assert until(lambda: has_steps(tmp_path))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err) == (130, False)
    assert "go on with --resume here" in err.splitlines()[-1]
    assert result_of("run", job, "--resume", "here", cwd=tmp_path)["weights_sha256"] == whole["weights_sha256"]


def test_the_command_begins_without_torch():
    code = "import sys, wide.cli.entry; sys.exit('torch' in sys.modules or 'msgspec' in sys.modules)"
    assert python("-c", code).returncode == 0


def test_a_run_goes_on_with_the_data_that_it_began_with_only():
    first = quietly(make(), steps=2)
    other = make(dataset=lambda: torch.utils.data.TensorDataset(torch.ones(83, 6), torch.zeros(83, dtype=torch.long)))
    with pytest.raises(package.UsageError, match=r"sample \d+ is not what it was when runs/\S+ was begun"):
        quietly(other, steps=4, resume=first.run_dir)
    assert quietly(other, steps=4, resume=first.run_dir, check=False).steps == 4


def test_a_program_that_was_changed_goes_on_with_a_word(tmp_path, capsys):
    job = a_job(tmp_path, "steps=2")
    options = ("--nodes", 0, "--out", "here")
    main(["run", str(job), *map(str, options)])
    job.write_text(job.read_text().replace("steps=2", "steps=3"))
    from wide.job import loading

    loading._loaded.clear()
    main(["run", str(job), "--nodes", "0", "--resume", "here"])
    assert re.search(r"small.py, line \d+, is not as it was when this run was last trained", capsys.readouterr().err)


def test_a_run_that_was_killed_before_its_first_checkpoint_goes_on_as_it_was_asked_to():
    first = quietly(make(), steps=4, seed=5)
    shutil.rmtree(Path(first.run_dir, "checkpoints"))
    again = quietly(make(), resume=first.run_dir)
    assert (again.steps, again.weights_sha256) == (first.steps, first.weights_sha256)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu")])
def test_a_run_within_a_context_that_would_not_reach_all_processes_is_refused(context):
    with (
        context(),
        pytest.raises(package.UsageError, match=r"wide.run was called within torch\.\w+\(\): call it outside"),
    ):
        quietly(make(), steps=1)


@processes
def test_the_order_of_a_set_is_the_same_in_every_process(tmp_path):
    body = "WORDS = [f'word{i}' for i in range(83)]\nORDER = {word: i for i, word in enumerate(set(WORDS))}"
    data = "dataset=lambda: torch.tensor([[float(ORDER[w])] * 6 for w in WORDS]) / 83"
    job = a_job(tmp_path, f"steps=4, loss=lambda model, x: model(x).square().mean(), {data}", body)
    assert len({result_of("run", job, "--nodes", n, cwd=tmp_path)["weights_sha256"] for n in (0, 0, 2)}) == 1


@processes
def test_a_signal_amid_a_discovery_is_no_success(tmp_path):
    body = (
        "import signal\ndef loss(model, batch):\n    loss.calls = getattr(loss, 'calls', 0) + 1\n"
        "    if loss.calls > 30:\n        model[0].weight.data.clamp_(-0.1, 0.1)\n"
        "    if loss.calls == 31: os.kill(os.getpid(), signal.SIGINT)\n"
        "    return nn.functional.cross_entropy(model(batch[0]), batch[1])"
    )
    job = a_job(tmp_path, "steps=40, loss=loss", body)
    code, _, err = wide("run", job, "--nodes", 0, "--no-check", "--out", "here", cwd=tmp_path)
    assert (code, "go on with --resume here" in err.splitlines()[-1]) == (130, True), err
