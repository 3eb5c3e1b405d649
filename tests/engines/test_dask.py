"""A real dask cluster on this machine: workers that are there and workers that come later lend themselves."""

from __future__ import annotations

import json
import signal
import uuid

import psutil
import pytest

from tests.engines.jobs import DIGITS, nodes_in, slow_digits, steps_in
from tests.processes import ROOT, relatives, result_of, started, until, wide

pytest.importorskip("distributed", reason="dask is not installed: make test-engines installs it")

from distributed import Client, LocalCluster

pytestmark = pytest.mark.processes


@pytest.fixture
def cluster(tmp_path):
    """One worker with one thread; nothing of a run is left on it afterwards, and no plugin."""
    mark = uuid.uuid4().hex
    places = {name: str(tmp_path / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**places, "PYTHONPATH": str(ROOT), "WIDE_TEST_MARK": mark}.items():
            patch.setenv(name, value)
        with LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address=None) as dask:
            dask.on = dask.scheduler_address.replace("tcp://", "dask://")
            dask.mark = mark
            yield dask
            assert until(lambda: not nodes_on(dask), 20)
            with Client(dask) as client:
                assert not client.run_on_scheduler(plugins_of_ours)


def plugins_of_ours(dask_scheduler):
    return [name for name in dask_scheduler.worker_plugins if name.startswith("wide")]


def nodes_on(cluster):
    return [process for process in relatives(cluster.mark) if "join" in words_of(process)]


def words_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_worker_that_is_added_later_joins_by_itself(cluster, tmp_path):
    job = slow_digits(tmp_path, held_at=20)
    alone = result_of("run", job, "--steps", 60, "--nodes", 0, cwd=tmp_path)
    (tmp_path / "gate").touch()
    options = ("--on", cluster.on, "--steps", 60, "--out", "here", "--json")
    with started("run", job, *options, cwd=tmp_path) as process:
        assert until(lambda: steps_in(tmp_path / "here") >= 5)
        assert nodes_in(tmp_path / "here") == ["dask-0"]
        cluster.scale(2)
        assert until(lambda: "dask-1" in nodes_in(tmp_path / "here"))
        (tmp_path / "gate").unlink()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert "wide1_" not in err
    assert all("wide1_" not in " ".join(words_of(one)) for one in psutil.process_iter())


def test_a_worker_that_is_taken_away_is_an_ordinary_leave(cluster, tmp_path):
    job = slow_digits(tmp_path, held_at=20)
    alone = result_of("run", job, "--steps", 40, "--nodes", 0, cwd=tmp_path)
    (tmp_path / "gate").touch()
    cluster.scale(2)
    options = ("--on", cluster.on, "--steps", 40, "--out", "here", "--json")
    with started("run", job, *options, cwd=tmp_path) as process:
        assert until(lambda: steps_in(tmp_path / "here") >= 5 and len(nodes_in(tmp_path / "here")) == 2)
        cluster.scale(1)
        (tmp_path / "gate").unlink()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert json.loads(out)["weights_sha256"] == alone["weights_sha256"]


def test_nodes_are_for_each_worker(cluster, tmp_path):
    options = ("--on", cluster.on, "--nodes", 2, "--steps", 40, "--json")
    code, out, err = wide("run", DIGITS, *options, cwd=tmp_path)
    assert code == 0, err
    assert {node["name"] for node in json.loads(out)["nodes"]} == {"dask-0", "dask-0-2"}


def test_ctrl_c_ends_everything_with_a_checkpoint(cluster, tmp_path):
    job = slow_digits(tmp_path)
    with started("run", job, "--on", cluster.on, "--out", "here", cwd=tmp_path) as process:
        assert until(lambda: steps_in(tmp_path / "here") >= 5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1].startswith("wide: interrupted after step ")


def test_ctrl_c_before_training_began_ends_everything(cluster, tmp_path):
    job = slow_digits(tmp_path)
    job.write_text(job.read_text().replace("digits = load_digits()", "time.sleep(600)\n    digits = load_digits()"))
    with started("run", job, "--on", cluster.on, "--out", "here", cwd=tmp_path) as process:
        assert until(lambda: nodes_on(cluster))
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "wide: interrupted before training began"
