"""Run one benchmark: a table for people on stderr, one JSON object as the last line of stdout."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = ("seed", "wire")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="only the JSON line, no table")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    benchmark = importlib.import_module(f"benchmarks.{arguments.name}")
    say = (lambda text: None) if arguments.json else (lambda text: print(text, file=sys.stderr, flush=True))
    print(json.dumps(benchmark.run(arguments.repeats, say)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
