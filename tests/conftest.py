"""What every test leaves as it found it."""

from __future__ import annotations

import signal

import pytest
import torch

from wide.launch.signals import SIGNALS


@pytest.fixture(autouse=True)
def signals_as_before():
    """The command sets its own handlers for good, and tests call it in this process: children would inherit them."""
    before = [signal.getsignal(number) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def one_thread():
    """As nodes compute, unless a job says otherwise: sums round differently with another number of threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def staged(tmp_path_factory):
    """A run of 20 seconds by 5 nodes, with names that want to do harm."""
    from benchmarks.staged import Staged
    from tests.dashboards import EVIL  # tests/extras run where there is no dashboard

    folder = tmp_path_factory.mktemp("runs") / "staged"
    run = Staged(folder, nodes=5, leases_per_s=200.0, name=lambda node: f"{EVIL}{node}")
    run.run(4000)
    run.close()
    return folder
