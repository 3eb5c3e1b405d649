"""The training of `peers` with hivemind: `hivemind.Optimizer` with an update per one batch of each worker, gradients
averaged among all of them, a DHT on loopback.

Only updates of all workers count: hivemind may put more batches into one, while its workers find out that there are
enough, and makes some with fewer workers.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from functools import partial
from typing import Any

import torch

from benchmarks import host_model, peer_share

LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
MATCHMAKING_S, REFRESH_S = 1.0, 0.1  # 0.3 and 0.02 were tried: not faster


def run(seconds: float, nodes: int) -> peer_share.Result:
    import hivemind

    dht = hivemind.DHT(host_maddrs=LOOPBACK, start=True)
    peers = [str(address) for address in dht.get_visible_maddrs()]
    with peer_share.workers(work, nodes, seconds, peers) as answer:
        return answer()


def work(rank: int, nodes: int, seconds: float, peers: list[str]) -> peer_share.Result:
    import hivemind
    from hivemind.optim.grad_averager import GradientAverager

    multiprocessing.set_start_method("fork", force=True)  # its processes cannot be pickled
    share = peer_share.Share(rank, nodes)
    options = {"target_group_size": nodes, "request_timeout": MATCHMAKING_S / 2}
    optimizer = hivemind.Optimizer(
        dht=hivemind.DHT(host_maddrs=LOOPBACK, initial_peers=peers, start=True),
        run_id="peers",
        batch_size_per_step=host_model.BATCH_SIZE,
        target_batch_size=host_model.BATCH_SIZE * nodes,
        params=share.parameters,
        optimizer=host_model.optimizer,
        matchmaking_time=MATCHMAKING_S,
        averaging_timeout=10.0,
        average_state_every=10**9,  # all have the same weights as long as all gradients are averaged
        grad_averager_factory=partial(GradientAverager, **options),
        averager_opts=options,
        tracker_opts={"min_refresh_period": REFRESH_S, "default_refresh_period": REFRESH_S},
        use_local_updates=False,
    )
    batches = itertools.count()

    def batch() -> float:
        optimizer.zero_grad()
        loss = share.loss(next(batches))
        torch.autograd.backward(loss)
        optimizer.step()
        return loss.item()

    def step(number: int) -> float:
        while True:
            before, loss = optimizer.local_epoch, batch()
            if optimizer.local_epoch > before and _group(optimizer.scheduled_grads) == nodes:
                return loss

    batch()
    while optimizer.tracker.global_progress.num_peers < nodes:  # whoever knows of nobody trains alone
        time.sleep(REFRESH_S)
    return peer_share.measure(step, seconds if rank == 0 else 1e9, nodes)  # the others go on until they are ended


def _group(averaging: Any) -> int:
    """How many workers averaged their gradients; `averaging`: hivemind's future of it."""
    return len(averaging.result()) if averaging and averaging.done() and not averaging.exception() else 0


if __name__ == "__main__":
    peer_share.main(run)
