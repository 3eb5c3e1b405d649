"""Runs stopped by one to three signals at random moments: no traceback, a true last line, and, where training had
begun, a checkpoint that goes on to the bits of the run that nobody disturbed.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

JOB = """
import time, torch, wide
from torch import nn
def slow(model, batch):
    time.sleep(0.004)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])
def data():
    x = torch.randn(512, 6)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())
job = wide.Job(model=lambda: nn.Linear(6, 2), dataset=data, loss=slow, batch_size=8, batches_per_step=4, steps=400,
               optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
"""
LONGEST_S, LONGEST_GAP_S, SETTLE_S = 10.0, 0.3, 60.0
STEP = re.compile(r"interrupted after step (\d+); go on with --resume (\S+)$")


def stop_many(runs: int, seed: int, nodes: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    """How it went; `problems` has a line for each run that did not end as it should."""
    chance = random.Random(seed)
    problems, begun, before, done = [], 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "stopped.py")
        job.write_text(JOB)
        undisturbed = _result(_run(job, 0, "--out", "whole"))
        for number in range(runs):
            count = chance.choice(nodes)
            code, last, errors = _stopped(job, count, f"run{number}", chance)
            match = STEP.search(last)
            problem = _problem(code, last, errors, bool(match))
            if match:
                begun += 1
                problem = problem or _resumes(job, count, match[2], undisturbed)
            before += "before training began" in last
            done += code == 0
            if problem:
                problems.append(f"run {number}, {count} nodes: {problem}: {errors[-400:]!r}")
                print(problems[-1], file=sys.stderr)
    return {"runs": runs, "before_training": before, "begun": begun, "done_anyway": done, "problems": problems}


def _run(job: Path, nodes: int, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "wide", "run", job.name, "--nodes", str(nodes), "--json", *options]
    return subprocess.Popen(
        command, cwd=job.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def _result(process: subprocess.Popen[str]) -> str:
    out, errors = process.communicate(timeout=SETTLE_S)
    if process.returncode:
        return errors[-300:]
    digest: str = json.loads(out)["weights_sha256"]
    return digest


def _stopped(job: Path, nodes: int, name: str, chance: random.Random) -> tuple[int, str, str]:
    process = _run(job, nodes, "--out", name)
    time.sleep(chance.uniform(0.0, 1.0) ** 2 * LONGEST_S)
    for _ in range(chance.randint(1, 3)):
        if process.poll() is None:
            _send(process.pid, chance)
            time.sleep(chance.uniform(0.0, LONGEST_GAP_S))
    try:
        _, errors = process.communicate(timeout=SETTLE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        return -1, "", f"did not end: {errors}"
    return process.returncode, errors.rstrip().rpartition("\n")[2], errors


def _send(pid: int, chance: random.Random) -> None:
    """To the command alone, or, as Ctrl-C and `timeout` do, to all of its group."""
    number = chance.choice((signal.SIGINT, signal.SIGTERM))
    if chance.random() < 0.5:
        os.killpg(pid, number)
    else:
        os.kill(pid, number)


def _problem(code: int, last: str, errors: str, has_begun: bool) -> str:
    if "Traceback" in errors and "<frozen" not in errors:
        return "a traceback"
    if code in (0, -signal.SIGTERM, -signal.SIGINT) or (code == 1 and "<frozen" in errors):
        return ""  # done already; or Python itself had not begun to run our first line
    if code not in (130, 143):
        return f"exit code {code}"
    return "" if has_begun or "interrupted before training began" in last else f"no true last line ({last!r})"


def _resumes(job: Path, nodes: int, folder: str, undisturbed: str) -> str:
    found = _result(_run(job, nodes, "--resume", folder))
    return "" if found == undisturbed else f"went on to {found} instead of {undisturbed}"


if __name__ == "__main__":
    print(json.dumps(stop_many(int(sys.argv[1]) if len(sys.argv) > 1 else 200, seed=1)))
