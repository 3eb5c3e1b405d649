"""Arguments to calls, results to stdout, errors to one line and an exit code. Imports torch only when it is needed."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from typing import Any, NoReturn

from wide import __version__
from wide.cli import checking, looking
from wide.cli.joining import add_commands, join
from wide.cli.launching import add_launch, launch
from wide.config import SERVE_AUDIT, SOCKET_HELP, Options, resolve
from wide.errors import StartsAgain, UsageError, WideError
from wide.telemetry.log import without_invites

DEFAULT_PORT = 9433  # W I D E on a telephone
SET_HELP = "a value for a job that is a function, `def job(lr=0.1)`: --set lr=0.3; once for each"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        hint = "; a job's own arguments stand behind --" if "unrecognized" in message else ""
        raise UsageError(f"{re.sub('@/dev/fd/[0-9]+', 'wide1_…', message)} (see `{self.prog} --help`{hint})")


def main(argv: list[str] | None = None) -> int:
    """The exit code; everything a person should read goes to stderr."""
    arguments = None
    _mend_streams()
    try:
        own, jobs = _divided(list(sys.argv[1:] if argv is None else argv))
        arguments = _parser().parse_args(own)
        _give(arguments, jobs, getattr(arguments, "set", None) or [])
        code: int = arguments.call(arguments)
        return code
    except WideError as error:
        verbose = getattr(arguments, "log", None) == "verbose" or os.environ.get("WIDE_LOG") == "verbose"
        if verbose and error.details:
            print(error.details, file=sys.stderr)
        print(f"wide: {without_invites(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read it has enough: `wide show RUN | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as a signal would have ended it
    except KeyboardInterrupt:
        print("wide: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _divided(words: list[str]) -> tuple[list[str], list[str]]:
    """The command's own words, and what stands behind `--`: the job's."""
    place = words.index("--") if "--" in words else len(words)
    return _with_place(words[:place]), words[place + 1 :]


def _with_place(words: list[str]) -> list[str]:
    """`--dashboard job.py` names a job, not a port."""
    pairs = zip(words, [*words[1:], ""], strict=True)
    return [
        "--dashboard=auto" if word == "--dashboard" and not re.search(r"^\d+$|:\d+$", after) else word
        for word, after in pairs
    ]


def _give(arguments: argparse.Namespace, words: list[str], pairs: list[str]) -> None:
    """What the job is told becomes part of its spec."""
    if not words and not pairs:
        return
    from wide.job.spec import with_arguments, with_set

    name = {_run: "job", _serve: "job", _plan: "target", join: "job", launch: "job"}.get(arguments.call)
    if name is None or getattr(arguments, name) is None:
        what = "what stands behind --" if words else "--set"
        raise UsageError(f"{what} is for a job: run, serve, plan, launch and join --job have one")
    setattr(arguments, name, with_set(with_arguments(getattr(arguments, name), words), pairs))


def _mend_streams() -> None:
    """Started with closed streams (`2>&-`), a process would take the next pipe it opens for its stderr."""
    for fd in (0, 1, 2):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="wide", description="Train one PyTorch model on the machines you have.")
    parser.add_argument("--version", action="version", version=f"wide {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train on this machine: a coordinator and N node processes")
    run.add_argument("--nodes", metavar="N", help="node processes; 0: a plain loop in this one (default: one per core)")
    run.add_argument(
        "--on",
        metavar="local|ray[://…]|slurm|dask://…|torchrun",
        help="the engine that places the nodes (default: local, processes of this machine)",
    )
    run.add_argument("--cpus-per-node", metavar="C", help="with --on: cores for each node (default: 1)")
    run.add_argument("--gpus-per-node", metavar="G", help="with --on: GPUs for each node (default: 0)")
    run.add_argument("--partition", metavar="P", help="with --on slurm: the partition")
    serve = commands.add_parser("serve", help="a coordinator for other machines; prints their `wide join …` line")
    serve.add_argument("--nodes", metavar="N", help="node processes on this machine, too (default: none)")
    serve.add_argument("--host", help="the address to listen on (default: 127.0.0.1)")
    serve.add_argument("--port", help=f"the port to listen on (default: {DEFAULT_PORT}; 0: any free one)")
    serve.add_argument("--address", metavar="HOST[:PORT],…", help="where others find it, if not where it listens")
    serve.add_argument(
        "--insecure", action="store_true", default=None, help="let other machines in unencrypted, too, with the token"
    )
    serve.add_argument("--keys", metavar="DIR", help="keys and an invite that `wide launch` made, instead of new ones")
    serve.add_argument("--hide-invite", action="store_true", help="do not print it: RUN/invite has it")
    for command, call in ((run, _run), (serve, _serve)):
        command.add_argument(
            "job", metavar="JOB", help="file.py, file.py:name or package.module; behind --: its own arguments"
        )
        command.add_argument("--json", action="store_true", help="print the result as one JSON object on stdout")
        _shared(command)
        command.set_defaults(call=call)
    serve.add_argument("--token-file", metavar="FILE", help="read the pool's token from here (or set WIDE_TOKEN)")
    plan = commands.add_parser("plan", help="measure, then say which strategy and codec a pool should use")
    plan.add_argument("target", metavar="JOB|INVITE", help="a job, for this machine's nodes; or a running pool")
    plan.add_argument("--nodes", metavar="N", help="node processes (default: one per core)")
    plan.add_argument("--set", metavar="NAME=VALUE", action="append", help=SET_HELP)
    plan.add_argument("--compress", metavar="CODEC", help="what may be used: lossless, auto (default), or one codec")
    plan.add_argument("--data", metavar="local|stream|auto", help="nodes build the data set, or are sent batches")
    plan.add_argument("--device", metavar="auto|cpu|cuda:0|mps", help="where nodes compute (default: auto)")
    plan.add_argument("--log", metavar="silent|normal|verbose", help="how much is said on stderr (default: normal)")
    plan.add_argument("--token-file", metavar="FILE", help="of the pool that is running (or set WIDE_TOKEN)")
    plan.add_argument("--json", action="store_true", help="print the plan as one JSON object on stdout")
    plan.set_defaults(call=_plan)
    export = commands.add_parser("export", help="a run's trained weights as one file")
    export.add_argument("run", metavar="RUN", help="the run's folder")
    export.add_argument("file", metavar="FILE", nargs="?", help="FILE.safetensors (default: the run's name) or FILE.pt")
    export.add_argument("--force", action="store_true", help="replace a file that exists")
    export.add_argument("--best", action="store_true", help="the best checkpoint's, not the newest (Job(best=…))")
    export.set_defaults(call=_export)
    looking.add_commands(commands)
    checking.add_commands(commands)
    add_commands(commands)
    add_launch(commands, SET_HELP)
    return parser


def _shared(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--strategy",
        metavar="sync|async|local|auto",
        help="sync (default: exact), async (nobody waits), local (seldom talks), auto (measures, then picks)",
    )
    command.add_argument("--set", metavar="NAME=VALUE", action="append", help=SET_HELP)
    command.add_argument("--steps", metavar="N", help="updates to make")
    command.add_argument("--epochs", metavar="X", help="passes over the data")
    command.add_argument("--seconds", metavar="S", help="stop after this time")
    command.add_argument("--seed", metavar="N")
    command.add_argument("--out", metavar="DIR", help="the run's folder (default: runs/<time>-<job>)")
    command.add_argument("--resume", metavar="auto|DIR", help="go on with a run; auto: with this job's newest, if any")
    command.add_argument(
        "--without", metavar="NODE", help="with --resume: from the last checkpoint before this node's first work"
    )
    command.add_argument("--checkpoint-every", metavar="S", help="seconds between two checkpoints (default: 30)")
    command.add_argument("--keep", metavar="N", help="checkpoints to keep (default: 3)")
    command.add_argument("--data", metavar="local|stream|auto", help="nodes build the data set, or are sent batches")
    command.add_argument(
        "--workers", metavar="N", help="processes for each node that fetch batches ahead (default: the job's, or 0)"
    )
    command.add_argument(
        "--compress",
        metavar="CODEC",
        help="lossless (default: what makes each link fastest, exactly), auto (also what loses precision), "
        "none, or one of lz4, zstd, bf16, int8, int4, topk",
    )
    command.add_argument(
        "--robust",
        metavar="clip|trimmed|median",
        help="async and local: a mean that one wrong update cannot carry away (clip: cheapest; see docs/trust.md)",
    )
    command.add_argument(
        "--no-check",
        dest="check",
        action="store_false",
        default=None,
        help="do not try first whether the job gives the same numbers twice",
    )
    command.add_argument(
        "--audit",
        metavar="SHARE",
        help="of all work, this share is computed by a second node, and compared (default: 0; serve: 0.01)",
    )
    command.add_argument("--log", metavar="silent|normal|verbose", help="how much is said on stderr (default: normal)")
    command.add_argument("--track", metavar="wandb|trackio|mlflow", help="send its numbers there, too")
    command.add_argument(
        "--dashboard",
        nargs="?",
        const="auto",
        metavar="[HOST:]PORT",
        help="a page about the run (default: any free port)",
    )
    command.add_argument("--control", action="store_true", default=None, help="the run can be steered from that page")
    command.add_argument("--plain", action="store_true", default=None, help="lines instead of a screen that lives")
    command.add_argument("--device", metavar="auto|cpu|cuda:0|mps", help="where nodes compute (default: auto)")
    command.add_argument(
        "--isa",
        metavar="auto|default|avx2|avx512",
        help="the instruction set, which bits depend on (default: this CPU's best; serve: the best that all have)",
    )
    command.add_argument("--socket", metavar="KEY=VALUE,…", help=SOCKET_HELP)


def _options(arguments: argparse.Namespace, **defaults: Any) -> Options:
    given = {name: getattr(arguments, name, None) for name in Options.__struct_fields__}
    for name, value in defaults.items():
        if given[name] is None and not os.environ.get(f"WIDE_{name.upper()}"):
            given[name] = value
    return resolve(given, os.environ)


def _run(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    if options.on == "local":  # it sees to the instruction set itself
        from wide.launch.local import run_file as run
    else:
        options = _options(arguments, host="0.0.0.0")  # whoever an engine places is on another machine
        from wide.launch.engines import run_on as run
        from wide.launch.instructions import chosen, obey

        obey(chosen(options, None))

    result = run(arguments.job, options)
    _report(result, arguments.json, options)
    return 0


def _serve(arguments: argparse.Namespace) -> int:
    options = _options(arguments, port=DEFAULT_PORT, audit=SERVE_AUDIT)
    from wide.job.place import located
    from wide.launch.folder import found_run
    from wide.launch.instructions import chosen, obey, start_again

    obey(chosen(options, found_run(located(arguments.job), options)), options.log != "silent")  # before torch is loaded
    from wide.launch.serve import Serving, serve

    token = os.environ.get("WIDE_TOKEN", "")
    host = options.host if arguments.host or os.environ.get("WIDE_HOST") else None
    port = options.port if arguments.port or os.environ.get("WIDE_PORT") else None
    serving = Serving(
        arguments.token_file, host, port, arguments.address, arguments.keys, arguments.hide_invite, os.name == "posix"
    )
    try:
        result = serve(arguments.job, options, serving)
    except StartsAgain as again:
        start_again(again, token)
    _report(result, arguments.json, options)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    options = _options(arguments)
    from wide.dashboard.plan import table
    from wide.launch.plan import ask_pool, is_pool, plan_job

    if is_pool(arguments.target):
        if arguments.set:
            raise UsageError("--set is for a job: a pool that is running has its values")
        plan = ask_pool(arguments.target, arguments.token_file, options.socket)
    else:
        plan = plan_job(arguments.target, options)
    print(table(plan), file=sys.stderr)
    if arguments.json:
        print(json.dumps(plan), flush=True)
    return 0


def _export(arguments: argparse.Namespace) -> int:
    from wide.launch.export import export

    print(export(arguments.run, arguments.file, arguments.force, arguments.best))
    return 0


def _report(result: Any, as_json: bool, options: Options) -> None:
    if options.log != "silent":
        print(result.summary(), file=sys.stderr)
    if as_json:
        print(result.to_json(), flush=True)
