"""A node that has loaded everything before it joins, as DDP's ranks have when their clock starts. Waits for a file.

python -m benchmarks.joiner READY GO INVITE --job JOB     makes the file READY, waits for GO, then is `wide join INVITE`
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

from wide.cli.main import main
from wide.job.loading import load
from wide.launch import join  # noqa: F401  (loaded ahead)

if __name__ == "__main__":
    ready, go, *words = sys.argv[1:]
    load(words[words.index("--job") + 1])
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first optimizer imports torch's compiler
    Path(ready).touch()
    while not Path(go).exists():
        time.sleep(0.01)
    sys.exit(main(["join", *words, "--log", "silent"]))
