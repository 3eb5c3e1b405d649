"""`codecs`: ratio and speed of every codec on real gradients, weights and batches, with one thread and with two;

and whether `choose` finds the best one: links from 1 Mbit/s to 100 Gbit/s are simulated piece by piece, from times and
lengths measured here, while `choose` sees only what the product itself would have measured.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.wide_job import job
from wide.codec.batch import pack
from wide.codec.choose import Role, candidates, choose
from wide.codec.encoders import THREADED
from wide.codec.ladder import LADDER, LOSSLESS, RAW
from wide.codec.lossless import Buffers, Planes
from wide.codec.pieces import PIECE_NBYTES
from wide.codec.planes import Bytes, difference
from wide.codec.speeds import Cpu, measure
from wide.telemetry.link import Link

MBITS = (1, 3, 10, 30, 100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
SIZES = (2_048, 38_400, 1 << 40)  # the seeds' model, the digits', all there is
THREADS = 2
WARM_UP_STEPS = 60
TRY_S, LEAST_TRIES = 1e-3, 3  # for a piece


@dataclass
class Sample:
    """Real data of one role: as lossless codecs see it, and as lossy ones do."""

    role: Role
    exact: Bytes
    numbers: Bytes
    width: int = 4

    def of(self, name: str) -> Bytes:
        return self.exact if name in LOSSLESS else self.numbers


@dataclass
class Timed:
    """One codec on one sample: what each piece took, with so many at work, and its length."""

    hands: int
    alone_s: list[float]  # to encode, in one thread
    encode_s: list[float]  # with the others at work too
    decode_s: list[float]
    nbytes: list[int]


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    torch.set_num_threads(1)
    table: dict[str, dict[str, dict[str, float]]] = {}
    verdicts: dict[tuple[str, int, bool, int], list[tuple[float, str]]] = {}
    curves: dict[str, list[dict[str, float]]] = {}
    for sample in samples():
        rows = table[sample.role] = {name: speeds(name, sample) for name in LADDER if name != RAW}
        for name, row in rows.items():
            say(
                f"{sample.role:9} {name:5} ratio {row['ratio']:6.2f} · encode {row['encode_mb_per_s']:6.0f} MB/s, with "
                f"{THREADS} threads {row['encode_mb_per_s_2']:6.0f} · decode {row['decode_mb_per_s']:6.0f}"
            )
        for size, lossless in itertools.product(SIZES, (True, False)):
            for _ in range(repeats):
                found = judge(sample, size, lossless)
                for mbit, (ratio, words, _) in zip(MBITS, found, strict=True):
                    verdicts.setdefault((sample.role, size, lossless, mbit), []).append((ratio, words))
            if size == SIZES[-1] and not lossless:
                curves[sample.role] = [times for _, _, times in found]
    worst = max((median(ratio for ratio, _ in rounds), max(rounds)[1]) for rounds in verdicts.values())
    say(f"the choice took at most {worst[0]:.3f} of the best fixed codec's time: {worst[1]}")
    return {"worst_choice": worst[0], "worst_where": worst[1], "codecs": table, "mbits": MBITS, "seconds": curves}


def samples() -> list[Sample]:
    """A gradient, a change of the weights and a few batches of the digits with 1.13 M parameters, some steps in."""
    torch.manual_seed(0)
    model, images = job.model(), job.dataset()
    optimizer = job.optimizer(list(model.parameters()))
    for _ in range(WARM_UP_STEPS):
        batch = images[torch.randint(len(images), (512,))]
        before = flat(model, lambda p: p.detach())
        optimizer.zero_grad()
        torch.autograd.backward(job.loss(model, batch))
        gradient = flat(model, lambda p: p.grad)
        optimizer.step()
    after = flat(model, lambda p: p.detach())
    moved = (after - before).view(torch.uint8).numpy()
    exact = difference(after.view(torch.uint8).numpy(), before.view(torch.uint8).numpy(), 4)
    packed = pack([images[torch.randint(len(images), (32,))] for _ in range(64)])
    raw = np.concatenate([np.frombuffer(buffer, np.uint8) for buffer in packed.buffers])
    return [
        Sample("gradient", gradient.view(torch.uint8).numpy(), gradient.view(torch.uint8).numpy()),
        Sample("weights", exact, moved),
        Sample("delta", gradient.view(torch.uint8).numpy(), gradient.view(torch.uint8).numpy()),
        Sample("batch", raw, raw, packed.width),
    ]


def flat(model: torch.nn.Module, of: Callable[[torch.nn.Parameter], Any]) -> torch.Tensor:
    return torch.cat([of(parameter).reshape(-1) for parameter in model.parameters()]).clone()


def pieces(raw: Bytes, most: int) -> list[Bytes]:
    end = min(len(raw), most)
    return [raw[start : min(start + PIECE_NBYTES, end)] for start in range(0, end, PIECE_NBYTES)]


def encode(name: str, raw: Bytes, width: int) -> Buffers:
    codec = LADDER[name]
    assert codec is not None
    return codec.encode(raw, width) if isinstance(codec, Planes) else codec.encode(raw.view(np.float32))


def decode(name: str, data: memoryview, raw: Bytes, width: int) -> None:
    codec = LADDER[name]
    assert codec is not None
    if isinstance(codec, Planes):
        codec.decode(data, raw, width)
    else:
        codec.decode(data, raw.view(np.float32))


def timed(name: str, sample: Sample, most: int) -> Timed:
    whole = pieces(sample.of(name), most)
    result = Timed(min(THREADS, len(whole)) if name in THREADED else 1, [], [], [], [])
    for raw in whole:
        encode_s: list[float] = []
        decode_s: list[float] = []
        began = time.perf_counter()
        while len(encode_s) < LEAST_TRIES or time.perf_counter() - began < TRY_S:
            started = time.perf_counter()
            buffers = encode(name, raw, sample.width)
            encoded = time.perf_counter()
            data, out = memoryview(b"".join(buffers)), np.empty_like(raw)
            joined = time.perf_counter()
            decode(name, data, out, sample.width)
            encode_s.append(encoded - started)
            decode_s.append(time.perf_counter() - joined)
        result.alone_s.append(min(encode_s))  # the machine's noise is not what is compared
        result.decode_s.append(min(decode_s))
        result.nbytes.append(len(data))
    crowding = result.hands * together(name, sample, most) / sum(result.alone_s) if result.hands > 1 else 1.0
    result.encode_s = [crowding * seconds for seconds in result.alone_s]  # two threads are not twice as quick
    return result


def together(name: str, sample: Sample, most: int) -> float:
    """Seconds to encode all pieces in two threads."""
    several = []
    with ThreadPoolExecutor(THREADS) as threads:
        for _ in range(LEAST_TRIES):
            started = time.perf_counter()
            list(threads.map(lambda raw: encode(name, raw, sample.width), pieces(sample.of(name), most)))
            several.append(time.perf_counter() - started)
    return min(several)


def speeds(name: str, sample: Sample) -> dict[str, float]:
    whole, took = sample.of(name), timed(name, sample, SIZES[-1])
    together_s = together(name, sample, SIZES[-1])
    return {
        "ratio": len(whole) / sum(took.nbytes),
        "encode_mb_per_s": len(whole) / 1e6 / sum(took.alone_s),
        "encode_mb_per_s_2": len(whole) / 1e6 / together_s,
        "decode_mb_per_s": len(whole) / 1e6 / sum(took.decode_s),
    }


def judge(sample: Sample, size: int, lossless: bool) -> list[tuple[float, str, dict[str, float]]]:
    """For each link: the chosen codec's time ÷ the best one's, in words, and the times of all."""
    names = candidates(sample.role, lossless)
    nbytes = min(len(sample.exact), size)
    took = {name: timed(name, sample, size) for name in names if name != RAW}
    numbers = sample.numbers.view(np.float32)[: nbytes // sample.width]
    measured = measure(names[1:], sample.exact[:nbytes], sample.width, numbers)
    found = []
    for mbit in MBITS:
        link = Link(mbit * 1e6 / 8, delay_s=1e-4)
        times = {name: simulated(took[name], link) if name != RAW else nbytes / link.bytes_per_s for name in names}
        chosen, _ = choose(sample.role, nbytes, link, Cpu(measured, THREADS), lossless)
        best = min(times, key=lambda name: times[name])
        ratio = (times[chosen] + link.delay_s) / (times[best] + link.delay_s)
        words = f"{chosen} instead of {best} for {nbytes} bytes of {sample.role} at {mbit} Mbit/s"
        found.append((ratio, words, times | {"chosen": times[chosen]}))
    return found


def simulated(took: Timed, link: Link) -> float:
    """Seconds from the first piece's encoding to the last one's decoding: some encoders, one link, one decoder."""
    encoders, sent_at, decoded_at = [0.0] * took.hands, 0.0, 0.0
    for encode_s, decode_s, nbytes in zip(took.encode_s, took.decode_s, took.nbytes, strict=True):
        encoder = encoders.index(min(encoders))
        encoders[encoder] += encode_s
        sent_at = max(sent_at, encoders[encoder]) + nbytes / link.bytes_per_s
        decoded_at = max(decoded_at, sent_at) + decode_s
    return decoded_at
