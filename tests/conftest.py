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
