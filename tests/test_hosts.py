"""Three machines in network namespaces, each joined by the one pasted line: late, cut off, revoked; the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from benchmarks.namespaces import hosts, why_not
from tests.processes import environment, result_of, until, wide
from tests.test_joining import places
from tests.test_serve import invited, query

pytestmark = pytest.mark.processes

JOB = """
import os
import time

import examples.digits as digits
import torch
import wide


def data():
    if os.environ.get("NO_DATA"):
        raise FileNotFoundError("no digits here")
    return digits.training_set()


def loss(model, batch):
    time.sleep(0.1 if os.path.exists(os.environ["HOLD"]) else 0.002)  # the run ends when the test has seen enough
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


job = wide.Job(
    model=digits.job.model,
    dataset=data,
    loss=loss,
    optimizer=digits.job.optimizer,
    batches_per_step=16,
    steps=160,
)
"""


@pytest.fixture(scope="module")
def possible():
    if problem := why_not():
        pytest.skip(problem)


class Machine:
    """A host, its user's folders, and the command that was pasted there."""

    def __init__(self, host, folder, stack, **env):
        self.host, self._stack = host, stack
        self.folder = folder / host.name
        self.folder.mkdir()
        self._env = environment(**places(self.folder), HOLD=str(folder / "hold"), **env)

    def start(self, *words):
        command = [*self.host.prefix, sys.executable, "-m", "wide", *map(str, words)]
        self.process = subprocess.Popen(
            command, cwd=self.folder, env=self._env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._stack.callback(self._end)
        return self.process

    def _end(self):
        self.process.kill()
        self.process.communicate()

    def cable(self, state):
        subprocess.run(["ip", "-n", self.host.name, "link", "set", "cable", state], check=True)


def merged_by(folder, name):
    found = query(folder, f"SELECT count(*) FROM ledger JOIN nodes USING (node) WHERE name = '{name}'")
    return found[0][0] if found else 0


def test_three_machines_one_late_one_cut_off_one_revoked(possible, tmp_path):
    (tmp_path / "far.py").write_text(JOB)
    (hold := tmp_path / "hold").touch()
    with ExitStack() as stack:
        here, *others = stack.enter_context(hosts([None] * 4))
        pool = Machine(here, tmp_path, stack)
        serving = pool.start("serve", "../far.py", "--host", "0.0.0.0", "--out", "../here", "--json")
        where, invite = invited(serving)
        assert where == f"{here.address}:9433"
        one, two, three = (
            Machine(host, tmp_path, stack, **env) for host, env in zip(others, ({}, {"NO_DATA": "1"}, {}), strict=True)
        )
        for machine, name in ((one, "one"), (two, "two")):
            machine.start("join", invite, "--allow-code", "any", "--name", name)
        assert until(lambda: merged_by(tmp_path, "one") and merged_by(tmp_path, "two"))
        three.start("join", invite, "--allow-code", "any", "--name", "late")
        two.cable("down")
        assert until(lambda: merged_by(tmp_path, "late"))
        cut_at = merged_by(tmp_path, "two")
        time_is_up = time.monotonic() + 4.0  # longer than a node may be silent
        assert until(lambda: time.monotonic() > time_is_up)
        two.cable("up")
        assert until(lambda: merged_by(tmp_path, "two") > cut_at + 1)
        assert wide("revoke", "here", "late", cwd=tmp_path)[0] == 0
        assert three.process.wait(15) == 77
        hold.unlink()
        out, said = serving.communicate(timeout=90)
        assert serving.returncode == 0, said
        assert one.process.wait(20) == 0
        assert two.process.wait(20) == 0
        told = two.process.stderr.read()
    assert "answers with the right certificate" in told
    assert "the pool streams its data to this machine" in told
    assert "is silent" in said or "left: " in said
    result = json.loads(out)
    assert (
        result["weights_sha256"]
        == result_of("run", "far.py", "--nodes", 0, cwd=tmp_path, HOLD=str(hold))["weights_sha256"]
    )
    by = query(tmp_path, "SELECT machines.name, invite FROM visits JOIN machines ON machine = machines.id")
    assert {name for name, _ in by} == {"one", "two", "late"}


def test_what_is_not_encrypted_is_told_so_at_a_pool_for_others(possible, tmp_path):
    (tmp_path / "far.py").write_text(JOB)
    with ExitStack() as stack:
        here, there = stack.enter_context(hosts([None] * 2))
        serving = Machine(here, tmp_path, stack).start("serve", "../far.py", "--host", "0.0.0.0", "--out", "../here")
        invited(serving)
        token = (tmp_path / "here" / "token").read_text().strip()
        far = Machine(there, tmp_path, stack, WIDE_TOKEN=token)
        join = ("join", f"{here.address}:9433", "--job", "../far.py")
        _, said = far.start(*join).communicate(timeout=60)
        assert (far.process.returncode, "join with the pool's invite" in said) == (77, True), said
        _, said = far.start(*join, "--insecure").communicate(timeout=60)
        assert (far.process.returncode, "this pool encrypts what comes from other machines" in said) == (77, True), said
        assert until(lambda: ("not encrypted",) in query(tmp_path, "SELECT reason FROM rejects"))
        assert serving.poll() is None
