"""`torchrun --nproc-per-node 4 -m wide.engine JOB …`: one process of it. Arguments to a rank, its end to an exit code.

Rank 0 tells what there is to tell; stdout carries the result alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec

from wide.launch.environment import add_wishes
from wide.launch.signals import STARTER, end_here, end_with_starter, on_signals, say_and_end

LENGTHS, FOLDER = ("steps", "epochs", "seconds", "seed"), ("out", "resume", "checkpoint_every", "keep")
VALUES = (*LENGTHS, *FOLDER, "device", "log", "track", "dashboard")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m wide.engine",
        description="The same job with torch's DistributedDataParallel, under torchrun. Options as in `wide run`.",
    )
    made.add_argument(
        "job", metavar="JOB", help="file.py, file.py:name or package.module; behind --: its own arguments"
    )
    made.add_argument("--json", action="store_true", help="rank 0 prints the result as one JSON object on stdout")
    made.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)  # for wide run --on torchrun
    made.add_argument("--set", metavar="NAME=VALUE", action="append", default=[], help="a value for a job's function")
    made.add_argument("--no-check", dest="check", action="store_false", default=None, help="as in `wide run`")
    made.add_argument("--plain", action="store_true", default=None, help="lines instead of a screen that lives")
    for name in VALUES:
        made.add_argument(f"--{name.replace('_', '-')}", metavar=name.rpartition("_")[2].upper())
    return made


def main() -> int:
    words = sys.argv[1:]
    place = words.index("--") if "--" in words else len(words)
    arguments = parser().parse_args(words[:place])
    answers = os.dup(1)
    os.dup2(2, 1)  # what the user's code prints is no answer
    from wide.errors import WideError

    is_first = os.environ.get("RANK", "0") == "0"
    try:
        result = _rank(arguments, words[place + 1 :])
    except WideError as error:
        if is_first and arguments.answer:
            _say(answers, ("error", error.exit_code, str(error), error.details))
        elif is_first:
            details = [error.details] if arguments.log == "verbose" else []
            print(*details, f"wide: {error}", sep="\n", file=sys.stderr, flush=True)
        return error.exit_code
    if is_first and arguments.answer:
        _say(answers, ("result", msgspec.Raw(result.to_json().encode())))
    elif is_first:
        if arguments.log != "silent":
            print(result.summary(), file=sys.stderr)
        if arguments.json:
            _say(answers, msgspec.Raw(result.to_json().encode()))
    return 0


def _say(answers: int, words: object) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(answers, msgspec.json.encode(words) + b"\n")


def _rank(arguments: argparse.Namespace, job_words: list[str]) -> Any:
    """The Result; of any other rank than 0, nothing."""
    from wide.config import resolve
    from wide.engine.team import Gone, Team
    from wide.errors import Interrupted, WideError
    from wide.job.loading import load
    from wide.job.place import located
    from wide.job.program import program_of
    from wide.job.spec import parts, with_arguments, with_set
    from wide.launch.folder import remembered_spec
    from wide.launch.kept import versions
    from wide.launch.on_torchrun import check
    from wide.node.greeting import pick_device

    given = {name: getattr(arguments, name) for name in (*VALUES, "plain", "check")}
    options = resolve(given, os.environ)
    check(options)
    device = pick_device(options.device, int(os.environ.get("LOCAL_RANK", "0")))
    team = Team(device)
    try:
        spec = ""
        with _by_all(team):
            spec = with_arguments(located(arguments.job), job_words)
            spec = with_set(spec, arguments.set) if arguments.set else spec
            spec = remembered_spec(spec, options) if team.is_first else spec
        told = team.shared([list(parts(spec).values), list(parts(spec).arguments)])  # a run that goes on remembers them
        spec = str(replace(parts(spec), values=tuple(told[0]), arguments=tuple(told[1])))
        with _by_all(team):
            load(spec)
        theirs = team.shared([program_of(spec), list(versions())])
        with _by_all(team):
            _check_alike(spec, *theirs)
        return _led(team, load(spec), spec, options) if team.is_first else _followed(team, load(spec))
    except Gone:
        raise
    except Interrupted as error:  # by torchrun, perhaps, which ends all when one has failed
        raise (team.another_one() if team.is_first else None) or error from None
    except WideError as error:
        if not team.is_first:
            team.confess(error)
        raise
    finally:
        team.close()


def _check_alike(spec: str, program: Any, theirs: list[str]) -> None:
    """A stale copy of a file, on one of several machines, would train something else without a word."""
    from wide.errors import Refused, VersionMismatch
    from wide.job.program import difference, program_of
    from wide.launch.kept import Versions, versions

    mine = versions()
    if (mine.wide, mine.torch) != (Versions(*theirs).wide, Versions(*theirs).torch):
        raise VersionMismatch(mine.differing(Versions(*theirs)).replace("the coordinator", "rank 0"))
    if words := difference(program_of(spec), program):
        raise Refused(f"{mine.host}: {words.replace('the pool', 'rank 0')}")


@contextlib.contextmanager
def _by_all(team: Any) -> Iterator[None]:
    """Every rank does this; if any of them fails, all do, and the reason is told once."""
    from wide.errors import WideError

    problem: WideError | None = None
    try:
        yield
    except WideError as error:
        problem = error
    team.all_well(problem)


def _led(team: Any, job: Any, spec: str, options: Any) -> Any:
    from wide.engine.lead import DDP, Lead
    from wide.job.loading import values_of
    from wide.job.spec import split_spec, title_of
    from wide.launch.training import Origin, Training

    command = ["torchrun", "--nproc-per-node", str(team.size), "-m", "wide.engine"]
    command += [word for word in sys.argv[1:] if word != "--answer"]
    origin = Origin(command, spec, end=say_and_end, values=values_of(spec))
    training = Training(job, title_of(split_spec(spec)[0]), options, origin)
    training.loop = lambda job, course, samples, device, checks: Lead(team, job, course, samples)
    return replace(training.train(None), strategy=DDP)


def _followed(team: Any, job: Any) -> None:
    """Signals are rank 0's business: it ends the run between two steps, and says so."""
    from wide.engine.follow import follow

    on_signals(signal.SIG_IGN)
    follow(team, job)


if __name__ == "__main__":
    on_signals(end_here)
    if os.name == "posix" and add_wishes(os.environ):
        with contextlib.suppress(OSError):  # then without
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
    end_with_starter(int(os.environ.pop(STARTER, "0")))
    sys.exit(main())
