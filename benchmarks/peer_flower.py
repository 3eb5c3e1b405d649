"""The training of `peers` with Flower: federated averaging, one batch a round on each client. Clients keep their
momentum, so the averaged weights are those that averaged gradients would give.

Over the streams of `start_server`, which Flower calls deprecated: a SuperLink is asked for work every few seconds only.
"""

from __future__ import annotations

import logging
import os
from statistics import fmean
from typing import Any

import torch
from torch import nn

from benchmarks import host_model, peer_share
from benchmarks.together import free_port

ROUND_S = 30.0


def run(seconds: float, nodes: int) -> peer_share.Result:
    import flwr

    logging.getLogger("flwr").setLevel(logging.ERROR)
    found: peer_share.Result = {}

    class Server(flwr.server.Server):  # type: ignore[misc]  # Flower's, which mypy does not see
        def fit(self, num_rounds: int, timeout: float | None) -> tuple[Any, float]:
            if not self.client_manager().wait_for(nodes, timeout=60):
                raise RuntimeError("the clients did not come")
            self.parameters = self.strategy.initialize_parameters(self.client_manager())
            found.update(peer_share.measure(self._round, seconds, nodes))
            return flwr.server.History(), seconds

        def _round(self, number: int) -> float:
            made = self.fit_round(number + 1, ROUND_S)
            if made is None or made[0] is None or len(made[2][0]) != nodes:
                raise RuntimeError(f"round {number} was not made by all {nodes} clients")
            self.parameters = made[0]
            return fmean(result.metrics["loss"] for _, result in made[2][0])

    weights = nn.utils.parameters_to_vector(peer_share.Share(0, nodes).parameters).detach().numpy()
    strategy = flwr.server.strategy.FedAvg(
        min_fit_clients=nodes,
        min_available_clients=nodes,
        accept_failures=False,
        initial_parameters=flwr.common.ndarrays_to_parameters([weights]),
    )
    server = Server(client_manager=flwr.server.SimpleClientManager(), strategy=strategy)
    with free_port() as port, peer_share.workers(work, nodes, address := f"127.0.0.1:{port}"):
        flwr.server.start_server(server_address=address, server=server)
    return found


def work(rank: int, nodes: int, address: str) -> peer_share.Result:
    import flwr

    logging.getLogger("flwr").setLevel(logging.ERROR)
    share = peer_share.Share(rank, nodes)
    optimizer = host_model.optimizer(share.parameters)
    rounds = iter(range(10**9))

    class Client(flwr.client.NumPyClient):  # type: ignore[misc]  # as above
        def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
            nn.utils.vector_to_parameters(torch.from_numpy(parameters[0]), share.parameters)  # views, no copies
            loss = share.loss(next(rounds))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            return [parameters[0]], host_model.BATCH_SIZE, {"loss": loss.item()}

    flwr.client.start_client(server_address=address, client=Client().to_client(), insecure=True)
    return {}


if __name__ == "__main__":
    os.environ["FLWR_TELEMETRY_ENABLED"] = "0"
    peer_share.main(run)
