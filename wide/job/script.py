"""Scripts that compute in a loop of their own, and that are run, not imported. `wide.local(model, …)` may stand in one
that says nothing else of a job: whoever wants to know what is trained runs the script up to that line. Knows files and
the text in them; does not import torch.
"""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

from wide.job.definition import Job
from wide.job.place import Place

LOCAL = re.compile(r"\bwide\.local\s*\(|^\s*from\s+wide\s+import\s[^#\n]*\blocal\b", re.MULTILINE)


class Entered(BaseException):
    """A script has come to its loop, and only what it trains is of interest here. What catches every Exception there
    must not catch this.
    """

    def __init__(self, job: Job) -> None:
        self.job = job


def has_local(path: Path) -> bool:
    """Does this script say wide.local?"""
    return LOCAL.search(path.read_text(encoding="utf-8", errors="replace")) is not None


def run_as_main(place: Place) -> None:
    """As `python file.py` does it, or `python -m package.module`."""
    if place.module:
        sys.path.insert(0, str(place.root))
        runpy.run_module(place.module, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(place.path.parent))
        runpy.run_path(str(place.path), run_name="__main__")
