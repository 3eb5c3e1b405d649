"""Every message of the protocol: one frozen struct each, its docstring is what the sender says. Knows no bytes.

A conversation:   node         Hello ─────────► coordinator
                       ◄──────── Welcome
                  Ready ────────►
                       ◄──────── Work            (+ weights, + sample ids or batches)   ┐ until the run is over,
                  Update ───────►                (+ gradient sum)                       ┘ one pair per lease
                       ◄──────── Stop
The evaluator, a child of the coordinator, speaks Evaluate / Evaluated instead of Work / Update.
"""

from __future__ import annotations

from typing import Any

import msgspec

PROTOCOL = 1


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Anything that is said. Tensors follow the message as its payload, raw."""


class Hello(Message, frozen=True):
    """I would like to work for you. This is my token, and this is what I run on."""

    token: str
    role: str  # "node" or "evaluator"
    name: str
    host: str
    pid: int
    build: str  # torch version, device kind, threads, instruction set: what bits depend on


class Welcome(Message, frozen=True):
    """You are in. Build your model and your data like this, then tell me what you built."""

    node: int
    seed: int
    data: str  # "local", "stream" or "auto"


class Tensor(Message, frozen=True):
    """A tensor of the model: where it lies in the flat buffer follows from the order of these."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Ready(Message, frozen=True):
    """I have built the model. These are its tensors, and this is how many samples my data set has (None: no data)."""

    tensors: list[Tensor]
    samples: int | None
    data_problem: str = ""


class Work(Message, frozen=True):
    """Please compute the gradient of these batches. Payload: weights (if yours are old), then ids or batches."""

    lease: int
    version: int
    step: int
    first: int  # of the step's batches
    sizes: list[int]  # samples in each batch
    step_samples: int  # N, so that each batch weighs n/N
    weights_nbytes: int  # 0: you already have this version
    batches: list[Any] | None = None  # how the streamed batches look; None: sample ids follow


class Update(Message, frozen=True):
    """Here is what you leased to me, summed. May I have more? Payload: the flat gradient buffer."""

    lease: int
    losses: list[float]
    touched: bytes  # one byte a trainable tensor: has it had a gradient?
    compute_s: float
    codec_s: float
    network_s: float
    rss_bytes: int


class Failed(Message, frozen=True):
    """Your code, or my machine, failed at this batch (-1: before any batch). I cannot go on."""

    lease: int
    batch: int
    problem: str
    details: str


class Leaving(Message, frozen=True):
    """I have to go. Give my work to somebody else."""

    why: str


class Evaluate(Message, frozen=True):
    """Please evaluate these weights. Payload: the weights."""

    epoch: int
    step: int
    weights_nbytes: int


class Evaluated(Message, frozen=True):
    """The user's evaluate() says this about the weights of that step."""

    epoch: int
    step: int
    metrics: dict[str, float]


class Stop(Message, frozen=True):
    """We are done with each other: why, and the exit code you should leave with."""

    why: str
    exit_code: int


TYPES: dict[int, type[Message]] = dict(
    enumerate((Hello, Welcome, Ready, Work, Update, Failed, Leaving, Evaluate, Evaluated, Stop), start=1)
)
CODES = {kind: code for code, kind in TYPES.items()}
