"""Who holds what: every lease that was granted and not answered, in one book. Knows blocks and nodes; decides nothing.

A block is out while somebody who may answer holds it; otherwise it is free, or merged. What is free is the policy's
knowledge, and nobody but this book tells it what comes back.
"""

from __future__ import annotations

from dataclasses import dataclass

from wide.strategy.policy import Policy
from wide.strategy.tree import Block


@dataclass(slots=True, eq=False)
class Lease:
    """`block` of the run, granted to `node` at this `age` of the weights, when the clock showed `granted_at`."""

    number: int
    node: int
    block: Block
    group: int
    age: int
    granted_at: float
    change: int  # how often the strategy had changed by then
    is_expired: bool = False
    is_check: bool = False  # its answer is compared, not merged
    pair: int = 0  # with that of another node that is at it, too; 0: with what was merged
    is_disturbed: bool = False  # its node was silent meanwhile, so it does not tell how quick that is


class Leases:
    """`by_node`: what each node has to answer, in the order of the grants. `out`: who is at each block, newest last."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.by_node: dict[int, dict[int, Lease]] = {}
        self.out: dict[Block, list[Lease]] = {}

    def follow(self, policy: Policy) -> None:
        """Another policy cuts from now on; nothing is out."""
        self.policy = policy
        self.out.clear()

    def welcome(self, node: int) -> dict[int, Lease]:
        self.by_node[node] = {}
        return self.by_node[node]

    def grant(self, lease: Lease) -> None:
        self.by_node[lease.node][lease.number] = lease
        self.out.setdefault(lease.block, []).append(lease)

    def grant_check(self, lease: Lease, pair: int = 0) -> None:
        """Its block is not out: it is merged, or will be by somebody else."""
        lease.is_check, lease.pair = True, pair
        self.by_node[lease.node][lease.number] = lease

    def claim(self, lease: Lease) -> bool:
        """Here is its result: does it still count? Yes, if nobody was quicker, and nobody was given it in other pieces.
        Then its block is out, even if it had been given back.
        """
        if lease.block in self.out:
            return True
        if self.policy.take_back(lease.block):
            self.out[lease.block] = [lease]
            return True
        return False

    def answered(self, lease: Lease) -> None:
        """It was, in whatever way; what becomes of its block is for one of the next three."""
        del self.by_node[lease.node][lease.number]

    def merge(self, block: Block) -> None:
        """The block's first result counts; whoever else still computes it comes too late."""
        del self.out[block]

    def give_back(self, block: Block) -> None:
        """Nobody's result for it will count."""
        del self.out[block]
        self.policy.give_back(block)

    def keep_first(self, lease: Lease, batches: int) -> Block | None:
        """Only the first batches of a lease were computed: these, or None, if they cannot be used. The rest is free
        again, unless others are at all of it.
        """
        if any(held is not lease for held in self.out[lease.block]):
            self._withdraw(lease)
            return None
        kept = self.policy.keep_first(lease.block, batches) if 0 < batches < lease.block.size else None
        if kept is None:
            self.give_back(lease.block)
        else:
            self.out[kept] = self.out.pop(lease.block)
        return kept

    def expire(self, lease: Lease) -> None:
        """It may never be answered. Should it be after all, and nobody has been given it again, it counts."""
        lease.is_expired = True
        self._withdraw(lease)

    def farewell(self, node: int) -> None:
        """Nobody will answer this node's leases: their blocks are free again, unless somebody else is at them too."""
        for lease in self.by_node.pop(node).values():
            self._withdraw(lease)

    def _withdraw(self, lease: Lease) -> None:
        holders = self.out.get(lease.block)
        if holders is None or lease not in holders:
            return
        holders.remove(lease)
        if not holders:
            self.give_back(lease.block)
