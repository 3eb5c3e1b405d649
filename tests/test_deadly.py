"""A batch that kills whoever computes it ends the run with its name; machines that are taken away do not."""

from __future__ import annotations

import pytest

from tests.processes import wide
from tests.test_run import a_job
from tests.test_state import a_pool, grants
from wide.coordinator.deadly import OPEN_LIMIT, Deadly
from wide.coordinator.events import EndRun, NodeJoined, NodeLeft
from wide.strategy.tree import Block


def test_the_first_death_says_nothing_yet_and_the_second_at_that_batch_alone_does():
    deadly = Deadly(is_open=False)
    assert deadly.died_at(Block(0, 4), "step 0, batches 0…3") == ""
    assert deadly.is_suspicious
    deadly.survived(Block(0, 1))
    assert deadly.died_at(Block(4, 5), "step 0, batch 4") == ""
    assert "step 0, batch 2: 2 processes ended without a word" in deadly.died_at(Block(2, 3), "step 0, batch 2")


def test_where_machines_come_and_go_that_is_told_and_ends_nothing():
    deadly = Deadly(is_open=True)
    for _ in range(OPEN_LIMIT - 1):
        assert deadly.died_at(Block(2, 3), "step 0, batch 2") == deadly.suspicion == ""
    assert deadly.died_at(Block(2, 3), "step 0, batch 2") == ""
    assert f"step 0, batch 2: {OPEN_LIMIT} processes" in deadly.suspicion


def test_after_a_death_leases_are_of_one_batch_until_somebody_got_through():
    pool = a_pool()
    for node in (1, 2, 3):
        pool.handle(NodeJoined(node), 0.0)
    held = next(iter(pool.members[1].leases.values())).block
    actions = pool.handle(NodeLeft(1, "killed", died=True), 1.0)
    assert all(grant.block.size == 1 for grant in grants(actions))
    assert pool._granting.is_careful
    pool.deadly.survived(held)
    assert not pool.deadly.is_suspicious


def test_whoever_leaves_politely_is_no_reason_for_suspicion():
    pool = a_pool()
    for node in (1, 2, 3):
        pool.handle(NodeJoined(node), 0.0)
    actions = pool.handle(NodeLeft(1, "it was told to leave"), 1.0)
    assert not pool._granting.is_careful
    assert not any(isinstance(action, EndRun) for action in actions)


@pytest.mark.processes
@pytest.mark.parametrize(("nodes", "words"), [(1, "the last one was computing step"), (3, "look at its samples")])
def test_a_batch_that_crashes_its_process_is_named(tmp_path, nodes, words):
    body = (
        "import os\ndef loss(model, batch):\n    if (batch[1] == 7).any(): os.kill(os.getpid(), 11)\n"
        "    return model(batch[0]).mean()"
    )
    data = "dataset=lambda: torch.utils.data.TensorDataset(torch.randn(83, 6), torch.arange(83))"
    job = a_job(tmp_path, f"loss=loss, steps=20, {data}", body)
    code, _, err = wide("run", job, "--nodes", nodes, "--no-check", cwd=tmp_path)
    assert (code, words in err) == (1, True), err
