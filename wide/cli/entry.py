"""Where the command `wide` begins: signals first, then everything else, which takes a moment to import."""

from __future__ import annotations

import contextlib
import os
import sys

from wide.launch.environment import add_wishes
from wide.launch.signals import end_here, on_signals

on_signals(end_here)  # until there is a run, which ends in its own way


def main() -> int:
    """Once more from the start, if something was missing that counts only there; or if everybody who looks at this
    machine's processes would see an invite.
    """
    words = sys.orig_argv[1:]
    if os.name == "posix":
        shown = _without_invites(words)
        if add_wishes(os.environ) or shown != words:
            with contextlib.suppress(OSError):  # then without
                os.execv(sys.executable, [sys.executable, *shown])
    from wide.cli.main import main as command

    return command(sys.argv[1:])


def _without_invites(words: list[str]) -> list[str]:
    """Each in a pipe of its own, which the next process reads instead."""
    return [_piped(word) if word.lower().startswith("wide1_") else word for word in words]


def _piped(word: str) -> str:
    read, write = os.pipe()
    with open(write, "w") as file:
        file.write(word[:4096])
    os.set_inheritable(read, True)
    return f"@/dev/fd/{read}"
