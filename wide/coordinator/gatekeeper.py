"""Is an update unlike what others send? Numbers only: norms, weights, losses. Knows no tensors, no clock, no network.

It hears of every update that arrives, and says a doubt in words, or nothing, mostly: then it learns from it what is
usual. A doubt decides nothing: the pool has the work done once more, by another node. So a wrong doubt costs that work,
and a missed one lets in `MOST` times the usual, no more.

An honest run begins, drifts and spikes. So nothing is doubted before there is something to compare it with; all is
measured against the median of the last updates, which follows a drift; and after a doubted one that was merged all the
same, because another node found the like, the next ones may be as long as that, until the median has followed.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from wide.strategy.usual import WINDOW, Lengths, Median

FEW, ENOUGH = 3, 16  # updates, to compare with at all, and to know how they scatter
SOME = 4  # of gradients, which are many, one of so many says what is usual, once that is known
GOLDEN = (math.sqrt(5) - 1) / 2  # which ones: in no step with nodes that take turns
MOST = 64.0  # times the usual: honest ones were seen to reach 34 (docs/findings.md)
MOST_EARLY = 4 * MOST  # while few are known
MOST_CLIPPED = MOST * MOST  # gradients of a job with clip_norm: they may explode, and what is merged is cut
MOST_LOSS = 1000.0  # times the usual, the first ones, and 1: below that telemetry/divergence.py does not look, either
LEAST = 1e-30  # that something weighs, or is long
NOTHING = 1e-9  # of the usual norm: no more than zero
BELIEVED = WINDOW // 2 + 1  # updates that say what is usual: then the median has followed, or it was one of a kind
CROWD = WINDOW // 3  # of the window are one node's: if there are three of them, it is no majority
SELDOM = 32  # of a node that has so many, one in so many counts


class Seen(NamedTuple):
    """An update. `amount` is what its norm grows with: how much its batches weigh, or how many steps its node has made;
    `per_sample`: if its losses are totals (wide.total), how much each sample counts. Only those of one kind and of one
    phase of the job are alike.
    """

    node: int
    kind: str  # the strategy's update_role
    norm: float
    amount: float
    losses: Sequence[float]
    per_sample: float | None = None
    phase: int = 0


class Usual:
    """What is known of one kind of update."""

    def __init__(self, most: float, is_delta: bool) -> None:
        self._most, self._is_delta = most, is_delta
        self.lengths, self.counts, self.losses = Lengths(wanders=is_delta), Median(), Median()
        self.most_loss = math.inf
        self.has_totals: bool | None = None  # nobody has said anything
        self._sound = 0  # that nobody had doubts about
        self._first_loss = 1.0
        self._since_zero = WINDOW  # updates
        self._believed = 0.0, 0.0, 0.0  # lengths for one and for one's root, and a loss
        self._believing = 0  # for so many updates more

    @property
    def most(self) -> float:
        return self._most if self.lengths.count >= ENOUGH else max(MOST_EARLY, self._most)

    @property
    def has_zeros(self) -> bool:
        """Where a loss is masked now and then, zeros are honest."""
        return self._since_zero < WINDOW

    def believed(self, amount: float) -> float:
        """As long as this, something was believed."""
        straight, wandering, _ = self._believed
        return max(straight * amount, wandering * math.sqrt(amount))

    def is_enough(self, norm: float) -> bool:
        """Is that known well enough without this one?"""
        self._sound += 1
        if self.lengths.count <= WINDOW or self._is_delta or norm <= 0:
            return False
        return self._sound * GOLDEN % 1.0 * SOME >= 1.0

    def learn(self, seen: Seen) -> None:
        if self._believing:
            self._believing -= 1
            if not self._believing:
                self._believed = 0.0, 0.0, 0.0
        if (amount := seen.amount) >= LEAST:
            self._since_zero += 1
            if seen.norm > NOTHING * self.lengths.usual(amount):
                self.lengths.add(seen.norm, amount)  # zeros say nothing about how long the others are
            else:
                self._since_zero = 0
            if seen.per_sample is not None:
                self.counts.add(seen.per_sample)
        self.losses.add(_largest(seen.losses))
        self.has_totals = seen.per_sample is not None
        if self._sound <= ENOUGH:
            self._first_loss = max(1.0, self.losses.value)
        if self._sound >= FEW:
            self.most_loss = MOST_LOSS * max(self._first_loss, self.losses.value, self._believed[2])

    def believe(self, seen: Seen) -> None:
        self._believing = BELIEVED
        straight, wandering, loss = self._believed
        if (amount := seen.amount) >= LEAST:
            straight = max(straight, seen.norm / amount)
            wandering = max(wandering, seen.norm / math.sqrt(amount)) if self._is_delta else 0.0
        self._believed = straight, wandering, max(loss, _largest(seen.losses))


class Gatekeeper:
    """One for a run. `is_clipped`: the job sets clip_norm."""

    def __init__(self, is_clipped: bool = False) -> None:
        self._most = {"gradient": MOST_CLIPPED if is_clipped else MOST, "delta": MOST}
        self._kinds: dict[tuple[str, int], Usual] = {}
        self._doubted: dict[int, tuple[Seen, Usual]] = {}  # by lease: until something is decided
        self._window: deque[int] = deque()  # whose updates were learned from last
        self._crowds: Counter[int] = Counter()
        self._passed_over = 0

    def doubt(self, lease: int, seen: Seen) -> str:
        """What is odd about it, in words; nothing, mostly."""
        usual = self._kinds.get(kind := (seen.kind, seen.phase))
        if usual is None:
            usual = self._kinds[kind] = Usual(self._most[seen.kind], seen.kind == "delta")
        if words := _doubt(seen, usual):
            self._doubted[lease] = seen, usual
        elif not usual.is_enough(seen.norm) and self._has_a_say(seen.node):
            usual.learn(seen)
        return words

    def forget(self, lease: int) -> None:
        """Its update was refused, or is of no use."""
        self._doubted.pop(lease, None)

    def merged(self, lease: int) -> None:
        """It counts; if it had been doubted, that is believed now, and part of what is usual."""
        if lease not in self._doubted:
            return
        seen, usual = self._doubted.pop(lease)
        usual.believe(seen)
        if self._has_a_say(seen.node):
            usual.learn(seen)

    def _has_a_say(self, node: int) -> bool:
        """What is usual is not for one quick node to say, if there are others."""
        window, crowds = self._window, self._crowds
        if crowds[node] >= CROWD and len(crowds) > 2:
            self._passed_over += 1
            if self._passed_over % SELDOM:
                return False
        if len(window) == WINDOW:
            gone = window.popleft()
            crowds[gone] -= 1
            if not crowds[gone]:
                del crowds[gone]
        window.append(node)
        crowds[node] += 1
        return True


def _doubt(seen: Seen, usual: Usual) -> str:
    lengths, norm, amount = usual.lengths, seen.norm, seen.amount
    has_totals = seen.per_sample is not None
    if has_totals != usual.has_totals is not None:
        return "its losses are totals, and others' are means" if has_totals else "it has no counts"
    if lengths.count >= FEW:
        if amount < LEAST:
            return "" if norm == 0 == amount else f"a norm of {norm:.3g}, of batches that count {amount:.3g}"
        length = max(lengths.usual(amount), LEAST)
        if norm > MOST * length and norm > usual.most * max(length, usual.believed(amount)):
            return f"its norm is {norm:.3g}, {norm / length:.3g} times what is usual for as much work"
        if norm <= NOTHING * length and not usual.has_zeros:
            return "it is zero, and nobody's was, lately"
        if seen.per_sample is not None and seen.per_sample > usual.most * (count := max(usual.counts.value, LEAST)):
            return f"its samples count {seen.per_sample / count:.3g} times what is usual"
    losses, most = seen.losses, usual.most_loss
    if losses and (max(losses) > most or min(losses) < -most):
        return f"a loss of {_largest(losses):.3g}, where {usual.losses.value:.3g} is usual"
    return ""


def _largest(losses: Sequence[float]) -> float:
    return max(max(losses), -min(losses)) if losses else 0.0
