"""`slowlink`: one node behind 20 Mbit/s, 1.13 M parameters, synchronous: what each `--compress` makes of it.

The first step, in which nothing is known of the node and it is given one batch, is left out. Then the digits over
the same link with `--compress auto`, to the example's end.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from statistics import mean, median
from typing import Any

from benchmarks.namespaces import Host, hosts, why_not
from benchmarks.pools import Served

MBIT = 20.0
SECONDS = 20.0
WISHES = ("none", "lossless", "auto")


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    if problem := why_not():
        raise SystemExit(problem)
    rates: dict[str, list[float]] = {wish: [] for wish in WISHES}
    with hosts([None, MBIT]) as (here, there):
        for i in range(repeats):
            for wish in WISHES:
                result = pool(here, [there], "benchmarks/wide_job.py", wish, "--seconds", str(SECONDS))
                rates[wish].append(1 / mean(result["step_seconds"][1:]))
            say(f"round {i + 1}, steps/s: " + " · ".join(f"{wish} {rates[wish][-1]:.2f}" for wish in WISHES))
        digits = pool(here, [there], "examples/digits.py", "auto")
    say(f"digits with --compress auto: accuracy {digits['metrics']['accuracy']:.3f}")
    return {
        "mbit": MBIT,
        "steps_per_s": {wish: median(values) for wish, values in rates.items()},
        "lossless": median(a / b for a, b in zip(rates["lossless"], rates["none"], strict=True)),
        "auto": median(a / b for a, b in zip(rates["auto"], rates["none"], strict=True)),
        "digits_accuracy": digits["metrics"]["accuracy"],
    }


def pool(here: Host, nodes: list[Host], job: str, compress: str, *options: str) -> dict[str, Any]:
    """A coordinator here, a node on each of the others; the coordinator's result."""
    options = ("--compress", compress, *options)
    with tempfile.TemporaryDirectory() as folder, closing(Served(folder, here, job, *options)) as served:
        for host in nodes:
            served.join(host, job)
        return served.result()
