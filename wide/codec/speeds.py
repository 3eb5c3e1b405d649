"""How quick each codec is on this machine, and how much it saves on the data at hand. Knows codecs and a stopwatch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wide.codec.encoders import THREADS
from wide.codec.ladder import LADDER
from wide.codec.lossless import Planes
from wide.codec.planes import Bytes

SAMPLE_NBYTES = 64 * 1024  # at each of
SAMPLES = 4  # places: layers differ
ROUNDS = 2  # over all codecs, some milliseconds apart: a busy machine is seldom busy all the time
TRY_S = 2e-3  # for each codec in each round; the best try counts


class Speed(NamedTuple):
    """What one codec does to one kind of data; the last two are what a piece costs however short it is."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    encode_call_s: float
    decode_call_s: float


# Until something is measured: a gradient and a step of SGD on the machine of docs/findings.md.
PRIORS = {
    "lz4": Speed(1.2, 900e6, 2000e6, 30e-6, 15e-6),
    "zstd": Speed(1.4, 350e6, 700e6, 50e-6, 15e-6),
    "bf16": Speed(2.0, 8000e6, 8000e6, 8e-6, 8e-6),
    "int8": Speed(3.99, 2500e6, 5000e6, 40e-6, 10e-6),
    "int4": Speed(7.52, 1500e6, 3000e6, 40e-6, 15e-6),
    "topk": Speed(141.0, 700e6, 1500e6, 150e-6, 60e-6),
}


@dataclass(slots=True)
class Cpu:
    """Speeds for one kind of data, and how many threads there are for codecs that gain from them."""

    speeds: dict[str, Speed] = field(default_factory=lambda: dict(PRIORS))
    threads: int = THREADS


def measure(names: tuple[str, ...], raw: Bytes, width: int) -> dict[str, Speed]:
    """Try the codecs on real data (numbers of `width` bytes): a few milliseconds each."""
    most = len(raw) // width * width
    if most > SAMPLES * SAMPLE_NBYTES:
        starts = [i * (most - SAMPLE_NBYTES) // (SAMPLES - 1) // width * width for i in range(SAMPLES)]
        sample = np.concatenate([raw[start : start + SAMPLE_NBYTES] for start in starts])
    else:
        sample = raw[:most]
    tries = [
        (name, _time(name, sample[: 16 * width], width), _time(name, sample, width))
        for _ in range(ROUNDS)
        for name in names
        if LADDER[name] is not None and len(sample)
    ]
    return {name: _speed(sample, [pair for other, *pair in tries if other == name]) for name, _, _ in tries}


def _speed(sample: Bytes, tries: list[list[tuple[float, float, int]]]) -> Speed:
    """From what a short piece and the whole sample took, in each round."""
    (encode_call_s, decode_call_s), (encode_s, decode_s) = (
        (min(round_[size][0] for round_ in tries), min(round_[size][1] for round_ in tries)) for size in (0, 1)
    )
    nbytes = tries[0][1][2]
    return Speed(
        len(sample) / nbytes,
        len(sample) / max(encode_s - encode_call_s, encode_s / 10),
        len(sample) / max(decode_s - decode_call_s, decode_s / 10),
        encode_call_s,
        decode_call_s,
    )


def _time(name: str, sample: Bytes, width: int) -> tuple[float, float, int]:
    """Seconds to encode and to decode, the best of a few; and the encoded length."""
    codec = LADDER[name]
    assert codec is not None
    best = [float("inf"), float("inf")]
    began, data = time.perf_counter(), memoryview(b"")
    while not data or time.perf_counter() - began < TRY_S:
        started = time.perf_counter()
        if isinstance(codec, Planes):
            data = memoryview(b"".join(codec.encode(sample, width)))
            encoded = time.perf_counter()
            codec.decode(data, np.empty_like(sample), width)
        else:
            values = sample.view(np.float32) if width == 4 else sample[: len(sample) // 4 * 4].view(np.float32)
            data = memoryview(b"".join(codec.encode(values)))
            encoded = time.perf_counter()
            codec.decode(data, np.empty_like(values))
        best = [min(best[0], encoded - started), min(best[1], time.perf_counter() - encoded)]
    return best[0], best[1], len(data)
