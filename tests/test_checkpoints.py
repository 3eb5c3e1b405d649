"""Checkpoints under SIGKILL: whenever it comes, the run goes on from there, to the same bits."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from faults.kills import NODES
from tests.processes import ROOT, environment

pytestmark = pytest.mark.processes


def test_a_run_killed_at_any_moment_is_resumed_to_the_same_bits():
    command = [sys.executable, "-m", "benchmarks", "kills", "--times", "2", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["failures"] == []
    assert result["kills"] == result["resumed"] == 2 * len(NODES)


def test_no_moment_of_a_coordinator_is_left_out():
    words = "".join(path.read_text() for path in (ROOT / "wide").rglob("*.py"))
    assert {moment for moment in re.findall(r'reach\("(.+?)"\)', words) if not moment.startswith("node.")} == set(NODES)
