"""Run one benchmark: a table for people on stderr, one JSON object as the last line of stdout."""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import signal
import sys

NAMES = (
    *("seed", "host", "wire", "codecs", "sockets", "logging", "slowlink", "strategies", "network"),
    *(
        "checkpoints",
        "lora",
        "scale",
        "stages",
        "peers",
        "tls",
        "door",
        "views",
        "dashboard",
        "rundb",
        "star",
        "workers",
        "recipes",
        "engines",
        "liars",
        "loops",
        "everything",
        "sim",
        "chaos",
        "kills",
    ),
)
FAULTS = ("sim", "chaos", "kills")  # no measurements, but answered here
OPTIONS = {"seconds": float, "nodes": int, "seed": int, "strategy": str, "times": int, "schedules": int, "cases": str}
OPTIONS |= {"strategies": str, "kinds": str, "seeds": int, "audit": float, "honest": int, "against": str}
FLAGS = ("detection", "throughput")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", action="store_true", help="also draw docs/plots/NAME.png (needs the extra `plots`)")
    for name, kind in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, help="for those that have it")
    for name in FLAGS:
        parser.add_argument(f"--{name}", action="store_true", default=None, help="for those that have it")
    arguments = parser.parse_args()
    room = "faults" if arguments.name in FAULTS else "benchmarks"
    benchmark = importlib.import_module(f"{room}.{arguments.name}")
    options = {name: value for name in (*OPTIONS, *FLAGS) if (value := getattr(arguments, name)) is not None}
    for name in options.keys() - inspect.signature(benchmark.run).parameters.keys():
        parser.error(f"{arguments.name} has no --{name}")

    def say(text: str) -> None:
        if not arguments.json:
            print(text, file=sys.stderr, flush=True)

    if arguments.plot:
        from benchmarks.plots import DRAWINGS, draw

        if arguments.name not in DRAWINGS:
            parser.error(f"there is no picture of {arguments.name}, only of {', '.join(DRAWINGS)}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # what was begun is cleaned up
    result = benchmark.run(arguments.repeats, say, **options)
    if arguments.plot:
        say(f"drawn: docs/plots/{draw(arguments.name, result).name}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
