"""Commands that only look: runs, show, top, report, compare, metrics, dashboard. They load no torch, and touch no
training; but for a dashboard with --control.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from wide.errors import UsageError
from wide.store.reading import found

OUTPUT_HELP = "where to (html: RUN/report.html, or compare.html; others: stdout)"
RUN_HELP = "the run's folder, its name in runs/, or latest"


def add_commands(commands: Any) -> None:
    runs = commands.add_parser("runs", help="all runs in a folder, the newest last")
    runs.add_argument("dir", metavar="DIR", nargs="?", default="runs", help="where they are (default: runs)")
    runs.add_argument("--all", action="store_true", help="not only the last 30")
    runs.set_defaults(call=_runs)
    show = commands.add_parser("show", help="one run: how it was begun, what came of it, how to go on")
    show.set_defaults(call=_show)
    top = commands.add_parser("top", help="look at a run that goes on in another terminal")
    top.add_argument("--plain", action="store_true", help="lines instead of a screen that lives")
    top.add_argument("--once", action="store_true", help="one line, and no more")
    top.set_defaults(call=_top)
    metrics = commands.add_parser("metrics", help="a run's numbers as OpenMetrics text")
    metrics.set_defaults(call=_metrics)
    for command in (show, top, metrics):
        command.add_argument("run", metavar="RUN", help=RUN_HELP)
    page = commands.add_parser("dashboard", help="a page about one run or several, which goes on or is over")
    page.add_argument("runs", metavar="RUN", nargs="*", default=["latest"], help=f"{RUN_HELP} (default: latest)")
    page.add_argument(
        "--port", metavar="[HOST:]PORT", default="auto", help="where (default: this machine, 9434 or any)"
    )
    page.add_argument("--control", action="store_true", help="runs that go on can be steered from that page")
    page.set_defaults(call=_dashboard)
    report = commands.add_parser("report", help="one page about a run, with plots and the lease timeline")
    report.add_argument("runs", metavar="RUN", nargs=1, help=RUN_HELP)
    compare = commands.add_parser("compare", help="one page about several runs, side by side")
    compare.add_argument(
        "runs", metavar="RUN", nargs="+", help="the runs' folders; the first is what others differ from"
    )
    for command in (report, compare):
        command.add_argument("--format", choices=("html", "md", "json"), default="html", help="default: html")
        command.add_argument("-o", "--output", metavar="FILE", help=OUTPUT_HELP)
        command.set_defaults(call=_report, is_several=command is compare)


def _runs(arguments: argparse.Namespace) -> int:
    from wide.dashboard.runs import listed

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print(listed(Path(arguments.dir), arguments.all, width))
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from wide.dashboard.runs import told

    print(told(found(arguments.run)))
    return 0


def _top(arguments: argparse.Namespace) -> int:
    from wide.dashboard.top import watch

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _enough)
    with contextlib.suppress(KeyboardInterrupt):  # which is how one leaves; the run goes on
        print(watch(found(arguments.run), arguments.plain, arguments.once))
    return 0


def _enough(number: int, frame: Any) -> None:
    raise KeyboardInterrupt


def _metrics(arguments: argparse.Namespace) -> int:
    from wide.dashboard.account import account
    from wide.dashboard.openmetrics import openmetrics

    run = account(found(arguments.run))
    print(openmetrics(run.brief, run.snapshot), end="")
    return 0


def _dashboard(arguments: argparse.Namespace) -> int:
    from wide.launch.dashboard import dashboard

    with contextlib.suppress(KeyboardInterrupt):  # which is how one leaves
        dashboard([found(run) for run in arguments.runs], arguments.port, arguments.control)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from wide.dashboard.report import report

    if arguments.is_several and len(arguments.runs) < 2:
        raise UsageError("compare needs two runs or more; about one: wide report RUN")
    folders = [found(run) for run in arguments.runs]
    text = report(folders, arguments.format)
    output = arguments.output
    if output is None and arguments.format == "html":
        output = str(folders[0] / "report.html") if len(folders) == 1 else "compare.html"
    if output in (None, "-"):
        sys.stdout.write(text if text.endswith("\n") else f"{text}\n")
        return 0
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{output} cannot be written ({error.strerror}): choose a file with -o") from None
    print(output)
    return 0
