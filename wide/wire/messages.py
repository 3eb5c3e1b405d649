"""Every message of the protocol: one frozen struct each, its docstring is what the sender says. Knows no bytes.

A conversation:   node         Knock ─────────► coordinator
                       ◄──────── Challenge
                  Hello ────────►                (with a proof that it knows a secret)
                       ◄──────── Known           (with the proof that the coordinator does, too)
                       ◄──────── Welcome
                       ◄──────── Probe           (empty ones, then loaded ones)    ┐ a few times
                  Probe ────────►                (said back)                       ┘
                  Ready ────────►
                       ◄──────── Work            (+ weights, + sample ids or batches)   ┐ until the run is over,
                  Update ───────►                (+ gradient sum)                       ┘ one pair per lease
                       ◄──────── Stop
Who is done with its part of a step may have its next Work already; then Weights come by themselves, and it begins.
Who has nothing else to say for a second says Alive.
What is not raw follows its message as Parts, in an order that both sides know (codec/pieces.py).
The evaluator, a child of the coordinator, speaks Evaluate / Evaluated instead of Work / Update.
A visitor, who comes before a machine's nodes, is made an Offer; a planner hears what was Planned. Then they go.

Who is one protocol behind is understood: fields are added at the end of a message, with defaults, and messages that are
new are said only to those who know them.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

PROTOCOL = 9
OLDEST = 9  # that is understood: one before PROTOCOL; but 8 said its token in clear, and is told to be updated
BEAT_S = 1.0  # whoever has said nothing else for so long says Alive
MOST_S = 1e9  # thirty years; sums of them stay finite
MOST_LOSS = 1e100  # and so do sums of these
LEAST_WEIGHT = 1e-30  # that is more than 0: by less nothing can be divided

# What a number must be is checked where a message is read, before anybody can count on it. A NaN is never in range.
Stored = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # SQLite holds no more
Seconds = Annotated[float, msgspec.Meta(ge=0, le=MOST_S)]
Weight = Annotated[float, msgspec.Meta(ge=0, le=MOST_LOSS)]
Logged = Annotated[
    dict[Annotated[str, msgspec.Meta(min_length=1, max_length=64)], tuple[float, Weight]], msgspec.Meta(max_length=64)
]
Loss = Annotated[float, msgspec.Meta(ge=-MOST_LOSS, le=MOST_LOSS)]


class Message(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Anything that is said. Tensors follow the message as its payload, raw."""


class Knock(Message, frozen=True):
    """Is somebody there? This is the newest protocol that I speak, and a number that I just made up."""

    protocol: Annotated[int, msgspec.Meta(ge=0, le=255)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Challenge(Message, frozen=True):
    """Yes: let us speak this protocol. Who are you? Prove it with this number, that I just made up."""

    protocol: Annotated[int, msgspec.Meta(ge=0, le=255)]
    nonce: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Hello(Message, frozen=True):
    """I would like to work for you. I know the secret of this name, and this is what I run on."""

    credential: Annotated[str, msgspec.Meta(max_length=64)]  # "token", "evaluator", "invite ID", or "machine ID"
    proof: Annotated[bytes, msgspec.Meta(max_length=32)]  # wire/proof.py
    role: (
        str  # "node", "evaluator"; "guest", who looks around; "visitor", who is enrolled, too; "planner", who only asks
    )
    name: str
    host: str
    pid: Stored
    build: str  # torch version, device kind, threads, instruction set: what bits depend on
    key: str = ""  # that only I know. Should you know me by it, this is my new connection, and the old one is void
    machine: Annotated[str, msgspec.Meta(max_length=64)] = ""  # the same for all processes of one machine
    cores: Annotated[int, msgspec.Meta(ge=0, le=65536)] = 0  # that it has for nodes like me
    isa: Annotated[str, msgspec.Meta(max_length=64)] = ""  # the instruction set that I use, and
    best: Annotated[str, msgspec.Meta(max_length=64)] = ""  # the best one that I could use (job/isa.py)
    device: Annotated[str, msgspec.Meta(max_length=16)] = ""  # what kind I compute on: cpu, cuda, mps


class Known(Message, frozen=True):
    """I believe you, and I know that secret, too. You came with an invite? From now on you are this machine of mine,
    with a secret of its own, whatever becomes of the invite.
    """

    proof: bytes
    machine: str = ""
    secret: bytes = b""


class Offer(Message, frozen=True):
    """This is what is trained here. Payload: the files of the job's code, one behind the other, in this order."""

    job: str
    parameters: int
    samples: int
    files: list[tuple[str, int]] = []  # name, within the job's folder, and bytes; empty: I do not send it
    main: str = ""  # which of them holds the job, and its name there
    arguments: list[str] = []  # that the job was given
    at: float = 0.0  # what my clock says
    values: list[str] = []  # that its function was called with: name:=JSON
    isa: str = ""  # the instruction set that all must use, so that their bits agree; empty: any


class Welcome(Message, frozen=True):
    """You are in. Build your model and your data like this, then tell me what you built."""

    node: int
    seed: int
    data: str  # "local", "stream" or "auto"
    checks: int = (
        0  # 1: please try whether the job gives the same numbers twice; 2: in another order; 3: only keep an eye
    )
    moved: list[str] = []  # parameters that the loss moves: their values travel with every update
    memory: tuple[int, int, int] | None = None  # of mine, that you can see if you run beside me: what is in there?
    steps: int | None = None  # that the run will have; None: it ends by time
    every: int | None = None  # nodes compute in loops of their own, and meet every so many steps (0: with each batch)


class Probe(Message, frozen=True):
    """How far apart are we, and how wide is the way? Please say this back, payload and all; but not the last one."""

    is_last: bool = False


class Tensor(Message, frozen=True):
    """A tensor of the model: where it lies in the flat buffer follows from the order of these."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Ready(Message, frozen=True):
    """I have built the model. These are its tensors, and this is how many samples my data set has (None: no data)."""

    tensors: list[Tensor]
    samples: Stored | None
    data_problem: str = ""
    weights: str = ""  # a fingerprint of those that I begin with: if yours are the same, you need not send them
    program: dict[str, list[int]] = {}  # the job's file ("") and those beside it: a checksum of each line
    probes: list[tuple[int, str]] = []  # some of my samples by number, and their fingerprints
    check: str = ""  # a fingerprint of what I computed, if you asked for that
    memory: str = ""  # what is in your memory, where you told me to look: weights and updates can be left there


class Work(Message, frozen=True):
    """Please compute these batches. Payload: weights (if yours are old), then ids or batches.

    In `sync` and `async` I would like the sum of their gradients. In `local` make a step of your own optimizer for each
    `group` of them, and tell me how far you got. If I am not in `sync` you may still be at your last work: go on with
    this one when you are done, and do not wait until I have read your update.
    """

    lease: int
    stretches: list[tuple[int, int, int, int]]  # step, first of its batches, how many, and N: the step's samples
    sizes: list[int]  # samples in each batch
    weights_nbytes: int  # raw ones in the payload; 0: you have this version, or they follow in parts
    batches: list[Any] | None = None  # how the streamed batches look; None: sample ids follow
    weights_codecs: list[str] = []  # in parts: each version since yours and how it is encoded; or, if
    is_whole: bool = False  # so, one version and all of it
    batches_codec: str = "raw"  # else the batches follow in parts too, and
    runs: list[tuple[int, int]] = []  # these are the bytes of each, and the bytes in a number
    reply_codec: str = "raw"  # how I would like your update to be encoded
    refused: int = 0  # your update for this lease did not count
    wants_speeds: tuple[str, ...] = ()  # please try these codecs on your next update, and tell me how it went
    strategy: str = "sync"
    group: int = 0
    weights_at: tuple[int, int] | None = None  # they are not sent, but lie here in my memory until you answer
    update_at: tuple[int, int] | None = None  # and here I would like to find your update, instead of its payload
    core: int = -1  # your machine is full: please compute on this one of the cores that you may use
    is_ahead: bool = False  # not yet: fetch your data, and begin when I send the next Weights
    epochs: list[int] = []  # of each stretch
    rates: list[float] = []  # the learning rates of your own optimizers' groups, if they follow from evaluations


class Weights(Message, frozen=True):
    """Here is the version that you have been waiting for: begin with the work that you have. Payload: the weights, if
    they are raw; otherwise as with Work.
    """

    weights_nbytes: int
    weights_codecs: list[str] = []
    is_whole: bool = False
    weights_at: tuple[int, int] | None = None
    refused: int = 0


class Update(Message, frozen=True):
    """Here is what you leased to me: a sum of gradients, or what my own steps changed. May I have more? Payload: that,
    as one flat buffer, if it is raw. If there are fewer losses than batches, I have to go, and this is how far I got.
    """

    lease: int
    losses: list[Loss]
    touched: bytes  # one bit a trainable tensor: has it had a gradient?
    compute_s: Seconds
    codec_s: Seconds
    network_s: Seconds
    rss_bytes: Stored
    codec: str = "raw"
    received_nbytes: Stored = 0  # of your last work's payload, after the first bytes of it, in
    received_s: Seconds = 0.0  # this time
    speeds: dict[str, tuple[float, float, float, float, float]] | None = None  # codec.speeds.Speed
    distracted_s: Seconds = 0.0  # the longest while in which I did not look for more of it
    is_finite: bool = True  # all of it; said of an update that lies in your memory, and was looked through here
    fetch_s: Seconds = 0.0  # of compute_s: until its batches were there
    decode_s: Seconds = 0.0  # of codec_s: your work, not my answer
    weights: list[Weight] = []  # if losses are totals: what each batch weighs, its count over the step's samples
    logged: Logged = {}  # by name: the sum of what my batches' losses logged, times their samples; and of these
    norm: Weight = 0.0  # of all of it; said where is_finite is


class Part(Message, frozen=True):
    """The next piece of what I said before. Payload: the piece, encoded."""


class Progress(Message, frozen=True):
    """How the pool is doing, now and then, for whoever sits in front of this machine."""

    step: int
    steps: int | None
    left_s: float | None
    batches: int  # that are merged
    yours: int  # of these
    per_s: float  # yours, lately


class Failed(Message, frozen=True):
    """Your code, or my machine, failed at this batch of the lease (-1: before any batch). I cannot go on."""

    lease: int
    batch: int
    problem: str
    details: str
    is_everywhere: bool = False  # it is the job's own fault: whoever tries it will fail
    moved: list[str] = []  # nothing is wrong, but these parameters are moved by the loss, and you did not know


class Leaving(Message, frozen=True):
    """I have to go. Give my work to somebody else. Payload: what my codec still owes you, if anything."""

    why: str


class Alive(Message, frozen=True):
    """I am still here."""


class Evaluate(Message, frozen=True):
    """Please evaluate these weights. Payload: the weights."""

    epoch: int
    step: int


class Evaluated(Message, frozen=True):
    """The user's evaluate() says this about the weights of that step."""

    epoch: int
    step: int
    metrics: dict[str, float]


class Stop(Message, frozen=True):
    """We are done with each other: why, and the exit code you should leave with."""

    why: str
    exit_code: int
    is_program: bool = False  # your code is not mine: if it was I who sent it, ask for it again
    isa: str = ""  # begin anew with this instruction set, which you have, and you are welcome


class Planned(Message, frozen=True):
    """You asked how this pool should train: this is what I measured, and what I would do. As JSON."""

    plan: str


TYPES: dict[int, type[Message]] = dict(
    enumerate(
        (
            Hello,
            Welcome,
            Ready,
            Work,
            Update,
            Failed,
            Leaving,
            Evaluate,
            Evaluated,
            Stop,
            Probe,
            Part,
            Planned,
            Alive,
            Progress,
            Weights,
            Knock,
            Challenge,
            Known,
            Offer,
        ),
        start=1,
    )
)
CODES = {kind: code for code, kind in TYPES.items()}
TO_COORDINATOR: tuple[type[Message], ...] = (
    *(Knock, Hello, Probe, Ready, Update, Part, Failed, Leaving, Evaluated, Alive),
)
