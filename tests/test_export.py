"""`wide export`: the trained weights as one file, in words if it cannot be."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

import wide
from tests.jobs import make
from wide.cli.main import main


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return wide.run(make(), nodes=0, steps=2, out=tmp_path / "r", log="silent")


@pytest.mark.parametrize(("arguments", "file"), [((), "r.safetensors"), (("mine.pt",), "mine.pt")])
def test_the_weights_are_those_of_the_result(run, capsys, arguments, file):
    assert main(["export", "r", *arguments]) == 0
    assert capsys.readouterr().out.strip() == file
    weights = load_file(file) if file.endswith("s") else torch.load(file, weights_only=True)
    for name, value in run.model.state_dict().items():
        assert torch.equal(weights[name], value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere",), "there is no run in it"),
        (("r", "x.onnx"), "ends in .safetensors or .pt"),
        (("r", "there.pt"), "exists already: choose another name, or say --force"),
        (("r", "no/such/folder/x.pt"), "cannot be written: No such file"),
    ],
)
def test_what_cannot_be_exported_is_explained(run, tmp_path, capsys, arguments, words):
    (tmp_path / "there.pt").write_text("mine")
    assert main(["export", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert (tmp_path / "there.pt").read_text() == "mine"


def test_an_old_file_is_replaced_only_when_asked_to(run, tmp_path):
    (tmp_path / "x.pt").write_text("old")
    assert main(["export", "r", "x.pt", "--force"]) == 0
    assert torch.load(tmp_path / "x.pt", weights_only=True)


def test_the_best_weights_can_be_had_instead_of_the_newest(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = iter((2.0, 1.0))
    job = make(evaluate=lambda model: {"acc": next(values)}, evaluate_every=2, best="acc")
    wide.run(job, nodes=0, steps=4, out="r", log="silent")
    assert main(["export", "r", "best.pt", "--best"]) == 0
    two = wide.run(make(), nodes=0, steps=2, out="two", log="silent")
    for name, value in torch.load("best.pt", weights_only=True).items():
        assert torch.equal(two.model.state_dict()[name], value)
    assert main(["export", "two", "other.pt", "--best"]) == 2
    assert "has no best checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize("nodes", [0, 1])
def test_whoever_called_is_told_when_training_is_over(tmp_path, nodes):
    """In this process, where a list that is not sent anywhere can be filled."""
    told = []
    job = make(finish=lambda result: told.append((result.steps, type(result.model).__name__)))
    wide.run(job, nodes=nodes, steps=2, log="silent", out=tmp_path / "run")
    assert told == [(2, "Sequential")]
