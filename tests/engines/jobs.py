"""Jobs for clusters: the digits of examples/, as they are, and slow enough that something can happen meanwhile."""

from __future__ import annotations

import sqlite3
from contextlib import closing

from tests.processes import ROOT

DIGITS = ROOT / "examples" / "digits.py"
SLOWLY = """
def slowly(model, batch):
    time.sleep(0.01)
    while wide.here().step >= {step} and os.path.exists({gate!r}):
        time.sleep(0.01)
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


job = """


def slow_digits(folder, held_at=0):
    """The same network and data; each batch takes 10 ms longer. From step `held_at` on it waits for as long as there is
    a file `gate` in the folder: the run cannot be over before what a test waits for has happened.
    """
    text = DIGITS.read_text().replace("import torch\n", "import os\nimport time\n\nimport torch\n", 1)
    text = text.replace("loss=wide.supervised(nn.CrossEntropyLoss())", "loss=slowly")
    path = folder / "slow.py"
    path.write_text(text.replace("\njob = ", SLOWLY.format(step=held_at, gate=str(folder / "gate")), 1))
    return path


def steps_in(folder):
    """How many updates are in its run.db by now."""
    try:
        with closing(sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)) as db:
            return db.execute("select coalesce(max(step) + 1, 0) from steps").fetchone()[0]
    except sqlite3.OperationalError:
        return 0


def nodes_in(folder):
    """The names of all nodes that ever joined, once for each time."""
    with closing(sqlite3.connect(f"file:{folder}/run.db?mode=ro", uri=True)) as db:
        return [name for (name,) in db.execute("select name from nodes order by joined_at")]
