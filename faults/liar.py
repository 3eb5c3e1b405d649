"""A node that lies: `wide join`, as anybody would start it, except for what it hands in (lies.py).

python -m faults.liar INVITE|HOST:PORT --kind KIND [--share X] [--honest K] [--seed N] [--tally FILE] …

KIND is one of lies.KINDS; of its leases it lies about a share, after the first K. All other words are `wide join`'s.
It never shares memory with its coordinator: a liar is a machine somewhere else, and lies in what it sends.
"""

from __future__ import annotations

import argparse
import functools
import sys
from unittest.mock import patch

from faults.lies import KINDS, Answer, Liar
from wide.codec.layout import Flat
from wide.node.beside import Beside
from wide.node.inbox import Package
from wide.node.session import Session
from wide.node.workbench import Workbench
from wide.transport.connection import Connection


class LyingSession(Session):
    """A real session up to the moment in which it hands in. What its liar remembers survives a connection."""

    def __init__(self, liar: Liar, connection: Connection, bench: Workbench, beside: Beside | None = None) -> None:
        super().__init__(connection, bench)  # whatever it is told of the coordinator's memory: it shares none
        self._liar = liar

    def _serve(self, package: Package) -> None:
        if self._liar.decides() and self._liar.is_lazy:
            self._answer_at_once(package)
        else:
            super()._serve(package)

    def _answer_at_once(self, package: Package) -> None:
        """Without computing anything."""
        if package.work.strategy != self._strategy.name:
            self._change_to(package.work.strategy)
        self._take_new_weights()
        if self._strategy.overlaps:
            self._finish_sending()
        if self._ahead is not None:
            self._ahead.done(package.work.lease)
        self._hand_in(package, self._bench.trainer.spare.take(), [0.0] * len(package.work.sizes), 0.0)

    def _hand_in(self, package: Package, total: Flat, losses: list[float], compute_s: float) -> None:
        answer = Answer(total, losses)
        with self._liar.telling(answer):
            if answer.seconds is not None:
                self._pretend(package, compute_s := answer.seconds)
            super()._hand_in(package, total, answer.losses, compute_s)

    def _pretend(self, package: Package, seconds: float) -> None:
        """Everything took so long."""
        payloads = self._bench.payloads
        self._waited_s = self._fetch_s = payloads.codec_s = payloads.decode_s = seconds
        package.received_s = package.distracted_s = seconds


def be(liar: Liar, words: list[str]) -> int:
    """`wide join`, with these words; its exit code."""
    from wide.cli.main import main

    with patch("wide.node.membership.Session", functools.partial(LyingSession, liar)):
        return main(["join", *words])


def _main() -> int:
    parser = argparse.ArgumentParser(prog="python -m faults.liar")
    parser.add_argument("--kind", choices=KINDS, required=True)
    parser.add_argument("--share", type=float, help="of its leases that it lies about (default: 1; bitflip: 0.01)")
    parser.add_argument("--honest", type=int, help="so many leases at first (default: 0; canary: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tally", help="a file that grows by a byte for each lease: x for a lie, . for the truth")
    said, words = parser.parse_known_args()
    return be(Liar(said.kind, said.share, said.honest, said.seed, said.tally), words)


if __name__ == "__main__":
    sys.exit(_main())
