"""Where the command `wide` begins: signals first, then everything else, which takes a moment to import."""

from __future__ import annotations

import contextlib
import os
import sys

from wide.launch.environment import add_wishes
from wide.launch.signals import end_here, on_signals

on_signals(end_here)  # until there is a run, which ends in its own way


def main() -> int:
    """Once more from the start, if something was missing that counts only there."""
    if os.name == "posix" and add_wishes(os.environ):
        with contextlib.suppress(OSError):  # then without
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    from wide.cli.main import main as command

    return command(sys.argv[1:])
