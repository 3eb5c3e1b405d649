"""`kills`: a run is killed at each named moment (wide/failpoint.py), many times each, and resumed. Is it the same run?

The same hash as without a kill, and each batch in the ledger once. All runs are forked from one warm process, so that
a kill costs tenths of a second.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

from faults.chaos import BATCHES_PER_EPOCH, BATCHES_PER_STEP
from faults.chaos_verdict import read_ledger
from wide.config import resolve
from wide.launch.processes import CONTEXT, Children, warm_up
from wide.launch.result import Result, from_json

STEPS = 10
SAVE_EVERY_S = 0.01
LIMIT_S = 60.0
NODES = {  # that a run has: some moments are a pool's
    "checkpoint.write": 0,
    "checkpoint.after_model": 0,
    "checkpoint.after_optimizer": 0,
    "checkpoint.before_rename": 0,
    "checkpoint.after_rename": 0,
    "checkpoint.after_latest": 0,
    "checkpoint.before_removal": 0,
    "run.db.commit": 0,
    "merge.before_answer": 1,
    "version.made": 1,
    "memory.share": 1,
}
MOST_REACHED = {"merge.before_answer": 14, "version.made": STEPS, "memory.share": 1}
REACHED = 8  # about how often the others are, in a run this short


def run(repeats: int, say: Callable[[str], None], times: int = 50, seed: int = 0) -> dict[str, Any]:
    """`times` kills at each moment, at a random visit to it; `repeats` does not count."""
    draw = random.Random(seed)
    failures: list[str] = []
    kills = 0
    with _workshop() as (job, folder):
        expected = _finish(job, folder / "undisturbed", 0)
        assert expected is not None, "the undisturbed run ended early"
        for moment, nodes in NODES.items():
            visits = []
            for i in range(times):
                out = folder / f"{moment}-{i}"
                visits.append(_kill(job, out, moment, draw.randint(1, MOST_REACHED.get(moment, REACHED))))
                if problem := _problem(job, out, nodes, expected.weights_sha256):
                    failures.append(f"{moment}, visit {visits[-1]}: {problem}")
                else:
                    shutil.rmtree(out)
            kills += times
            say(f"{moment:<28} {times} kills, at visits {min(visits)} to {max(visits)}")
        for failure in failures:
            say(failure)
    return {"failpoints": len(NODES), "kills": kills, "resumed": kills - len(failures), "failures": failures}


@contextlib.contextmanager
def _workshop() -> Iterator[tuple[Path, Path]]:
    """A copy of the job, away from our logging.py, and a place for runs."""
    with tempfile.TemporaryDirectory(prefix="wide-kills-") as name:
        job = Path(shutil.copy(Path(__file__).with_name("chaos_job.py"), name))
        warm_up(str(job))
        yield job, Path(name)


def _kill(job: Path, out: Path, moment: str, visit: int) -> int:
    """Begin a run that dies at this visit, or at an earlier one if it is over before. Returns which it was."""
    while _finish(job, out, NODES[moment], f"{moment}=kill:{visit}") is not None:
        shutil.rmtree(out)
        if visit == 1:
            raise SystemExit(f"{moment} is never reached")
        visit = (visit + 1) // 2
    return visit


def _problem(job: Path, out: Path, nodes: int, sha256: str) -> str:
    """Resume it; what is wrong with what comes out, if anything."""
    try:
        result = _finish(job, out, nodes)
    except SystemExit as error:
        return str(error)
    if result is None:
        return "the resumed run was killed"
    ledger = read_ledger(out, BATCHES_PER_STEP, BATCHES_PER_EPOCH)
    if (ledger.steps, ledger.lost, ledger.doubled) != (STEPS, 0, 0):
        return f"{ledger}"
    return "" if result.weights_sha256 == ledger.sha256 == sha256 else "another hash"


def _finish(job: Path, out: Path, nodes: int, failpoints: str = "") -> Result | None:
    """Begin a run, or go on with it. None, if it was killed."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    arguments = (str(job), str(out), nodes, failpoints, theirs)
    process = Children().start("faults.kills", "attempt", *arguments, may_have_children=True)
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            raise SystemExit(f"it hangs: nothing within {LIMIT_S:g} s")
        return from_json(ours.recv_bytes())
    except EOFError:
        process.join()
        if process.exitcode != -signal.SIGKILL:
            raise SystemExit(f"it ended with {process.exitcode}") from None
        return None
    finally:
        process.kill()
        process.join()
        ours.close()


def attempt(spec: str, out: str, nodes: int, failpoints: str, parent: Pipe) -> None:
    """In a process of its own: one run, to its end or to the moment at which it dies."""
    from wide import failpoint
    from wide.job.loading import load
    from wide.launch.crew import Crew, LocalNodes
    from wide.launch.training import Origin, Training

    failpoint.arm(failpoints)
    given = {"out": out, "resume": "auto", "steps": STEPS, "checkpoint_every": SAVE_EVERY_S, "keep": 1, "log": "silent"}
    options = resolve(given, {})
    training = Training(load(spec), "kills", options, Origin(["kills"]))
    if nodes:
        with contextlib.closing(Crew(spec, options, LocalNodes(spec, options, nodes), evaluates=False)) as crew:
            result = training.train(lambda: crew)
    else:
        result = training.train(None)
    parent.send_bytes(result.to_json().encode())
