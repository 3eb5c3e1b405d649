"""Mutated conversations against the whole server, over the in-memory twin: callers, members, their updates in every
codec. Whatever is sent, the coordinator goes on, and only the sender is dismissed.

    python -m tests.fuzz --frames 1000000          mutations of good frames, from a seed; ends with one JSON line
    python -m tests.fuzz --atheris -runs=100000    the same target, led by coverage (needs atheris)

A crash ends the process, which is why tests run this in a process of its own; a hang, or memory beyond the cap, fails.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import resource
import struct
import sys
import time
import zlib
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from faults.disk import Disk, MemoryDb
from tests.greet import KNOCK, NONCES, a_hello
from tests.jobs import make
from wide.codec.encoders import Encoders
from wide.codec.ladder import LADDER, RAW
from wide.codec.layout import Flat
from wide.codec.pieces import cut, encode
from wide.codec.speeds import PRIORS
from wide.config import resolve
from wide.coordinator import assembly
from wide.coordinator.assembly import Course
from wide.coordinator.master import Master
from wide.exchange import reception
from wide.exchange.door import Door
from wide.exchange.feed import Feed
from wide.exchange.guests import Guests
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.telemetry.clock import Clock
from wide.telemetry.divergence import Divergence
from wide.transport.memory import MemoryHub, MemoryStream
from wide.wire import frames
from wide.wire import messages as say

HANG_S = 1.0
CAP_NBYTES = 200 << 20
LENGTHS = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)
TOKEN = "the pool's"


class Target:
    """A coordinator whose clock stands still while it listens, and whose run never ends."""

    def __init__(self, codec):
        reception.nonce = lambda: NONCES[1]  # so that what is said can be made up beforehand
        job = make()
        samples = Samples(job, job.seed)
        schedule = Schedule(len(samples), 8, 4, job.seed)
        model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 4, dtype=torch.float64))
        self.master = Master(job, model, seed=0)
        self.now, self.reasons = 1.0, collections.Counter()
        options = resolve({"compress": "none" if codec == RAW else codec, "steps": 2**53}, {})
        clock = Clock(lambda: self.now, lambda: self.now)
        course = Course(options, schedule, self.master, 2**53, MemoryDb(Disk()), None, clock=clock)
        self.hub = MemoryHub(lambda seconds, has_news: 0.0)
        door = Door(Guests(TOKEN, "evaluator's"), job.seed, "auto", options.codecs, "build")
        priors = lambda names, *_: {name: PRIORS[name] for name in names}  # noqa: E731
        parts = (self.hub, door, Feed(samples, schedule), Encoders(threads=0), True, False)
        self.server = assembly.server(course, *parts, try_codecs=priors)
        self.server.run.record.db.insert = self._count

    def _count(self, table, rows):
        """In place of run.db, which would grow: why somebody was refused."""
        for row in rows:
            self.reasons[row[2] if table == "rejects" else table] += 1

    def feed(self, *said, pieces=1):
        """One conversation, from its first byte to its last. A function is told the last lease, and says its bytes."""
        stream = MemoryStream()
        self.hub.call(stream, "127.0.0.1:5")
        fed = 0
        for words in said:
            data = words(self.server.pool._granting._granted) if callable(words) else words
            fed += max(1, data.count(frames.MAGIC))
            step = max(1, len(data) // pieces)
            for start in range(0, max(1, len(data)), step):
                stream.arrive(data[start : start + step])
                self.turn()
        stream.hang_up()
        self.turn()
        self.server.pool._failures.step_closed()  # two that agree on a failure end a run, and so do high losses: as they
        self.server.run.record.divergence = Divergence()  # should, but what is looked for here is something else
        assert stream.is_closed, "it was not let go of"
        assert not self.server.exchange.nodes, "somebody is still there"
        return fed

    def turn(self):
        """Until there is nothing more to hear; each time the clock is looked at, a little has passed."""
        server = self.server
        while self.hub._has_news() and (self.hub._callers or any(s.has_input() for s in self.hub._loud)):
            self.now += 1e-3
            server.exchange.turn(0.0)
            server._take_happenings()
        self.now += 0.05
        server._tick(self.now, lambda: "")
        assert server.run.ended is None, server.run.ended


def greeting(layout):
    """What a member says until it is given work: its hello, the echoes, and what it has built."""
    hello = frames.encode(KNOCK) + frames.encode(a_hello(TOKEN))
    empty = frames.encode(say.Probe())
    loaded = frames.encode(say.Probe(), 64 * 1024) + bytes(64 * 1024)
    return [hello, empty, loaded, frames.encode(say.Ready(layout.describe(), 83))]  # by this clock it is far away


class Talk:
    """Good conversations: how a member begins, what it may say when it has work, and what strangers say."""

    def __init__(self, layout, codec):
        torch.manual_seed(1)
        self._layout, self._codec = layout, codec
        flat = Flat(layout, only_live=True)
        for view in [*flat.trainable, *flat.averaged]:
            view.copy_(torch.randn(view.shape))
        self._payload = bytes(flat.bytes)
        if codec != RAW:
            self._parts = [b"".join(encode(piece, codec, flat.raw)) for piece in cut(layout, only_live=True)]
        self.greeting = greeting(layout)
        small = [say.Failed(1, 2, "p", "d"), say.Leaving("why"), say.Probe(), say.Alive()]
        small += [say.Ready(layout.describe(), 5), say.Evaluated(1, 2, {"a": 1.0})]
        hellos = [a_hello(*who) for who in ((TOKEN, "planner"), (TOKEN, "visitor"), ("guess", "node"))]
        self.small = [[frames.encode(message)] for message in small]
        self.small += [[frames.encode(KNOCK), frames.encode(hello)] for hello in hellos]

    def update(self, lease):
        """For this lease, in buffers."""
        speeds = {"zstd": (1.2, 1e9, 1e9, 1e-5, 1e-5)}
        touched = bytes(len(self._layout.trainable) // 8 + 1)
        update = say.Update(lease, [0.5], touched, 1.0, 0.1, 0.2, 10**9, self._codec, 10**6, 0.1, speeds, 0.1)
        if self._codec == RAW:
            return [frames.encode(update, len(self._payload)), self._payload]
        said = [b for part in self._parts for b in (frames.encode(say.Part(), len(part)), part)]
        return [frames.encode(update), *said]

    def drawn(self, chance):
        """One conversation, with something wrong in it."""
        fate = chance.random()
        if fate < 0.15:
            return mutated(self.greeting, chance)
        if fate < 0.3:
            return mutated(chance.choice(self.small), chance)
        if fate < 0.45:
            return [*self.greeting, *mutated(chance.choice(self.small), chance)]
        return [*self.greeting, lambda lease: b"".join(mutated(self.update(lease), chance))]


def mutated(buffers, chance):
    """A good conversation with something wrong in it; often with a checksum that fits, so that it gets further."""
    buffers = [bytearray(buffer) for buffer in buffers]
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        victim = chance.choice(buffers[-4:] if chance.random() < 0.7 else buffers)
        kind = chance.randrange(7)
        if kind == 0 and victim:
            victim[chance.randrange(len(victim))] ^= 1 << chance.randrange(8)
        elif kind == 1 and victim:
            victim[chance.randrange(len(victim))] = chance.randrange(256)
        elif kind == 2:
            del victim[chance.randrange(len(victim) + 1) :]
        elif kind == 3:
            at = chance.randrange(len(victim) + 1)
            victim[at:at] = chance.randbytes(chance.randrange(20))
        elif kind == 4 and len(victim) >= 8:
            at = chance.randrange(len(victim) - 7)
            victim[at : at + 8] = struct.pack("<Q", chance.choice(LENGTHS))
        elif kind == 5:
            buffers.insert(chance.randrange(len(buffers) + 1), bytearray(chance.choice(buffers)))
        elif kind == 6 and len(victim) > frames.FIXED.size and victim[:4] == frames.MAGIC:
            mend(victim)
    if chance.random() < 0.7:
        for buffer in buffers:
            if len(buffer) > frames.FIXED.size and buffer[:4] == frames.MAGIC:
                mend(buffer)
    return buffers


def mend(frame):
    """Make the lengths and the checksum of a mutated header fit again; a payload behind it stays one."""
    magic, protocol, code, flags, _, payload_nbytes, _ = frames.FIXED.unpack_from(frame)
    behind = payload_nbytes if payload_nbytes <= len(frame) - frames.FIXED.size else 0
    header = frame[frames.FIXED.size : len(frame) - behind]
    frames.FIXED.pack_into(
        frame, 0, magic, protocol, code, flags, len(header), payload_nbytes, zlib.crc32(header, code)
    )


def fuzz(count, seed):
    chance = random.Random(seed)
    reasons, slowest_s, fed = collections.Counter(), 0.0, 0
    before = peak_nbytes()
    for codec in LADDER:
        target = Target(codec)
        talk = Talk(target.master.layout, codec)
        target.feed(*talk.greeting, lambda lease, talk=talk: b"".join(talk.update(lease)))
        target.server.run.record.flush(force=True)
        assert target.reasons["ledger"] == 1, f"an update in {codec} should have been merged: {target.reasons}"
        until = fed + count // len(LADDER)
        while fed < until:
            conversation, pieces = talk.drawn(chance), chance.choice((1, 1, 3))
            started = time.perf_counter()
            fed += target.feed(*conversation, pieces=pieces)
            slowest_s = max(slowest_s, time.perf_counter() - started)
        assert not target.reasons["served badly"], "an exception of our own"
        reasons += target.reasons
    grown = peak_nbytes() - before
    result = {"frames": fed, "seed": seed, "slowest_s": slowest_s, "grown_mb": grown / 1e6, "reasons": reasons}
    return result, slowest_s < HANG_S and grown < CAP_NBYTES


def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def led_by_coverage(arguments):
    import atheris

    targets = {codec: Target(codec) for codec in LADDER}
    talks = {codec: Talk(target.master.layout, codec) for codec, target in targets.items()}
    codecs = list(LADDER)

    @atheris.instrument_func
    def one(data):
        """The first byte picks the codec and whether a greeting goes before;"""
        if data:
            codec = codecs[data[0] % len(codecs)]
            begin = talks[codec].greeting if data[0] & 0x80 else []
            targets[codec].feed(*begin, bytes(data[1:]))

    with TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for at, talk in enumerate(talks.values()):
            first = 0x80 + (at - 0x80) % len(codecs)
            for i, buffers in enumerate([*talk.small, *(talk.update(lease) for lease in (1, 2, 3))]):
                (corpus / f"{at}-{i}").write_bytes(bytes([first]) + b"".join(buffers))
                (corpus / f"{at}-{i}-first").write_bytes(bytes([at]) + b"".join(buffers))
        atheris.instrument_all() if "--all" in arguments else None
        atheris.Setup([sys.argv[0], "-timeout=1", "-rss_limit_mb=4096", *arguments, str(corpus)], one)
        atheris.Fuzz()


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    options, rest = parser.parse_known_args()
    torch.set_num_threads(1)
    if options.atheris:
        return led_by_coverage(rest)
    result, is_fine = fuzz(options.frames, options.seed)
    print(json.dumps(result))
    return 0 if is_fine else 1


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
