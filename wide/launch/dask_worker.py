"""What a dask worker does for a pool: it keeps one `wide join`, for as long as the plugin is there that brought it.
Runs on dask's machines; does not import dask.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from wide.config import Options
from wide.errors import Unreachable
from wide.launch.engines import join_words
from wide.launch.kept import KeptNode, after, versions

RETRY_S = 600  # the coordinator is the caller's process: whoever resumes it calls its workers anew


@dataclass(frozen=True)
class Loan:
    """What every worker is told. `folder`: where the caller stands."""

    options: Options
    invite: str
    folder: str


class Lender:
    """The nodes of one worker; `tell` brings a message to the caller."""

    def __init__(self, loan: Loan, name: str, threads: int, tell: Callable[[dict[str, Any]], None]) -> None:
        self._name, self._tell = name, tell
        count = nodes_of(loan.options, threads)
        words = [*join_words(sys.executable, loan.options), "--name", name]
        words += ["--nodes", str(count), "--retry", str(RETRY_S)]
        self._node = KeptNode(words, loan.invite, loan.folder)
        threading.Thread(target=self._keep, daemon=True).start()

    def leave(self) -> None:
        self._node.leave()

    def _keep(self) -> None:
        self._tell({"versions": list(versions())})
        failures, leaving = 0, self._node.leaving
        while not leaving.is_set():
            ended = self._node.work()
            what = after(ended, self._name, failures)
            is_lost = ended.code == Unreachable.exit_code  # its caller was killed, or cut off, and does not come back
            if what.told and not leaving.is_set() and not is_lost:
                self._tell({"told": what.told})
            if is_lost or not what.is_again:
                return
            failures += 1
            leaving.wait(what.pause_s)


def nodes_of(options: Options, threads: int) -> int:
    """On each worker: --nodes, or as many as its threads have room for."""
    return options.nodes or max(1, threads // options.cpus_per_node)
