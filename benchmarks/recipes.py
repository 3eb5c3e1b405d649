"""`recipes`: every job of docs/jobs.md in every way that a job can be run.

With 0, 1 and 3 nodes, with data that is streamed, and stopped in the middle and resumed with another number of nodes:
always the same weights. With the strategies that promise no equal bits: a finite loss. No measurements.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import wide
from wide.errors import WideError
from wide.job.seeding import seed_everything

DOCUMENT = Path(__file__).parents[1] / "docs" / "jobs.md"
EXACT: dict[str, dict[str, Any]] = {
    "0 nodes": {"nodes": 0},
    "1 node": {"nodes": 1},
    "3 nodes": {"nodes": 3},
    "streamed": {"nodes": 2, "data": "stream"},
}
OTHERS: dict[str, dict[str, Any]] = {name: {"nodes": 2, "strategy": name} for name in ("async", "local")}


class Recipe(NamedTuple):
    """A heading, and the whole file that it makes: the document's first block, and its own."""

    name: str
    source: str


def recipes() -> list[Recipe]:
    first, *others = re.split(r"^## ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (preamble,) = _blocks(first)
    found = [(text.partition("\n")[0].strip(), _blocks(text)) for text in others]
    return [Recipe(name, f"{preamble}\n\n{block}") for name, (block,) in found]


def _blocks(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def job_of(recipe: Recipe, folder: Path) -> wide.Job:
    """As if the file were a script: its functions reach node processes by value. What it writes is in the folder."""
    file = folder / "job.py"
    file.write_text(recipe.source, encoding="utf-8")
    names: dict[str, Any] = {"__name__": "recipe", "__file__": str(file)}
    with contextlib.chdir(folder):
        seed_everything(0)
        exec(compile(recipe.source, file, "exec"), names)
    job: wide.Job = names["job"]
    return job


def run(repeats: int, say: Callable[[str], None], cases: str = "") -> dict[str, Any]:
    """`cases`: only recipes whose name has this in it."""
    known = [recipe for recipe in recipes() if cases.lower() in recipe.name.lower()]
    width = max(len(recipe.name) for recipe in known)
    say("  ".join([" " * width, *(f"{name:9}" for name in (*EXACT, "resumed", *OTHERS))]))
    exact, finite = 0, 0
    problems: dict[str, str] = {}
    for recipe in known:
        with tempfile.TemporaryDirectory() as folder:
            said = _tried(recipe, Path(folder))
        hashes = [said[name] for name in (*EXACT, "resumed")]
        exact += len(set(hashes)) == 1 and hashes[0] != "failed"
        finite += all(said[name] == "finite" for name in OTHERS)
        problems |= {f"{recipe.name}, {kind}": words for kind, words in said["problems"].items()}
        say("  ".join([f"{recipe.name:{width}}", *(f"{said[name]:9}" for name in (*EXACT, "resumed", *OTHERS))]))
    for where, words in problems.items():
        say(f"{where}: {words}")
    return {"recipes": len(known), "one_hash": exact, "strategies": finite, "problems": problems}


def _tried(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """By the way in which it was run: the weights' hash, or whether the loss is finite; and what went wrong."""
    job = job_of(recipe, folder)
    said: dict[str, Any] = {"problems": {}}
    for name, how in (EXACT | {"resumed": {}} | OTHERS).items():
        try:
            result = _run(job, folder / name, **how) if how else _resumed(recipe, job, folder / name)
            said[name] = _finite(result) if name in OTHERS else result.weights_sha256[:8]
        except WideError as error:
            said[name], said["problems"][name] = "failed", str(error)
    return said


def _resumed(recipe: Recipe, job: wide.Job, folder: Path) -> wide.Result:
    """Half of it with 3 nodes, the rest with 1. Where the run's length is part of the result, it is stopped halfway."""
    half = max(1, (job.steps or 8) // 4)
    if "progress" in recipe.source:
        stops = msgspec.structs.replace(job, evaluate_every=half, stop_when=lambda evaluations: True)
        _run(stops, folder, nodes=3)
    else:
        _run(job, folder, nodes=3, steps=half)
    return wide.run(job, resume=folder, nodes=1, steps=job.steps, epochs=job.epochs, log="silent")


def _run(job: wide.Job, folder: Path, **how: Any) -> wide.Result:
    return wide.run(job, out=folder, log="silent", **how)


def _finite(result: wide.Result) -> str:
    return "finite" if result.loss_last is not None and math.isfinite(result.loss_last) else "not finite"
