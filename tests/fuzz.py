"""Mutated frames through the coordinator's whole intake: reader, messages, placing, every decoder.

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

from tests.jobs import make
from wide.codec.ladder import LADDER, RAW
from wide.codec.layout import Flat
from wide.codec.pieces import cut, encode
from wide.coordinator.choices import Choices
from wide.coordinator.intake import Intake
from wide.coordinator.master import Master
from wide.coordinator.peer import Peer, Sent
from wide.coordinator.probe import PROBE_NBYTES, Probing
from wide.coordinator.record import Record
from wide.errors import ConnectionLost, ProtocolError, VersionMismatch
from wide.job.schedule import Schedule
from wide.store.rundb import RunDb
from wide.telemetry.link import Link
from wide.telemetry.progress import Progress
from wide.transport.connection import Connection
from wide.transport.memory import pair
from wide.wire import frames
from wide.wire import messages as say

HANG_S = 1.0
CAP_NBYTES = 200 << 20
HEADER_LIMIT = 1 << 20
LENGTHS = (0, 1, 2**16, 2**31 - 1, 2**32 - 1, 2**63, 2**64 - 1)


class Target:
    """What a coordinator does with a member's bytes, up to the point where an update is whole."""

    def __init__(self, folder):
        job = make()
        model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 4, dtype=torch.float64))
        self.master = Master(job, model, seed=0)
        record = Record(RunDb(Path(folder) / "run.db"), Progress(), Schedule(9, 1, 1, 0))
        choices = Choices("lossless", self.master.layout.live_nbytes, record, ThreadPoolExecutor(1))
        self.intake = Intake(self.master, choices, lambda: 0.0)
        self.reasons = collections.Counter()

    def feed(self, data, codec):
        """One conversation; whatever is not allowed is counted."""
        mine, theirs = pair()
        peer = Peer(Connection(mine), "fuzz", 0.0, node=1, is_working=True, sent={1: Sent([8], codec)})
        peer.up, peer.down, peer.probing = Link(1e6), Link(1e6), Probing()
        limit = max(self.master.layout.live_nbytes, PROBE_NBYTES)
        peer.connection.reader.allow(lambda m, n: self.intake.place_for(peer, m, n), HEADER_LIMIT, limit)
        theirs.send([data])
        theirs.close()
        try:
            while True:
                for message in peer.connection.receive():
                    self.hear(peer, message)
        except ConnectionLost:
            self.reasons["waited for more"] += 1
        except ProtocolError as error:
            self.reasons[error.reason] += 1
        except VersionMismatch:
            self.reasons["version mismatch"] += 1
        finally:
            self.intake.forget(peer)
            peer.connection.close()

    def hear(self, peer, message):
        if isinstance(message, say.Update):
            done = self.intake.update(peer, message)
        elif isinstance(message, say.Part):
            whole = self.intake.part(peer)
            done = whole and whole[1]
        elif isinstance(message, say.Leaving):
            done = self.intake.debt(peer, 1.0)
        else:
            done = None
        if done is not None:
            done.is_finite()
            self.master.release(done)
            self.reasons["accepted"] += 1


def good_conversations(layout):
    """One for each codec, and the small messages."""
    torch.manual_seed(1)
    flat = Flat(layout, only_live=True)
    for view in [*flat.trainable, *flat.averaged]:
        view.copy_(torch.randn(view.shape))
    pieces = cut(layout, only_live=True)
    for codec in LADDER:
        update = say.Update(
            1, [0.5], b"\x0f", 1.0, 0.1, 0.2, 10**9, codec=codec, speeds={"zstd": (1.2, 1e9, 1e9, 1e-5, 1e-5)}
        )
        if codec == RAW:
            yield codec, [frames.encode(update, len(flat.bytes)), bytes(flat.bytes)]
        else:
            parts = [b"".join(encode(piece, codec, flat.raw)) for piece in pieces]
            yield (
                codec,
                [frames.encode(update), *(b for part in parts for b in (frames.encode(say.Part(), len(part)), part))],
            )
    small = [say.Hello("t", "node", "n", "h", 1, "b"), say.Failed(1, 2, "p", "d"), say.Leaving("why"), say.Probe()]
    small += [say.Ready(layout.describe(), 5), say.Evaluated(1, 2, {"a": 1.0})]
    for message in small:
        yield RAW, [frames.encode(message)]


def mutated(buffers, chance):
    """A good conversation with something wrong in it; often with a checksum that fits, so that it gets further."""
    buffers = [bytearray(buffer) for buffer in buffers]
    for _ in range(chance.choice((1, 1, 1, 2, 5))):
        victim = chance.choice(buffers)
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
    return b"".join(buffers)


def mend(frame):
    """Make the lengths and the checksum of a mutated header fit again."""
    header = frame[frames.FIXED.size :]
    magic, protocol, code, flags, _, payload_nbytes, _ = frames.FIXED.unpack_from(frame)
    frames.FIXED.pack_into(frame, 0, magic, protocol, code, flags, len(header), payload_nbytes, zlib.crc32(header))


def fuzz(count, seed):
    chance = random.Random(seed)
    with TemporaryDirectory() as folder:
        target = Target(folder)
        good = list(good_conversations(target.master.layout))
        for codec, buffers in good:
            target.feed(b"".join(buffers), codec)
        accepted, slowest_s, fed = target.reasons["accepted"], 0.0, 0
        before = peak_nbytes()
        while fed < count:
            codec, buffers = chance.choice(good)
            data = mutated(buffers, chance)
            started = time.perf_counter()
            target.feed(data, codec)
            slowest_s = max(slowest_s, time.perf_counter() - started)
            fed += max(1, data.count(frames.MAGIC))
    grown = peak_nbytes() - before
    result = {"frames": fed, "seed": seed, "slowest_s": slowest_s, "grown_mb": grown / 1e6, "reasons": target.reasons}
    is_fine = slowest_s < HANG_S and grown < CAP_NBYTES and accepted >= len(LADDER)
    return result, is_fine


def peak_nbytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def led_by_coverage(arguments):
    import atheris

    with TemporaryDirectory() as folder:
        target = Target(folder)
        codecs = list(LADDER)

        @atheris.instrument_func
        def one(data):
            if data:
                target.feed(bytes(data[1:]), codecs[data[0] % len(codecs)])

        corpus = Path(folder) / "corpus"
        corpus.mkdir()
        for i, (codec, buffers) in enumerate(good_conversations(target.master.layout)):
            (corpus / str(i)).write_bytes(bytes([codecs.index(codec)]) + b"".join(buffers))
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
