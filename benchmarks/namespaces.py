"""Hosts on shaped links: network namespaces around one bridge, with tbf on both ends of every cable. Linux, root.

Delay is not shaped: kernels without netem cannot.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

BURST = "32kb"
QUEUE = "1mb"
_numbers = itertools.count()


@dataclass(frozen=True)
class Host:
    """A namespace with one address; put `prefix` in front of a command to run it there."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.name]


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    try:
        with hosts([None]):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here ({error}); this needs Linux, root, `ip` and `tc`"


@contextlib.contextmanager
def hosts(mbits: list[float | None]) -> Iterator[list[Host]]:
    """One host for each entry, its cable limited to that many Mbit/s each way (None: not limited)."""
    tag = f"wide{os.getpid()}x{next(_numbers)}"
    hub, made = f"{tag}hub", [f"{tag}h{i}" for i in range(len(mbits))]
    with contextlib.ExitStack() as stack:
        _namespace(hub, stack)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for i, (name, mbit) in enumerate(zip(made, mbits, strict=True)):
            _namespace(name, stack)
            plug = f"plug{i}"
            _run("ip", "-n", hub, "link", "add", plug, "type", "veth", "peer", "name", "cable", "netns", name)
            _run("ip", "-n", hub, "link", "set", plug, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "cable")
            _run("ip", "-n", name, "link", "set", "cable", "up")
            if mbit is not None:
                for where, device in ((hub, plug), (name, "cable")):
                    shape = ("rate", f"{mbit}mbit", "burst", BURST, "limit", QUEUE)
                    _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield [Host(name, f"10.77.0.{i + 1}") for i, name in enumerate(made)]


def _namespace(name: str, stack: contextlib.ExitStack) -> None:
    _run("ip", "netns", "add", name)
    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=False)
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
