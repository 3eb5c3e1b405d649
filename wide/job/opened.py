"""One data set for all processes of a machine: opened once, by the process that the others are forked from. Knows a
job's dataset(); knows nothing of nodes.

What is in memory is shared by a fork until somebody writes to it. What is not in memory is not shared well: a file has
one position for all, and threads do not survive. So a data set that has left any behind is for its own process only,
and whoever wants others must not fork them from this one.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import Any, NamedTuple

from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.loading import users_code
from wide.job.seeding import OwnGenerators, seed_everything

FILES, THREADS = "/proc/self/fd", "/proc/self/task"


class _Opened(NamedTuple):
    job: Job
    seed: int
    dataset: Any
    only_in: int | None  # a process; None: in all that are forked from it, too


_opened: _Opened | None = None


def dataset_of(job: Job, seed: int) -> Any:
    """The job's data set: opened ahead with this seed, or now."""
    if _opened is not None and _opened.job is job and _opened.seed == seed and _opened.only_in in (None, os.getpid()):
        return _opened.dataset
    OwnGenerators(dataset=job.dataset).rewind()
    seed_everything(seed)  # a random split, or random data, is the same on every machine
    with users_code("dataset() failed"):
        return job.dataset()


def open_ahead(job: Job, seed: int) -> bool:
    """May others be forked from this process now? They find what was opened. What fails, fails again for whoever needs
    it, who can tell. With several torch threads nothing is opened: they would not survive, and fewer may round
    differently.
    """
    global _opened
    if job.threads > 1 or not os.path.isdir(FILES):  # not every system tells what is open
        return True
    before = _belongings()
    try:
        dataset = dataset_of(job, seed)
    except TrainingFailed:
        return False
    is_shared = _belongings() <= before
    _opened = _Opened(job, seed, dataset, None if is_shared else os.getpid())
    gc.freeze()  # the collector would write to every page that is shared
    return is_shared


def _belongings() -> set[str]:
    """Open files and connections, and threads: Python's, and those of libraries."""
    found = {f"thread {number}" for number in os.listdir(THREADS)}
    for number in os.listdir(FILES):
        with contextlib.suppress(OSError):  # that of the listing itself
            found.add(f"{number} {os.readlink(f'{FILES}/{number}')}")
    return found
