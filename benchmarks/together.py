"""So many processes at once, each of which says how quick it was."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from typing import Any, TypeAlias

Counts: TypeAlias = "multiprocessing.SimpleQueue[float]"


def together(nodes: int, job: str, work: Callable[..., None], *more: Any) -> float:
    """The sum of what `work(rank, barrier, counts, *more)` puts into `counts`; `job` is loaded once for all of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", job])
    barrier: Barrier = context.Barrier(nodes)
    counts: Counts = context.SimpleQueue()
    processes = [context.Process(target=work, args=(rank, barrier, counts, *more)) for rank in range(nodes)]
    try:
        for process in processes:
            process.start()
        total = sum(counts.get() for _ in processes)
        for process in processes:
            process.join(30.0)
        return total
    finally:
        for process in processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def free_port() -> Iterator[int]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    yield port
