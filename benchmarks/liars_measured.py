"""The other parts of `liars`: how long a seldom liar goes unnoticed, what being careful costs, and whether honest nodes
are left alone.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.host import WARM_S
from benchmarks.liars_pool import JOBS, ROOT, Pool

SHARE = 0.01  # of a liar's leases in which a bit is flipped
AUDITS = (0.1, 0.02, 0.01)
MOST_TIMES = 6.0  # as many leases as are to be expected: only one liar in four hundred gets so far
CASES = (("seed_job.py:ten", 4, 10), ("host_job.py:small_2", 2, 2))  # job, nodes, batches for an update
SECONDS = 5.0
CHECKED, UNCHECKED = ["--audit", "0.02"], ["--audit", "0"]
SLOWER = (1.0, 1.0, 1.5, 4.0)  # than the quickest node

Say = Callable[[str], None]


def detection(repeats: int, say: Say) -> dict[str, Any]:
    """The liar's leases until it was named, against 1 / (share · audit): by chance, an audit must meet a lie. Canaries,
    and leases in which the liar itself is the second one, find it sooner.
    """
    found: dict[str, Any] = {}
    for audit in AUDITS:
        expected, leases, lies, missed = 1 / (SHARE * audit), [], [], 0
        for seed in range(repeats):
            is_named, handed_in, lied = _until_named(audit, seed, MOST_TIMES * expected)
            missed += not is_named
            leases.append(handed_in)
            lies.append(lied)
            verdict = "named" if is_named else "not named"
            say(f"audit {audit:g}: {verdict} after {handed_in} leases, {lied} lies (expected {expected:.0f})")
        row = {"expected": expected, "mean": mean(leases), "median": median(leases), "lies": mean(lies)}
        found[f"{audit:g}"] = row | {"leases": leases, "missed": missed}
    return found


def _until_named(audit: float, seed: int, most_leases: float) -> tuple[bool, int, int]:
    options = ["--strategy", "sync", "--audit", str(audit)]
    with tempfile.TemporaryDirectory() as folder, Pool(folder, f"{JOBS}:small", *options) as pool:
        pool.lie("bitflip", seed, SHARE)
        for number in range(3):
            pool.join(f"honest-{number + 1}")
        outcome = pool.outcome(most_leases)
        if outcome.code == 2:
            raise SystemExit(pool.said())
        return outcome.is_found, outcome.leases, outcome.lies


def speeds(repeats: int, say: Say, against: str = "") -> dict[str, float]:
    """batches/s of pools that are careful over those that are not; `against`: another tree of this project, as it was
    before it could be. Medians of the ratios to the runs before and after.
    """
    found = {}
    for job, nodes, per_update in CASES:

        def careful() -> float:
            return _speed(ROOT, job, nodes, per_update, CHECKED)  # noqa: B023

        def careless() -> float:
            return _speed(Path(against) if against else ROOT, job, nodes, per_update, UNCHECKED)  # noqa: B023

        ratios, before = [], careless()
        for i in range(repeats):
            checked, after = careful(), careless()
            ratios.append(2 * checked / (before + after))
            say(f"{job}, {nodes} nodes, round {i + 1}: {after:.4g} batches/s without, ratio {ratios[-1]:.3f}")
            before = after
        found[f"{job.partition('_')[0]}_{nodes}"] = median(ratios)
    return found


def _speed(tree: Path, job: str, nodes: int, per_update: int, options: list[str]) -> float:
    """Of one `wide run`, once it is warm. A tree that knows nothing of --audit is as careless as can be."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    wide = [sys.executable, "-m", "wide", "run"]
    words = subprocess.run([*wide, "--help"], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [*wide, f"{tree}/benchmarks/{job}", "--nodes", str(nodes), "--seconds", str(SECONDS + WARM_S)]
        command += [
            "--log",
            "silent",
            "--json",
            "--out",
            f"{folder}/run",
            *(options if "--audit" in words.stdout else []),
        ]
        subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.DEVNULL, check=True)
        with closing(sqlite3.connect(f"{folder}/run/run.db")) as db:
            times: list[float] = [at for (at,) in db.execute("SELECT merged_at FROM steps ORDER BY step")]
    warm = [at for at in times if at - times[0] >= WARM_S]
    return (len(warm) - 1) * per_update / (warm[-1] - warm[0])


def honest_runs(runs: int, strategies: list[str], say: Say, audit: float | None = None) -> dict[str, Any]:
    """Four honest nodes, one of them four times slower, whose losses leap in the middle of the run: nobody may be
    quarantined or named.
    """
    wronged, doubted, failed, accuracies = 0, 0, 0, []
    for i in range(runs):
        strategy = strategies[i % len(strategies)]
        options = ["--strategy", strategy, "--seed", str(i), *(["--audit", str(audit)] if audit is not None else [])]
        with tempfile.TemporaryDirectory() as folder, Pool(folder, f"{JOBS}:spiked", *options) as pool:
            for number, slower in enumerate(SLOWER):
                pool.join(f"honest-{number + 1}", slower)
            outcome = pool.outcome()
            leap = pool.leap()
        wronged += len(outcome.wronged)
        doubted += sum(kinds.count("doubted") for kinds in outcome.told.values())
        failed += outcome.code != 0
        accuracies.append(outcome.accuracy)
        told = outcome.told or "nothing"
        say(f"run {i + 1}, {strategy}: the loss leapt {leap:.0f}-fold; told: {told}; accuracy {outcome.accuracy}")
    return {"runs": runs, "wronged": wronged, "doubted": doubted, "failed": failed, "accuracies": accuracies}
