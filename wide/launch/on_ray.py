"""`wide run --on ray`: the coordinator is an actor of a Ray cluster, and so is each node; Ray places them, and starts
them again. This process tells Ray what is wanted, shows what the coordinator says, decides which nodes are started
again, and ends everything. What the actors do is in ray_actors.py.

The coordinator stays on one machine: this one, if it belongs to the cluster, else the one that Ray's client server runs
on. So the run's folder is there whenever Ray starts it again; both sides must see it, which is tried first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from wide.config import Options
from wide.dashboard.progress import counted
from wide.errors import BY_EXIT_CODE, Interrupted, Unreachable, UsageError, VersionMismatch, WideError
from wide.job.place import located
from wide.job.spec import parts, split_spec, title_of
from wide.launch.code import code_of
from wide.launch.engines import needs
from wide.launch.folder import RunFolder
from wide.launch.kept import Ended, Versions, after
from wide.launch.ray_actors import CoordinatorActor, NodeActor
from wide.launch.result import Result, from_json
from wide.launch.served import ERROR, Errand
from wide.launch.signals import on_signals, say_and_end

HELLO_S = 5.0  # for an address to answer
LOOK_S = 0.5
GOODBYE_S = 5.0  # for nodes that the coordinator has told that the run is over


def run(spec: str, options: Options, address: str) -> Result:
    """Train on the cluster at `address`; if that is empty, on the one that runs here, or that RAY_ADDRESS names."""
    needs("ray", "ray")
    spec = located(spec)
    path, _ = split_spec(spec)
    code = code_of(spec) if address else None
    with contextlib.redirect_stdout(sys.stderr), _connected(address, options), _Signals() as signals:
        folder = RunFolder(options.out, options.resume, title_of(path), path)
        folder.close()
        there = msgspec.structs.replace(options, out=folder.path.absolute(), resume="auto")
        place = replace(parts(spec), place=str(Path(parts(spec).place).absolute()))
        errand = Errand(str(place), there, os.getcwd(), tuple(sys.argv), code)
        pool = RayPool(errand, options, signals)
        try:
            result = pool.train()
        finally:
            pool.close()
        return replace(result, run_dir=str(folder.path))


@contextlib.contextmanager
def _connected(address: str, options: Options) -> Iterator[None]:
    import ray

    named = address or os.environ.get("RAY_ADDRESS", "").removeprefix("ray://")
    _knock(named)
    try:
        ray.init(
            f"ray://{address}" if address else "auto", logging_level="error", log_to_driver=options.log == "verbose"
        )
    except (ConnectionError, ValueError) as error:
        if not named:
            words = "no Ray cluster runs here, and RAY_ADDRESS names none: `ray start --head` starts one"
            raise Unreachable(f"{words}; or say --on ray://HOST:10001") from None
        raise Unreachable(f"the Ray cluster at {named} cannot be used: {_first_line(error)}") from None
    except RuntimeError as error:
        raise VersionMismatch(f"the Ray cluster{' at ' * bool(named)}{named}: {_first_line(error)}") from None
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), HELLO_S).close()
        except OSError as error:
            raise Unreachable(f"no Ray cluster answers at {address}: {error.strerror or error}") from None


class RayPool:
    """A run's coordinator and nodes, as actors."""

    def __init__(self, errand: Errand, options: Options, signals: _Signals) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        self._ray, self._errand, self._options, self._signals = ray, errand, options, signals
        here = ray.get_runtime_context().get_node_id()
        address = next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
        stays = NodeAffinitySchedulingStrategy(here, soft=False)
        kind = ray.remote(CoordinatorActor).options(num_cpus=0, max_restarts=-1, scheduling_strategy=stays)
        self._coordinator = kind.remote(errand, address)
        self._nodes: list[Any] = []
        self._calls: dict[Any, int] = {}  # what nodes are doing
        self._asked: dict[Any, int] = {}  # which versions they have
        self._failures: Counter[int] = Counter()
        self._refused: list[Ended] = []
        self._mine: Versions | None = None

    def train(self) -> Result:
        self._check_folder()
        while True:
            self._pass_signals_on()
            heard = self._patiently(lambda: self._coordinator.hear.remote())
            sys.stderr.write("".join(heard.words))
            sys.stderr.flush()
            if heard.answer is not None:
                return self._ended(heard.answer)
            if heard.invite and not self._nodes:
                self._place(heard.invite)
            self._look_at_nodes()

    def close(self) -> None:
        """Nodes that know that the run is over end by themselves."""
        for actor in (self._coordinator, *self._nodes):
            with contextlib.suppress(Exception):  # Ray's own, when its cluster is gone
                self._ray.kill(actor)

    def _check_folder(self) -> None:
        """Does the coordinator's machine see the run's folder?"""
        self._mine = self._patiently(lambda: self._coordinator.versions.remote())
        assert self._errand.options.out is not None
        marker = self._errand.options.out / f".seen-{secrets.token_hex(8)}"
        marker.touch()
        try:
            is_seen = self._patiently(lambda: self._coordinator.sees.remote(str(marker)))
        finally:
            marker.unlink()
        if not is_seen:
            raise UsageError(
                f"{self._mine.host}, where the coordinator would run, does not see {marker.parent}: "
                "give --out a folder on storage that both have, or run the command on a machine of the cluster"
            )

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
        self._nodes = [
            kind.remote(f"ray-{number}", options, invite, self._errand.folder) for number in range(1, count + 1)
        ]
        for index, node in enumerate(self._nodes):
            self._asked[node.versions.remote()] = index
            self._calls[node.work.remote(0.0)] = index

    def _look_at_nodes(self) -> None:
        for call in self._done([*self._asked]):
            index = self._asked.pop(call)
            with contextlib.suppress(self._ray.exceptions.RayActorError):  # its work tells, too
                theirs: Versions = self._ray.get(call)
                if self._mine is not None and (words := theirs.differing(self._mine)):
                    self._say(words)
        for call in self._done([*self._calls]):
            index = self._calls.pop(call)
            try:
                self._go_on(index, self._ray.get(call))
            except self._ray.exceptions.ActorUnavailableError:  # its machine was taken away; Ray finds it another
                self._calls[self._nodes[index].work.remote(0.0)] = index
            except self._ray.exceptions.RayError as error:
                self._refused.append(Ended("", 1, _last_line(error)))
                self._say(f"ray-{index + 1} cannot be started: {_last_line(error)}")
        if self._nodes and len(self._refused) == len(self._nodes):
            last = self._refused[-1]
            self._stop()
            raise BY_EXIT_CODE.get(last.code, WideError)(f"no node is left: {last.words}")

    def _go_on(self, index: int, ended: Ended) -> None:
        what = after(ended, f"ray-{index + 1}", self._failures[index])
        if what.told:
            self._say(what.told)
        if what.is_again:
            self._failures[index] += 1
            self._calls[self._nodes[index].work.remote(what.pause_s)] = index
        elif ended.code:
            self._refused.append(ended)

    def _ended(self, answer: Sequence[Any]) -> Result:
        if answer[0] != ERROR:
            self._wait_for_goodbyes()
            return from_json(answer[1].encode())
        _, code, words, *details = answer
        if code > 128 and self._signals.received:
            raise Interrupted(words, self._signals.received[0])
        if code > 128:
            raise Interrupted(words, code - 128)
        raise BY_EXIT_CODE.get(code, WideError)(words, *details)

    def _wait_for_goodbyes(self) -> None:
        placed = [call for call, index in self._calls.items() if index not in self._asked.values()]
        if placed:
            self._ray.wait(placed, num_returns=len(placed), timeout=GOODBYE_S)

    def _stop(self) -> None:
        """With a checkpoint."""
        self._coordinator.stop.remote()
        while self._patiently(lambda: self._coordinator.hear.remote()).answer is None:
            pass

    def _pass_signals_on(self) -> None:
        if self._signals.are_new:
            self._coordinator.stop.remote()

    def _patiently(self, ask: Any) -> Any:
        """The coordinator's answer; should Ray be starting it again, as soon as it is there."""
        call = ask()
        while True:
            self._pass_signals_on()
            if not self._done([call], LOOK_S):
                continue
            try:
                return self._ray.get(call)
            except self._ray.exceptions.ActorUnavailableError:
                call = ask()
            except self._ray.exceptions.RayError as error:
                raise WideError(
                    f"Ray cannot keep the coordinator: {_last_line(error)}; go on with --resume auto"
                ) from None

    def _done(self, calls: list[Any], timeout_s: float = 0.0) -> list[Any]:
        if not calls:
            return []
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
        return list(done)

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


class _Signals:
    """Ctrl-C and SIGTERM: each is passed on to the coordinator; who asks a third time does not want to wait for it."""

    def __init__(self) -> None:
        self.received: list[int] = []
        self._seen = 0

    def __enter__(self) -> _Signals:
        self._before = on_signals(self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        import signal

        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def are_new(self) -> bool:
        seen, self._seen = self._seen, len(self.received)
        return self._seen > seen

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) >= 3:
            say_and_end(number, "left; Ray ends the coordinator, and the run can go on from its last checkpoint")


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _last_line(error: BaseException) -> str:
    return next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
