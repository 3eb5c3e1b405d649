"""Run one benchmark: a table for people on stderr, one JSON object as the last line of stdout."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = ("seed", "wire", "codecs", "sockets", "logging", "slowlink", "strategies", "network")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", action="store_true", help="also draw docs/plots/NAME.png (needs the extra `plots`)")
    arguments = parser.parse_args()
    benchmark = importlib.import_module(f"benchmarks.{arguments.name}")

    def say(text: str) -> None:
        if not arguments.json:
            print(text, file=sys.stderr, flush=True)

    if arguments.plot:
        from benchmarks.plots import DRAWINGS, draw

        if arguments.name not in DRAWINGS:
            parser.error(f"there is no picture of {arguments.name}, only of {', '.join(DRAWINGS)}")
    result = benchmark.run(arguments.repeats, say)
    if arguments.plot:
        say(f"drawn: {draw(arguments.name, result)}")
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
