"""`chaos`: real processes under faults of every class, from a seed: is anything lost, doubled or wrong?

kill (SIGKILL a node; another joins), pause (SIGSTOP), leave (SIGTERM; another joins), join (one more, for a while),
cut, reset and slow (its link, through a proxy of our own), coordinator (SIGKILL, started again at once), full (the
disk). The verdict comes from the ledger, and in `sync` from the hash of a run without faults. Without enough faults of
a class it is void.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from faults.chaos_pool import INTERRUPTED, ROOT, Coordinator, Disk, Merges, Nodes, plain_environment
from faults.chaos_schedule import PLANNED, Fault, schedule, why_void
from faults.chaos_verdict import Happened, Ledger, percentile_99, read_ledger, recoveries
from faults.proxy import CUT, HEALTHY, Condition, Proxy
from wide.launch.processes import warm_up

EXTRAS = 3  # slots for those who join on top
SLEEP_MS = 60.0
SLOW = (20_000.0, 200_000.0)  # bytes/s; an update has 11 kB
SLOW_DELAY_S = 0.1
TICK_S = 0.05
AGAIN_S = 0.5  # a fault that could not happen is tried again
RESTART_S = 1.0  # whoever ended by itself
PATIENCE_S = 60.0  # without a single merge: it hangs
BATCHES_PER_STEP, BATCHES_PER_EPOCH = 16, 128  # chaos_job.py's


def run(
    repeats: int,
    say: Callable[[str], None],
    seconds: float = 600.0,
    nodes: int = 8,
    seed: int = 0,
    strategy: str = "sync",
) -> dict[str, Any]:
    """Once: it is long enough, so `repeats` does not count."""
    folder = Path(tempfile.mkdtemp(prefix="wide-chaos-"))
    try:
        with _pool(folder, nodes, strategy) as chaos:
            chaos.reign(schedule(seed, seconds), seconds, say)
            ledger = read_ledger(chaos.run_dir, BATCHES_PER_STEP, BATCHES_PER_EPOCH)
            merges = chaos.merges.times
            chaos.keep_evidence(folder)
        say(f"{ledger.steps} steps, {ledger.batches} batches")
        hash_equal = _reference(folder, ledger.steps) == ledger.sha256 if strategy == "sync" else None
    except BaseException:
        print(f"what there is to see is in {folder}", file=sys.stderr)
        raise
    result = _result(chaos, merges, ledger, seconds) | {"hash_equal": hash_equal}
    result |= {"seconds": seconds, "seed": seed, "strategy": strategy, "nodes": nodes}
    _tell(result, say)
    if hash_equal is False or ledger.lost or ledger.doubled:
        say(f"what there is to see is in {folder}")
    else:
        shutil.rmtree(folder)
    return result


@contextlib.contextmanager
def _pool(folder: Path, nodes: int, strategy: str) -> Iterator[Chaos]:
    """A pool at work. In the end no process and no mount is left."""
    job = Path(shutil.copy(Path(__file__).with_name("chaos_job.py"), folder))  # away from our logging.py
    with contextlib.ExitStack() as stack:
        os.environ |= {"WIDE_TOKEN": secrets.token_hex(8), "CHAOS_SLEEP_MS": str(SLEEP_MS)}
        warm_up(str(job))
        disk = stack.enter_context(contextlib.closing(Disk(folder / "disk")))
        run_dir = disk.folder / "run"
        coordinator = Coordinator(job, run_dir, folder / "coordinator.log", strategy)
        proxy = stack.enter_context(Proxy(nodes + EXTRAS, ("127.0.0.1", coordinator.port)))
        crew = stack.enter_context(contextlib.closing(Nodes(proxy.ports, job, folder / "nodes.log")))
        merges = stack.enter_context(contextlib.closing(Merges(run_dir / "run.db")))
        merges.start()
        coordinator.start()
        stack.callback(coordinator.kill)
        for slot in range(nodes):
            crew.start(slot)
        yield Chaos(coordinator, crew, proxy, disk, merges, nodes)


class Chaos:
    """Carries out a schedule: what is to be done when is on the agenda; who ends is replaced."""

    def __init__(
        self, coordinator: Coordinator, crew: Nodes, proxy: Proxy, disk: Disk, merges: Merges, nodes: int
    ) -> None:
        self.coordinator, self.crew, self.proxy, self.disk, self.merges = coordinator, crew, proxy, disk, merges
        self.run_dir = disk.folder / "run"
        self.happened: list[Happened] = []
        self.unasked: Counter[str] = Counter()  # ends that nobody asked for
        self._slots = range(nodes)
        self._extras = range(nodes, nodes + EXTRAS)
        self._busy: set[int] = set()  # slots with a fault that lasts
        self._asked: set[int] = set()  # processes that were told to go
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._unhealed: set[Callable[[], None]] = set()
        self._restart_at: float | None = None
        self._do: dict[str, Callable[[Fault], Happened | None]] = {kind: getattr(self, f"_{kind}") for kind in PLANNED}

    def reign(self, faults: list[Fault], seconds: float, say: Callable[[str], None]) -> None:
        """Until the time is over; then heal everything, see that it goes on, and stop it cleanly."""
        if not self.merges.wait_for_one_after(0.0, PATIENCE_S):
            raise SystemExit("the pool did not come up in time")
        say(f"{len(faults)} faults in {seconds:g} s ({'tmpfs' if self.disk.is_mounted else 'prlimit'} for a full disk)")
        began = told_at = time.monotonic()
        for fault in faults:
            self._later(fault.at_s, partial(self._try, fault))
        while (now := time.monotonic()) < began + seconds:
            self._turn(now)
            if now - told_at > seconds / 10:
                told_at = now
                say(f"{now - began:5.0f} s: {len(self.happened)} faults, {len(self.merges.times)} merges")
            if time.time() - self.merges.times[-1] > PATIENCE_S:
                raise SystemExit(f"nothing was merged for {PATIENCE_S:g} s")
            time.sleep(TICK_S)
        self._calm_down()

    def _turn(self, now: float) -> None:
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        if self.disk.is_full:
            self.disk.fill(self.coordinator.process.pid)
        if self._restart_at is None and (code := self.coordinator.process.poll()) is not None:
            self.unasked[f"coordinator {code}{' (disk full)' if self.disk.is_full else ''}"] += 1
            self._restart_at = now + RESTART_S
        if self._restart_at is not None and now >= self._restart_at:
            self._restart_at = None
            self.coordinator.start()
        for slot, process in list(self.crew.processes.items()):
            if process.is_alive():
                continue
            del self.crew.processes[slot]
            is_asked = process.pid in self._asked
            if is_asked:
                self._asked.discard(process.pid)
            else:
                self.unasked[f"node {process.exitcode}"] += 1
            if slot in self._slots:
                self._later(0.0 if is_asked else RESTART_S, partial(self.crew.start, slot))

    def _calm_down(self) -> None:
        now = time.monotonic()
        self._agenda.clear()
        for heal in list(self._unhealed):
            heal()
        for slot in self._slots:
            if slot not in self.crew.processes:
                self.crew.start(slot)
        healed = time.time()
        while not (self.merges.times[-1] > healed):
            self._turn(time.monotonic())
            if time.monotonic() - now > PATIENCE_S:
                raise SystemExit(f"{PATIENCE_S:g} s after all was healed nothing is merged")
            time.sleep(TICK_S)
        code = self.coordinator.stop()
        self.merges.look()
        if code != INTERRUPTED:
            raise SystemExit(f"the coordinator, told to stop, ended with {code}")

    def keep_evidence(self, folder: Path) -> None:
        """Before the disk is gone."""
        shutil.copytree(self.run_dir, folder / "run")
        (folder / "faults.json").write_text(json.dumps([vars(fault) for fault in self.happened]))
        (folder / "merges.json").write_text(json.dumps(self.merges.times))

    # ── the faults ───────────────────────────────────────────────────────────────────────────────────────────────

    def _later(self, seconds: float, deed: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._order), deed))

    def _try(self, fault: Fault) -> None:
        """Now, or a little later if there is nobody to whom it could happen."""
        happened = self._do[fault.kind](fault)
        if happened is None:
            self._later(AGAIN_S, partial(self._try, fault))
        else:
            self.happened.append(happened)

    def _pick(self, fault: Fault, is_lasting: bool = False) -> int | None:
        """Someone who is there; of those with nothing lasting one at least is spared by all that lasts."""
        there = [slot for slot in self._slots if self.crew.is_alive(slot) and not (is_lasting and slot in self._busy)]
        return there[int(fault.pick * len(there))] if len(there) > is_lasting else None

    def _kill(self, fault: Fault) -> Happened | None:
        return self._end(fault, signal.SIGKILL)

    def _leave(self, fault: Fault) -> Happened | None:
        return self._end(fault, signal.SIGTERM)

    def _end(self, fault: Fault, number: signal.Signals) -> Happened | None:
        slot = self._pick(fault)
        if slot is None or self.crew.processes[slot].pid in self._asked:
            return None
        now = time.time()
        self._asked.add(self.crew.signal(slot, number))
        return Happened(fault.kind, now, now, f"slot {slot}")

    def _join(self, fault: Fault) -> Happened | None:
        slot = next((slot for slot in self._extras if slot not in self.crew.processes), None)
        if slot is None:
            return None
        self.crew.start(slot)

        def leave() -> None:
            if self.crew.is_alive(slot):
                self._asked.add(self.crew.signal(slot, signal.SIGTERM))

        return self._until(fault, leave, f"slot {slot}")

    def _pause(self, fault: Fault) -> Happened | None:
        slot = self._pick(fault, is_lasting=True)
        if slot is None:
            return None
        process = self.crew.processes[slot]
        self._busy.add(slot)
        self.crew.signal(slot, signal.SIGSTOP)

        def go_on() -> None:
            self._busy.discard(slot)
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGCONT)

        return self._until(fault, go_on, f"slot {slot}")

    def _cut(self, fault: Fault) -> Happened | None:
        return self._link(fault, CUT)

    def _slow(self, fault: Fault) -> Happened | None:
        least, most = SLOW
        return self._link(fault, Condition(bytes_per_s=least + fault.pick * (most - least), delay_s=SLOW_DELAY_S))

    def _link(self, fault: Fault, condition: Condition) -> Happened | None:
        slot = self._pick(fault, is_lasting=True)
        if slot is None:
            return None
        self._busy.add(slot)
        self.proxy.set(slot, condition)

        def heal() -> None:
            self._busy.discard(slot)
            self.proxy.set(slot, HEALTHY)

        return self._until(fault, heal, f"slot {slot}")

    def _reset(self, fault: Fault) -> Happened | None:
        slot = self._pick(fault)
        if slot is None:
            return None
        now = time.time()
        self.proxy.reset(slot)
        return Happened(fault.kind, now, now, f"slot {slot}")

    def _coordinator(self, fault: Fault) -> Happened | None:
        last = max((fault.began for fault in self.happened if fault.kind == "coordinator"), default=0.0)
        if self.coordinator.process.poll() is not None or self.merges.times[-1] <= last:
            return None  # it has not come back from the last time
        now = time.time()
        self.coordinator.kill()
        self.coordinator.start()
        return Happened(fault.kind, now, now)

    def _full(self, fault: Fault) -> Happened | None:
        if self.disk.is_full or self.coordinator.process.poll() is not None:
            return None
        self.disk.fill(self.coordinator.process.pid)

        def make_room() -> None:
            self.disk.free(self.coordinator.process.pid)

        return self._until(fault, make_room)

    def _until(self, fault: Fault, end: Callable[[], None], who: str = "") -> Happened:
        """It lasts; in the end `end` is called, at the latest when all is healed."""
        happened = Happened(fault.kind, time.time(), float("inf"), who)

        def over() -> None:
            self._unhealed.discard(over)
            end()
            happened.ended = time.time()

        self._unhealed.add(over)
        self._later(fault.lasts_s, over)
        return happened


def _reference(folder: Path, steps: int) -> str:
    """The hash of the same job after so many steps, in one process, with no faults."""
    command = [sys.executable, "-m", "wide", "run", str(folder / "chaos_job.py"), "--nodes", "0", "--steps", str(steps)]
    command += ["--json", "--log", "silent", "--out", str(folder / "reference")]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), stdout=subprocess.PIPE, text=True, check=True)
    return str(json.loads(done.stdout)["weights_sha256"])


def _result(chaos: Chaos, merges: list[float], ledger: Ledger, seconds: float) -> dict[str, Any]:
    faults = Counter(fault.kind for fault in chaos.happened)
    found = recoveries(merges, chaos.happened)
    measured = {kind: len(values) for kind, values in found.items()}
    reasons = why_void(faults, measured, seconds)
    return {
        "faults": {kind: faults[kind] for kind in PLANNED},
        "lost": ledger.lost,
        "doubled": ledger.doubled,
        "node_recovery_p99_s": percentile_99(found["kill"]),
        "cut_recovery_p99_s": percentile_99(found["cut"]),
        "coordinator_recovery_p99_s": percentile_99(found["coordinator"]),
        "longest_s": {kind: max(values, default=None) for kind, values in found.items()},
        "measured": measured,
        "unasked_ends": dict(chaos.unasked),
        "void": bool(reasons),
        "why_void": reasons,
        "steps": ledger.steps,
        "batches": ledger.batches,
    }


def _tell(result: dict[str, Any], say: Callable[[str], None]) -> None:
    say(f"{'class':<12} {'faults':>6} {'seen':>6} {'longest pause':>14}")
    for kind, count in result["faults"].items():
        longest = result["longest_s"].get(kind)
        seen = result["measured"].get(kind, "")
        say(f"{kind:<12} {count:>6} {seen:>6} {'' if longest is None else f'{longest:12.2f} s'}")
    say(f"{sum(result['faults'].values())} faults; ends that nobody asked for: {result['unasked_ends'] or 'none'}")
    say(f"lost {result['lost']}, doubled {result['doubled']}, the same hash: {result['hash_equal']}")
    for reason in result["why_void"]:
        say(f"void: {reason}")
