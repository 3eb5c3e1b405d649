"""A data set is opened once for all processes of a machine, where they can share it; and nobody can tell by the bits."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from tests.jobs import make, points
from tests.processes import result_of
from wide.errors import TrainingFailed
from wide.job import opened
from wide.job.opened import dataset_of, open_ahead
from wide.job.samples import Samples
from wide.launch.sent import received, sent
from wide.transport.shared import IS_POSSIBLE

pytestmark = pytest.mark.skipif(not IS_POSSIBLE, reason="nothing is shared here")


@pytest.fixture(autouse=True)
def nothing_opened(monkeypatch):
    monkeypatch.setattr(opened, "_opened", None)


def in_a_fork(function):
    """What it returns there: a small number."""
    pid = os.fork()
    if pid == 0:
        os._exit(function())
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_whoever_is_forked_finds_what_was_opened():
    calls = []
    job = make(dataset=lambda: calls.append(1) or points())
    assert open_ahead(job, 0)
    assert Samples(job, 0)._dataset is Samples(job, 0)._dataset
    assert in_a_fork(lambda: len(Samples(job, 0)) and len(calls)) == 1


def test_another_seed_or_job_opens_its_own():
    calls = []
    job = make(dataset=lambda: calls.append(1) or torch.randn(50, 2))
    assert open_ahead(job, 0)
    first = dataset_of(job, 0)
    assert not torch.equal(dataset_of(job, 1), first)
    assert torch.equal(dataset_of(make(dataset=job.dataset), 0), first)
    assert len(calls) == 3


@pytest.mark.parametrize("what", ["file", "thread"])
def test_what_cannot_be_shared_is_for_its_own_process_only(tmp_path, what):
    calls, over, kept = [], threading.Event(), []

    def dataset():
        calls.append(1)
        if what == "file":
            kept.append(open(tmp_path / "data", "w"))  # noqa: SIM115
        else:
            kept.append(threading.Thread(target=over.wait))
            kept[-1].start()
        return points()

    job = make(dataset=dataset)
    assert not open_ahead(job, 0)
    over.set()
    dataset_of(job, 0)
    assert len(calls) == 1
    assert in_a_fork(lambda: len(dataset_of(job, 0)) and len(calls)) == 2


def test_what_fails_fails_again_where_it_can_be_told():
    job = make(dataset=lambda: 1 / 0)
    assert not open_ahead(job, 0)
    with pytest.raises(TrainingFailed, match=r"dataset\(\) failed: ZeroDivisionError"):
        Samples(job, 0)


def test_several_threads_do_not_survive_a_fork_so_nothing_is_opened():
    assert open_ahead(make(threads=2, dataset=lambda: 1 / 0), 0)


def test_a_large_job_is_sent_in_memory_that_is_nobodys_to_change():
    data = torch.arange(1e6)
    with sent({"data": data, "view": data[5:], "name": "n"}) as words:
        assert len(words) < 1000
        there = received(words)
        there["data"][7] = -1
        assert received(words)["data"][7] == data[7] == 7
    assert there["view"][2] == -1
    assert there["name"] == "n"


def test_a_small_job_is_sent_in_words():
    with sent([torch.ones(3), "n"]) as words:
        pass
    assert received(words)[0].tolist() == [1, 1, 1]


JOB = """
import os, torch
from torch.utils.data import random_split
from tests.jobs import make, points

def dataset():
    with open("calls", "a") as file:
        print(os.getpid(), file=file)
    return random_split(points(), [60, 23])[0]

job = make(dataset=dataset)
"""


@pytest.mark.processes
def test_a_pool_calls_dataset_once_with_the_seed_of_the_run_even_if_it_is_resumed(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    alone = result_of("run", "job.py", "--nodes", 0, "--seed", 5, "--steps", 6, cwd=tmp_path)
    (tmp_path / "calls").unlink()
    result_of("run", "job.py", "--nodes", 3, "--seed", 5, "--steps", 3, "--out", "o", cwd=tmp_path)
    resumed = result_of("run", "job.py", "--nodes", 3, "--resume", "o", "--steps", 6, cwd=tmp_path)
    assert resumed["weights_sha256"] == alone["weights_sha256"]
    assert len((tmp_path / "calls").read_text().split()) == 2
