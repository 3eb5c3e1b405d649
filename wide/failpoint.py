"""Named moments at which a test may end this process, make a write fail, or a number wrong. Does nothing unless it was
asked to.

WIDE_FAILPOINTS="checkpoint.before_rename=kill:2"     SIGKILL, the second time that moment is reached
WIDE_FAILPOINTS="checkpoint.write=full:1,run.db.commit=kill"     "no space left on device"; several, with commas
WIDE_FAILPOINTS="node.update=flip:3"     one bit of the third update that this node sends

The moments: checkpoint.write, .after_model, .after_optimizer, .before_rename, .after_rename, .after_latest,
.before_removal; run.db.commit; merge.before_answer; version.made; node.before_send, node.update; memory.share,
node.maps_memory.
"""

from __future__ import annotations

import errno
import os
import signal
from dataclasses import dataclass


@dataclass(slots=True)
class _Plan:
    """What happens when the moment is reached for the `countdown`-th time."""

    deed: str
    countdown: int


_plans: dict[str, _Plan] = {}


def arm(text: str) -> None:
    """As WIDE_FAILPOINTS says it."""
    _plans.clear()
    for part in filter(None, text.split(",")):
        name, _, deed = part.partition("=")
        what, _, count = deed.partition(":")
        _plans[name.strip()] = _Plan(what or "kill", int(count or 1))


def reach(name: str) -> None:
    """This moment is reached."""
    if not _plans or (plan := _plans.get(name)) is None:
        return
    plan.countdown -= 1
    if plan.countdown:
        return
    if plan.deed == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))


def is_spoilt(name: str) -> bool:
    """Should what is at hand at this moment be wrong?"""
    if not _plans or (plan := _plans.get(name)) is None or plan.deed != "flip":
        return False
    plan.countdown -= 1
    return plan.countdown == 0


arm(os.environ.get("WIDE_FAILPOINTS", ""))
