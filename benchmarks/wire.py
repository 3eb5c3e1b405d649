"""`wire`: messages with payloads over our Connection against bare sockets, over loopback, the sides alternating.

Two processes, each on a core of its own. On a virtual machine a core that waits halts, wakes up slowly and then runs
cold code, which makes short round trips five times as long as the code itself: so 1 KB is also timed with both on one
core, where nothing halts. That is `extra_us_1kb`; the other is `extra_us_1kb_two_cores`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from statistics import median
from typing import Any

from benchmarks.loopback import Loopback
from wide.config import Sockets

SIZES = {"1kb": 1 << 10, "16kb": 16 << 10, "256kb": 256 << 10, "1mb": 1 << 20, "16mb": 16 << 20, "256mb": 256 << 20}
ROUNDS = {"1kb": 500, "16kb": 300, "256kb": 100, "1mb": 50, "16mb": 7, "256mb": 1}  # some 20 to 100 ms each
PAIRS = 4  # of measurements in one repeat

Pairs = list[tuple[float, float]]  # seconds of a round trip: ours, bare


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """For each size: bytes/s of both, their ratio, and how much longer our round trip takes; medians over pairs."""
    result: dict[str, Any] = {}
    with closing(Loopback(max(SIZES.values()))) as loopback:

        def alternate(size: str) -> Pairs:
            pairs = []
            for _ in range(repeats):
                sides = loopback.open("ours", Sockets()), loopback.open("bare", Sockets())
                for i in range(PAIRS):
                    order = sides if i % 2 else sides[::-1]
                    seconds = {side: loopback.seconds(side, SIZES[size], ROUNDS[size]) for side in order}
                    pairs.append((seconds[sides[0]], seconds[sides[1]]))
            return pairs

        loopback.share_cores(2)
        for size, nbytes in SIZES.items():
            pairs = alternate(size)
            ours, bare = (median(nbytes / 1e6 / pair[side] for pair in pairs) for side in (0, 1))
            ratio = median(bare / ours for ours, bare in pairs)
            result |= {f"ratio_{size}": ratio, f"ours_mb_per_s_{size}": ours, f"bare_mb_per_s_{size}": bare}
            say(f"{size:>6}: ours {ours:7.1f} MB/s, bare sockets {bare:7.1f} MB/s, ratio {ratio:.2f}")
            if size == "1kb":
                result["extra_us_1kb_two_cores"] = _extra_us(pairs)
        loopback.share_cores(1)
        result["extra_us_1kb"] = _extra_us(alternate("1kb"))
    say(
        f"a round trip of 1 KB takes {result['extra_us_1kb']:.1f} µs longer than over bare sockets, "
        f"{result['extra_us_1kb_two_cores']:.1f} µs with a core for each"
    )
    return result


def _extra_us(pairs: Pairs) -> float:
    return median((ours - bare) * 1e6 for ours, bare in pairs)
