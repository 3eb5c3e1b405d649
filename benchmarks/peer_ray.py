"""The training of `peers` with Ray: a synchronous parameter server, as in Ray's examples. Actors compute gradients, one
more averages them and makes the update.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks import host_model, peer_share

Vector = np.ndarray[Any, np.dtype[np.float32]]  # (params,)


class Server:
    def __init__(self) -> None:
        share = peer_share.Share(0, 1)
        self._weights = nn.Parameter(nn.utils.parameters_to_vector(share.parameters).detach())
        self._optimizer = host_model.optimizer([self._weights])

    def weights(self) -> Vector:
        weights: Vector = self._weights.detach().numpy()
        return weights

    def update(self, *gradients: Vector) -> Vector:
        self._weights.grad = torch.from_numpy(np.mean(gradients, axis=0))
        self._optimizer.step()
        return self.weights()


class Worker:
    def __init__(self, rank: int, nodes: int) -> None:
        self._share = peer_share.Share(rank, nodes)

    def gradient(self, number: int, weights: Vector) -> tuple[Vector, float]:
        nn.utils.vector_to_parameters(torch.from_numpy(weights), self._share.parameters)  # views, no copies
        loss = self._share.loss(number)
        gradients = torch.autograd.grad(loss, self._share.parameters)
        return nn.utils.parameters_to_vector(gradients).numpy(), loss.item()


def run(seconds: float, nodes: int) -> peer_share.Result:
    import ray

    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:  # sockets need a short path
        try:
            ray.init(
                num_cpus=nodes + 1,  # as many as there are actors, whatever the machine has
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=256 * 1024**2,
                _node_ip_address="127.0.0.1",
                _temp_dir=folder,
            )
            return _train(ray, seconds, nodes)
        finally:
            ray.shutdown()


def _train(ray: Any, seconds: float, nodes: int) -> peer_share.Result:
    server = ray.remote(num_cpus=1)(Server).remote()
    workers = [ray.remote(num_cpus=1)(Worker).remote(rank, nodes) for rank in range(nodes)]
    weights = server.weights.remote()

    def step(number: int) -> float:
        nonlocal weights
        asked = [worker.gradient.options(num_returns=2).remote(number, weights) for worker in workers]
        weights = server.update.remote(*(gradient for gradient, _ in asked))
        loss: float = ray.get(asked[0][1])
        return loss

    return peer_share.measure(step, seconds, nodes)


if __name__ == "__main__":
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    peer_share.main(run)
