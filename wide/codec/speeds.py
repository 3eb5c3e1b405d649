"""How quick each codec is on this machine, and how much it saves on the data at hand. Knows codecs and a stopwatch."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from wide.codec.ladder import LADDER
from wide.codec.lossless import Planes
from wide.codec.planes import Bytes

SAMPLE_NBYTES = 256 * 1024


class Speed(NamedTuple):
    """What one codec does to one kind of data. `call_s` is what a piece costs however short it is."""

    ratio: float
    encode_bytes_per_s: float
    decode_bytes_per_s: float
    call_s: float


# Until something is measured: a gradient and a step of SGD on the machine of docs/findings.md.
PRIORS = {
    "lz4": Speed(1.2, 900e6, 2000e6, 60e-6),
    "zstd": Speed(1.4, 350e6, 700e6, 100e-6),
    "bf16": Speed(2.0, 8000e6, 8000e6, 20e-6),
    "int8": Speed(3.99, 2500e6, 5000e6, 60e-6),
    "int4": Speed(7.52, 1300e6, 3000e6, 80e-6),
    "topk": Speed(141.0, 600e6, 1500e6, 250e-6),
}


@dataclass(slots=True)
class Cpu:
    """Speeds for one kind of data, and how many pieces can be worked on at once."""

    speeds: dict[str, Speed] = field(default_factory=lambda: dict(PRIORS))
    threads: int = field(default_factory=lambda: min(4, os.cpu_count() or 1))


def measure(names: tuple[str, ...], raw: Bytes, width: int) -> dict[str, Speed]:
    """Try the codecs on real data (numbers of `width` bytes): a few milliseconds each."""
    sample = raw[: min(len(raw), SAMPLE_NBYTES) // width * width]
    return {name: _measure(name, sample, width) for name in names if LADDER[name] is not None and len(sample)}


def _measure(name: str, sample: Bytes, width: int) -> Speed:
    short_s, _, _ = _time(name, sample[: 16 * width], width)
    encode_s, decode_s, nbytes = _time(name, sample, width)
    work_s = max(encode_s - short_s, encode_s / 10)
    return Speed(len(sample) / nbytes, len(sample) / work_s, len(sample) / decode_s, short_s)


def _time(name: str, sample: Bytes, width: int) -> tuple[float, float, int]:
    """Seconds to encode and to decode, the better of two; and the encoded length."""
    codec = LADDER[name]
    assert codec is not None
    best = [float("inf"), float("inf")]
    for _ in range(2):
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
