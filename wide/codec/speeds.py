"""How quick each codec is on this machine, and how much it saves on the data at hand. Knows codecs and a stopwatch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wide.codec.encoders import THREADS
from wide.codec.ladder import LADDER
from wide.codec.lossless import Planes
from wide.codec.lossy import Floats
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


Trial = Callable[[tuple[str, ...], Bytes, int, Floats], dict[str, Speed]]  # `measure`, or what stands for it


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


def measure(names: tuple[str, ...], exact: Bytes, width: int, numbers: Floats) -> dict[str, Speed]:
    """Try the codecs on real data, a few milliseconds each: lossless ones on its bytes, `width` to a number, lossy ones
    on the same numbers as fp32.
    """
    count = len(exact) // width
    least = min(SAMPLE_NBYTES // width, count)
    starts = [i * (count - least) // (SAMPLES - 1) for i in range(SAMPLES)] if count > SAMPLES * least else [0]
    ends = [start + (least if len(starts) > 1 else count) for start in starts]
    sample = np.concatenate([exact[a * width : b * width] for a, b in zip(starts, ends, strict=True)])
    floats = np.concatenate([numbers[a:b] for a, b in zip(starts, ends, strict=True)])
    tries = [
        (name, _time(name, sample[: 16 * width], width, floats[:16]), _time(name, sample, width, floats))
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


def _time(name: str, sample: Bytes, width: int, floats: Floats) -> tuple[float, float, int]:
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
            data = memoryview(b"".join(codec.encode(floats)))
            encoded = time.perf_counter()
            codec.decode(data, np.empty_like(floats))
        best = [min(best[0], encoded - started), min(best[1], time.perf_counter() - encoded)]
    return best[0], best[1], len(data)
