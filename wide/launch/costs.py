"""What a lower instruction set costs on this machine: a small net's steps, timed once with each and remembered.
Does not import torch: the clock runs in processes of their own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys

from wide.job import isa
from wide.job.isa import Isa
from wide.launch.places import cache_folder, private

FILE = "instructions.json"
PATIENCE_S = 60.0
TIMED = """
import time, torch
from torch import nn
torch.set_num_threads(1)
net = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.GELU(), nn.Linear(256, 64))
steps, x = torch.optim.AdamW(net.parameters()), torch.ones(64, 256)
def step():
    net(x).softmax(1).square().mean().backward()
    steps.step()
times, end = [], time.perf_counter() + 0.2
while time.perf_counter() < end:
    began = time.perf_counter()
    step()
    times.append(time.perf_counter() - began)
print(min(times))
"""


def words(used: Isa) -> str:
    """`avx2 instead of avx512 costs about 7 % here`; empty, if nothing is lost, or that could not be found out."""
    best = isa.best_here()
    if used.how != isa.FIXED or used == best:
        return ""
    mine, theirs = step_s(best), step_s(used)
    if mine is None or theirs is None:
        return ""
    cost = 1 - mine / theirs
    said = f"about {100 * cost:.0f} % of a small net's speed" if cost > 0.02 else "next to nothing"
    return f"{used.name} instead of {best.name} costs {said} here"


def step_s(used: Isa) -> float | None:
    """One step with this set, by the clock; or as it was when this was asked before."""
    key = f"{used} on {isa.cpu()}, torch {importlib.metadata.version('torch')}"
    known = _known()
    if key not in known:
        environment = {name: value for name, value in os.environ.items() if name not in isa.VARIABLES} | used.variables
        command = [sys.executable, "-c", TIMED]
        try:
            quiet = subprocess.DEVNULL
            known[key] = float(subprocess.check_output(command, env=environment, stderr=quiet, timeout=PATIENCE_S))
        except (OSError, ValueError, subprocess.SubprocessError):
            return None
        with contextlib.suppress(OSError):
            (private(cache_folder()) / FILE).write_text(json.dumps(known))
    return known[key]


def _known() -> dict[str, float]:
    try:
        found = json.loads((cache_folder() / FILE).read_text())
        return {str(key): float(value) for key, value in found.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
