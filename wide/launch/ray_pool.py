"""A run's coordinator and nodes as actors of a Ray cluster: placed, listened to, and ended. Decides which nodes are
started again; what the actors do is in ray_actors.py.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from wide.dashboard.progress import counted
from wide.errors import BY_EXIT_CODE, Interrupted, UsageError, VersionMismatch, WideError
from wide.launch.kept import Ended, Versions, after, versions
from wide.launch.ray_actors import CoordinatorActor, Heard, NodeActor
from wide.launch.result import Result, from_json
from wide.launch.served import ERROR, Errand
from wide.launch.signals import on_signals, say_and_end

LOOK_S = 0.5
GOODBYE_S = 5.0  # for nodes that the coordinator has told that the run is over
MOST_SIGNALS = 3


class Wishes:
    """Ctrl-C and SIGTERM: each is passed on to the coordinator; who asks a third time does not want to wait for it."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._passed_on = 0

    def __enter__(self) -> Wishes:
        self._before = on_signals(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def are_new(self) -> bool:
        before, self._passed_on = self._passed_on, len(self.received)
        return self._passed_on > before

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) >= MOST_SIGNALS:
            say_and_end(number, "left at once: Ray ends the run's actors; it can go on from its last checkpoint")


class RayPool:
    """The actors of one run."""

    def __init__(self, errand: Errand, wishes: Wishes) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._errand, self._options, self._wishes = ray, errand, errand.options, wishes
        here = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        stays = NodeAffinitySchedulingStrategy(here, soft=False)
        kind = ray.remote(CoordinatorActor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=stays)
        self._coordinator = kind.remote(errand, address)
        self._nodes: list[Any] = []
        self._work: dict[Any, int] = {}  # calls to nodes, and whose they are
        self._asked: dict[Any, int] = {}  # which versions they have; unanswered, as long as they have no place
        self._failures: Counter[int] = Counter()
        self._lost: list[Ended] = []  # who is not started again

    def train(self) -> Result:
        mine = self._check_coordinator()
        while True:
            heard: Heard = self._answer(self._coordinator.hear.remote)
            sys.stderr.write("".join(heard.words))
            sys.stderr.flush()
            if heard.answer is not None:
                return self._result(heard.answer)
            if heard.invite and not self._nodes:
                self._place(heard.invite)
            self._compare_versions(mine)
            self._look_at_nodes()

    def close(self) -> None:
        for actor in (self._coordinator, *self._nodes):
            with contextlib.suppress(Exception):  # Ray's own, when its cluster is gone
                self._ray.kill(actor)

    def _check_coordinator(self) -> Versions:
        """Is it this program, and does its machine see the run's folder?"""
        mine: Versions = self._answer(self._coordinator.versions.remote)
        if mine.wide != (here := versions()).wide:
            raise VersionMismatch(f"{mine.host} has wide {mine.wide}, {here.host} has {here.wide}: install the same")
        folder = self._options.out
        assert folder is not None
        marker = folder / f".seen-{secrets.token_hex(8)}"
        marker.touch()
        try:
            is_seen = self._answer(lambda: self._coordinator.sees.remote(str(marker)))
        finally:
            marker.unlink()
        if not is_seen:
            raise UsageError(
                f"{mine.host}, where the coordinator would run, does not see {folder}: "
                "give --out a folder on storage that both have, or run the command on a machine of the cluster"
            )
        return mine

    def _place(self, invite: str) -> None:
        """All at once: those that find no place wait for one, which is what an autoscaler looks at."""
        count, options = self._options.node_count, self._options
        if words := crowded(self._ray.nodes(), count, options.cpus_per_node, options.gpus_per_node):
            self._say(words)
        kind = self._ray.remote(NodeActor).options(
            num_cpus=options.cpus_per_node,
            num_gpus=options.gpus_per_node,
            max_restarts=-1,
            scheduling_strategy="SPREAD",
        )
        folder = self._errand.folder
        self._nodes = [kind.remote(f"ray-{number}", options, invite, folder) for number in range(1, count + 1)]
        for index, node in enumerate(self._nodes):
            self._asked[node.versions.remote()] = index
            self._work[node.work.remote(0.0)] = index

    def _compare_versions(self, mine: Versions) -> None:
        for call in self._done([*self._asked]):
            del self._asked[call]
            with contextlib.suppress(self._ray.exceptions.RayError):  # its work tells, too
                theirs: Versions = self._ray.get(call)
                if words := theirs.differing(mine):
                    self._say(words)

    def _look_at_nodes(self) -> None:
        for call in self._done([*self._work]):
            index = self._work.pop(call)
            try:
                self._go_on(index, self._ray.get(call))
            except self._ray.exceptions.ActorUnavailableError:  # its machine was taken away; Ray finds another
                self._work[self._nodes[index].work.remote(0.0)] = index
            except self._ray.exceptions.RayError as error:
                self._say(f"ray-{index + 1}{_where(error)} cannot be started: {_last_line(error)}")
                self._lost.append(Ended("", 1, _last_line(error)))
        if self._nodes and len(self._lost) == len(self._nodes):
            self._stop()
            raise BY_EXIT_CODE.get(self._lost[-1].code, WideError)(f"no node is left: {self._lost[-1].words}")

    def _go_on(self, index: int, ended: Ended) -> None:
        what = after(ended, f"ray-{index + 1}", self._failures[index])
        if what.told:
            self._say(what.told)
        if what.is_again:
            self._failures[index] += 1
            self._work[self._nodes[index].work.remote(what.pause_s)] = index
        elif ended.code:
            self._lost.append(ended)

    def _result(self, answer: Sequence[Any]) -> Result:
        if answer[0] != ERROR:
            self._wait_for_goodbyes()
            return from_json(answer[1].encode())
        _, code, words, *details = answer
        if code > 128:  # by our signal, or by somebody else's
            raise Interrupted(words, self._wishes.received[0] if self._wishes.received else code - 128)
        raise BY_EXIT_CODE.get(code, WideError)(words, *details)

    def _wait_for_goodbyes(self) -> None:
        """Of the nodes that have a place."""
        waiting = {index for call, index in self._asked.items() if not self._done([call])}
        self._done([call for call, index in self._work.items() if index not in waiting], GOODBYE_S)

    def _stop(self) -> None:
        """With a checkpoint."""
        self._coordinator.stop.remote()
        while self._answer(self._coordinator.hear.remote).answer is None:
            pass

    def _answer(self, ask: Callable[[], Any]) -> Any:
        """The coordinator's; should Ray be starting it again, as soon as it is there."""
        call = ask()
        while True:
            if self._wishes.are_new:
                self._coordinator.stop.remote()
            if not self._done([call], LOOK_S):
                continue
            try:
                return self._ray.get(call)
            except self._ray.exceptions.ActorUnavailableError:
                if self._wishes.received:  # the one that was told is gone
                    self._coordinator.stop.remote()
                call = ask()
            except self._ray.exceptions.RayError as error:
                words = f"Ray cannot keep the coordinator ({_last_line(error)})"
                raise WideError(f"{words}: go on with --resume {self._options.out}") from None

    def _done(self, calls: list[Any], timeout_s: float = 0.0) -> list[Any]:
        return list(self._ray.wait(calls, num_returns=len(calls), timeout=timeout_s)[0]) if calls else []

    def _say(self, words: str) -> None:
        if self._options.log != "silent":
            print(words, file=sys.stderr, flush=True)


def crowded(machines: Sequence[dict[str, Any]], count: int, cpus: int, gpus: int) -> str:
    """What is asked and what there is, if that is less; empty, if all nodes have room."""
    alive = [machine.get("Resources", {}) for machine in machines if machine.get("Alive")]
    room = sum(
        int(min(found.get("CPU", 0.0) // cpus, found.get("GPU", 0.0) // gpus if gpus else count)) for found in alive
    )
    if room >= count:
        return ""
    asked = counted(cpus, "CPU") + (f" and {counted(gpus, 'GPU')}" if gpus else "")
    total = {kind: int(sum(found.get(kind, 0.0) for found in alive)) for kind in ("CPU", "GPU")}
    has = f"{counted(len(alive), 'machine')}, {counted(total['CPU'], 'CPU')}, {counted(total['GPU'], 'GPU')}"
    words = f"asked for {counted(count, 'node')} with {asked} each; Ray has room for {room} ({has})"
    return f"{words}: the others wait until there is more"


def _where(error: BaseException) -> str:
    """On which machine, as far as Ray tells."""
    found = re.search(r"\bip[=:] ?([0-9a-f.:]+)", str(error))
    return f" on {found[1]}" if found else ""


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
