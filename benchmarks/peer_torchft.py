"""The training of `peers` with torchft: every worker is a replica group of its own, gradients are averaged by gloo, and
a lighthouse agrees on the quorum of every update.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which is documented there

from benchmarks import host_model, peer_share

TIMEOUT = timedelta(seconds=30)


def run(seconds: float, nodes: int) -> peer_share.Result:
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=nodes, join_timeout_ms=30_000)
    try:
        address = f"http://127.0.0.1:{lighthouse.address().rsplit(':', 1)[1].rstrip('/')}"
        with peer_share.workers(work, nodes, seconds, address) as answer:
            return answer()
    finally:
        lighthouse.shutdown()


def work(rank: int, nodes: int, seconds: float, lighthouse: str) -> peer_share.Result:
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    share = peer_share.Share(rank, nodes)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,  # all begin with the same weights, and nobody comes late
        state_dict=dict,
        min_replica_size=nodes,
        init_sync=False,
        timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"replica_{rank}",
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, share.model, gradient_as_bucket_view=True)
    optimizer = Optimizer(manager, host_model.optimizer(share.parameters))

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = share.loss(number, model)
        torch.autograd.backward(loss)
        optimizer.step()
        if manager.current_step() != number + 1 or manager.num_participants() != nodes:
            raise RuntimeError(f"update {number} was not made by all {nodes} replicas")
        return loss.item()

    return peer_share.measure(step, seconds if rank == 0 else 1e9, nodes)  # the others go on until they are ended


if __name__ == "__main__":
    os.environ["RUST_LOG"] = "error"  # a dozen lines for each update cost time that is not its own
    peer_share.main(run)
