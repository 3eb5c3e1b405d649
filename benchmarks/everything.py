"""`everything`: all benchmarks, one after the other, written to docs/benchmarks.md: machine, commit, medians, and every
single round. Takes hours; `make bench` runs it. With --cases NAME,NAME only these; the others' pages stay.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/benchmarks.md"
NAMES = (
    *(
        "seed",
        "host",
        "stages",
        "peers",
        "scale",
        "lora",
        "checkpoints",
        "strategies",
        "network",
        "slowlink",
        "tls",
        "door",
    ),
    *("wire", "codecs", "sockets", "logging"),
)
DRAWN = {"host", "stages", "wire", "codecs", "sockets", "logging", "slowlink", "strategies", "network"}
HIDDEN = {"curves"}  # too long for a table
HEAD = """# Benchmarks

`make bench` wrote this page. Every side of a comparison alternates with the others in one run; figures are medians,
and every single round is shown, because the machine is shared and noisy. What helped, and what did not, is in
[findings.md](findings.md).
"""


def run(repeats: int, say: Callable[[str], None], cases: str = "") -> dict[str, Any]:
    chosen = cases.split(",") if cases else list(NAMES)
    pages, took = _pages(), {}
    for name in chosen:
        say(f"── {name} ──")
        began = time.monotonic()
        pages[name] = _page(name, repeats, say)
        took[name] = round(time.monotonic() - began)
        ordered = [pages[name] for name in NAMES if name in pages]
        PAGE.write_text("\n".join([HEAD, *ordered]), encoding="utf-8")
    return {"seconds": took, "page": str(PAGE.relative_to(ROOT))}


def _page(name: str, repeats: int, say: Callable[[str], None]) -> str:
    module = importlib.import_module(f"benchmarks.{name}")
    what = " ".join((module.__doc__ or "").split("\n\n")[0].split()).partition(": ")[2]
    command = [sys.executable, "-m", "benchmarks", name, "--repeats", str(repeats)]
    command += ["--plot"] if name in DRAWN and _can_draw() else []
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    assert process.stdout is not None
    rounds = []
    try:
        for line in process.stderr:
            rounds.append(line.rstrip())
            say(rounds[-1])
        output = process.stdout.read().strip().splitlines()
    finally:
        process.terminate()
        process.wait()
    if process.returncode or not output:
        body = f"Could not be run here: {rounds[-1] if rounds else 'no words'}\n"
    else:
        rows = _rows(json.loads(output[-1]))
        body = "| | median |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows)
    picture = f"\n![{name}](plots/{name}.png)\n" if name in DRAWN else ""
    shown = "\n".join(rounds)
    details = f"\n<details><summary>every round</summary>\n\n```\n{shown}\n```\n\n</details>\n"
    return f"## {name}\n\n{what[:1].upper()}{what[1:]}\n\n{_where(repeats)}\n\n{body}{picture}{details}"


def _rows(result: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(result, dict):
        return [
            row for key, value in result.items() if key not in HIDDEN for row in _rows(value, f"{prefix} {key}".strip())
        ]
    if isinstance(result, list):
        return [(prefix, ", ".join(_plain(value) for value in result))]
    return [(prefix, _plain(result))]


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _where(repeats: int) -> str:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    cpu = torch.backends.cpu.get_cpu_capability()
    machine = (
        f"{psutil.cpu_count()} cores ({platform.machine()}, {cpu}), {psutil.virtual_memory().total / 2**30:.0f} GiB"
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, {platform.system()}"
    return f"Commit {commit.stdout.strip()}, {machine}, {versions}; {repeats} repetitions."


def _pages() -> dict[str, str]:
    """As they are now, by name."""
    if not PAGE.exists():
        return {}
    parts = re.split(r"^(?=## )", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0].removeprefix("## "): part.rstrip("\n") + "\n" for part in parts}


def _can_draw() -> bool:
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return False
    return True
