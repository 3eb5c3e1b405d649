"""`wide run --on ENGINE`: nodes are placed by an engine that the user has already, and come in by an invite, as any
machine does. Knows which engine is meant and what a node's command is; each engine has a file of its own, `on_….py`.

An engine places processes and restarts them. A node is one process that dials out, with one secret, and its exit code
tells what to do: 0 done; 69 and 75 try again; 2, 76 and 77 never.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

from wide.config import Options
from wide.errors import UsageError
from wide.launch.result import Result

NEVER_AGAIN = (2, 76, 77)  # a node that ends so would end so again
EXPIRES_S = 30 * 86400.0  # of the invite that an engine's nodes come by: it restarts them for as long as a run lasts
USES = 1_000_000


def run_on(spec: str, options: Options) -> Result:
    """Train the job with nodes that `options.on` places."""
    kind, _, address = options.on.partition("://")
    if options.nodes == 0:
        raise UsageError(f"--on {kind} --nodes 0: a plain loop in this process needs no engine; leave one of them away")
    run: Callable[[str, Options, str], Result] = importlib.import_module(f"wide.launch.on_{kind}").run
    return run(spec, options, address)


def needs(library: str, extra: str) -> None:
    """One clear line, where an engine's library is not installed."""
    if importlib.util.find_spec(library) is None:
        raise UsageError(f"--on {extra} needs {library}: pip install 'wiiiiide[{extra}]'")


def join_words(python: str, options: Options) -> list[str]:
    """The command of one node. The invite comes by the environment (WIDE_INVITE) or a file, never by the command line.
    The pool is its owner's, so its code is taken without asking.
    """
    words = [python, "-m", "wide", "join", "--allow-code", "any", "--device", options.device, "--log", options.log]
    return words if options.workers is None else [*words, "--workers", str(options.workers)]
