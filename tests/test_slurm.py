"""What Slurm is told and what it answers, without one; the scripts run by bash. With one: engines/test_slurm.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.processes import ROOT, wide
from wide.config import Options
from wide.errors import UsageError
from wide.launch import slurm
from wide.launch.slurm import Machine, Staying, Task

DIGITS = ROOT / "examples" / "digits.py"
SINFO = """\
debug*|n1|2|(null)
debug*|n2|4+|gpu:2
big|n3|64|gpu:a100:4(S:0-1),shard:8
"""
SHOWN = (
    "JobId=4 ArrayJobId=1 ArrayTaskId=2 JobName=a JobState=FAILED Reason=NonZeroExitCode ExitCode=77:0 StdOut=/a b\n"
    "JobId=1 ArrayJobId=1 ArrayTaskId=3-4 JobName=a JobState=PENDING Reason=Resources ExitCode=0:0\n"
)


def test_machines_are_read_with_their_cores_and_gpus():
    assert slurm.machines_of(SINFO) == [
        Machine("debug", True, "n1", 2, 0),
        Machine("debug", True, "n2", 4, 2),
        Machine("big", False, "n3", 64, 4),
    ]


@pytest.mark.parametrize(
    ("given", "count"),
    [
        ({}, slurm.NODES),
        ({"nodes": 6}, 6),
        ({"cpus_per_node": 2}, 3),
        ({"gpus_per_node": 1}, 2),
        ({"partition": "big", "gpus_per_node": 2, "cpus_per_node": 8, "nodes": 2}, 2),
    ],
)
def test_as_many_nodes_as_there_is_room_for(given, count):
    assert slurm.node_count(slurm.machines_of(SINFO), Options(**given)) == count


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nodes": 7}, "--nodes 7, each with 1 core: partition debug has room for 6"),
        ({"gpus_per_node": 3}, "each with 1 core and 3 GPUs: partition debug has room for 0"),
        ({"partition": "small"}, "--partition small: this cluster has big, debug"),
    ],
)
def test_what_can_never_be_is_refused_with_what_there_is(given, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        slurm.node_count(slurm.machines_of(SINFO), Options(**given))


def test_a_cluster_without_a_default_partition_wants_one_named():
    with pytest.raises(UsageError, match="no default partition: say --partition big"):
        slurm.node_count([Machine("big", False, "n3", 64, 4)], Options())


def test_tasks_are_read_from_what_scontrol_shows():
    assert slurm.tasks_of(SHOWN) == [Task("FAILED", "77:0", "NonZeroExitCode"), Task("PENDING", "0:0", "Resources")]
    assert slurm.tasks_of("slurm_load_jobs error: Invalid job id specified") == []


@pytest.mark.parametrize(
    ("tasks", "said"),
    [
        ([Task("FAILED", "77:0", ""), Task("PENDING", "0:0", "")], None),
        ([Task("COMPLETING", "0:0", "")], None),
        (
            [Task("FAILED", "77:0", ""), Task("FAILED", "77:0", ""), Task("CANCELLED", "0:15", "")],
            "2 failed with 77, cancelled by signal 15",
        ),
        ([], "Slurm has forgotten them"),
        ([Task("FAILED", "0:53", "")] * 2, "Slurm's machines do not see /shared/run"),
    ],
)
def test_an_array_is_over_when_no_task_can_come_back(tasks, said):
    why = slurm.why_over(tasks, Path("/shared/run"))
    assert said in why if said else why == ""


def test_what_waits_is_told_with_slurms_reason():
    assert slurm.why_waiting(slurm.tasks_of(SHOWN)) == "Resources"
    assert slurm.why_waiting([Task("RUNNING", "0:0", "None"), Task("PENDING", "0:0", "Priority")]) == ""


@pytest.mark.parametrize("partition", ["a b", "a\n#SBATCH --uid=0", "$(id)", "a;b", ""])
def test_a_partition_that_is_no_name_does_not_get_into_a_script(partition):
    with pytest.raises(UsageError, match="--partition"):
        slurm.asked_lines(partition)


def test_a_folder_that_slurm_could_not_write_as_a_log_is_refused():
    assert slurm.log_of(Path("/a b/100%/%a.log")) == '"/a b/100%%/%a.log"'
    with pytest.raises(UsageError, match="choose --out DIR"):
        slurm.log_of(Path('/a"\n#SBATCH --uid=0/%a.log'))


@pytest.mark.parametrize("title", ["digits", "My Job: 2", "ünïcode", "x" * 200, "$(id)"])
def test_a_name_has_only_plain_letters(title):
    assert re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?", slurm.plain_name(title))


@pytest.fixture
def task(tmp_path):
    """Runs the nodes' script as Slurm would, with a `python` that ends with the given code; what was asked of Slurm."""

    def run(code, restarts=0, has_invite=True):
        bin_, asked = tmp_path / "it's bin", tmp_path / "asked"
        bin_.mkdir(exist_ok=True)
        invite = tmp_path / "$(touch injected) invite"
        if has_invite:
            invite.write_text("wide1_x")
        python, scontrol = bin_ / "python", bin_ / "scontrol"
        python.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
        scontrol.write_text(f'#!/bin/sh\necho "$@" >> "{asked}"\n')
        for file in (python, scontrol):
            file.chmod(0o755)
        text = slurm.nodes_script(Options(), 3, "wide-x", invite, tmp_path, Staying(patience_s=1, again=(69, 75)))
        text = re.sub(r"(?m)^python=.*", f'python="{python}"', text)
        names = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2", "SLURMD_NODENAME": "n1"}
        names |= {"SLURM_RESTART_COUNT": str(restarts), "PATH": f"{bin_}:/usr/bin:/bin"}
        done = subprocess.run(["bash"], input=text, env=names, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert not (tmp_path / "injected").exists()
        return done, asked.read_text() if asked.exists() else ""

    return run


@pytest.mark.parametrize("code", [0, 2, 76, 77, 1])
def test_a_task_that_is_over_ends_with_its_nodes_exit_code(task, code):
    done, asked = task(code)
    assert (done.returncode, asked) == (code, "")
    assert "--name n1-2" in done.stdout
    assert "wide1_" not in done.stdout


@pytest.mark.parametrize("code", [69, 75])
def test_a_task_that_should_try_again_asks_for_its_requeue_but_not_for_ever(task, code):
    assert task(code)[1] == "requeue 7_2\n"
    assert task(code, restarts=1000)[1] == "requeue 7_2\n"  # from the first time


def test_a_machine_that_does_not_see_the_run_says_so(task):
    done, asked = task(0, has_invite=False)
    assert (done.returncode, asked) == (2, "")
    assert "must be on storage that all machines share" in done.stderr


@pytest.mark.processes
def test_without_slurms_commands_one_line_says_so(tmp_path):
    code, _, err = wide("run", DIGITS, "--on", "slurm", cwd=tmp_path, PATH="/nowhere")
    assert (code, err.count("\n")) == (2, 1)
    assert "there is no sinfo here" in err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("Batch job submission failed: Invalid account or account/partition combination specified", 2),
        ("Unable to contact slurm controller (connect failure)", 69),
    ],
)
def test_what_sbatch_says_is_said_on_one_line(tmp_path, said, code):
    commands = {
        "sinfo": "echo 'debug*|n1|2|(null)'",
        "sbatch": f"echo 'sbatch: error: {said}' >&2; exit 1",
        "scancel": "exit 0",
    }
    for name, words in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{words}\n")
        (tmp_path / name).chmod(0o755)
    found, _, err = wide("run", DIGITS, "--on", "slurm", cwd=tmp_path, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert found == code
    assert err.splitlines()[-1] == f"wide: sbatch says: {said}"
