"""Batches fetched ahead by processes beside the node. Knows which were asked for and who fetches them; what a batch is,
and when it is computed, others know.

Bits do not depend on it: a worker seeds each batch as the node would, and answers with exactly what it got. Nor does
memory: whatever was asked for, so many batches are there or on their way as workers can be kept busy with.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

import torch

from wide.errors import TrainingFailed
from wide.job.samples import Samples
from wide.node.parcel import Parcel, receive, unwrap
from wide.node.worker import ARE_POSSIBLE, Failed, NotSent, Nursery, Worker, start
from wide.telemetry.log import log

AHEAD = 3  # batches for each worker: one that is here, one that it fetches, one that it will
MOST_DEATHS = 3  # over one batch
LOOK_S = 0.1
GRACE_S = 0.5  # for a worker to end by itself
MEMORY = "most likely this machine's memory is full: use fewer workers, or workers=0"

Key = Hashable


@dataclass(slots=True, eq=False)
class Request:
    key: Key
    ids: torch.Tensor
    where: tuple[Any, ...]
    deaths: int = 0
    is_wanted: bool = True


@dataclass(slots=True)
class _Hand:
    """A worker, and what it was asked for, in the order in which it answers."""

    worker: Worker
    requests: deque[Request] = field(default_factory=deque)


class Workers:
    """`ask` for batches in the order in which they will be computed; `take` each, or `forget` it."""

    def __init__(self, samples: Samples, count: int, nursery: Nursery) -> None:
        self._samples, self._nursery, self._count = samples, nursery, count
        self._waiting: deque[Request] = deque()
        self._asked: dict[Key, Request] = {}  # that nobody has taken yet
        self._here: dict[Key, Any] = {}
        self._hands: list[_Hand] = []
        for _ in range(count):
            self._hands.append(_Hand(self._born()))

    def ask(self, key: Key, ids: torch.Tensor, *where: Any) -> None:
        """What `Samples.batch` would be given. Once is enough."""
        if key not in self._asked:
            request = self._asked[key] = Request(key, ids, where)
            self._waiting.append(request)
            self._hand_out()

    def take(self, key: Key, look: Callable[[], None] = lambda: None) -> Any:
        """As soon as it is there. Meanwhile this looks up now and then; `look` may raise. What the user's code has
        raised is raised here.
        """
        request = self._asked[key]
        while key not in self._here and self._hands:
            if request in self._waiting and self._waiting[0] is not request:  # it is wanted before the others
                self._waiting.remove(request)
                self._waiting.appendleft(request)
            self._hand_out(at_once=request)
            if not self._gather(LOOK_S):
                look()
        if not self._hands:
            found: Any = NotSent("")
        else:
            found = self._here.pop(key)
            self._gather(0.0)
            self._hand_out()
        del self._asked[key]
        if isinstance(found, Failed):
            raise TrainingFailed(found.words, found.details)
        if isinstance(found, NotSent):
            self._give_up(found.why)
            found = self._samples.batch(request.ids, *request.where)
        return found

    def forget(self, keys: Iterable[Key] | None = None) -> None:
        """These, or all, are not wanted any more."""
        for key in list(self._asked) if keys is None else keys:
            if (request := self._asked.pop(key, None)) is not None:
                request.is_wanted = False
                self._here.pop(key, None)
        self._waiting = deque(request for request in self._waiting if request.is_wanted)

    def close(self) -> None:
        """What they are at is of no interest any more."""
        hands, self._hands = self._hands, []
        for hand in hands:
            hand.worker.pipe.close()
        deadline = time.monotonic() + GRACE_S
        for hand in hands:
            _end(hand.worker.pid, deadline)

    def _hand_out(self, at_once: Request | None = None) -> None:
        """To whoever has the least to do; `at_once` is not kept waiting by what nobody takes."""
        while self._waiting and self._hands:
            hand = min(self._hands, key=lambda hand: len(hand.requests))
            under_way = len(self._here) + sum(len(hand.requests) for hand in self._hands)
            if under_way >= AHEAD * self._count and self._waiting[0] is not at_once:
                return
            request = self._waiting.popleft()
            hand.requests.append(request)
            try:
                hand.worker.pipe.send_bytes(pickle.dumps((request.ids.numpy().tobytes(), request.where)))
            except OSError:
                self._lost(hand)

    def _gather(self, timeout_s: float) -> bool:
        """What has come. Was there anything?"""
        pipes = {hand.worker.pipe: hand for hand in self._hands}
        ready = wait(list(pipes), timeout_s)
        for pipe in ready:
            hand = pipes[pipe]  # type: ignore[index]
            try:
                parcel = receive(hand.worker.pipe)
            except (EOFError, OSError):
                self._lost(hand)
                continue
            request = hand.requests.popleft()
            if request.is_wanted:
                self._here[request.key] = _answer(parcel)
        return bool(ready)

    def _lost(self, hand: _Hand) -> None:
        """Somebody killed it. What it was asked for is fetched again; but not for ever, if that is what kills it."""
        hand.worker.pipe.close()
        how = _end(hand.worker.pid, deadline=0.0)
        again = [request for request in hand.requests if request.is_wanted]
        if again and again[0] is hand.requests[0]:
            again[0].deaths += 1
            if again[0].deaths >= MOST_DEATHS:
                words = (
                    f"{MOST_DEATHS} workers one after the other ended while they fetched this batch ({how}): {MEMORY}"
                )
                self._here[again.pop(0).key] = Failed(words, "")
        log.error("a worker of node process %d ended (%s): a new one fetches its batches again", os.getpid(), how)
        self._waiting.extendleft(reversed(again))
        hand.worker, hand.requests = self._born(), deque()

    def _born(self) -> Worker:
        try:
            return start(self._nursery)
        except OSError as error:
            raise TrainingFailed(f"a worker cannot be started ({error.strerror}): {MEMORY}") from None

    def _give_up(self, why: str) -> None:
        if self._hands:
            log.error("batches cannot be handed over by workers (%s): this node fetches them itself", why)
            self.close()


def workers_for(samples: Samples, count: int, threads: int, open_again: Callable[[], Samples] | None) -> Workers | None:
    """None, where they would be of no use, or are not to be had. `open_again`: the data set cannot be shared."""
    if not count or samples.is_gathered:
        return None
    if why := why_not():
        log.info("%s", why)
        return None
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    return Workers(samples, count, Nursery(open_again or (lambda: samples), threads, cores))


def why_not() -> str:
    """Why there are no workers on this machine; empty if there are."""
    if not ARE_POSSIBLE:
        return "workers are forked, which is not safe on this system: each node fetches its batches itself"
    if torch.get_default_device().type != "cpu":
        return "workers have no GPU, which is torch's default device here: each node fetches its batches itself"
    return ""


def _answer(parcel: Parcel) -> Any:
    try:
        return unwrap(parcel)
    except Exception as error:
        return NotSent(f"{type(error).__name__}: {error}".split("\n")[0])


def _end(pid: int, deadline: float) -> str:
    """It is gone afterwards; and how it went."""
    status = 0
    with contextlib.suppress(ChildProcessError):
        done, status = os.waitpid(pid, os.WNOHANG)
        while not done and time.monotonic() < deadline:
            time.sleep(0.002)
            done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
