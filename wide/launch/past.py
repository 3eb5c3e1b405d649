"""What a run's folder says about how it was computed: which rows made each step, by whom, under which options, what was
evaluated. Knows run.db, run.json and what checkpoints say of themselves; computes nothing.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from wide.config import Options
from wide.coordinator.resume import KEPT, LENGTHS
from wide.errors import UsageError
from wide.launch import story
from wide.launch.folder import CHECKPOINTS
from wide.launch.keys import DIGESTS, digests_key
from wide.store import checkpoint
from wide.store.reading import Reading, found
from wide.store.sessions import sessions
from wide.wire.words import line

EXACT = ("none", "lossless", "lz4", "zstd")
ROWS = """SELECT step, first_batch, last_batch, node, digest, committed_at FROM ledger
    WHERE step BETWEEN ? AND ? AND node IS NOT NULL ORDER BY step, first_batch"""
WHO = """SELECT nodes.name, host, (SELECT address FROM visits WHERE visits.node = nodes.node ORDER BY at DESC)
    FROM nodes WHERE nodes.node = ? ORDER BY joined_at DESC LIMIT 1"""


class Row(NamedTuple):
    """One merged piece of work, as the ledger has it; `last` is inclusive, batches are the step's own."""

    step: int
    first: int
    last: int
    node: int
    digest: int | None
    at: float


class Past:
    """Of one run, for as long as the block lasts."""

    def __init__(self, run: str | Path) -> None:
        self.folder = found(run)
        self._db = Reading(self.folder)
        self._terms = _terms(self.folder)
        self.checkpoints = checkpoint.kept(self.folder / CHECKPOINTS)
        self._told = {path: checkpoint.told(path) for _, path in self.checkpoints}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.__exit__()

    # ── what can be compared ─────────────────────────────────────────────────────────────────────────────────────

    def key(self) -> bytes:
        """With which its digests were made."""
        if (key := digests_key(self.folder)) is None:
            raise UsageError(f"{self.folder} has no {DIGESTS}: there is nothing to compare with")
        return key

    def check_digests(self) -> None:
        """Raises UsageError, if it has none at all."""
        columns = self._db.rows("ledger", "SELECT name FROM pragma_table_info('ledger')")
        if ("digest",) not in columns:
            raise UsageError(
                f"{self.folder} was trained by an older version of wide, which kept no digests of updates: "
                "there is nothing to compare with"
            )
        if not self._db.rows("ledger", "SELECT 1 FROM ledger WHERE digest IS NOT NULL LIMIT 1"):
            raise UsageError(f"{self.folder}: its ledger has no digests of updates ({self.why_none()})")

    def why_none(self) -> str:
        """The likeliest reason why the ledger has rows without a digest."""
        options = self._terms[-1][1] if self._terms else {}
        if str(options.get("on", "")).startswith("torchrun"):
            return "--on torchrun keeps none"
        if (strategy := options.get("strategy") or "sync") != "sync":
            return f"--strategy {strategy} keeps none: only in sync would anybody else have computed the same"
        return "they were folded to keep run.db small, or an older version of wide trained them"

    @property
    def steps(self) -> int:
        """One more than the last that has a row."""
        ((last,),) = self._db.rows("ledger", "SELECT max(step) FROM ledger") or [(None,)]
        return 0 if last is None else int(last) + 1

    @property
    def first_compared(self) -> int:
        """From here on every row has a digest."""
        ((last,),) = self._db.rows("ledger", "SELECT max(step) FROM ledger WHERE digest IS NULL") or [(None,)]
        return 0 if last is None else int(last) + 1

    def rows(self, first: int, last: int) -> Iterator[list[Row]]:
        """Step by step."""
        rows = [Row(*row) for row in self._db.rows("ledger", ROWS, first, last)]
        for _, its in itertools.groupby(rows, key=lambda row: row.step):
            yield list(its)

    # ── what it was computed with ────────────────────────────────────────────────────────────────────────────────

    @property
    def spec(self) -> str:
        spec = story.spec_of(self.folder)
        if not spec:
            raise UsageError(f"{self.folder} does not say which file its job is in: it cannot be computed again")
        return spec

    def changed(self) -> str:
        """In which way the job's file is not what it was when the run was last trained; empty, if it is."""
        job: dict[str, Any] = next((one["job"] for one in reversed(sessions(self.folder)) if one.get("job")), {})
        path = Path(str(job.get("path", job.get("file", ""))))
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            return f"{path} cannot be read ({error})"
        if job.get("sha256") in (None, hashlib.sha256(text.encode()).hexdigest()):
            return ""
        pairs = itertools.zip_longest(str(job.get("source", "")).splitlines(), text.splitlines())
        at = next((number for number, (old, new) in enumerate(pairs, 1) if old != new), 1)
        return f"{path}, line {at}, is not as it was when this run was trained"

    @property
    def data(self) -> dict[str, str]:
        """Fingerprints of some samples, by number; and "build", in words what bits depend on. Empty: not known."""
        return next(filter(None, (told.get("data") for told in self._told.values())), {})

    def sha256(self, path: Path) -> str:
        """Of the weights in that checkpoint; empty, if it does not say."""
        return str(self._told[path].get("sha256") or "")

    @property
    def moved(self) -> set[str]:
        """What the loss, or the optimizer, was seen to move, sooner or later."""
        return {name for told in self._told.values() for name in told.get("moved", {})}

    @property
    def seed(self) -> int | None:
        asked = [told.get("asked", {}).get("seed") for told in self._told.values()]
        asked += [options.get("seed") for _, options in self._terms]
        return next((seed for seed in asked if seed is not None), None)

    def options(self, at: float) -> Options:
        """Those that were in force at that time, of the ones that numbers depend on."""
        terms = [options for began_at, options in self._terms if began_at <= at] or [{}]
        return Options(**{name: terms[-1][name] for name in (*LENGTHS, "device") if terms[-1].get(name) is not None})

    def check_exact(self, rows: list[Row]) -> None:
        """Raises UsageError, if these were sent with less than all of their bits."""
        terms = [options for began_at, options in self._terms if began_at <= rows[0].at] or [{}]
        compress = terms[-1].get("compress") or ("auto" if terms[-1].get("strategy") == "auto" else "lossless")
        if compress not in EXACT:
            raise UsageError(
                f"step {rows[0].step} was computed with --compress {compress}, which loses precision on the way: what "
                "was merged does not follow from the batches alone, and cannot be computed again"
            )

    # ── what became of it ────────────────────────────────────────────────────────────────────────────────────────

    def who(self, node: int) -> str:
        """`node 3 (laptop, 192.168.1.7)`."""
        for name, host, address in self._db.rows("nodes", WHO, node):
            words = [line(str(word)) for word in dict.fromkeys((name, _host(address) or host)) if word]
            return f"node {node} ({', '.join(words)})" if words else f"node {node}"
        return f"node {node}"

    def losses(self, below: int) -> list[float]:
        """Of all steps before that one. An old row may stand for several."""
        found: list[float] = []
        for step, loss in self._db.rows("steps", "SELECT step, loss FROM steps WHERE step < ? ORDER BY step", below):
            found.extend([math.nan if loss is None else loss] * (step + 1 - len(found)))
        return found

    def logged(self, first: int, end: int) -> list[tuple[int, str, float, float]]:
        query = "SELECT step, metric, value, samples FROM logged WHERE step >= ? AND step < ? ORDER BY rowid"
        rows = self._db.rows("logged", query, first, end)
        return [(step, name, math.nan if value is None else value, count) for step, name, value, count in rows]

    def evaluated(self, steps: int) -> dict[str, float]:
        """What evaluate() said of the model after so many steps."""
        rows = self._db.rows("evaluations", "SELECT metric, value FROM evaluations WHERE step = ?", steps)
        return {name: math.nan if value is None else value for name, value in rows}


def _host(address: str | None) -> str:
    """Without the port, which says nothing about a caller."""
    host, _, port = (address or "").rpartition(":")
    return host if host and port.isdigit() else address or ""


def _terms(folder: Path) -> list[tuple[float, dict[str, Any]]]:
    """When each process began, and its options: what it was not given was as before (resume.py)."""
    found: list[tuple[float, dict[str, Any]]] = []
    for session in sessions(folder):
        given = session.get("options")
        given = given if isinstance(given, dict) else {}
        before = found[-1][1] if found else {}
        is_asked = any(given.get(name) is not None for name in LENGTHS)
        names = [name for name in KEPT if given.get(name) is None and not (is_asked and name in LENGTHS)]
        began_at = session.get("began_at")
        options = given | {name: before.get(name) for name in names}
        found.append((began_at if isinstance(began_at, int | float) else 0.0, options))
    return found
