"""Whatever a program does to its state, it trains as a plain loop would, in any pool; or it is refused, in words."""

from __future__ import annotations

import pytest
import torch

import wide
from tests import brought, plain, stateful
from tests.stateful import OWN_GENERATORS
from wide.store.weights import weights_sha256

STEPS = 7
EXACT, HONEST = stateful.EXACT | brought.EXACT, stateful.HONEST | brought.HONEST
REFUSED = stateful.REFUSED | brought.REFUSED


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def alone(job, **options):
    return wide.run(job, **({"nodes": 0, "steps": STEPS, "log": "silent"} | options))


@pytest.mark.parametrize("name", EXACT)
def test_what_the_loss_does_to_weights_is_part_of_training(name):
    result = alone(EXACT[name])
    expected = plain.train(EXACT[name], STEPS)
    assert result.weights_sha256 == weights_sha256(expected)
    flags = {name: parameter.requires_grad for name, parameter in expected.named_parameters()}
    assert {name: p.requires_grad for name, p in result.model.named_parameters()} == flags


@pytest.mark.parametrize("name", EXACT)
def test_and_goes_on_when_it_is_resumed(name, tmp_path):
    whole = alone(EXACT[name])
    alone(EXACT[name], steps=5, out=tmp_path / "part")
    assert alone(EXACT[name], resume=str(tmp_path / "part")).weights_sha256 == whole.weights_sha256


def test_a_step_of_torchs_that_a_job_replaced_is_called_as_it_is_and_seeded(monkeypatch):
    torchs = torch.optim.SGD.step

    def noisy(self, closure=None):
        torchs(self, closure)
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.001)

    monkeypatch.setattr(torch.optim.SGD, "step", noisy)
    job = brought.make()
    assert alone(job).weights_sha256 == weights_sha256(plain.train(job, STEPS))


@pytest.mark.parametrize("name", OWN_GENERATORS)
def test_generators_of_its_own_are_seeded_for_each_batch(name):
    job, own = OWN_GENERATORS[name]
    result = alone(job)
    assert alone(job).weights_sha256 == result.weights_sha256
    if own is not None:
        assert result.weights_sha256 == weights_sha256(plain.train(job, STEPS, own))


@pytest.mark.parametrize("name", HONEST)
def test_whoever_keeps_something_harmless_is_left_in_peace(name, capfd):
    assert alone(HONEST[name]).weights_sha256 == weights_sha256(plain.train(HONEST[name], STEPS))
    assert "carried" not in capfd.readouterr().err


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_with_its_name(name):
    job, words = REFUSED[name]
    with pytest.raises(wide.TrainingFailed) as refusal:
        alone(job, steps=30)
    assert words in str(refusal.value)


@pytest.mark.processes
@pytest.mark.parametrize(
    "options", [{"nodes": 1}, {"nodes": 3}, {"nodes": 3, "data": "stream"}, {"check": False}], ids=str
)
@pytest.mark.parametrize(
    "name",
    [
        "a weight assigned",
        "a teacher",
        "unfrozen on the way",
        "one in a closure",
        "a teacher that the optimizer moves",
        "unfrozen by the scheduler",
        "gradients that model() left",
        "a teacher that a hook moves by its data",
        "a table that a hook moves",
    ],
)
def test_any_pool_gives_the_same_bits(name, options):
    job = EXACT[name] if name in EXACT else OWN_GENERATORS[name][0]
    assert alone(job, **({"nodes": 2} | options)).weights_sha256 == alone(job).weights_sha256


@pytest.mark.processes
@pytest.mark.parametrize("options", [{"nodes": 2}, {"nodes": 2, "data": "stream"}], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "a warm-up that ends later",
        "the first batch's mean",
        "a data set that counts",
        "a number that changes later",
        "a teacher that is no part of the model",
        "noise that is remembered",
    ],
)
def test_any_pool_refuses_the_same(name, options):
    job, words = REFUSED[name]
    with pytest.raises(wide.TrainingFailed) as refusal:
        alone(job, **({"steps": 5_000} | options))  # looked for now and then, so not found at once
    assert words in str(refusal.value) or "keeps state from batch to batch" in str(refusal.value)


@pytest.mark.processes
def test_settings_of_torch_travel_with_the_job():
    torch.set_default_dtype(torch.float64)
    try:
        job = EXACT["a weight assigned"]
        here = alone(make_double(job))
        assert here.weights_sha256 == alone(make_double(job), nodes=2).weights_sha256
        assert next(here.model.parameters()).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def make_double(job):
    import msgspec

    return msgspec.structs.replace(job, loss=lambda model, batch: job.loss(model, [batch[0].double(), batch[1]]))
