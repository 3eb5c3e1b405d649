"""A real Ray cluster of three Ray nodes on this machine: the same bits, whatever Ray takes away."""

from __future__ import annotations

import json
import os
import signal
import stat
import uuid

import psutil
import pytest

from tests.engines.jobs import DIGITS, nodes_in, slow_digits, steps_in
from tests.processes import ROOT, relatives, result_of, started, until, wide

pytest.importorskip("ray", reason="Ray is not installed: make test-engines installs it")

from ray.cluster_utils import Cluster

pytestmark = pytest.mark.processes

CLIENT_PORT = 23700 + os.getpid() % 1000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three Ray nodes of one CPU each; `mark` is in the environment of all that runs there."""
    home = tmp_path_factory.mktemp("home")
    changes = {
        "XDG_STATE_HOME": str(home / "state"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "PYTHONPATH": str(ROOT),
        "WIDE_TEST_MARK": uuid.uuid4().hex,
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changes.items():
            patch.setenv(name, value)
        head = {"num_cpus": 1, "include_dashboard": False, "ray_client_server_port": CLIENT_PORT}
        ray = Cluster(initialize_head=True, head_node_args=head)
        ray.others = [ray.add_node(num_cpus=1) for _ in range(2)]
        ray.mark, ray.home = changes["WIDE_TEST_MARK"], home
        yield ray
        ray.shutdown()


@pytest.fixture
def on_ray(cluster):
    """And nothing of a run is left on it afterwards."""
    yield {"RAY_ADDRESS": cluster.address}
    assert until(lambda: not ours(cluster), 20), [process.cmdline() for process in ours(cluster)]


def ours(cluster):
    """Processes of pools on the cluster: not Ray's own."""
    return [process for process in relatives(cluster.mark) if {"wide", "wide.launch.served"} & set(words_of(process))]


def words_of(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def coordinators(cluster):
    return [process for process in ours(cluster) if "wide.launch.served" in words_of(process)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What a plain loop in one process gives."""
    return result_of("run", DIGITS, "--steps", 40, "--nodes", 0, cwd=tmp_path_factory.mktemp("alone"))


def test_three_ray_nodes_give_the_bits_of_a_plain_loop(cluster, on_ray, alone, tmp_path):
    code, out, err = wide(
        *("run", DIGITS, "--on", "ray", "--nodes", 3, "--steps", 40, "--json"), cwd=tmp_path, **on_ray
    )
    assert code == 0, err
    result = json.loads(out)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["metrics"] == alone["metrics"]
    assert {node["name"] for node in result["nodes"]} == {"ray-1", "ray-2", "ray-3"}
    folder = tmp_path / result["run_dir"]
    assert steps_in(folder) == 40
    assert "40 steps done" in err
    assert "wide1_" not in err
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_run_survives_a_ray_node_that_is_removed_one_that_is_added_and_its_coordinators_death(
    cluster, on_ray, tmp_path
):
    job = slow_digits(tmp_path, held_at=60)
    alone = result_of("run", job, "--steps", 120, "--nodes", 0, cwd=tmp_path)
    (tmp_path / "gate").touch()
    options = ("--on", "ray", "--nodes", 3, "--steps", 120, "--checkpoint-every", 1, "--out", "here", "--json")
    with started("run", job, *options, cwd=tmp_path, **on_ray) as process:
        assert until(lambda: steps_in(tmp_path / "here") >= 10)
        cluster.remove_node(cluster.others.pop())
        removed_at = steps_in(tmp_path / "here")
        assert until(lambda: steps_in(tmp_path / "here") >= removed_at + 10)
        cluster.others.append(cluster.add_node(num_cpus=1))
        assert until(lambda: len(nodes_in(tmp_path / "here")) >= 4)  # the one that was lost came back, on the new one
        (before,) = coordinators(cluster)
        before.parent().kill()  # the actor
        assert until(lambda: not before.is_running() or before.status() == psutil.STATUS_ZOMBIE, 10)
        assert until(lambda: any(one.pid != before.pid for one in coordinators(cluster)))
        (tmp_path / "gate").unlink()
        out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert result["weights_sha256"] == alone["weights_sha256"]
    assert result["steps"] == 120
    assert "going on from step" in err


def test_ctrl_c_ends_everything_with_a_checkpoint(cluster, on_ray, tmp_path):
    job = slow_digits(tmp_path)
    options = ("--on", "ray", "--nodes", 2, "--steps", 60, "--out", "here")
    with started("run", job, *options, cwd=tmp_path, **on_ray) as process:
        assert until(lambda: steps_in(tmp_path / "here") >= 5)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1].startswith("wide: interrupted after step ")
    assert until(lambda: not ours(cluster), 20)
    resumed = result_of("run", job, "--nodes", 0, "--resume", "here", cwd=tmp_path)
    alone = result_of("run", job, "--nodes", 0, "--steps", 60, cwd=tmp_path)
    assert resumed["weights_sha256"] == alone["weights_sha256"]


def test_a_caller_that_is_killed_leaves_nothing_on_the_cluster(cluster, on_ray, tmp_path):
    job = slow_digits(tmp_path)
    with started("run", job, "--on", "ray", "--nodes", 2, "--out", "here", cwd=tmp_path, **on_ray) as process:
        assert until(lambda: steps_in(tmp_path / "here") >= 5)
        process.kill()
    assert until(lambda: not ours(cluster), 30)


def test_more_nodes_than_there_is_room_for(cluster, on_ray, alone, tmp_path):
    options = ("--on", "ray", "--nodes", 5, "--steps", 40, "--json")
    code, out, err = wide("run", DIGITS, *options, cwd=tmp_path, **on_ray)
    assert code == 0, err
    assert json.loads(out)["weights_sha256"] == alone["weights_sha256"]
    assert "asked for 5 nodes with 1 CPU each; Ray has room for 3 (3 machines, 3 CPUs, 0 GPUs)" in err


def test_by_rays_client_the_jobs_code_travels(cluster, on_ray, alone, tmp_path):
    (tmp_path / "sent.py").write_text(DIGITS.read_text())
    options = ("--on", f"ray://127.0.0.1:{CLIENT_PORT}", "--nodes", 2, "--steps", 40, "--out", "here", "--json")
    code, out, err = wide("run", "sent.py", *options, cwd=tmp_path)
    assert code == 0, err
    assert json.loads(out)["weights_sha256"] == alone["weights_sha256"]
    story = json.loads((tmp_path / "here" / "run.json").read_text())
    assert story["sessions"][0]["job"]["path"].startswith(str(cluster.home / "cache"))


def test_a_job_that_fails_says_so_as_at_home(cluster, on_ray, tmp_path):
    job = tmp_path / "broken.py"
    job.write_text(DIGITS.read_text().replace("batch_size=32", "batch_size=31 + undefined"))
    code, _, err = wide("run", job, "--on", "ray", "--nodes", 1, cwd=tmp_path, **on_ray)
    at_home = wide("run", job, "--nodes", 0, cwd=tmp_path)
    assert (code, err.splitlines()[-1]) == (at_home[0], at_home[2].splitlines()[-1])
