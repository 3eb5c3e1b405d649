"""A run ends by itself only if its loss has left every scale behind, and still grows."""

from __future__ import annotations

import math

import pytest

from wide.telemetry.divergence import Divergence


def problem(losses):
    divergence = Divergence()
    for loss in losses:
        divergence.observe(loss)
    return divergence.problem


HONEST = {
    "it falls": [10 * 0.9**i for i in range(200)],
    "it begins low and rises": [0.02 + min(1.0, i / 50) for i in range(300)],
    "it begins at nothing": [1e-6 * 2**i for i in range(24)] + [17.0] * 100,
    "it begins at zero": [0.0] * 20 + [500.0] * 50,
    "it begins high and stays": [1e6 * (1 + math.sin(i)) for i in range(100)],
    "three bad steps": [1.0] * 50 + [1e9] * 3 + [1.0] * 50,
    "a plateau after a jump": [1.0] * 30 + [5_000.0] * 100,
    "a negative one": [-1.0 - i for i in range(100)],
}


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_loss_ends_no_run(name):
    assert problem(HONEST[name]) == ""


@pytest.mark.parametrize("factor", [1.08, 1.5, 3.0])
@pytest.mark.parametrize("start", [0.02, 1.0, 1e5])
def test_one_that_grows_without_end_does(factor, start):
    assert "training diverges: the loss began at" in problem(start * factor**i for i in range(400))
