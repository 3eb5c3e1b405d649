"""What follows from evaluations: when a run ends, which weights were best, what a scheduler goes by."""

from __future__ import annotations

import math

import pytest
import torch

import wide
from tests.jobs import make, mlp
from tests.test_state import grants, join, kinds
from wide.coordinator.events import (
    CloseStep,
    EndRun,
    GrantLease,
    Judged,
    MakeVersion,
    MergeUpdate,
    NameBest,
    NodeLeft,
    SaveCheckpoint,
    Ticked,
    UpdateArrived,
)
from wide.coordinator.judging import Judge, Verdict
from wide.coordinator.state import Pool, Verdicts
from wide.errors import TrainingFailed
from wide.job.descent import Descent
from wide.job.schedule import Schedule
from wide.store import checkpoint
from wide.store.checkpoint import Checkpoint

PLATEAU = wide.on_metric("loss", lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5))


def a_pool(steps=4, every=2, keeps_best=False, awaited=0):
    schedule = Schedule(1000, 1, 2, seed=0, evaluate_every=every)
    return Pool(schedule, steps, None, verdicts=Verdicts(awaited, keeps_best))


def work(pool, leases, now=1.0):
    """All that is out, and what follows from it."""
    actions = []
    while leases:
        lease = leases.pop(0)
        new = pool.handle(UpdateArrived(lease.node, lease.lease), now)
        actions += new
        if not any(isinstance(action, CloseStep) and action.is_evaluated for action in actions):
            leases += grants(new)
    return actions


def test_after_an_evaluated_step_nothing_is_leased_before_it_is_judged():
    pool = a_pool()
    actions = work(pool, join(pool, 1))
    assert [action for action in actions if isinstance(action, CloseStep)] == [CloseStep(0), CloseStep(1, True)]
    assert pool.steps == 2
    assert not pool.handle(Ticked(), 50.0)
    assert not join(pool, 2), "nor to newcomers"
    assert grants(pool.handle(Judged(), 60.0))


def test_what_was_leased_ahead_is_merged_but_makes_no_version_before_the_verdict():
    pool = a_pool(every=1)
    one, two = join(pool, 1, 2)
    ahead = grants(pool.handle(UpdateArrived(1, one.lease), 1.0))
    ahead += [grant for grant in grants(pool.handle(UpdateArrived(2, two.lease), 1.1)) if grant.version]
    assert pool.version == 1
    for lease in ahead:
        assert kinds(pool.handle(UpdateArrived(lease.node, lease.lease), 2.0)) == [MergeUpdate]
    assert pool.version == 1
    while pool.version == 1:
        actions = pool.handle(Judged(), 3.0)
        assert kinds(actions)[:1] == [GrantLease] or kinds(actions)[:1] == [MakeVersion]
        work(pool, grants(actions))


def test_a_run_that_should_stop_ends_with_the_weights_that_were_judged():
    pool = a_pool()
    work(pool, join(pool, 1))
    actions = pool.handle(Judged("enough"), 9.0)
    assert kinds(actions) == [SaveCheckpoint, EndRun]
    assert (actions[0].position.steps, actions[1].why) == (2, "enough")


def test_the_last_step_is_judged_before_the_run_ends():
    pool = a_pool(steps=3)
    work(pool, grants([*work(pool, join(pool, 1)), *pool.handle(Judged(), 1.0)]))
    assert (pool.steps, pool.is_over) == (3, False)
    assert kinds(pool.handle(Judged(is_best=True), 1.0)) == [NameBest, SaveCheckpoint, EndRun]


def test_the_best_weights_are_saved_before_it_is_known_that_they_are_the_best():
    pool = a_pool(keeps_best=True)
    actions = work(pool, join(pool, 1))
    assert [type(action) for action in actions][-1] is SaveCheckpoint
    assert pool.handle(Judged(is_best=True), 2.0)[0] == NameBest(2)


def test_a_run_that_ended_before_the_verdict_waits_for_it_again():
    pool = a_pool(awaited=1)
    assert not join(pool, 1)
    assert grants(pool.handle(Judged(), 1.0))


def test_a_node_that_leaves_meanwhile_changes_nothing():
    pool = a_pool()
    work(pool, join(pool, 1, 2))
    assert not grants(pool.handle(NodeLeft(2, "gone"), 2.0))
    assert grants(pool.handle(Judged(), 3.0))


# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def a_judge(before=None, **wishes):
    job, model = make(**wishes), mlp()
    return Judge(job, Descent(job, model, [name for name, _ in model.named_parameters()], 0), before)


def test_stop_when_hears_all_evaluations_so_far():
    heard = []
    judge = a_judge(stop_when=lambda said: heard.append(said) or len(said) == 2)
    assert judge.hear(5, 0, {"loss": 1.0}, False) == Verdict()
    assert judge.hear(10, 1, {"loss": 0.5, "acc": 0.9}, False) == Verdict("stop_when said so after step 10")
    assert heard[-1] == [
        {"step": 5.0, "epoch": 0.0, "loss": 1.0},
        {"step": 10.0, "epoch": 1.0, "loss": 0.5, "acc": 0.9},
    ]


def test_best_is_the_largest_or_the_smallest_and_never_a_nan():
    values = (0.5, math.nan, 0.4, 0.6, 0.6)
    for best, expected in (("acc", [True, False, False, True, False]), ("-acc", [True, False, True, False, False])):
        judge = a_judge(best=best)
        assert [judge.hear(i, 0, {"acc": v}, False).is_best for i, v in enumerate(values, 1)] == expected


def test_a_run_that_goes_on_remembers_what_was_judged():
    judge = a_judge(best="acc", stop_when=lambda said: len(said) == 3)
    judge.hear(1, 0, {"acc": 0.9, "odd": math.inf}, False)
    again = a_judge(judge.state(), best="acc", stop_when=lambda said: len(said) == 3)
    assert again.steps == 1
    assert again.hear(2, 0, {"acc": 0.8}, False) == Verdict()
    assert again.hear(3, 0, {"acc": 0.8}, False).why_stop


def test_the_end_of_a_run_is_no_moment_of_the_jobs_own():
    judge = a_judge(best="loss", scheduler=PLATEAU, stop_when=lambda said: True)
    assert judge.hear(7, 0, {"loss": 1.0}, True) == Verdict(is_best=True)
    assert judge.steps == 0, "a longer run would not know of it"


def test_a_scheduler_goes_by_the_metric():
    judge = a_judge(scheduler=PLATEAU)
    for step, loss in enumerate((1.0, 2.0, 3.0), 1):
        judge.hear(step, 0, {"loss": loss}, False)
    assert judge._descent.group_rates == [0.025]


@pytest.mark.parametrize(
    ("wishes", "words"),
    [
        ({"best": "accuracy"}, r"Job\(best=…\): there is no metric 'accuracy'; there are epoch, loss, step"),
        ({"scheduler": wide.on_metric("acc", PLATEAU.build)}, "wide.on_metric: there is no metric 'acc'"),
        ({"stop_when": lambda said: said[-1]["acc"] > 1}, "stop_when failed: KeyError: 'acc'"),
    ],
)
def test_a_wish_that_cannot_be_met_is_explained(wishes, words):
    with pytest.raises(TrainingFailed, match=words):
        a_judge(**wishes).hear(1, 0, {"loss": 1.0}, False)


# ── the best checkpoint ──────────────────────────────────────────────────────────────────────────────────────────────


def test_the_best_checkpoint_stays_while_others_go(tmp_path):
    for step in range(1, 6):
        checkpoint.write(tmp_path, Checkpoint(step, {"w": torch.zeros(1)}, {}, {}), keep=2)
        if step == 2:
            assert checkpoint.name_best(tmp_path, 2) == ""
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000002", "step-00000004", "step-00000005"]
    assert checkpoint.best(tmp_path) == tmp_path / "step-00000002"
    assert checkpoint.newest(tmp_path)[1].step == 5
    assert checkpoint.oldest_step(tmp_path) == 4, "nobody goes on from the best one"
