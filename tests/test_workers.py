"""Workers: batches fetched ahead by other processes are the same batches, whatever happens to those processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections import namedtuple
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests.jobs import SAMPLES, make
from tests.processes import result_of, started, until, wide
from wide.cli.main import main
from wide.config import resolve
from wide.errors import TrainingFailed, UsageError
from wide.job.samples import Samples
from wide.node.worker import ARE_POSSIBLE
from wide.node.workers import AHEAD, workers_for

pytestmark = pytest.mark.skipif(not ARE_POSSIBLE, reason="no safe fork here")

Pair = namedtuple("Pair", ["x", "name"])


class Thing:
    def __init__(self, samples):
        self.samples, self.text = samples, "words"

    def __eq__(self, other):
        return self.text == other.text and torch.equal(self.samples, other.samples)


class Numbers:
    """Each sample is its number."""

    def __init__(self, look=lambda i: None):
        self.look = look

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        self.look(i)
        return torch.full((3,), float(i))


@contextlib.contextmanager
def at_work(count=2, threads=1, **changes):
    job = make(**{"dataset": Numbers, **changes})
    samples = Samples(job, 0)
    workers = workers_for(samples, count, threads, None)
    with contextlib.closing(workers):
        yield samples, workers


def pids(workers):
    return [hand.worker.pid for hand in workers._hands]


def ids(*numbers):
    return torch.tensor(numbers)


def big(samples):
    return torch.stack(samples).repeat(1, 5000)  # more than goes through a pipe


COLLATES = {
    "tensors": torch.stack,
    "large": big,
    "strings": lambda samples: ["a", "b" * 50_000],
    "dicts": lambda samples: {"x": big(samples), "names": ("n", None, 3, 1.5), "nothing": torch.empty(0, 4)},
    "named tuples": lambda samples: Pair(torch.stack(samples), "n"),
    "arrays": lambda samples: [np.stack([s.numpy() for s in samples]).T, big(samples).numpy(), np.float32(2)],
    "objects": lambda samples: Thing(torch.stack(samples)),
    "lambdas": lambda samples: (lambda: None, torch.stack(samples))[1:],
    "odd tensors": lambda samples: [
        big(samples).t(),
        torch.stack(samples).expand(2, 2, 3),
        torch.stack(samples).to_sparse(),
    ],
    "types": lambda samples: [torch.stack(samples).bfloat16(), torch.stack(samples) > 1, torch.tensor(1 + 2j)],
}


def shape(value):
    return (
        (value.dtype, value.shape, value.stride()) if isinstance(value, torch.Tensor) and not value.is_sparse else None
    )


def same(one, other):
    if isinstance(one, torch.Tensor):
        return shape(one) == shape(other) and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, np.ndarray):
        return one.strides == other.strides and np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("kind", COLLATES)
def test_a_batch_of_any_kind_comes_as_it_is(kind):
    with at_work(collate=COLLATES[kind]) as (samples, workers):
        workers.ask("it", ids(0, 1), 7)
        assert same(workers.take("it"), samples.batch(ids(0, 1), 7))


@pytest.mark.parametrize("collate", [torch.stack, big])
def test_memory_begins_where_torchs_own_does_or_products_would_round_differently(collate):
    with at_work(collate=lambda samples: [collate(samples), collate(samples)]) as (_, workers):
        workers.ask("it", ids(0, 1), 7)
        assert [tensor.data_ptr() % 64 for tensor in workers.take("it")] == [0, 0]


def test_what_a_batch_shares_within_itself_it_still_shares():
    def collate(samples):
        whole = torch.stack(samples)
        return [whole, whole[1:], whole]

    with at_work(collate=collate) as (_, workers):
        workers.ask("it", ids(0, 1), 7)
        whole, part, again = workers.take("it")
        part.fill_(9)
        assert again is whole
        assert whole.tolist() == [[0, 0, 0], [9, 9, 9]]


def test_of_a_view_into_something_large_only_its_part_travels():
    data = torch.arange(4e6).reshape(-1, 100)
    with at_work(collate=lambda samples: data[2:4, 1:]) as (_, workers):
        workers.ask("it", ids(0, 1), 7)
        part = workers.take("it")
        assert same(part, data[2:4, 1:])
        assert part.untyped_storage().nbytes() < 2000


def test_a_collate_may_use_its_memory_again():
    room = torch.empty(2, 15_000)
    with at_work(count=1, collate=lambda samples: room.copy_(big(samples))) as (_, workers):
        for i in range(3):
            workers.ask(i, ids(i, i), 0)
        batches = [workers.take(i) for i in range(3)]
    assert [batch.unique().tolist() for batch in batches] == [[0.0], [1.0], [2.0]]


def test_random_numbers_are_those_of_the_node_in_any_order():
    class Noise(Numbers):
        def __getitem__(self, i):
            return torch.randn(3) + np.random.rand()

    with at_work(dataset=Noise) as (samples, workers):
        for i in range(20):
            workers.ask(i, ids(i), i)
        found = {i: workers.take(i) for i in [19, 3, *range(3), *range(4, 19)]}
        assert all(torch.equal(found[i], samples.batch(ids(i), i)) for i in range(20))


def test_threads_are_those_of_the_node_and_their_sums_too():
    def sums(samples):
        return torch.get_num_threads(), torch.randn(1 << 20).sum()

    with at_work(threads=2, collate=sums) as (samples, workers):
        torch.set_num_threads(2)
        here = samples.batch(ids(0), 5)  # OpenMP has its helpers now; the next worker is forked from that
        os.kill(pids(workers)[0], signal.SIGKILL)
        for i in range(4):
            workers.ask(i, ids(0), 5)
        assert all(same(workers.take(i), here) for i in range(4))


def test_only_a_few_batches_are_fetched_ahead(tmp_path):
    def look(i):
        (tmp_path / str(i)).touch()

    with at_work(count=2, dataset=lambda: Numbers(look)) as (_, workers):
        for i in range(30):
            workers.ask(i, ids(i), 0)
        workers.take(0)
        assert until(lambda: len(list(tmp_path.iterdir())) == 2 * AHEAD + 1, seconds=20)
        assert workers._waiting[0].key == 2 * AHEAD + 1


def test_what_is_forgotten_keeps_nobody_waiting():
    with at_work(count=1) as (_, workers):
        for i in range(20):
            workers.ask(("old", i), ids(i), 0)
        workers.take(("old", 0))
        workers.forget([("old", i) for i in range(20)])
        workers.ask("new", ids(5), 0)
        assert workers.take("new").unique().tolist() == [5.0]
        workers.ask(("old", 1), ids(9), 0)
        assert workers.take(("old", 1)).unique().tolist() == [9.0]


@pytest.mark.parametrize(
    "changes",
    [
        {"dataset": lambda: Numbers(lambda i: 1 / (3 - i))},
        {"dataset": lambda: Numbers(lambda i: [][i])},
        {"collate": lambda samples: torch.cat([*samples, None])},
    ],
)
def test_errors_have_the_words_that_they_have_without_workers(changes):
    with at_work(**changes) as (samples, workers):
        with pytest.raises(TrainingFailed) as expected:
            samples.batch(ids(1, 3), 0)
        workers.ask("bad", ids(1, 3), 0)
        with pytest.raises(TrainingFailed) as found:
            workers.take("bad")
    assert str(found.value) == str(expected.value)
    assert "test_workers.py:" in str(found.value)
    assert "Traceback" in found.value.details


def test_whoever_waits_may_give_up():
    def enough():
        raise KeyboardInterrupt

    with at_work(dataset=lambda: Numbers(lambda i: signal.pause())) as (_, workers):
        workers.ask("it", ids(1), 0)
        with pytest.raises(KeyboardInterrupt):
            workers.take("it", enough)
        mine = pids(workers)
    assert not any(psutil.pid_exists(pid) for pid in mine)


def test_a_worker_that_is_killed_is_replaced(tmp_path):
    def kill_once(i):
        with contextlib.suppress(FileExistsError):
            if i == 4:
                os.close(os.open(tmp_path / "killed", os.O_CREAT | os.O_EXCL))
                os.kill(os.getpid(), signal.SIGKILL)

    with at_work(dataset=lambda: Numbers(kill_once)) as (_, workers):
        before = set(pids(workers))
        for i in range(10):
            workers.ask(i, ids(i), 0)
        assert [workers.take(i)[0, 0].item() for i in range(10)] == list(range(10))
        assert len(before & set(pids(workers))) == 1


def test_a_batch_that_kills_every_worker_is_told_with_the_likely_cause():
    def kill(i):
        if i == 4:
            os.kill(os.getpid(), signal.SIGKILL)

    with at_work(dataset=lambda: Numbers(kill)) as (_, workers):
        for i in range(6):
            workers.ask(i, ids(i), 0)
        with pytest.raises(TrainingFailed, match=r"3 workers .* \(SIGKILL\): .* memory is full: use fewer workers"):
            workers.take(4)
        assert workers.take(5).unique().tolist() == [5.0]


def test_what_cannot_be_pickled_is_fetched_by_the_node():
    with at_work(collate=lambda samples: iter(samples) and (s for s in samples)) as (_, workers):
        for i in range(4):
            workers.ask(i, ids(i), 0)
        assert [next(workers.take(i))[0].item() for i in range(4)] == [0, 1, 2, 3]
        assert pids(workers) == []


def test_an_open_file_has_a_position_in_each_process(tmp_path):
    class Lines(Numbers):
        def __init__(self):
            (tmp_path / "data").write_text("".join(f"{i:03}\n" for i in range(SAMPLES)))
            self.file = open(tmp_path / "data", buffering=1)  # noqa: SIM115

        def __getitem__(self, i):
            self.file.seek(4 * i)
            return torch.tensor([int(self.file.readline()) for _ in range(5)])

    with at_work(dataset=Lines) as (samples, workers):
        for i in range(60):
            workers.ask(i, ids(i, i + 9), 0)
            assert samples.batch(ids(i), 0)[0, 4] == i + 4
        assert all(workers.take(i)[:, 0].tolist() == [i, i + 9] for i in range(60))


def test_one_big_tensor_needs_no_workers():
    assert workers_for(Samples(make(), 0), 2, 1, None) is None


def test_how_many_is_said_as_every_option_is(capsys):
    assert (resolve({"workers": 3}, {"WIDE_WORKERS": "2"}).workers, resolve({}, {"WIDE_WORKERS": "2"}).workers) == (
        3,
        2,
    )
    with pytest.raises(UsageError, match=r"Job\(workers=…\) must be a whole number of at least 0, got -1"):
        make(workers=-1)
    assert main(["run", "job.py", "--workers", "-1"]) == 2
    assert "--workers -1: must be at least 0" in capsys.readouterr().err


JOB = """
import os, random, signal, sys
import numpy as np
import torch
from tests.jobs import SAMPLES, make, points

class Data:
    def __init__(self):
        self.points, self.node = points(), os.getpid()

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        if i == 40 and os.getpid() != self.node and not os.path.exists("killed"):
            os.close(os.open("killed", os.O_CREAT))
            os.kill(os.getpid(), signal.SIGKILL)
        if i == int(os.environ.get("BAD", -1)):
            raise ValueError("bad sample")
        x, y = self.points[i]
        return x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand(), y

job = make(dataset=Data, workers=int(os.environ.get("WORKERS", 0)))
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return path


@pytest.mark.processes
def test_weights_are_the_same_with_workers_even_if_one_is_killed(job, tmp_path):
    alone = result_of("run", job, "--steps", 20, "--nodes", 0, cwd=tmp_path)
    one = result_of("run", job, "--steps", 20, "--nodes", 1, cwd=tmp_path, WIDE_WORKERS="2")
    assert (tmp_path / "killed").exists()
    three = result_of("run", job, "--steps", 20, "--nodes", 3, cwd=tmp_path, WORKERS="2")
    assert one["weights_sha256"] == three["weights_sha256"] == alone["weights_sha256"]


@pytest.mark.processes
def test_a_failing_sample_ends_the_run_in_the_same_words(job, tmp_path):
    (tmp_path / "killed").touch()
    code, _, err = wide("run", job, "--steps", 20, "--nodes", 1, "--workers", 2, cwd=tmp_path, BAD="50")
    assert code == TrainingFailed.exit_code
    assert "node 1: the data set failed at sample 50: ValueError: bad sample (job.py:" in err.splitlines()[-1]


@pytest.mark.processes
def test_nothing_is_left_of_a_node_that_is_killed(job, tmp_path):
    (tmp_path / "killed").touch()
    before = set(os.listdir("/dev/shm"))
    with started(
        "run", job, "--nodes", 2, "--workers", 2, "--seconds", 60, cwd=tmp_path, stderr=subprocess.DEVNULL
    ) as run:

        def families():
            everybody = [p for p in psutil.Process(run.pid).children(recursive=True) if len(p.children()) == 2]
            return [p for p in everybody if not any(child.children() for child in p.children())]

        assert until(lambda: len(families()) == 2)
        node, other = families()
        workers = node.children()
        node.kill()
        assert until(lambda: not any(worker.is_running() for worker in workers), seconds=20)
        assert other.is_running()
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=60)
    assert set(os.listdir("/dev/shm")) <= before
    assert json.loads(next(Path(tmp_path).glob("runs/*/run.json")).read_text())
