"""`wide replay` and `wide blame`: does what a run has merged follow from its batches? Knows a run's past, and how to
compute it again; says what differs, whose it was, and from where to go on.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from wide.dashboard.progress import counted
from wide.errors import UsageError
from wide.job.definition import Job
from wide.job.loading import load
from wide.job.settings import build
from wide.launch.past import Past, Row
from wide.launch.recompute import Recompute
from wide.launch.verdict import UNCLEAR, UPDATE, WEIGHTS, Fault, Verdict, verdict
from wide.store import checkpoint
from wide.store.checkpoint import Checkpoint

TELL_S = 10.0


def replay(run: str | Path, step: int, is_forced: bool = False) -> Verdict:
    """Does that step follow from the nearest checkpoint before it?"""
    with _opened(run, is_forced) as (past, job):
        if not 0 <= step < past.steps:
            raise UsageError(f"--step {step}: {past.folder} has steps 0 to {past.steps - 1}")
        its = next(past.rows(step, step), [])
        if not its or any(row.digest is None for row in its):
            raise UsageError(f"--step {step}: the ledger has no digests of it ({past.why_none()})")
        near = [place for place in past.checkpoints if place[0] <= step]
        fault, compared, first = _follow(past, job, near[-1][1] if near else None, step, not is_forced)
        name = "the beginning" if not near else f"the checkpoint of step {first}"
        steps = f"step {step} follows" if first == step else f"steps {first} to {step} follow"
        good = f"{steps} from {name}: {counted(compared, 'merged update')} computed again, the same to the bit"
        return verdict("wide.replay/1", past, fault, (first, step, compared), good)


def blame(run: str | Path, since: int | None = None, is_forced: bool = False) -> Verdict:
    """The first step that does not follow from those before it, and whose updates were in it."""
    with _opened(run, is_forced) as (past, job):
        path = _begin_at(past, since)
        last = past.steps - 1
        fault, compared, first = _follow(past, job, path, last, not is_forced)
        if compared:
            count = counted(compared, "merged update")
            good = f"steps {first} to {last} follow: {count} computed again, the same to the bit"
        else:
            good = f"there is nothing to compare after step {first}"
        if first:
            good += f"; what was before step {first} was not looked at"
        return verdict("wide.blame/1", past, fault, (first, last, compared), good)


def _begin_at(past: Past, since: int | None) -> Path | None:
    """From the beginning, if the ledger still has all digests, else from the oldest checkpoint since when it has; or
    from the newest before that step. None: from the beginning.
    """
    known = past.first_compared
    if since is not None:
        near = [path for step, path in past.checkpoints if step <= since]
        return near[-1] if near else None
    if not known:
        return None
    later = [path for step, path in past.checkpoints if step >= known]
    if not later:
        raise UsageError(
            f"the ledger has digests from step {known} on ({past.why_none()}), and no checkpoint since then is kept: "
            "there is nothing to begin with"
        )
    return later[0]


@contextlib.contextmanager
def _opened(run: str | Path, is_forced: bool) -> Iterator[tuple[Past, Job]]:
    """What the user's code prints is not for stdout."""
    with Past(run) as past, contextlib.redirect_stdout(sys.stderr):
        past.check_digests()
        spec, changed = past.spec, past.changed()
        if changed and not is_forced:
            raise UsageError(f"{changed}: put it back, or say --force to compute with what is there now")
        job = load(spec)
        if job.own_loop is not None:
            raise UsageError(f"{past.folder}: a loop in a script computed this, which nobody else can run again")
        here, before = build(torch.device("cpu"), job.threads), past.data.get("build")
        if before and before != here and not is_forced:
            raise UsageError(
                f"this run was computed with {before}, and this is {here}: its bits would differ, whoever was right; "
                "or say --force"
            )
        threads = torch.get_num_threads()
        torch.set_num_threads(job.threads)  # as the run's processes had it: sums round differently with others
        try:
            yield past, job
        finally:
            torch.set_num_threads(threads)


def _follow(past: Past, job: Job, path: Path | None, last: int, checks: bool) -> tuple[Fault | None, int, int]:
    """Compute from that checkpoint to that step: where it stops to follow, how many rows were compared, and the first
    step.
    """
    again, compared = Recompute(job, past, _read(path), checks), 0
    first, tell = again.step, _teller(last)
    saved = {step: place for step, place in past.checkpoints if step > first}
    for rows in past.rows(first, last):
        if rows[0].step != again.step:
            break
        past.check_exact(rows)
        differ = again.compare(rows)
        compared += sum(row.digest is not None for row in rows)
        if differ:
            return Fault(kind_of(differ, rows, again.step == first), again.step, differ), compared, first
        if sum(row.last - row.first + 1 for row in rows) < again.batches(again.step) and again.step == last:
            return None, compared, first  # the run is in the middle of it
        again.make(rows)
        if again.step in saved and (theirs := past.sha256(saved[again.step])) and theirs != again.sha256():
            return Fault(WEIGHTS, again.step - 1, []), compared, first
        tell(again.step)
    if again.step <= last:
        raise UsageError(f"step {again.step} is not in the ledger with its rows ({past.why_none()})")
    return None, compared, first


def kind_of(differ: Sequence[Row], rows: Sequence[Row], is_first: bool) -> str:
    """Where all differ at once, from several nodes, what they have in common is wrong: the weights they were sent."""
    if len(differ) < len(rows):
        return UPDATE
    if is_first or len({row.node for row in rows}) == 1:
        return UNCLEAR
    return WEIGHTS


def _read(path: Path | None) -> Checkpoint | None:
    try:
        return checkpoint.read(path) if path is not None else None
    except checkpoint.Broken as error:
        raise UsageError(f"{path} cannot be used: {error}") from None


def _teller(last: int) -> Callable[[int], None]:
    """A word now and then, for whoever waits."""
    told_at = time.monotonic()

    def tell(step: int) -> None:
        nonlocal told_at
        if (now := time.monotonic()) - told_at >= TELL_S:
            told_at = now
            print(f"wide: step {step} of {last + 1}; until there all follow", file=sys.stderr, flush=True)

    return tell
