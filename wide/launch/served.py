"""The coordinator as a child of an engine's worker: `wide serve`, told by its parent what to serve, and answering in
lines of JSON: its invite as soon as there is one, the result or the error in the end. Knows its parent's pipes.
"""

from __future__ import annotations

import os
import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from wide.config import Options
from wide.errors import WideError
from wide.job.spec import parts
from wide.launch.code import Code, put_down
from wide.launch.crew import Launcher
from wide.launch.instructions import chosen, obey
from wide.transport.endpoint import Endpoint

INVITE, RESULT, ERROR = "invite", "result", "error"


@dataclass(frozen=True)
class Errand:
    """What is to be served. `options` name the run's folder, and say to go on with what is in it. `code`: the job's
    files, if they have to be put down first; `folder`: where the caller stands, `command`: what it was called with.
    """

    spec: str
    options: Options
    folder: str
    command: tuple[str, ...]
    code: Code | None = None

    def placed(self) -> str:
        """The job's spec on this machine."""
        if self.code is None:
            return self.spec
        found, told = parts(put_down(self.code)), parts(self.spec)
        return str(type(found)(found.place, found.module, told.values, told.arguments))


class Elsewhere:
    """Nodes that the parent has placed by its engine."""

    is_open, is_here, may_fork = True, False, True

    def start(self, endpoint: Endpoint) -> None:
        pass

    def trouble(self) -> str:
        return ""

    def are_done(self) -> bool:
        return False

    def close(self) -> None:
        pass


def main() -> None:
    """Serve what stdin says, for whoever dials `address`."""
    address = sys.argv[1]
    errand: Errand = pickle.load(sys.stdin.buffer)
    sys.argv[:] = errand.command
    answers = open(os.dup(1), "w", encoding="utf-8")  # noqa: SIM115  (until this process ends)
    os.dup2(2, 1)  # whatever the user's code prints
    _say(answers, *_served(errand, address, answers))


def _served(errand: Errand, address: str, answers: IO[str]) -> tuple[object, ...]:
    try:
        obey(chosen(errand.options, errand.options.out), tells=False)
    except WideError as error:
        return ERROR, error.exit_code, str(error), error.details
    from wide.launch.serve import Serving, serve

    def place(invite: str, folder: Path) -> Launcher:
        _say(answers, INVITE, invite)
        return Elsewhere()

    try:
        result = serve(errand.placed(), errand.options, Serving(address=address), place)
    except WideError as error:
        return ERROR, error.exit_code, str(error), error.details
    return RESULT, result.to_json()


def _say(answers: IO[str], *words: object) -> None:
    answers.write(msgspec.json.encode(words).decode() + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
