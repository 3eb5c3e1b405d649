"""Jobs, their files, options, schedules and samples: what users write, and what they write wrong."""

from __future__ import annotations

import inspect
import pydoc
import sqlite3

import numpy as np
import pytest
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

import wide
from tests.jobs import make, points
from wide.config import resolve, usable_cores
from wide.errors import TrainingFailed, UsageError
from wide.job.loading import load, split_spec
from wide.job.model import build_model, check_loss
from wide.job.program import difference, program_of
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.store.rundb import RunDb


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("model", 3, "must be a function"),
        ("evaluate", "x", "must be a function or None"),
        ("batch_size", 0, "at least 1"),
        ("batches_per_step", 2.5, "whole number"),
        ("epochs", -1, "above 0"),
        ("steps", 1.5, "whole number"),
        ("clip_norm", float("nan"), "above 0"),
        ("seed", -1, "from 0 to"),
    ],
)
def test_a_wrong_field_is_explained(field, value, words):
    with pytest.raises(UsageError, match=words):
        make(**{field: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": torch.nn.Linear(6, 3)}, "give a function that builds it, model=lambda: Linear"),
        ({"loss": torch.nn.CrossEntropyLoss()}, r"write loss=wide.supervised\(nn.CrossEntropyLoss\(\)\)"),
        ({"loss": torch.nn.functional.mse_loss}, r"write loss=wide.supervised\(F.mse_loss\)"),
        ({"dataset": points()}, "dataset=…. must be a function, got TensorDataset: write dataset=lambda: …"),
        ({"optimizer": 0.1}, "write optimizer=lambda params: …"),
        ({"epoch": 3}, r"Job\(epoch=…\): there is no such field; did you mean epochs\?"),
        ({"colour": 3}, "there is no such field; there are model, dataset"),
    ],
)
def test_what_is_meant_is_said_where_something_else_was_written(changes, words):
    with pytest.raises(UsageError, match=words):
        make(**changes)


def test_what_is_missing_is_named():
    with pytest.raises(UsageError, match="Job needs loss=…, optimizer=… too"):
        wide.Job(model=points, dataset=points)


def test_what_is_no_data_at_all_is_explained():
    with pytest.raises(TrainingFailed, match="returned a object, whose samples cannot be looked up by number"):
        Samples(make(dataset=object), 0)


def test_the_help_of_a_job_is_a_page_that_names_every_field():
    page = pydoc.render_doc(wide.Job)
    assert all(name in page for name in wide.Job.__struct_fields__)
    assert "batch_size: int = 32" in str(inspect.signature(wide.Job))


def test_a_file_that_is_not_there_is_looked_for_somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"no such file .looked for in {tmp_path}"):
        load("jobs/mine.py")


def test_flags_come_before_the_environment_and_that_before_defaults():
    environ = {"WIDE_STEPS": "7", "WIDE_LOG": "silent", "WIDE_NODES": ""}
    options = resolve({"steps": 3, "log": None}, environ)
    assert (options.steps, options.log, options.nodes, options.data) == (3, "silent", None, "auto")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": "-1"}, "--nodes -1: must be at least 0"),
        ({"nodes": "many"}, "--nodes many: expected a whole number"),
        ({"steps": "0"}, "--steps 0: must be at least 1"),
        ({"seconds": "soon"}, "--seconds soon: expected a number"),
        ({"epochs": "0"}, "--epochs 0: must be a number above 0"),
        ({"epochs": "inf"}, "--epochs inf: must be a number above 0"),
        ({"strategy": "fast"}, "--strategy fast: expected sync or async or local or auto"),
        ({"data": "remote"}, "expected local or stream or auto"),
        ({"device": "tpu"}, "--device tpu: expected auto, cpu"),
        ({"speed": "9"}, "there is no option 'speed'"),
    ],
)
def test_wrong_options_are_explained(given, words):
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        resolve(given, {})


def test_a_bad_environment_variable_is_named():
    with pytest.raises(UsageError, match="WIDE_STEPS x: expected a whole number"):
        resolve({}, {"WIDE_STEPS": "x"})


def test_a_spec_names_file_and_job():
    assert [str(part) for part in split_spec("a/b.py")] == ["a/b.py", "job"]
    assert [str(part) for part in split_spec("a/b.py:big")] == ["a/b.py", "big"]


@pytest.mark.parametrize(
    ("source", "spec", "words"),
    [
        ("x = 1", "", "there is no wide.Job called 'job' in it; write `job = wide.Job"),
        ("from tests.jobs import make\nbig = make()", "", "it has big: say .*:big"),
        ("import no_such_module_here", "", "ModuleNotFoundError: No module named 'no_such_module_here' .*job.py:1"),
        ("a = 1\ndef f():\n    return 1 / 0\nf()", "", "ZeroDivisionError: division by zero .job.py:3 in f"),
        ("def f(:", "", "SyntaxError: .* .job.py:1"),
        ("import wide\njob = wide.Job(model=1, dataset=1, loss=1, optimizer=1)", "", "must be a function"),
    ],
)
def test_a_file_without_a_usable_job_is_explained(tmp_path, source, spec, words):
    path = tmp_path / "job.py"
    path.write_text(source)
    with pytest.raises(UsageError, match=words):
        load(str(path) + spec)


def test_a_missing_file_is_explained():
    with pytest.raises(UsageError, match="nowhere.py: no such file"):
        load("nowhere.py")


def test_a_job_finds_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_job.py").write_text("from tests.jobs import make\njob = make()\n")
    (tmp_path / "with_neighbour.py").write_text("from neighbour_of_job import job\n")
    assert isinstance(load(str(tmp_path / "with_neighbour.py")), wide.Job)


def test_an_epoch_holds_every_sample_once_and_the_last_step_is_short():
    schedule = Schedule(samples=83, batch_size=8, batches_per_step=4, seed=5)
    steps = [schedule.step(number) for number in range(3)]
    assert [step.batches for step in steps] == [4, 4, 3]
    assert [step.samples for step in steps] == [32, 32, 19]
    assert [step.is_last_of_epoch for step in steps] == [False, False, True]
    assert schedule.sizes(steps[2], 0, 3) == [8, 8, 3]
    ids = [i for step in steps for i in schedule.ids(step, 0, step.batches).tolist()]
    assert sorted(ids) == list(range(83))


def test_the_order_follows_from_seed_and_epoch_alone():
    def first(seed, epoch):
        schedule = Schedule(100, 10, 5, seed)
        return schedule.ids(schedule.step(epoch * 2), 0, 1).tolist()

    assert first(0, 0) == first(0, 0)
    assert len({tuple(first(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


def test_fractions_of_an_epoch():
    schedule = Schedule(100, 10, 5, 0)
    assert [schedule.steps_for(epochs) for epochs in (0.1, 0.5, 1, 1.5, 3)] == [1, 1, 2, 3, 6]


def test_an_empty_data_set_is_explained():
    with pytest.raises(TrainingFailed, match="empty"):
        Schedule(0, 8, 4, 0)


def as_samples(dataset, **changes):
    return Samples(make(dataset=lambda: dataset, **changes), seed=0)


def test_one_big_tensor_is_gathered_as_a_loader_would(tmp_path):
    ids = torch.tensor([3, 1, 80])
    x, y = points().tensors
    mapped = np.memmap(tmp_path / "x.bin", dtype=np.float32, mode="w+", shape=(83, 6))
    mapped[:] = x.numpy()
    readable = np.memmap(tmp_path / "x.bin", dtype=np.float32, mode="r", shape=(83, 6))
    for dataset in (TensorDataset(x, y), Subset(TensorDataset(x, y), range(82, -1, -1)), x, mapped, readable):
        samples = as_samples(dataset)
        assert samples.is_gathered
        ours, theirs = samples.batch(ids, 0), default_collate([dataset[i] for i in ids.tolist()])
        assert str(ours) == str(theirs)


def test_a_gathered_batch_of_a_strided_view_copies_only_its_own_samples():
    text = torch.arange(1000)
    samples = as_samples(text.unfold(0, 11, 1))
    assert samples.batch(torch.tensor([5, 7]), 0).tolist() == [list(range(5, 16)), list(range(7, 18))]


def test_a_subset_that_transforms_its_samples_is_asked_for_them():
    class Doubled(Subset):
        def __getitem__(self, index):
            return self.dataset[self.indices[index]] * 2

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    samples = as_samples(Doubled(torch.arange(10).reshape(10, 1), range(10)))
    assert samples.batch(torch.tensor([4, 2]), 0).tolist() == [[8], [4]]


def test_batched_access_is_used_where_the_data_set_offers_it():
    class Batched:
        def __len__(self):
            return 10

        def __getitems__(self, ids):
            return [torch.tensor(i) for i in ids]

    assert as_samples(Batched()).batch(torch.tensor([4, 2]), 0).tolist() == [4, 2]


def test_a_data_set_that_raises_at_one_index_says_which():
    class Holed:
        def __len__(self):
            return 10

        def __getitem__(self, i):
            if i == 7:
                raise OSError("cannot read image")
            return i

    samples = as_samples(Holed())
    with pytest.raises(
        TrainingFailed, match=r"failed at sample 7: OSError: cannot read image \(test_job.py:\d+ in __geti"
    ):
        samples.batch(torch.tensor([1, 7]), 0)


def test_samples_of_different_shapes_are_explained():
    with pytest.raises(TrainingFailed, match="collate failed"):
        as_samples([torch.ones(2), torch.ones(3)]).batch(torch.tensor([0, 1]), 0)


def test_a_loss_must_be_one_number_with_a_gradient():
    parameter = torch.ones(3, requires_grad=True)
    assert check_loss(parameter.sum()) is not None
    for wrong, words in (
        (1.0, "float, not a tensor"),
        (parameter * 2, "not a scalar"),
        (torch.ones(()), "does not depend"),
    ):
        with pytest.raises(TrainingFailed, match=words):
            check_loss(wrong)


def test_a_model_must_be_a_module():
    with pytest.raises(TrainingFailed, match="returned int, not a torch.nn.Module"):
        build_model(make(model=lambda: 3), 0)


def test_run_db_can_be_read_while_it_is_written(tmp_path):
    db = RunDb(tmp_path / "run.db")
    db.insert("steps", [(0, 0, 32, 0.5, 0.1, 1.0)])
    db.close()
    reader = sqlite3.connect(tmp_path / "run.db")
    tables = {name for (name,) in reader.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    assert tables >= {"ledger", "steps", "nodes", "rejects", "samples"}
    assert reader.execute("SELECT * FROM steps").fetchall() == [(0, 0, 32, 0.5, 0.1, 1.0)]


def test_a_folder_that_cannot_be_written_is_explained(tmp_path):
    with pytest.raises(TrainingFailed, match="cannot be written"):
        RunDb(tmp_path / "missing" / "run.db")


def test_as_many_nodes_as_this_process_may_use_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert usable_cores(tmp_path) == 6
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert usable_cores(tmp_path) == 6
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert usable_cores(tmp_path) == 2
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert usable_cores(tmp_path) == 6
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("300000\n")
    assert usable_cores(tmp_path) == 3


def test_two_programs_are_told_apart_by_file_and_line(tmp_path, monkeypatch):
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.py").write_text("import beside_mine\n\nx = 1\n")
        (tmp_path / name / "beside_mine.py").write_text("y = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "ours"))
    import beside_mine  # noqa: F401

    ours = program_of(tmp_path / "ours" / "mine.py")
    assert set(ours) == {"", "beside_mine.py", "--"}
    theirs = program_of(tmp_path / "theirs" / "mine.py")
    assert difference(theirs, ours) == ""
    (tmp_path / "theirs" / "mine.py").write_text("import beside_mine  \r\n\r\nx = 1\r\n\r\n")
    assert difference(program_of(tmp_path / "theirs" / "mine.py"), ours) == "", "how lines end is no difference"
    (tmp_path / "theirs" / "mine.py").write_text("import beside_mine\n\nx = 2\n")
    assert difference(program_of(tmp_path / "theirs" / "mine.py"), ours) == (
        "your job's file is not the pool's: line 3 differs"
    )
    assert difference(program_of(f"{tmp_path}/ours/mine.py\x1f--lr"), ours).startswith("your job's arguments")
    assert "has 4 lines, the pool's 3" in difference({"": [*ours[""], 5]}, ours)
    assert "beside_mine.py is not the pool's: line 1" in difference(ours | {"beside_mine.py": [1]}, ours)
