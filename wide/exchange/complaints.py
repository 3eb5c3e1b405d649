"""What strangers were refused for: one row for each, as long as they are few; of a flood one row now and then, with its
size. Knows counts and a clock's readings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from wide.errors import ProtocolError, Refused, WideError
from wide.exchange.happenings import Rejected
from wide.wire import words

ROWS_BURST, ROWS_PER_S = 32.0, 0.1
SUMMED_UP_S = 30.0
MOST_KINDS = 64  # of address and reason; what is beyond that is of "others"
OTHERS = "others"


class Complaints:
    """`tell` is told what is worth a row."""

    def __init__(self, tell: Callable[[Rejected], None], now: Callable[[], float]) -> None:
        self._tell, self._now = tell, now
        self._left, self._at, self._summed_at = ROWS_BURST, now(), now()
        self._untold: Counter[tuple[str, str]] = Counter()

    def of(self, host: str, address: str, error: WideError) -> None:
        """Somebody at this address was refused, before it was known who it is."""
        now = self._now()
        self._left = min(ROWS_BURST, self._left + (now - self._at) * ROWS_PER_S)
        self._at, reason = now, reason_of(error)
        if self._left >= 1:
            self._left -= 1
            self._tell(Rejected(None, reason, f"{address}: {words.line(str(error))}"))
            return
        key = (host, reason)
        self._untold[key if key in self._untold or len(self._untold) < MOST_KINDS else (OTHERS, reason)] += 1

    def sum_up(self, is_last: bool = False) -> None:
        """What was not told yet, when it is time for that."""
        if self._untold and (is_last or self._now() - self._summed_at >= SUMMED_UP_S):
            untold, self._untold, self._summed_at = self._untold, Counter(), self._now()
            for (host, reason), count in untold.items():
                self._tell(Rejected(None, reason, f"{host}: {count:,} more such callers"))


def reason_of(error: WideError) -> str:
    """One countable word or two."""
    if isinstance(error, ProtocolError):
        return error.reason
    return "refused" if isinstance(error, Refused) else type(error).__name__.lower()
