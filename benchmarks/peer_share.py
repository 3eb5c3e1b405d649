"""What the runners of `peers` share: a worker's share of the training, how time is taken, processes that end with their
runner, and the line it prints. Knows torch, and no framework.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from statistics import fmean

import torch
from torch import Tensor, nn

from benchmarks import host_model

WARM_S = 1.5  # which do not count, as in `host`
FEW = 5  # updates whose losses make the first and the last one
Result = dict[str, float]


class Share:
    """The small model, and the batches that are this worker's: one of every `nodes`."""

    def __init__(self, rank: int, nodes: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)  # the same weights, and the same order of batches, everywhere
        self.model = host_model.model(host_model.WIDTHS["small"])
        self.parameters = list(self.model.parameters())
        self._points, self._labels = host_model.points().tensors
        self._batches = torch.split(torch.randperm(len(self._points)), host_model.BATCH_SIZE)[rank::nodes]
        self._criterion = nn.CrossEntropyLoss()

    def loss(self, number: int, model: nn.Module | None = None) -> Tensor:
        """The loss of this worker's batch of that number; `model`: its model, wrapped by a framework."""
        ids = self._batches[number % len(self._batches)]
        loss: Tensor = self._criterion((model or self.model)(self._points[ids]), self._labels[ids])
        return loss


def measure(step: Callable[[int], float], seconds: float, nodes: int) -> Result:
    """Makes updates, warm ones first: `step` makes the one of that number, of one batch per node, and gives a loss."""
    losses: list[float] = []
    start = time.perf_counter()
    warm = 0, start
    for number in itertools.count():
        losses.append(step(number))
        now = time.perf_counter()
        if now - start < WARM_S or number == 0:
            warm = number, now
        elif now - warm[1] >= seconds:
            rate = nodes * (number - warm[0]) / (now - warm[1])
            return {"batches_per_s": rate, "loss_first": fmean(losses[:FEW]), "loss_last": fmean(losses[-FEW:])}
    raise AssertionError("counting never ends")


@contextlib.contextmanager
def workers(work: Callable[..., Result], nodes: int, *more: object) -> Iterator[Callable[[], Result]]:
    """`work(rank, nodes, *more)` in so many processes; gives a function that waits for the first one's result."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "benchmarks.host_model"])
    answers, theirs = context.Pipe(duplex=False)
    processes = [context.Process(target=_work, args=(theirs, work, rank, nodes, *more)) for rank in range(nodes)]

    def answer() -> Result:
        found = _first(answers, *(process.sentinel for process in processes))
        if isinstance(found, str):
            raise RuntimeError(f"a worker: {found}")
        return found

    try:
        for process in processes:
            process.start()
        yield answer
    finally:
        for process in processes:
            if process.pid:
                process.kill()


def _work(answers: Connection, work: Callable[..., Result], *arguments: object) -> None:
    try:
        answers.send(work(*arguments))
    except Exception as error:  # whatever a framework raises: that is the answer, in one line
        answers.send(" ".join(f"{type(error).__name__}: {error}".split()))


def _first(answers: Connection, *sentinels: int) -> Result | str:
    wait([answers, *sentinels])
    found: Result | str = answers.recv() if answers.poll() else "a process ended without a word"
    return found


def main(run: Callable[[float, int], Result]) -> None:
    """`SECONDS NODES` on the command line, the result as the last line on stdout. `run` has a process of its own, so
    that nothing which a framework starts outlives this one.
    """
    signal.signal(signal.SIGTERM, _stop)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    context = multiprocessing.get_context("fork")
    answers, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, run, float(sys.argv[1]), int(sys.argv[2])))
    process.start()
    group = process.pid or 0
    os.setpgid(group, group)
    try:
        found = _first(answers, process.sentinel)
    finally:
        process.terminate()  # which lets it clean up
        process.join(10.0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    if isinstance(found, str):
        sys.exit(found)
    print(json.dumps(found))


def _stop(number: int, frame: object) -> None:
    sys.exit(128 + number)  # what was begun is cleaned up
