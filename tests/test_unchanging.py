"""A version is what changes: frozen parameters and constant buffers travel once, and stand once in a run's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import wide
from tests import plain
from tests.greet import introduced
from tests.jobs import make
from tests.processes import result_of
from tests.twin import Twin
from wide.codec import sums
from wide.codec.layout import Flat, Layout
from wide.coordinator import checkpoints
from wide.coordinator.run import Run
from wide.exchange.switchboard import Switchboard
from wide.store.weights import state_sha256, weights_sha256
from wide.wire import messages as say

STEPS = 7


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


class Tabled(nn.Module):
    """A large table that is only read, a small one, a frozen layer. `touch` is what a batch does to the table."""

    def __init__(self, touch=None, persistent=True):
        super().__init__()
        self.first, self.last, self.frozen = nn.Linear(6, 64), nn.Linear(64, 3), nn.Linear(64, 64)
        self.frozen.requires_grad_(False)
        self.register_buffer("table", torch.randn(64, 128), persistent=persistent)  # 32 KB
        self.register_buffer("small", torch.ones(4))
        self.register_buffer("calls", torch.zeros(1))
        self.touch = touch

    def forward(self, x):
        hidden = self.frozen(torch.relu(self.first(x))) + (self.table @ self.table[0]) * self.small[0]
        if self.training and self.touch is not None:
            self.touch(self, hidden.detach())
        return self.last(hidden)


def add_in_place(model, hidden):
    model.table.add_(0.01 * hidden.mean())


def assign(model, hidden):
    model.table = model.table * 0.99


def by_data(model, hidden):
    model.table.data.mul_(0.99)


def from_the_fifth_step_on(model, hidden):
    model.calls += 1
    if model.calls > 4:
        model.table.add_(0.01)


MOVING = {f.__name__: f for f in (add_in_place, assign, by_data, from_the_fifth_step_on)}


def job_with(touch=None, **more):
    return make(model=lambda: Tabled(touch, **more))


def alone(job, **options):
    return wide.run(job, **({"nodes": 0, "steps": STEPS, "log": "silent"} | options))


def test_large_buffers_count_as_constant_but_for_what_torchs_layers_change():
    norm = nn.BatchNorm1d(8192)
    layout = Layout(nn.Sequential(Tabled(), norm))
    assert [slot.name for slot in layout.constant] == ["0.table"]
    assert {"1.running_mean", "0.small"} <= {slot.name for slot in layout.averaged}
    widened = Layout(nn.Sequential(Tabled(), norm), moved={"0.table"})
    assert (widened.constant, widened.moved_buffers) == ([], ["0.table"])


def test_a_constant_is_part_of_no_update_and_of_no_version_but_the_first():
    layout = Layout(Tabled())
    trained = sum(p.nbytes for p in Tabled().parameters() if p.requires_grad)
    assert layout.live_nbytes < trained + 1024
    assert layout.nbytes - layout.live_nbytes >= 64 * 128 * 4 + 64 * 65 * 4


@pytest.mark.parametrize("persistent", [True, False])
def test_a_model_with_constants_gives_the_bits_of_the_plain_program(persistent):
    job = job_with(persistent=persistent)
    expected = weights_sha256(plain.train(job, STEPS))
    assert alone(job).weights_sha256 == expected
    for shares in (True, False):
        twin = Twin(job, steps=STEPS, shares=shares)
        model = twin.train(*(twin.join(f"n{i}", is_beside=True) for i in range(2)))
        assert weights_sha256(model) == expected


@pytest.mark.parametrize("persistent", [True, False])
@pytest.mark.parametrize("name", MOVING)
def test_a_constant_that_changes_after_all_is_noticed_and_trains_as_in_a_plain_loop(name, persistent):
    job = job_with(MOVING[name], persistent=persistent)
    result = alone(job)
    assert result.weights_sha256 == weights_sha256(plain.train(job, STEPS))
    alone(job, steps=3, out="part")
    assert alone(job, resume="part").weights_sha256 == result.weights_sha256


def change_by_data_late(model, hidden):
    model.calls += 1
    if model.calls == 30:
        model.table.data[0, 0] += 0.5


def test_a_constant_that_is_changed_behind_torchs_back_after_long_is_found_too():
    job = job_with(change_by_data_late)
    assert alone(job, steps=40).weights_sha256 == weights_sha256(plain.train(job, 40))


def test_what_happened_between_two_looks_is_found_by_the_next_and_called_late(monkeypatch):
    monkeypatch.setattr(sums, "QUICK_NBYTES", 0)
    monkeypatch.setattr(sums, "FIRST_LOOKS", 0)
    monkeypatch.setattr(sums, "SHARE", 0.0)  # after the first look there is no time for another
    layout = Layout(Tabled())
    flat = Flat(layout, only_live=False)
    untouched = sums.Untouched(flat.raw, layout.constant)
    untouched.begin()
    assert (untouched.changed(), untouched.is_late) == ([], False)
    flat.constant[0][3, 4] = 1.0
    assert (untouched.changed(), untouched.is_late) == ([], True)
    monkeypatch.setattr(sums, "SHARE", 1e9)
    assert (untouched.changed(), untouched.is_late) == (["table"], True)


@pytest.mark.processes
@pytest.mark.parametrize("name", ["add_in_place", "from_the_fifth_step_on"])
def test_and_so_it_does_in_a_pool(name, tmp_path):
    Path("job.py").write_text(f"from tests.test_unchanging import *\njob = job_with({name})\n")
    expected = weights_sha256(plain.train(job_with(MOVING[name]), STEPS))
    result = result_of("run", "job.py", "--nodes", 2, "--steps", STEPS, cwd=tmp_path)
    assert result["weights_sha256"] == expected


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_the_other_strategies_train_what_is_not_frozen(strategy):
    job = job_with()
    twin = Twin(job, steps=STEPS, strategy=strategy)
    before = {name: tensor.clone() for name, tensor in twin.master.model.state_dict().items()}
    model = twin.train(*(twin.join(f"n{i}") for i in range(2)))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {"first.weight", "first.bias", "last.weight", "last.bias"}


def test_what_is_evaluated_after_the_first_time_is_sent_without_what_never_changes(monkeypatch):
    sent = []
    send = Switchboard.send

    def watched(self, peer, message, *payload):
        if isinstance(message, say.Evaluate):
            sent.append(sum(len(part) for part in payload))
        send(self, peer, message, *payload)

    monkeypatch.setattr(Switchboard, "send", watched)
    job = make(model=Tabled, evaluate=lambda model: {"x": 1.0})
    twin = Twin(job, steps=9, evaluates=True)
    evaluator = twin.call()
    introduced(evaluator, token="evaluator's", role="evaluator")
    assert isinstance(evaluator.wait(), say.Known)
    evaluator.wait()
    evaluator.send(say.Ready(twin.master.layout.describe(), None))
    node = twin.join()
    while twin.run.ended is None or twin.server._evaluation.is_busy:
        node.work()
        twin.turn()
        for message in evaluator.poll():
            if isinstance(message, say.Evaluate):
                evaluator.send(say.Evaluated(message.epoch, message.step, {"x": 1.0}))
    assert sent == [twin.master.layout.nbytes] + 2 * [twin.master.layout.live_nbytes]


@pytest.fixture
def large(monkeypatch):
    """Whatever never changes counts as large."""
    monkeypatch.setattr(checkpoints, "LARGE_NBYTES", 1)


def test_what_never_changes_stands_once_in_a_runs_folder(large, monkeypatch):
    save = Run._save_checkpoint
    monkeypatch.setattr(Run, "_save_checkpoint", lambda self, it: save(self, it) or self._saving._writer._settle())
    monkeypatch.setattr(checkpoints.FileWriter, "_settle", settled, raising=False)
    result = alone(job_with(), checkpoint_every=1e-9, out="run")
    files = sorted(Path("run/checkpoints").glob("step-*/frozen.safetensors"))
    assert len(files) == 3
    assert len({os.stat(file).st_ino for file in files}) == 1
    assert state_sha256(wide.load("run").weights) == result.weights_sha256


def settled(writer):
    with writer._changed:
        assert writer._changed.wait_for(lambda: not writer._has_work and not writer._is_writing, 30)


def test_a_run_goes_on_and_is_exported_from_both_files(large, tmp_path):
    whole = alone(job_with())
    alone(job_with(), steps=3, out="part")
    assert list(Path("part/checkpoints").glob("step-*/frozen.safetensors"))
    assert alone(job_with(), resume="part").weights_sha256 == whole.weights_sha256
    assert wide.load("part").weights_sha256 == whole.weights_sha256
    from wide.launch.export import export

    path = export("part", "model.pt", is_forced=False)
    assert state_sha256(torch.load(path, weights_only=True)) == whole.weights_sha256


def test_where_files_cannot_be_linked_they_are_written_again(large, monkeypatch):
    def no_links(*_):
        raise OSError("not on this disk")

    monkeypatch.setattr(os, "link", no_links)
    whole = alone(job_with())
    alone(job_with(), steps=3, out="part")
    assert alone(job_with(), resume="part").weights_sha256 == whole.weights_sha256


def test_a_file_that_somebody_has_written_to_is_not_taken_over(large):
    alone(job_with(), steps=3, out="part")
    (file,) = Path("part/checkpoints").glob("step-*/frozen.safetensors")
    good = file.read_bytes()
    file.write_bytes(good)
    result = alone(job_with(), resume="part")
    newest = Path("part/checkpoints") / Path("part/checkpoints/latest").read_text().strip()
    assert (newest / "frozen.safetensors").read_bytes() == good
    assert not os.path.samefile(newest / "frozen.safetensors", file)
    assert wide.load("part").weights_sha256 == result.weights_sha256


def test_a_damaged_file_of_what_never_changes_is_noticed(large):
    alone(job_with(), steps=3, out="part")
    (file,) = Path("part/checkpoints").glob("step-*/frozen.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(wide.TrainingFailed, match="frozen.safetensors is not what was written"):
        alone(job_with(), resume="part")


def test_a_frozen_table_is_looked_up_in_functional_code_too():
    """A buffer that is used by a function, not by the module, is the module's still."""

    def loss(model, batch):
        x, y = batch
        return functional.cross_entropy(model(x) + model.table[:3, 0], y)

    job = make(model=lambda: Tabled(), loss=loss)
    assert alone(job).weights_sha256 == weights_sha256(plain.train(job, STEPS))
