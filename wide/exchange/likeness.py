"""What the machines of an exact pool must have in common: the kind of device, and the instruction set. Decides who may
come in as it is, who should come again with another set, and on which one the pool should settle. Knows their words.
"""

from __future__ import annotations

from collections.abc import Callable

from wide.errors import NotYet, OtherSet, Refused
from wide.job.isa import ANY, Isa, common, parse
from wide.wire.messages import Hello


class Likeness:
    """`used` is the set of the coordinator's process, which makes the optimizer's step; `best` what it could use.
    `may_settle`: it may start again with a lower one, as long as nothing was trained. Then `wanted` is that one.
    """

    def __init__(
        self,
        used: Isa,
        best: Isa,
        may_settle: bool,
        is_exact: Callable[[], bool] = lambda: True,
        has_begun: Callable[[], bool] = lambda: False,
    ) -> None:
        self._used, self._best, self._may_settle = used, best, may_settle
        self._is_exact, self._has_begun = is_exact, has_begun
        self._kind = ""  # of device, that the first member has
        self.wanted: Isa | None = None

    @property
    def offered(self) -> str:
        """To whoever thinks of joining: what it will have to use."""
        return str(self.wanted or self._used) if self._is_exact() else ""

    def check(self, hello: Hello, is_alike: bool, is_first: bool) -> None:
        """Raises, if this node's bits would differ. `is_alike`: it says the same words as the coordinator; `is_first`:
        nobody else is there.
        """
        if not self._is_exact():
            return
        self._check_device(hello.device, is_first and not self._has_begun())
        used, best = parse(hello.isa), parse(hello.best)
        if hello.device == "cpu" and not is_alike and used is not None and best is not None:
            self._check_isa(used, best)

    def _check_device(self, kind: str, may_choose: bool) -> None:
        if kind and (may_choose or not self._kind):
            self._kind = kind
        if kind and kind != self._kind:
            raise Refused(
                f"this pool computes on {self._kind}, exactly, and {kind} rounds differently: join with --device "
                f"{self._kind}, or start the pool with --strategy local"
            )

    def _check_isa(self, used: Isa, best: Isa) -> None:
        goal = self.wanted or self._used
        if used == goal:
            if self.wanted is not None:
                raise NotYet(f"this pool begins anew with {goal.name} instructions")
            return
        if best.has(goal):
            raise OtherSet(f"this pool uses {goal.name} instructions, so that all compute the same bits", str(goal))
        lower = common(self.wanted or self._best, best)
        if lower is None:
            raise Refused(
                f"this pool computes on {self._used.family}, exactly, and {best.family} rounds differently: "
                "start the pool with --strategy local"
            )
        if self._may_settle and not self._has_begun():
            self.wanted = lower
            words = f"this pool settles on {lower.name} instructions, which all of its machines have"
            raise OtherSet(words, str(lower))
        why = "has begun with them" if self._may_settle else "was told to use them"
        theirs = best.name if best.maker in (goal.maker, ANY) else f"{best.maker}'s {best.name}"
        raise Refused(
            f"this pool uses {goal.name} instructions and {why}; this machine has only {theirs}, and its bits would "
            f"differ: start the pool with --isa {lower.name}, or with --strategy local"
        )
