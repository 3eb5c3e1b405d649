"""The processes of one run under torchrun: who is there, what rank 0 says to all, and what went wrong with one of them.
Knows torch.distributed; knows nothing of jobs.

Words are JSON and tensors, never pickle. A rank that fails leaves its words in the store, which outlives it: rank 0
tells them, and everybody else ends in silence.
"""

from __future__ import annotations

import contextlib
import gc
import os
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from wide.errors import BY_EXIT_CODE, TrainingFailed, UsageError, WideError
from wide.store.state_dict import Packing, unpack

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PROBLEM = "problem"
LOST = ("gloo", "nccl", "connection", "socket", "timed out")  # in what torch says when another rank is gone
TORCH = str(Path(torch.__file__).parent)
STOP = -1


class Gone(WideError):
    """Another rank has ended; if it said why, rank 0 tells that."""


class Lost(TrainingFailed):
    """The same, as rank 0 tells it."""


class Order(NamedTuple):
    """What rank 0 wants all to compute: the run's batches first…end-1, and with which learning rates, if nobody but
    rank 0 can know them.
    """

    first: int
    end: int
    rates: Sequence[float] = ()


class Team:
    """All ranks, seen from one of them."""

    def __init__(self, device: torch.device) -> None:
        missing = [name for name in VARIABLES if name not in os.environ]
        if missing:
            raise UsageError(
                f"{missing[0]} is not set: start it with torchrun --nproc-per-node N -m wide.engine JOB, "
                "or with wide run JOB --on torchrun --nodes N"
            )
        self.device = device
        with self.together():
            store, self.rank, self.size = next(rendezvous("env://"))
            self._store = PrefixStore("wide", store)
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=PrefixStore("group", store), rank=self.rank, world_size=self.size)
        self.is_first = self.rank == 0
        self._saying: Any = None  # an order that is under way

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """While the block runs, ranks wait for each other: one that is gone ends it."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if not _is_torchs(error) or not any(word in str(error).lower() for word in LOST):
                raise
            raise self.why_gone(error) from None

    def why_gone(self, error: Exception) -> WideError:
        """To be raised, when another rank is gone."""
        words, details = "another process of this run ended: with torch.distributed that ends them all", str(error)
        if not getattr(self, "is_first", False):
            return Gone(words, details)
        return self.another_one() or Lost(words, details)

    def another_one(self) -> WideError | None:
        """Rank 0: why another one could not go on, if it has said so."""
        said = self._confessed()
        return Lost(*said[1:]) if said is not None else None

    def _confessed(self) -> tuple[int, str, str] | None:
        with contextlib.suppress(RuntimeError):  # the store's process is gone, too
            if self._store.check([PROBLEM]):
                code, words, details = msgspec.json.decode(self._store.get(PROBLEM))
                return code, words, details
        return None

    def confess(self, error: WideError) -> None:
        """This rank cannot go on: rank 0 will find these words. Of several ranks, the first one's."""
        words = msgspec.json.encode((error.exit_code, str(error), error.details)).decode()
        with contextlib.suppress(RuntimeError):
            self._store.compare_set(PROBLEM, "", words)

    def all_well(self, problem: WideError | None) -> None:
        """Called by all: raises, if anybody has a problem. Rank 0 has the words."""
        if problem is not None:
            self.confess(problem)
        flag = torch.tensor([problem is not None], dtype=torch.int32, device=self.device)
        with self.together():
            dist.all_reduce(flag)
        if flag.item():
            code, words, details = self._confessed() or (1, "a process of this run could not begin", "")
            raise BY_EXIT_CODE.get(code, TrainingFailed)(words, details) if self.is_first else Gone(words)

    def say(self, order: Order) -> None:
        """Rank 0 to all others; it begins with its own share before they have heard it."""
        words = torch.tensor([order.first, order.end, *order.rates], dtype=torch.float64, device=self.device)
        with self.together():
            self._settle()
            self._saying = dist.broadcast(words, src=0, async_op=True)

    def _settle(self) -> None:
        if self._saying is not None:
            self._saying.wait()
            self._saying = None

    def hear(self, rates: int) -> Order | None:
        """What rank 0 says, with so many learning rates; None: it is over."""
        first, end, *others = self._heard(torch.zeros(2 + rates, dtype=torch.float64, device=self.device)).tolist()
        return Order(int(first), int(end), others) if first != STOP else None

    def stop(self, rates: int) -> None:
        """Rank 0's last words; whoever is gone already does not hear them."""
        with contextlib.suppress(WideError), self.together():
            self.say(Order(STOP, STOP, [0.0] * rates))
            self._settle()

    def _heard(self, words: torch.Tensor) -> torch.Tensor:
        with self.together():
            dist.broadcast(words, src=0)
        return words

    def shared(self, value: Any = None) -> Any:
        """A nest of plain values and tensors, as rank 0 has it."""
        packing = Packing()
        nest = packing.pack(value, "shared")
        tensors = packing.tensors
        shapes = {name: (str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in tensors.items()}
        nest, shapes = msgspec.json.decode(self._shared_bytes(msgspec.json.encode((nest, shapes))))
        for name, (dtype, shape) in shapes.items():
            if not self.is_first:
                tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype))
            on_device = tensors[name].to(self.device)
            self._heard(on_device)
            tensors[name] = on_device.cpu()
        return unpack(nest, tensors)

    def _shared_bytes(self, words: bytes) -> bytes:
        size = int(self._heard(torch.tensor([len(words)], device=self.device)).item())
        mine = torch.frombuffer(bytearray(words), dtype=torch.uint8) if self.is_first else torch.empty(size).byte()
        return bytes(self._heard(mine.to(self.device)).cpu().numpy().data)

    def gathered(self, words: bytes) -> list[bytes]:
        """What each of all ranks says."""
        sizes = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        sizes[self.rank] = len(words)
        with self.together():
            dist.all_reduce(sizes)
            mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            mine[: len(words)] = torch.frombuffer(bytearray(words), dtype=torch.uint8)
            mine = mine.to(self.device)
            everybody = [torch.empty_like(mine) for _ in range(self.size)]
            dist.all_gather(everybody, mine)
        return [bytes(one.cpu().numpy().data[:n]) for one, n in zip(everybody, sizes.tolist(), strict=True)]

    def close(self) -> None:
        """Gloo's threads need Python to release what they sent last. So they have to end before Python does, else the
        process aborts; and they do when nobody has the group any more (DDP has it, in a circle).
        """
        dist.destroy_process_group()
        gc.collect()


def _is_torchs(error: Exception) -> bool:
    """Or the user's own, who may write of connections, too?"""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith((TORCH, __file__))
