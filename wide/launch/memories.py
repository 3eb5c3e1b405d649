"""What this machine remembers of pools that it has joined: its own key in each, and the code that its owner allowed to
run. In the user's state folder, for that user alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from wide.launch.keys import write_secret
from wide.launch.places import private, state_folder
from wide.telemetry.log import log
from wide.wire.proof import Credential

MOST_ALLOWED = 50


class Memory(msgspec.Struct, frozen=True):
    """Of one pool. `invite` is the id of the one by which this machine came."""

    machine: str = ""
    secret: bytes = b""
    invite: str = ""
    allowed: tuple[str, ...] = ()  # hashes of code

    @property
    def credential(self) -> Credential | None:
        return Credential(f"machine {self.machine}", self.secret) if self.machine else None


def recall(pin: bytes) -> Memory:
    """Nothing, of a pool that was never joined, or if it cannot be read."""
    path = _path(pin)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Memory)
    except FileNotFoundError:
        return Memory()
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        log.warning("%s cannot be read (%s): this machine joins as a new one", path, error)
        return Memory()


def remember(pin: bytes, memory: Memory) -> None:
    """If it cannot be written, this machine will have to join anew; that is all."""
    path = _path(pin)
    try:
        private(path.parent)
        write_secret(path, msgspec.json.encode(memory).decode())
    except OSError as error:
        log.warning("%s cannot be written (%s): next time this machine joins as a new one", path, error.strerror)


def allow(pin: bytes, digest: str) -> None:
    memory = recall(pin)
    if digest not in memory.allowed:
        allowed: Sequence[str] = (*memory.allowed, digest)
        remember(pin, msgspec.structs.replace(memory, allowed=tuple(allowed[-MOST_ALLOWED:])))


def _path(pin: bytes) -> Path:
    return state_folder() / "pools" / f"{pin.hex()}.json"
