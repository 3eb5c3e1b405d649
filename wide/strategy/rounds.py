"""When a round of local training may close: a quorum, and a grace window that nobody has to guess. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

SPREADS = 4.0  # a node this many median deviations later than the median is late
LEAST_GRACE = 0.5  # of the median: machines are never exactly alike, and what is merged late is old


def usual_s(durations_s: Sequence[float], spreads: float = SPREADS, least: float = LEAST_GRACE) -> float:
    """Median + k·MAD of how long contributions took: whoever needs longer is late. Endless while nothing is known."""
    if not durations_s:
        return math.inf
    middle = median(durations_s)
    spread = median(abs(duration - middle) for duration in durations_s)
    return middle + max(spreads * spread, least * middle)


def may_close(arrived: int, awaited: int, waited_s: float, durations_s: Sequence[float]) -> tuple[bool, str]:
    """May the round close with `arrived` contributions while `awaited` others are still expected? And why."""
    if not arrived:
        return False, "nobody has contributed yet"
    if not awaited:
        return True, f"all {arrived} are in"
    if 2 * arrived < arrived + awaited:
        return False, f"{arrived} of {arrived + awaited} are no quorum"
    limit = usual_s(durations_s)
    if waited_s <= limit:
        return False, f"{awaited} may still come, {limit - waited_s:.2g} s are left"
    return True, f"{arrived} are in, {awaited} are later than median + {SPREADS:g}·MAD = {limit:.2g} s"
