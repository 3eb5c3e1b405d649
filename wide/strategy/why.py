"""Why is it slow? A run's snapshot in, what holds it up in words out, the costliest first. Pure.

A pool could do what its nodes compute while they do nothing else, as many of them at a time as their machines have
cores. What it does less than that has a reason, and each reason leaves its mark in the snapshot.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import fmean, median
from typing import NamedTuple

from wide.strategy.catalogue import EXACT, STRATEGIES
from wide.strategy.description import Measured, Setting, Travel
from wide.strategy.plan import forecast
from wide.telemetry.snapshot import NodeView, Snapshot

LEAST_STEPS = 3  # nothing is said before these
WELL = 0.85  # of what the nodes can compute is as it should be
WORTH = 1.2  # what is less quicker than that is not advised
FETCHES = 0.4  # of its computing time is too much for data
TRAVELS = 0.25  # of a step's time is too much for a link
EVALUATES = 0.05  # of the time, in which all wait for it
BUSY = 0.6  # of its time the coordinator's loop has hardly a pause
FINE_S = 5e-3  # of computing in a step is little against what goes around it
SLOW = 0.5  # of what others do is slow
LEAST_SHARE = 0.05  # of an equal share is next to nothing
CHECKPOINT_S, ROWS = 15.0, 5000  # a disk that is slower, or behind by more writes, is slow
NOT_EXACT = "not exact"


class Finding(NamedTuple):
    """What is in the way: of what kind, in words, and which part of the pool's time it costs, as far as can be seen."""

    kind: str
    words: str
    lost: float


def why_slow(run: Snapshot) -> list[Finding]:
    """Nothing: all is well, or it is too early to tell."""
    if run.step - run.before[0] < LEAST_STEPS or not run.nodes:
        return []
    looks = (_evaluation, _data, _link, _slow_node, _too_few_batches, _tiny_steps, _disk, _cores)
    found = [finding for look in looks if (finding := look(run)) is not None]
    return sorted(found, key=lambda finding: -finding.lost)


def verdict(run: Snapshot) -> str:
    """In one line; empty while nothing can be said."""
    if found := why_slow(run):
        return found[0].words
    used = utilisation(run)
    if used is None or run.step - run.before[0] < LEAST_STEPS:
        return ""
    if used >= WELL:
        return f"all is well: the pool does {used:.0%} of what its nodes can compute"
    beside = [view for view in _present(run) if view.link is not None and view.link.is_here]
    if beside and len(beside) >= max(view.cores for view in beside):
        reason = f"the coordinator, and whatever else runs on {beside[0].host or 'its machine'}, share their cores"
    else:
        reason = "the rest of their time they wait for each other: more batches_per_step would even that out"
    return f"the pool does {used:.0%} of what its nodes can compute; {reason}"


def explained(run: Snapshot) -> tuple[tuple[str, ...], str]:
    """What is in the way, and the verdict, as a snapshot carries them to views."""
    return tuple(finding.words for finding in why_slow(run)), verdict(run)


def possible(run: Snapshot) -> float:
    """Batches in a second that its nodes could compute together, as many at a time as their machines have cores."""
    return sum(_rate(view) * part for view, part in _in_turns(run))


def utilisation(run: Snapshot) -> float | None:
    """The part of that which it does; None, while that was not measured."""
    could = possible(run)
    return min(1.0, run.batches_per_s / could) if could else None


def measured(run: Snapshot, with_lossy: bool = False) -> list[Measured]:
    """Nodes as a plan knows them: their speed, and what each codec makes of their links."""
    nodes = []
    for view, part in _in_turns(run):
        if (link := view.link) is not None and link.computes_batches_per_s:
            ways = link.travel_s | ((link.lossy_s or {}) if with_lossy else {})
            travel = {codec: Travel(*seconds) for codec, seconds in ways.items()}
            rate = part * link.computes_batches_per_s
            nodes.append(Measured(view.totals.node, view.totals.name, rate, travel, link.is_here))
    return nodes


# ── each reason ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _evaluation(run: Snapshot) -> Finding | None:
    if run.evaluating < EVALUATES:
        return None
    words = f"evaluate() takes {run.evaluation_s:.2g} s, and all nodes wait for it {run.evaluating:.0%} of the time"
    return Finding("evaluate", f"{words}: evaluate on less data, or in fewer epochs", run.evaluating)


def _data(run: Snapshot) -> Finding | None:
    late = [view for view in _present(run) if _fetches(view) >= FETCHES and view.recent.compute > 0.02]
    if not late:
        return None
    part = fmean(_fetches(view) for view in late)
    who = "all nodes" if len(late) == len(_present(run)) > 1 else ", ".join(_name(view) for view in late[:3])
    words = f"the data set limits {who}: {part:.0%} of the computing time is spent fetching batches"
    return Finding("data", f"{words}; decode it beforehand, or make its __getitem__ quicker", part)


def _link(run: Snapshot) -> Finding | None:
    """Where each step waits for an update and its weights, the slowest link in use sets the pace."""
    strategy = STRATEGIES.get(run.strategy)
    far = [view for view in _at_work(run) if view.link is not None and not view.link.is_here and view.link.travel_s]
    if strategy is None or strategy.overlaps or not far or not run.steps_per_s:
        return None
    slowest = max(far, key=lambda view: sum(_travel(view)))
    up_s, down_s = _travel(slowest)
    part = min(1.0, (up_s + down_s) * run.steps_per_s)
    if part < TRAVELS:
        return None
    waiting = fmean([view.recent.wait for view in _at_work(run) if view is not slowest] or [0.0])
    way = "uplink" if up_s >= down_s else "downlink"
    words = f"{_name(slowest)}'s {way} limits the step: updates and weights travel for {part:.0%} of it"
    others = f", and the others wait {waiting:.0%} of their time" if waiting > 1 - WELL else ""
    return Finding("link", words + others + _remedies(run), max(part, waiting))


def _remedies(run: Snapshot) -> str:
    """What would help, by how much, and at what price."""
    nodes, setting = measured(run, with_lossy=True), Setting(run.batches_per_step, run.busy_s_per_update)
    if not nodes or not run.batches_per_s:
        return ""
    lossy = forecast(run.strategy, nodes, setting).batches_per_s / run.batches_per_s
    local = forecast("local", nodes, setting).batches_per_s / run.batches_per_s
    ways = []
    if lossy > WORTH and any(view.link is not None and view.link.lossy_s for view in run.nodes):
        ways.append(f"--compress auto would give about {lossy:.1f} × ({NOT_EXACT})")
    if local > WORTH * max(1.0, lossy):
        ways.append(f"--strategy local about {local:.1f} × ({NOT_EXACT})")
    return f"; {', '.join(ways)}" if ways else "; more batches_per_step would need it less often"


def _slow_node(run: Snapshot) -> Finding | None:
    """In sync even the least share, one batch, may take a node longer than all others need for the rest."""
    views = [view for view in _at_work(run) if _rate(view)]
    if run.strategy != EXACT.name or len(views) < 2 or not run.steps_per_s:
        return None
    slowest = min(views, key=_rate)
    usual = median(_rate(view) for view in views if view is not slowest)
    waiting = fmean(view.recent.wait for view in views if view is not slowest)
    if _rate(slowest) > SLOW * usual or run.steps_per_s / _rate(slowest) < SLOW or waiting < 1 - WELL:
        return None
    words = (
        f"{_name(slowest)} is {usual / _rate(slowest):.1f} × slower than the others, and even one batch takes it "
        f"{run.steps_per_s / _rate(slowest):.0%} of a step: the others wait {waiting:.0%} of their time"
    )
    return Finding("node", f"{words}; more batches_per_step would give each its share", waiting)


def _too_few_batches(run: Snapshot) -> Finding | None:
    nodes, batches = len(_seats(run)), run.batches_per_step
    if run.strategy == "local" or nodes <= batches:
        return None
    words = f"a step has {batches} batch{'es' * (batches != 1)} for {nodes} nodes: {nodes - batches} of them have none"
    return Finding("batches", f"{words}; raise batches_per_step", 1 - batches / nodes)


def _tiny_steps(run: Snapshot) -> Finding | None:
    """Each step costs messages, wake-ups and an update of the weights; what it is worth should be far more."""
    used = utilisation(run)
    if used is None or used >= WELL or not run.steps_per_s:
        return None
    worth_s, takes_s = run.batches_per_step / possible(run), 1 / run.steps_per_s
    if run.busy < BUSY and worth_s > FINE_S:
        return None
    busy = f"the coordinator is busy {run.busy:.0%} of the time" if run.busy >= BUSY else ""
    if worth_s > 10 * FINE_S:
        words = f"{busy} with messages, codecs and sums: raise batches_per_step, so that there is less of them"
        return Finding("steps", words, min(run.busy, 1 - used))
    words = (
        f"the work is cut very fine: a step is {1000 * worth_s:.3g} ms of computing, and takes {1000 * takes_s:.3g} ms"
    )
    words += f"; {busy}" if busy else ""
    return Finding("steps", f"{words}: raise batch_size, or batches_per_step", 1 - used)


def _disk(run: Snapshot) -> Finding | None:
    if run.checkpoint_s < CHECKPOINT_S and run.rows_waiting < ROWS:
        return None
    words = f"the disk is slow: the last checkpoint took {run.checkpoint_s:.0f} s, {run.rows_waiting} writes wait"
    return Finding("disk", f"{words}. Training goes on beside it; --out on another disk, or --checkpoint-every", 0.01)


def _cores(run: Snapshot) -> Finding | None:
    by_machine: dict[str, list[NodeView]] = defaultdict(list)
    for view in _present(run):
        if view.machine and view.cores:
            by_machine[view.machine].append(view)
    full = [views for views in by_machine.values() if len(views) > max(view.cores for view in views)]
    if not full:
        return None
    views = max(full, key=len)
    cores = max(view.cores for view in views)
    words = f"{len(views)} nodes share {cores} core{'s' * (cores != 1)} of {views[0].host or 'one machine'}"
    return Finding("cores", f"{words}: no more than that compute at a time, so {cores} would be as quick", 0.005)


# ── what they look at ────────────────────────────────────────────────────────────────────────────────────────────────


def _present(run: Snapshot) -> list[NodeView]:
    return [view for view in run.nodes if not view.is_silent]


def _at_work(run: Snapshot) -> list[NodeView]:
    """Whose batches were merged lately, and not only now and then: the pool does not wait for the others."""
    least = LEAST_SHARE * run.batches_per_s / max(1, len(run.nodes))
    return [view for view in _present(run) if view.recent.batches_per_s > least]


def _in_turns(run: Snapshot) -> list[tuple[NodeView, float]]:
    """Everybody, and the part of the time that is theirs: where nodes of a machine take turns, their speed is that of
    one which has a core for itself.
    """
    strategy, present = STRATEGIES.get(run.strategy), _present(run)
    sharing = Counter(view.machine for view in present)
    takes_turns = strategy is not None and strategy.takes_turns
    return [
        (view, min(1.0, view.cores / sharing[view.machine]) if takes_turns and view.machine and view.cores else 1.0)
        for view in present
    ]


def _seats(run: Snapshot) -> list[NodeView]:
    """As many nodes as can compute at a time."""
    taken: dict[str, int] = defaultdict(int)
    found = []
    for view in _present(run):
        taken[view.machine] += 1
        if not view.machine or not view.cores or taken[view.machine] <= view.cores:
            found.append(view)
    return found


def _rate(view: NodeView) -> float:
    if view.link is not None:
        return view.link.computes_batches_per_s
    return view.recent.batches_per_s / view.recent.compute if view.recent.compute > 0.01 else 0.0


def _fetches(view: NodeView) -> float:
    return min(1.0, view.recent.fetch / view.recent.compute) if view.recent.compute else 0.0


def _travel(view: NodeView) -> tuple[float, float]:
    """Of its update and of new weights, in the quickest codec that it may use."""
    ways = view.link.travel_s.values() if view.link is not None else ()
    return min(ways, key=sum, default=(0.0, 0.0))


def _name(view: NodeView) -> str:
    return f"node {view.totals.node} ({view.totals.name})"
