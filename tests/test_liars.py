"""What liars say, and what they leave alone: a benchmark with liars that lie otherwise than they claim shows nothing."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import wide
from faults.lies import HONEST_FIRST, KINDS, Answer, Liar
from tests.jobs import make, mlp
from tests.processes import ROOT, environment
from tests.twin import ELSEWHERE, Twin
from wide.codec.digest import KEY_NBYTES, Digest
from wide.codec.layout import Flat, Layout, scale
from wide.coordinator.taken import Comparison, Taken

LAYOUT = Layout(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)))
DIGEST = Digest(bytes(KEY_NBYTES))
BROKEN = ("out of order", "wrong payload", "bad numbers", "unknown codec", "bad header")
HARMLESS_TO_WEIGHTS = ("loss", "loss_low", "times", "samples")


def an_answer():
    flat = Flat(LAYOUT, only_live=True)
    flat.raw.zero_()
    generator = torch.Generator().manual_seed(1)
    for tensor in (*flat.trainable, *flat.averaged):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    flat.touched = (1 << len(flat.trainable)) - 1
    return Answer(flat, [0.5, 0.25])


def told(kind, leases=1, **options):
    """What the last of so many answers has become."""
    liar = Liar(kind, **options)
    for _ in range(leases):
        answer = an_answer()
        answer.total.trainable[0].mul_(liar.leases + 1)  # no two updates are alike
        liar.decides()
        with liar.telling(answer):
            pass
    return answer, liar


def changed_bits(answer, before):
    differing = answer.total.raw ^ before.total.raw
    return sum(int(byte).bit_count() for byte in differing)


def between_tensors(flat):
    """The bytes that belong to no tensor."""
    mask = torch.ones(LAYOUT.live_nbytes, dtype=torch.bool)
    for slot in (*LAYOUT.trainable, *LAYOUT.averaged, *LAYOUT.kept):
        mask[slot.offset : slot.offset + slot.nbytes] = False
    return flat.raw[mask]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "times"])
def test_every_lie_can_be_seen_in_a_digest(kind):
    answer, _ = told(kind, 2, share=1.0, honest=0)
    honest = an_answer()
    honest.total.trainable[0].mul_(2)
    assert DIGEST.of(answer.total, answer.losses) != DIGEST.of(honest.total, honest.losses)


@pytest.mark.parametrize("kind", KINDS)
def test_no_lie_touches_what_lies_between_tensors(kind):
    answer, _ = told(kind, 2, share=1.0, honest=0)
    assert not between_tensors(answer.total).any(), "or the next honest update in this memory would look like a lie"


@pytest.mark.parametrize("kind", HARMLESS_TO_WEIGHTS)
def test_who_lies_in_words_leaves_the_tensors_alone(kind):
    answer, _ = told(kind)
    assert changed_bits(answer, an_answer()) == 0


def test_one_bit_is_flipped_and_no_more():
    for seed in range(20):
        answer, _ = told("bitflip", share=1.0, seed=seed)
        assert changed_bits(answer, an_answer()) == 1


def test_one_number_is_none():
    answer, _ = told("nan")
    assert sum(int(tensor.isnan().sum()) for tensor in answer.total.trainable) == 1
    answer, _ = told("buffers")
    assert sum(int(tensor.isnan().sum()) for tensor in answer.total.averaged) == 1
    assert not any(tensor.isnan().any() for tensor in answer.total.trainable)


@pytest.mark.parametrize(("kind", "factor"), [("thousandfold", 1000.0), ("flipped", -1.0), ("scaled", 1.05)])
def test_what_is_scaled_is_scaled_everywhere(kind, factor):
    answer, before = told(kind)[0], an_answer()
    for after, honest in zip(answer.total.trainable, before.total.trainable, strict=True):
        assert torch.equal(after, honest * factor)


def test_a_stale_update_is_the_one_before():
    answer, _ = told("stale", 3)
    before, _ = told("times", 2)
    assert torch.equal(answer.total.raw, before.total.raw)


def test_zeros_look_like_work():
    answer, _ = told("zeros")
    assert not answer.total.raw.any()
    assert len(answer.losses) == 2
    assert all(0 < loss < 10 for loss in answer.losses)


def test_losses_and_times_are_such_as_messages_may_have():
    for seed in range(10):
        assert all(math.isfinite(loss) and abs(loss) <= 1e100 for loss in told("loss", seed=seed)[0].losses)
        assert told("times", seed=seed)[0].seconds in (1e-6, 1e8)


def test_a_share_of_leases_is_lied_about_and_the_tally_tells_which(tmp_path):
    _, liar = told("bitflip", 500, share=0.1, seed=3, tally=str(tmp_path / "tally"))
    tally = (tmp_path / "tally").read_bytes()
    assert (len(tally), tally.count(b"x")) == (500, liar.lies)
    assert 25 < liar.lies < 90


def test_who_fears_a_canary_is_honest_at_first():
    answer, liar = told("canary", HONEST_FIRST)
    assert liar.lies == 0
    _, liar = told("canary", HONEST_FIRST + 5)
    assert liar.lies == 5


def test_the_same_seed_lies_alike():
    one, other = (told("bitflip", 50, share=0.5, seed=7) for _ in range(2))
    assert torch.equal(one[0].total.raw, other[0].total.raw)
    assert one[1].lies == other[1].lies


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
@pytest.mark.parametrize("kind", ["flipped", "zeros", "stale", "times"])
def test_a_liar_speaks_the_protocol(kind, strategy):
    twin = Twin(make(model=mlp), strategy=strategy, steps=4)
    liar = Liar(kind)
    nodes = [twin.join("honest"), twin.join("another"), twin.join("liar", liar=liar)]
    twin.train(*nodes)
    assert liar.lies
    assert not [reason for _, reason, _ in twin.rejects() if reason in BROKEN], "it lies, but in good manners"


class Says:
    """A liar that changes its answers by `lie`, after the first `honest` ones."""

    is_lazy = False

    def __init__(self, lie, honest=0):
        self._lie, self._honest = lie, honest

    def decides(self):
        return True

    @contextmanager
    def telling(self, answer):
        self._honest -= 1
        if self._honest < 0:
            self._lie(answer)
        yield


def fill_gaps(answer):
    """Numbers between the tensors, which belong to none."""
    flat = answer.total
    tensors = [*flat.trainable, *flat.averaged, *flat.kept]
    values = [tensor.clone() for tensor in tensors]
    flat.raw.fill_(0x3C)
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def test_what_a_stranger_writes_between_tensors_is_no_part_of_any_update():
    """Nodes of the coordinator's machine compute in memory that a stranger's update came in before."""
    twin = Twin(make(model=mlp), steps=30, shares=True, audit=0.7)
    beside = [twin.join("one", is_beside=True), twin.join("two", is_beside=True)]
    stranger = twin.join("stranger", liar=Says(fill_gaps))
    model = twin.train(*beside, stranger)
    assert [node.stop for node in (*beside, stranger)] == [None] * 3, "nobody computes other bits"
    alone = Twin(make(model=mlp), steps=30)
    for ours, theirs in zip(model.parameters(), alone.train(alone.join()).parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_what_is_cleared_is_all_between_tensors_and_nothing_else():
    answer, honest = an_answer(), an_answer()
    fill_gaps(answer)
    assert between_tensors(answer.total).all()
    LAYOUT.clear_gaps(answer.total.bytes)
    assert changed_bits(answer, honest) == 0


def logs(model, batch):
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss, {"mine": loss.detach(), "shown": 1.0}


def lies_of(metric):
    def lie(answer):
        answer.total.logged[metric] = (1e6, answer.total.logged[metric][1])

    return lie


JUDGED = {
    "on_metric": {"scheduler": wide.on_metric("mine", torch.optim.lr_scheduler.ReduceLROnPlateau)},
    "best": {"best": "-mine"},
    "stop_when": {"stop_when": lambda said: False},
}


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
@pytest.mark.parametrize("name", JUDGED)
def test_who_lies_about_a_metric_that_training_goes_by_is_found(name, strategy):
    twin = Twin(make(model=mlp, loss=logs, evaluate_every=1, **JUDGED[name]), strategy=strategy, steps=6, audit=1.0)
    honest = [twin.join("one"), twin.join("two")]
    liar = twin.join("liar", liar=Says(lies_of("mine")))
    twin.train(*honest, liar)
    assert [node.stop for node in honest] == [None, None]
    assert liar.stop.exit_code == 77


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_honest_nodes_may_differ_in_what_is_only_shown(strategy):
    """How long it took, say."""
    twin = Twin(make(model=mlp, loss=logs, evaluate_every=1, best="-mine"), strategy=strategy, steps=6, audit=1.0)
    nodes = [twin.join("one"), twin.join("two"), twin.join("three", liar=Says(lies_of("shown")))]
    twin.train(*nodes)
    assert [node.stop for node in nodes] == [None] * 3


def test_a_digest_has_metrics_in_any_order_and_is_what_it_was_without():
    answer, goes_by = an_answer(), {"a", "b"}.__contains__
    digest, before = Digest(bytes(KEY_NBYTES), goes_by), DIGEST.of(answer.total, answer.losses)
    assert digest.of(answer.total, answer.losses) == before
    answer.total.logged = {"a": (1.0, 8.0), "b": (2.0, 8.0), "c": (3.0, 8.0)}
    said = digest.of(answer.total, answer.losses)
    assert DIGEST.of(answer.total, answer.losses) == before
    answer.total.logged = {"b": (2.0, 8.0), "a": (1.0, 8.0)}
    assert digest.of(answer.total, answer.losses) == said
    for other in ({"a": (1.0, 8.0)}, {"a": (1.0, 8.0), "b": (2.0, 4.0)}, {"a": (2.0, 8.0), "b": (1.0, 8.0)}):
        answer.total.logged = other
        assert digest.of(answer.total, answer.losses) not in (said, before)


@pytest.mark.parametrize(
    ("mine", "theirs", "is_near"),
    [
        ({"m": (0.0, 32.0)}, {"m": (1.0, 32.0)}, True),  # of 32 one was right
        ({"m": (1.0, 32.0)}, {"m": (32.0, 32.0)}, False),
        ({"m": (math.nan, 32.0)}, {"m": (math.nan, 32.0)}, True),
        ({"m": (math.nan, 32.0)}, {"m": (1.0, 32.0)}, False),
        ({"m": (math.inf, 32.0)}, {"m": (math.inf, 32.0)}, True),
        ({"m": (1.0, 0.0)}, {"m": (1.0, 32.0)}, False),
        ({"m": (1.0, 0.0)}, {"m": (0.0, 0.0)}, False),
        ({"m": (1.0, 32.0)}, {}, False),
        ({"shown": (1.0, 32.0)}, {"shown": (9e9, 32.0)}, True),
    ],
)
def test_metrics_of_two_nodes_are_near_or_far(mine, theirs, is_near):
    comparison, one, other = Comparison(lambda flat: None, {"m"}.__contains__), an_answer(), an_answer()
    one.total.logged, other.total.logged = mine, theirs
    comparison.done(1, True, Taken(one.total, [], one.losses, None))
    assert (comparison.distance(1, Taken(other.total, [], other.losses, None)) <= 1) == is_near


@pytest.mark.parametrize(("one_is_on_cpu", "other_is_on_cpu"), [(True, True), (True, False), (False, True)])
def test_what_is_allowed_follows_from_the_devices_of_these_two(one_is_on_cpu, other_is_on_cpu):
    comparison, one, other = Comparison(lambda flat: None), an_answer(), an_answer()
    scale(other.total, 1.01)
    comparison.done(1, True, Taken(one.total, [], one.losses, None, is_on_cpu=one_is_on_cpu))
    distance = comparison.distance(1, Taken(other.total, [], other.losses, None, is_on_cpu=other_is_on_cpu))
    assert (distance > 1) == (one_is_on_cpu and other_is_on_cpu)


def totals(model, batch):
    return wide.total(torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum"), len(batch[1]))


def weighs(each):
    def lie(answer):
        answer.total.weights = [each] * len(answer.losses)

    return lie


def has_no_counts(answer):
    answer.total.weights = []


COUNTS = {
    "totals among means": ({}, weighs(1.0)),
    "means among totals": ({"loss": totals}, has_no_counts),
    "zeros": ({"loss": totals}, weighs(0.0)),
    "next to nothing": ({"loss": totals}, weighs(1e-300)),
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("honest", [0, 1, 2])
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("robust", [None, "median"])
def test_nobody_ends_a_run_with_counts_in_its_first_updates(name, honest, is_first, robust):
    changes, lie = COUNTS[name]
    twin = Twin(make(**{"model": mlp} | changes), strategy="async", steps=8, robust=robust)
    liar = Says(lie, honest)
    nodes = [twin.join("liar", liar=liar)] if is_first else []
    nodes += [twin.join("one"), twin.join("two")]
    nodes += [] if is_first else [twin.join("liar", liar=liar)]
    model = twin.train(*nodes)
    assert (twin.run.ended.why, twin.run.ended.failure) == ("8 steps done", "")
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def test_a_weight_that_nothing_can_be_divided_by_is_refused():
    twin = Twin(make(model=mlp, loss=totals), strategy="async", steps=4)
    twin.train(twin.join("one"), twin.join("two"), twin.join("liar", liar=Says(weighs(1e-300))))
    assert [(reason, detail) for _, reason, detail in twin.rejects() if reason == "bad numbers"] == [
        ("bad numbers", f"{ELSEWHERE}: a batch that weighs 1e-300")
    ]


@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_a_job_that_says_totals_now_and_then_is_told_so_in_async_too(nodes):
    def loss(model, batch):
        return totals(model, batch) if wide.here().batch % 2 else logs(model, batch)[0]

    twin = Twin(make(model=mlp, loss=loss), strategy="async", steps=100, is_open=False)
    said = ""
    try:
        twin.train(*(twin.join(f"honest {i}") for i in range(nodes)))
        said = twin.run.ended.failure  # a node has met both in one lease
    except wide.TrainingFailed as error:  # or a version has
        said = str(error)
    assert "for some batches of a step, and a mean for others" in said


@pytest.mark.processes
def test_a_real_liar_joins_a_real_pool_and_its_benchmark_counts():
    command = [sys.executable, "-m", "benchmarks", "liars", "--json", "--strategies", "sync", "--kinds", "nan"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["runs"], result["reached"], result["lived"], result["wronged"]) == (1, 1, 1, 0)
    (row,) = result["rows"]
    assert row["is_exact"], "nothing that is no number was merged"
    assert row["lies"] == row["leases"] >= 1
    assert row["merged"] == 0
    assert row["known_as"]


def test_a_machine_that_lied_and_left_is_kept_out_by_its_name():
    """It would come back at once, under another number."""
    twin = Twin(make(), steps=3)
    node = twin.join("a")
    twin.server.exchange._reception._known["m7", "its key"] = node.number
    node.hang_up()
    twin.turn()
    twin.server.exchange.send_machine_away(node.number, "it computes other bits")
    assert twin.server.exchange._reception.machines_sent_away == {"m7": "it computes other bits"}
