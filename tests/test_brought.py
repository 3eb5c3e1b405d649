"""Programs that a pool's own processes could spoil: files and threads of a job, collates that reuse memory, batches of
kinds that cannot be streamed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.jobs import make
from tests.processes import result_of, wide
from tests.stateful import Data
from tests.test_run import a_job
from tests.twin import Twin
from wide.codec.batch import pack
from wide.errors import TrainingFailed
from wide.job.reach import reach
from wide.store.weights import weights_sha256

processes = pytest.mark.processes

OPEN_FILE = """
import numpy as np
FILE = "data.bin"
if not os.path.exists(FILE): np.random.RandomState(0).randn(400, 2000).astype("f4").tofile(FILE)
HANDLE = open(FILE, "rb")
class Rows:
    def __len__(self): return 400
    def __getitem__(self, i):
        HANDLE.seek(i * 8000)
        row = np.frombuffer(HANDLE.read(8000), dtype="f4")[:6].copy()
        return torch.from_numpy(row), int(abs(row[0]) * 10) % 3
"""
THREADS = """
from concurrent.futures import ThreadPoolExecutor
EXECUTOR = ThreadPoolExecutor(2)
SIZES = list(EXECUTOR.map(lambda i: i * 2, range(10)))
class Rows:
    def __len__(self): return 40
    def __getitem__(self, i):
        return EXECUTOR.submit(lambda: torch.full((6,), i / 40)).result(), i % 3
"""


@processes
@pytest.mark.parametrize("body", [OPEN_FILE, THREADS], ids=["a file", "threads"])
def test_what_a_job_opens_while_it_is_imported_is_each_process_own(tmp_path, body):
    job = a_job(tmp_path, "steps=25, dataset=Rows, batches_per_step=6", body)
    hashes = {result_of("run", job, "--nodes", n, cwd=tmp_path)["weights_sha256"] for n in (0, 3)}
    assert len(hashes) == 1


@processes
def test_a_loss_that_ends_python_is_named(tmp_path):
    job = a_job(tmp_path, "steps=5, loss=loss", "def loss(model, batch):\n    raise SystemExit('bye')")
    code, _, err = wide("run", job, "--nodes", 2, cwd=tmp_path)
    assert (code, "SystemExit: bye (small.py:" in err) == (1, True), err


def reusing():
    room = torch.empty(8, 6)

    def collate(samples):
        for i, (x, _) in enumerate(samples):
            room[i] = x
        return [room[: len(samples)], torch.stack([y for _, y in samples])]

    model = lambda: nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))  # noqa: E731 without dropout: in a twin
    return make(
        model=model, dataset=lambda: Data(lambda self, x, i: x), collate=collate
    )  # nodes and feed share a process


def test_a_collate_that_reuses_its_memory_may_be_streamed():
    hashes = []
    for data in ("local", "stream"):
        twin = Twin(reusing(), data=data)
        hashes.append(weights_sha256(twin.train(*(twin.join(f"n{i}") for i in range(2)))))
    assert hashes[0] == hashes[1]


class Attributes(dict):
    __getattr__ = dict.__getitem__


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (np.ma.masked_greater(np.arange(4.0), 2), "MaskedArray"),
        (np.arange(4.0).astype(">f4"), "ndarray"),
        (Attributes(x=1), "Attributes"),
        (np.rec.fromarrays([np.arange(3)], names="a"), "recarray"),
    ],
    ids=["masked", "foreign bytes", "a dict's child", "records"],
)
def test_what_would_arrive_as_something_else_is_not_streamed(value, kind):
    with pytest.raises(TrainingFailed, match=f"a batch holds a {kind}, which cannot be streamed"):
        pack({"x": value})


def test_modules_within_modules_and_those_that_a_function_imports_are_reached(tmp_path, monkeypatch):
    (tmp_path / "helpers").mkdir()
    (tmp_path / "helpers" / "__init__.py").write_text("")
    (tmp_path / "helpers" / "augment.py").write_text(
        "import numpy as np\nN = 0\nRNG = np.random.default_rng(0)\n"
        "def count(x):\n    global N\n    N += 1\n    return x + RNG.random()\n"
    )
    (tmp_path / "uses.py").write_text(
        "import helpers.augment\ndef outer(x): return helpers.augment.count(x)\n"
        "def inner(x):\n    from helpers.augment import count\n    return count(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import uses

    for function in (uses.outer, uses.inner):
        found = reach(loss=function)
        assert len(found.generators) == 1
        assert any(place.key == "N" for place in found.places)
