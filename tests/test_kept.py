"""Nodes and coordinators that an engine keeps, without an engine: what exit codes mean, and children that end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from tests.processes import environment, until
from tests.test_run import SLOW_LOSS, a_job, result_of
from wide.cli.main import main
from wide.config import Options
from wide.job.spec import parts, with_arguments, with_set
from wide.launch.code import code_of
from wide.launch.dask_worker import nodes_of
from wide.launch.engines import join_words
from wide.launch.kept import LONGEST_PAUSE_S, Ended, KeptNode, Versions, after, bound
from wide.launch.ray_actors import CoordinatorActor
from wide.launch.ray_pool import crowded
from wide.launch.result import from_json
from wide.launch.served import Errand


@pytest.mark.parametrize(
    ("code", "is_again"), [(0, False), (2, False), (76, False), (77, False), (69, True), (75, True)]
)
def test_an_exit_code_tells_whether_a_node_is_started_again(code, is_again):
    assert after(Ended("atlas", code, ""), "ray-1", 0).is_again == is_again


@pytest.mark.parametrize("code", [1, 143, -signal.SIGKILL])
def test_a_node_that_was_killed_is_started_again_ever_more_slowly_and_that_is_told_once(code):
    first, later = (after(Ended("atlas", code, "no room"), "ray-3", failures) for failures in (0, 1))
    assert first.told == f"ray-3 on atlas ended with exit code {code}: no room; it is started again"
    assert later.told == ""
    assert first.pause_s < later.pause_s <= after(Ended("", code, ""), "", 500).pause_s == LONGEST_PAUSE_S


def test_a_node_that_was_refused_is_told_about():
    told = after(Ended("atlas", 77, "the pool does not want it"), "ray-3", 0).told
    assert told == "ray-3 on atlas ended with exit code 77: the pool does not want it; it is not started again"


def test_a_machine_with_other_versions_is_named():
    mine = Versions("here", "0.1.0", "2.13.0", "3.11.7")
    assert Versions("there", *mine[1:]).differing(mine) == ""
    words = Versions("there", "0.2.0", "2.12.1", "3.11.7").differing(mine)
    assert words.startswith("there has wide 0.2.0, torch 2.12.1; the coordinator wide 0.1.0, torch 2.13.0: ")


def machine(cpus, gpus=0, is_alive=True):
    return {"Alive": is_alive, "Resources": {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}}


def test_what_is_asked_and_what_there_is():
    machines = [machine(4), machine(3), machine(64, is_alive=False)]
    assert crowded(machines, 3, 2, 0) == ""
    assert crowded(machines, 4, 2, 0) == (
        "asked for 4 nodes with 2 CPUs each; Ray has room for 3 (2 machines, 7 CPUs, 0 GPUs): "
        "the others wait until there is more"
    )
    assert "with 1 CPU and 1 GPU each; Ray has room for 2 " in crowded([machine(8, 2), machine(8)], 3, 1, 1)
    assert "Ray has room for 0 (0 machines, 0 CPUs, 0 GPUs)" in crowded([], 1, 1, 0)


def test_a_dask_worker_lends_what_its_threads_have_room_for():
    assert nodes_of(Options(), 8) == 8
    assert nodes_of(Options(cpus_per_node=4), 8) == 2
    assert nodes_of(Options(cpus_per_node=4), 1) == 1
    assert nodes_of(Options(nodes=3), 8) == 3


@pytest.mark.parametrize(("engine", "library"), [("ray", "ray"), ("dask://127.0.0.1:8786", "distributed")])
def test_without_the_library_one_line_says_how_to_get_it(engine, library, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as if it were not installed
    assert main(["run", str(a_job(tmp_path)), "--on", engine]) == 2
    extra = engine.partition(":")[0]
    assert capsys.readouterr().err == f"wide: --on {extra} needs {library}: pip install 'wiiiiide[{extra}]'\n"


def test_code_that_is_put_down_elsewhere_keeps_what_the_job_was_told(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = with_set(with_arguments(f"{a_job(tmp_path)}:other", ["--deep", "3"]), ["lr=0.3"])
    placed = parts(Errand(spec, Options(), "", (), code_of(spec)).placed())
    assert placed.place.startswith(str(tmp_path / "cache"))
    assert placed.place.endswith("/small.py:other")
    assert (placed.values, placed.arguments) == (parts(spec).values, ("--deep", "3"))


SAYS = "import os, sys; print('wide: refused', os.environ['WIDE_INVITE'], file=sys.stderr); sys.exit(77)"


def test_a_kept_node_has_its_invite_from_the_environment_and_says_how_it_ended(tmp_path, capfd):
    ended = KeptNode([sys.executable, "-c", SAYS], "wide1_abc", str(tmp_path)).work()
    assert (ended.code, ended.words) == (77, "refused wide1_…")


def test_a_kept_node_that_is_told_to_leave_leaves(tmp_path):
    node = KeptNode([sys.executable, "-c", "import time; time.sleep(600)"], "wide1_abc", "/no/such/folder")
    found = []
    thread = threading.Thread(target=lambda: found.append(node.work()))
    thread.start()
    assert until(lambda: node._child is not None)
    node.leave()
    thread.join(20)
    assert found[0].code == -signal.SIGTERM


KEEPER = """
import subprocess, sys, time
from wide.launch.kept import bound
child = subprocess.Popen(bound([sys.executable, "-c", "import time; time.sleep(600)"]))
print(child.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds a child to its parent")
def test_a_child_ends_with_whoever_keeps_it():
    with subprocess.Popen(
        [sys.executable, "-c", KEEPER], stdout=subprocess.PIPE, env=environment(), text=True
    ) as keeper:
        try:
            child = psutil.Process(int(keeper.stdout.readline()))
            assert until(lambda: child.cmdline()[1:] == ["-c", "import time; time.sleep(600)"])  # for a moment it is []
        finally:
            keeper.kill()
    assert until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, 20)


def test_a_child_whose_keeper_is_gone_already_does_not_begin():
    words = bound([sys.executable, "-c", "print('begun')"])
    words[words.index(str(os.getpid()))] = "1"  # somebody else's
    if sys.platform == "linux":
        assert subprocess.run(words, capture_output=True, timeout=60, check=False).stdout == b""


def heard_until(actor, condition, patience_s=60):
    """All words, and what was heard last."""
    words, deadline = [], time.monotonic() + patience_s
    while time.monotonic() < deadline:
        heard = actor.hear()
        words += heard.words
        if condition(heard):
            return "".join(words), heard
    raise AssertionError("".join(words))


@pytest.fixture
def errand(tmp_path, monkeypatch):
    """Of a small run; what is kept of it is of this test only."""
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", environment()["PYTHONPATH"])
    job = a_job(tmp_path, "steps=40, loss=loss", SLOW_LOSS)
    options = Options(out=tmp_path / "here", resume="auto", checkpoint_every=0.2, device="cpu")
    return Errand(str(job), options, str(tmp_path), ("wide", "run", "small.py", "--on", "ray"))


@pytest.mark.processes
def test_a_kept_coordinator_that_is_killed_goes_on_and_gives_the_same_bits(errand, tmp_path):
    actor = CoordinatorActor(errand, "127.0.0.1")
    said, heard = heard_until(actor, lambda heard: heard.invite)
    assert "wide1_" not in said
    node = KeptNode([*join_words(sys.executable, errand.options), "--name", "ray-1"], heard.invite, str(tmp_path))
    ends = []
    thread = threading.Thread(target=lambda: ends.append(node.work()))
    thread.start()
    heard_until(actor, lambda heard: (tmp_path / "here" / "checkpoints" / "latest").exists())
    actor._child.process.kill()
    said, heard = heard_until(actor, lambda heard: heard.answer)
    thread.join(60)
    assert re.search(r"the coordinator on .* died \(exit code -9\): it is started again", said)
    assert "going on from step" in said
    assert ends[0].code == 0
    result = from_json(heard.answer[1].encode())
    alone = result_of("run", "small.py", "--nodes", 0, cwd=tmp_path)
    assert result.weights_sha256 == alone["weights_sha256"]


@pytest.mark.processes
def test_a_kept_coordinator_that_is_told_to_stop_stops(errand):
    actor = CoordinatorActor(errand, "127.0.0.1")
    heard_until(actor, lambda heard: heard.invite)
    actor.stop()
    _, heard = heard_until(actor, lambda heard: heard.answer)
    assert heard.answer[:2] == ["error", 143]


@pytest.mark.processes
def test_a_kept_coordinator_that_cannot_begin_says_why(errand, tmp_path):
    (tmp_path / "small.py").write_text("job = 3\n")
    _, heard = heard_until(CoordinatorActor(errand, "127.0.0.1"), lambda heard: heard.answer)
    assert heard.answer[:2] == ["error", 2]


@pytest.mark.processes
def test_a_kept_coordinator_that_dies_again_and_again_is_given_up(errand, tmp_path):
    (tmp_path / "small.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGKILL)\n")
    said, heard = heard_until(CoordinatorActor(errand, "127.0.0.1"), lambda heard: heard.answer)
    assert heard.answer[:2] == ["error", 1]
    assert "died 3 times" in heard.answer[2]
    assert said.count("it is started again") == 2
