"""`sockets`: the seeds' study of buffer sizes, read sizes, NODELAY and QUICKACK, over our Connection on loopback.

All settings take turns in one run. Payloads of 16 MB are sent with each process on a core of its own, round trips of
1 KB timed with both on one (see wire.py for why).
"""

from __future__ import annotations

import random
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from statistics import median
from typing import Any

from benchmarks.loopback import Loopback
from wide.config import Sockets

LARGE_NBYTES, LARGE_ROUNDS = 16 << 20, 3
SMALL_NBYTES, SMALL_ROUNDS = 1 << 10, 300
TURNS = 4  # in one repeat
KB, MB = 1 << 10, 1 << 20

SETTINGS = {
    "default": Sockets(),
    **{f"buffer_{n >> 10}kb": Sockets(buffer_nbytes=n) for n in (64 * KB, 256 * KB, MB, 4 * MB, 8 * MB, 16 * MB)},
    **{f"read_{n >> 10}kb": Sockets(read_nbytes=n) for n in (64 * KB, MB)},
    "read_all": Sockets(read_nbytes=0),
    "nodelay_off": Sockets(nodelay=False),
    "quickack_on": Sockets(quickack=True),
}


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """For each setting: MB/s and µs (medians), both ÷ the default's of the same turn, and the buffer it really got."""
    with closing(Loopback(LARGE_NBYTES)) as loopback:
        large = [turn for _ in range(repeats) for turn in _turns(loopback, 2, LARGE_NBYTES, LARGE_ROUNDS)]
        small = [turn for _ in range(repeats) for turn in _turns(loopback, 1, SMALL_NBYTES, SMALL_ROUNDS)]
    result = {name: _figures(name, large, small) for name in SETTINGS}
    for name, figures in result.items():
        say(
            f"{name:>14}: {figures['mb_per_s']:5.0f} MB/s ({figures['speed']:.2f} of the default), "
            f"1 KB in {figures['us']:5.1f} µs ({figures['delay']:.2f}), "
            f"buffer {figures['granted_kb']} KB"
        )
    return result


def _turns(loopback: Loopback, cores: int, nbytes: int, rounds: int) -> Iterator[dict[str, float]]:
    """Seconds of each setting, in turns, on new connections: how far the kernel has tuned one is partly luck."""
    loopback.share_cores(cores)
    links = {name: loopback.open("ours", sockets) for name, sockets in SETTINGS.items()}
    for _ in range(TURNS):
        order = random.sample(sorted(links), len(links))  # nobody is always first, or always behind the same one
        yield {name: loopback.seconds(links[name], nbytes, rounds) for name in order}


def _figures(name: str, large: list[dict[str, float]], small: list[dict[str, float]]) -> dict[str, float]:
    return {
        "mb_per_s": median(LARGE_NBYTES / 1e6 / turn[name] for turn in large),
        "speed": median(turn["default"] / turn[name] for turn in large),
        "us": median(turn[name] * 1e6 for turn in small),
        "delay": median(turn[name] / turn["default"] for turn in small),
        "granted_kb": _granted_kb(SETTINGS[name].buffer_nbytes),
    }


def _granted_kb(buffer_nbytes: int) -> int:
    """What the kernel makes of a wish: Linux doubles it, up to twice net.core.rmem_max. 0: autotuned."""
    with socket.socket() as sock:
        if buffer_nbytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_nbytes)
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >> 10
    return 0
