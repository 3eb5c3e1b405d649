"""Commands that check what a run has merged, and for whom it counts: replay, blame, shares."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wide.cli.looking import RUN_HELP
from wide.errors import UsageError

if TYPE_CHECKING:
    from wide.launch.verdict import Verdict

FORCE_HELP = "even if the job's file, torch or the instruction set are not what they were"


def add_commands(commands: Any) -> None:
    replay = commands.add_parser("replay", help="compute one step again: does what was merged follow? (sync)")
    replay.add_argument("--step", metavar="N", required=True, help="as the ledger numbers them, from 0 on")
    replay.set_defaults(call=_replay)
    blame = commands.add_parser("blame", help="the first step that does not follow, and whose update it was (sync)")
    blame.add_argument(
        "--from",
        dest="since",
        metavar="N",
        help="begin with the checkpoint before this step (default: at the beginning)",
    )
    blame.set_defaults(call=_blame)
    shares = commands.add_parser("shares", help="who did how much of a run, and how much of that was verified")
    shares.add_argument("--sign", action="store_true", help="write RUN/shares.json, signed with the pool's key")
    shares.add_argument("--check", metavar="FILE", help="is this what a pool signed? Needs no run")
    shares.add_argument("--certificate", metavar="PEM", help="with --check: the pool's, RUN/certificate.pem")
    shares.set_defaults(call=_shares)
    for command in (replay, blame):
        command.add_argument("run", metavar="RUN", help=RUN_HELP)
        command.add_argument("--force", action="store_true", help=FORCE_HELP)
    shares.add_argument("run", metavar="RUN", nargs="?", help=RUN_HELP)
    for command in (replay, blame, shares):
        command.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def _replay(arguments: argparse.Namespace) -> int:
    step = _number("--step", arguments.step)
    from wide.launch.replay import replay

    return _told(replay(arguments.run, step, arguments.force), arguments.json)


def _blame(arguments: argparse.Namespace) -> int:
    since = _number("--from", arguments.since) if arguments.since is not None else None
    from wide.launch.replay import blame

    return _told(blame(arguments.run, since, arguments.force), arguments.json)


def _told(verdict: Verdict, as_json: bool) -> int:
    print(json.dumps(verdict.as_json) if as_json else "\n".join(verdict.words), flush=True)
    return 0 if verdict.follows else 1


def _number(option: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise UsageError(f"{option} {text}: expected a step's number, from 0 on")
    return int(text)


def _shares(arguments: argparse.Namespace) -> int:
    from wide.launch import shares

    if arguments.check is not None:
        if arguments.run is not None or arguments.sign:
            raise UsageError("--check FILE needs nothing else but --certificate: a statement speaks for itself")
        certificate = Path(arguments.certificate) if arguments.certificate is not None else None
        found = shares.check(Path(arguments.check), certificate)
        print(json.dumps(found.as_json) if arguments.json else found.words, flush=True)
        return 0 if found.holds else 1
    if arguments.run is None:
        raise UsageError("which run? wide shares RUN, or wide shares --check FILE")
    if arguments.certificate is not None:
        raise UsageError("--certificate PEM belongs to --check FILE")
    table = shares.shares_of(arguments.run)
    if arguments.sign:
        table = shares.signed(table)
    print(json.dumps(table.as_json) if arguments.json else table.words, flush=True)
    return 0
