"""`wide run --on dask://HOST:PORT`: the coordinator is this process; a plugin has every worker of the cluster lend
itself, those that are there and those that come later. Knows dask's client; what a worker does is in dask_worker.py.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from wide.config import Options
from wide.errors import Unreachable, UsageError
from wide.launch.crew import Launcher
from wide.launch.dask_worker import Loan
from wide.launch.engines import needs
from wide.launch.kept import Versions, versions
from wide.launch.result import Result
from wide.launch.serve import Serving, serve
from wide.telemetry.log import log
from wide.transport.endpoint import Endpoint
from wide.wire.invite import parse

HELLO_S, UNKNOWN_S = 10.0, 3.0


def run(spec: str, options: Options, address: str) -> Result:
    """Train with the workers of the dask cluster whose scheduler is at `address`."""
    needs("distributed", "dask")
    if options.gpus_per_node:
        raise UsageError("--on dask takes no --gpus-per-node: a worker has the GPUs that it was started with")
    import dask
    from distributed import Client

    scheme = "tls" if dask.config.get("distributed.comm.require-encryption") else "tcp"
    try:
        client = Client(f"{scheme}://{address}", timeout=HELLO_S)
    except (OSError, ValueError) as error:
        raise Unreachable(f"no dask scheduler answers at {address}: {error}") from None

    def place(invite: str, folder: Path) -> Launcher:
        return DaskNodes(client, Loan(options, invite, os.getcwd()))

    with client:
        return serve(spec, options, Serving(), place)


class DaskNodes:
    """The workers of a dask cluster, by a plugin that is there for as long as the run."""

    is_open, is_here, may_fork = True, False, False  # a client has threads

    def __init__(self, client: Any, loan: Loan) -> None:
        self._client, self._loan = client, loan
        self._name = f"wide-{parse(loan.invite).pin.hex()[:16]}"  # of this pool, also when it is resumed
        self._mine = versions()

    def start(self, endpoint: Endpoint) -> None:
        self._client.subscribe_topic(self._name, self._hear)
        self._client.register_plugin(plugin(self._loan, self._name), name=self._name)
        count = len(self._client.scheduler_info(n_workers=-1)["workers"])
        log.info("dask has %d worker%s; those that come later join too", count, "s" * (count != 1))

    def trouble(self) -> str:
        return ""  # another worker may come

    def are_done(self) -> bool:
        return False

    def close(self) -> None:
        """Nodes that have not ended by themselves are told to leave."""
        deadline = time.monotonic() + UNKNOWN_S
        while True:
            try:
                self._client.unregister_worker_plugin(self._name)
                return
            except ValueError:  # not known yet: a signal came while it was being registered
                if time.monotonic() > deadline:
                    return
                time.sleep(0.1)
            except Exception:  # dask's own, when its scheduler is gone
                return

    def _hear(self, event: tuple[float, dict[str, Any]]) -> None:
        told = event[1]
        words = told.get("told") or Versions(*told["versions"]).differing(self._mine)
        if words:
            log.warning("%s", words)


def plugin(loan: Loan, name: str) -> Any:
    """A class within a function is pickled as it is, and not by its name: a worker without wiiiiide can still say so,
    where it would otherwise fail to start.
    """
    import pickle

    from distributed import WorkerPlugin

    class Lending(WorkerPlugin):  # type: ignore[misc]
        def __init__(self, loan: bytes, topic: str) -> None:
            self.loan, self.topic = loan, topic
            self.lender: Any = None

        def setup(self, worker: Any) -> None:
            def tell(message: dict[str, Any]) -> None:
                worker.loop.add_callback(worker.log_event, self.topic, message)

            try:
                import pickle

                from wide.launch.dask_worker import Lender

                loan = pickle.loads(self.loan)
            except Exception as error:
                tell({"told": f"dask worker {worker.name} at {worker.address} has not this wiiiiide: {error}"})
                return
            self.lender = Lender(loan, f"dask-{worker.name}"[:60], worker.state.nthreads, tell)

        def teardown(self, worker: Any) -> None:
            if self.lender is not None:
                self.lender.leave()

    return Lending(pickle.dumps(loan), name)
