"""A transformers.Trainer in a pool trains what its own train() trains. With the real libraries: `make test-extras`."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch

import wide

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")

from tests.extras import trainers  # noqa: E402  (it needs transformers)
from tests.extras.trainers import classifier, gpt, writer  # noqa: E402
from tests.processes import result_of  # noqa: E402

Trainer = transformers.Trainer


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.set_verbosity_error()


def job_of(trainer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return wide.hf.job(trainer)


def run(trainer, nodes=0, **options):
    return wide.run(job_of(trainer), **({"nodes": nodes, "log": "silent"} | options))


def losses(trainer):
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def trained(make):
    """By trainer.train() itself."""
    trainer = make()
    trainer.train()
    return trainer


def same_weights(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def assert_same_curve(make, **options):
    """The pool's losses are those of train(), step by step, and so are rates, epochs, and the weights in the end."""
    expected, trainer = trained(make), make()
    run(trainer, **options)
    assert losses(trainer) == pytest.approx(losses(expected), abs=1e-4)
    for mine, theirs in zip(trainer.state.log_history, expected.state.log_history, strict=True):
        assert mine["step"] == theirs["step"]
        assert mine["epoch"] == pytest.approx(theirs["epoch"])
        assert mine.get("learning_rate") == pytest.approx(theirs.get("learning_rate"))
    for mine, theirs in zip(trainer.model.parameters(), expected.model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3)
    return trainer


# ── what is trained is what train() trains ───────────────────────────────────────────────────────────────────────


def test_padded_text_gives_trains_losses_and_one_hash_from_any_pool(tmp_path):
    def make():
        return writer(tmp_path, max_steps=50, lr_scheduler_type="cosine", warmup_steps=5)

    expected = losses(trained(make))
    hashes = set()
    for nodes in (0, 1, 3):
        trainer = make()
        hashes.add(run(trainer, nodes).weights_sha256)
        assert len(expected) == 50
        assert losses(trainer) == pytest.approx(expected, abs=1e-4)
    assert len(hashes) == 1


class Weighted(Trainer):
    """A loss of its own, by a part of the model that it keeps, and a mean of each batch."""

    loss_is_scaled_for_ga = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.weights, self.body, self.lock = torch.tensor([1.0, 2.0, 1.0]), self.model.bert, threading.Lock()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model.classifier(self.body(**inputs).pooler_output)
        loss = torch.nn.functional.cross_entropy(logits, labels, weight=self.weights)
        return (loss, {"logits": logits}) if return_outputs else loss


NO_EVAL = {"eval_strategy": "no", "save_strategy": "no", "load_best_model_at_end": False}


def with_optimizers(folder):
    model = gpt()
    bias, rest = ([p for n, p in model.named_parameters() if ("bias" in n) is is_bias] for is_bias in (True, False))
    optimizer = torch.optim.SGD([{"params": rest}, {"params": bias, "lr": 0.05}], lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    return writer(folder, model=model, given={"optimizers": (optimizer, scheduler)})


def no_labels_in(data, *numbers):
    return [{**row, "labels": [-100] * len(row["labels"])} if i in numbers else row for i, row in enumerate(data)]


MAKERS = {
    "label smoothing": lambda folder: writer(folder, label_smoothing_factor=0.1),
    "a loss of its own": lambda folder: classifier(folder, Weighted, **NO_EVAL),
    "optimizers=(…)": with_optimizers,
    "optimizer_cls_and_kwargs": lambda folder: writer(
        folder, given={"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})}
    ),
    "beyond an epoch, one at a time": lambda folder: writer(
        folder, data=trainers.texts(11), per_device_train_batch_size=1, gradient_accumulation_steps=3, max_steps=9
    ),
    "without the last batch": lambda folder: writer(
        folder, data=trainers.texts(13), dataloader_drop_last=True, max_steps=-1, num_train_epochs=2.5
    ),
    "in order": lambda folder: writer(folder, train_sampling_strategy="sequential"),
    "a seed for the data": lambda folder: writer(folder, data_seed=7, seed=5),
    "all columns": lambda folder: writer(folder, remove_unused_columns=False),
    "no labels in some": lambda folder: writer(folder, data=no_labels_in(trainers.texts(), *range(0, 90, 2))),
    "checkpointing": lambda folder: writer(folder, gradient_checkpointing=True, max_steps=4),
}


@pytest.mark.parametrize("name", MAKERS)
def test_its_steps_are_those_of_train(name, tmp_path):
    assert_same_curve(lambda: MAKERS[name](tmp_path))


def test_in_bf16_they_are_as_close_as_it_can_tell(tmp_path):
    expected, trainer = (
        trained(lambda: writer(tmp_path, bf16=True, max_steps=4)),
        writer(tmp_path, bf16=True, max_steps=4),
    )
    run(trainer)
    assert losses(trainer) == pytest.approx(losses(expected), abs=4e-3)  # train() divides before it rounds


def test_groups_of_equal_length_are_kept_and_give_one_hash(tmp_path):
    hashes = {
        run(writer(tmp_path, train_sampling_strategy="group_by_length", max_steps=8), nodes).weights_sha256
        for nodes in (0, 2)
    }
    assert len(hashes) == 1


class Backwards(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        return list(range(len(self.train_dataset)))[::-1]


def test_a_sampler_of_its_own_is_asked(tmp_path):
    assert_same_curve(lambda: writer(tmp_path, Backwards, max_steps=5))


class Counting(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from trainers.texts(40)


def test_a_stream_is_read_as_it_comes(tmp_path):
    trainer = assert_same_curve(lambda: writer(tmp_path, data=Counting(), max_steps=5))
    assert trainer.state.global_step == 5


# ── libraries on top ─────────────────────────────────────────────────────────────────────────────────────────────

LORA = """
import transformers, wide
from tests.extras.trainers import gpt, with_lora, writer
model = gpt(width=128)
trainer = writer("out", model=with_lora(model) if {lora} else model, max_steps=6)
job = wide.hf.job(trainer)
"""


def test_of_lora_only_the_adapters_travel(tmp_path):
    pytest.importorskip("peft")
    sent = {}
    for lora in (True, False):
        Path("job.py").write_text(LORA.format(lora=lora))
        arguments = ("run", "job.py", "--nodes", 2)
        result = result_of(*arguments, cwd=tmp_path, WIDE_FAILPOINTS="memory.share=full", HF_HUB_OFFLINE="1")
        sent[lora] = sum(node["bytes_sent"] for node in result["nodes"]) / result["steps"]
    assert sent[True] * 10 < sent[False]


def test_adapters_are_saved_as_ever(tmp_path):
    peft = pytest.importorskip("peft")
    trainer = writer(tmp_path, model=trainers.with_lora(gpt()))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    run(trainer)
    changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora" in name for name in changed)
    trainer.save_model(tmp_path / "saved")
    again = peft.PeftModel.from_pretrained(gpt(), tmp_path / "saved")
    assert same_weights(again, trainer.model)


def tuned(folder, **more):
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = Dataset.from_list([{"text": " ".join(f"w{(3 * j + i) % 60}" for j in range(3 + i % 14))} for i in range(64)])
    usual = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 5e-3, "bf16": False}
    plain = {"max_steps": 16, "logging_steps": 4, "report_to": [], "use_cpu": True, "disable_tqdm": True}
    args = SFTConfig(str(folder), gradient_checkpointing=False, save_strategy="no", **(usual | plain | more))
    model = gpt(dropout=0.1)
    data = {"train_dataset": rows, "eval_dataset": rows.select(range(8))}
    return SFTTrainer(model=model, args=args, processing_class=trainers.tokenizer(), **data)


def test_trls_trainer_learns_and_gives_one_hash(tmp_path):
    pytest.importorskip("trl")
    results = []
    for nodes in (0, 2):
        trainer = tuned(tmp_path, eval_strategy="steps", eval_steps=8)
        results.append(run(trainer, nodes))
        assert losses(trainer)[-1] < losses(trainer)[0] - 0.3
        assert "mean_token_accuracy" in trainer.state.log_history[0]
        assert "eval_loss" in trainer.state.log_history[2]
    assert results[0].weights_sha256 == results[1].weights_sha256
    assert results[0].metrics == results[1].metrics


def test_trls_own_forward_belongs_to_the_copy(tmp_path):
    pytest.importorskip("trl")
    trainer = tuned(tmp_path, label_smoothing_factor=0.1)  # this path calls the forward that was there before TRL's
    run(trainer)
    assert losses(trainer)[-1] < losses(trainer)[0] - 0.3


# ── afterwards ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_classifier_is_evaluated_and_its_best_is_kept(tmp_path):
    trainer = classifier(tmp_path)
    result = run(trainer, 2)
    state = trainer.state
    evaluated = [row for row in state.log_history if "eval_accuracy" in row]
    assert [row["epoch"] for row in evaluated] == [1.0, 2.0, 3.0]
    assert state.best_metric == max(row["eval_accuracy"] for row in evaluated)
    best = Path(result.run_dir) / "checkpoints" / (Path(result.run_dir) / "checkpoints" / "best").read_text().strip()
    assert state.best_model_checkpoint == str(best)
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(state.best_metric)


def test_early_stopping_stops_as_train_does(tmp_path):
    def make():
        patience = transformers.EarlyStoppingCallback(2)
        return classifier(tmp_path, Weighted, num_train_epochs=12, given={"callbacks": [patience]})

    expected, trainer = trained(make), make()
    run(trainer)
    assert trainer.state.global_step == expected.state.global_step < trainer.state.max_steps


def test_the_trainer_goes_on_as_after_train(tmp_path):
    trainer = writer(tmp_path, max_steps=12, logging_steps=5)
    result = run(trainer)
    assert same_weights(trainer.model, result.model)
    state = trainer.state
    assert (state.global_step, state.max_steps) == (12, 12)
    assert [row["step"] for row in state.log_history] == [5, 10, 12]
    rows = result.history.to_dict("records") if hasattr(result.history, "to_dict") else result.history
    assert state.log_history[0]["loss"] == pytest.approx(sum(row["loss"] for row in rows[:5]) / 5)
    last = state.log_history[-1]
    assert {"train_runtime", "train_samples_per_second", "train_steps_per_second", "train_loss"} <= set(last)
    trainer.save_model(tmp_path / "saved")
    assert same_weights(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved"), trainer.model)


def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path):
    whole = run(writer(tmp_path))
    part = run(writer(tmp_path), steps=5)
    trainer = writer(tmp_path)
    again = run(trainer, steps=12, resume=part.run_dir)
    assert again.weights_sha256 == whole.weights_sha256
    assert len(losses(trainer)) == 12


def test_making_a_job_leaves_the_trainer_as_it_is(tmp_path):
    trainer = writer(tmp_path)
    before, torchs = {k: v.clone() for k, v in trainer.model.state_dict().items()}, torch.get_rng_state()
    job = job_of(trainer)
    assert torch.equal(torch.get_rng_state(), torchs)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert same_weights(job.model(), trainer.model)
    assert (trainer.optimizer, trainer.lr_scheduler) == (None, None)


# ── what is refused, and what is told ────────────────────────────────────────────────────────────────────────────


class Late(Trainer):
    """Another loss once it was called so often: by whom, a pool does not say."""

    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        loss = super().compute_loss(model, inputs, False, num_items_in_batch)
        return loss * 0.5 if self.calls > 40 else loss


def test_a_loss_that_counts_its_calls_is_refused(tmp_path):
    with pytest.raises(wide.TrainingFailed, match="calls.*changes from batch to batch"):
        run(writer(tmp_path, Late), 2)


class ByStep(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, False, num_items_in_batch)
        return loss * (1 + self.state.global_step / 10 + self.state.epoch)


def test_a_loss_may_ask_for_the_step(tmp_path):
    assert_same_curve(lambda: writer(tmp_path, ByStep, max_steps=6))


class Prepared(Trainer):
    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        return prepared | {"attention_mask": torch.ones_like(prepared["input_ids"])}


def test_inputs_are_prepared_as_train_prepares_them(tmp_path):
    assert_same_curve(lambda: writer(tmp_path, Prepared))


class Deep(Trainer):
    """It learns from what lies between the layers, too, where it is told of it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        said = model(**inputs, output_hidden_states=True, num_items_in_batch=num_items_in_batch)
        between = sum(state.square().sum() for state in said.hidden_states or ())
        return said.loss + 0.001 * between / num_items_in_batch


@pytest.mark.parametrize("nodes", [0, 2])
@pytest.mark.parametrize("was_asked", [False, True])
def test_what_is_between_the_layers_is_there_on_nodes_too(nodes, was_asked, tmp_path):
    """transformers hangs hooks into a model that was asked, which cannot be copied."""

    def make():
        trainer = writer(tmp_path, Deep, model=trainers.llama())
        if was_asked:
            assert trainer.model(torch.ones(1, 4, dtype=torch.long), output_hidden_states=True).hidden_states
        return trainer

    assert_same_curve(make, nodes=nodes)


class Taught(Trainer):
    """A teacher, of which it wants what lies between the layers."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.teacher = trainers.llama().requires_grad_(False)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        said = model(**inputs, num_items_in_batch=num_items_in_batch)
        ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        states = self.teacher(**ids, output_hidden_states=True).hidden_states
        return said.loss + 0.001 * sum(state.square().sum() for state in states) / num_items_in_batch


@pytest.mark.parametrize("nodes", [0, 2])
def test_a_teacher_is_asked_on_nodes_too(nodes, tmp_path):
    trainer = writer(tmp_path, Taught, max_steps=4, gradient_accumulation_steps=1)
    expected = trained(lambda: writer(tmp_path, Taught, max_steps=4, gradient_accumulation_steps=1))
    run(trainer, nodes)
    assert losses(trainer) == pytest.approx(losses(expected), abs=1e-4)


class Beside(Trainer):
    """A sum over the step's items, and a little term that is none."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, False, num_items_in_batch)
        return loss + 0.001 * sum(parameter.square().sum() for parameter in model.parameters())


def test_a_term_beside_a_sum_is_trained_where_one_batch_is_a_step(tmp_path):
    assert_same_curve(lambda: writer(tmp_path, Beside, gradient_accumulation_steps=1))


def test_what_is_trained_once_is_trained_again_with_the_whole_schedule(tmp_path):
    def twice(first, second):
        trainer = writer(tmp_path, max_steps=4)
        first(trainer)
        second(trainer)
        return [row["learning_rate"] for row in trainer.state.log_history if "loss" in row], losses(trainer)

    rates, curve = twice(Trainer.train, Trainer.train)
    for again in (run, functools.partial(run, nodes=2)):
        its_rates, its_curve = twice(Trainer.train, again)
        assert its_rates == pytest.approx(rates)
        assert its_curve == pytest.approx(curve, abs=1e-4)


class Chatty(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, False, num_items_in_batch)
        self.log({"raw": float(loss.detach())})
        return loss


def test_what_it_logs_is_logged(tmp_path):
    trainer = writer(tmp_path, Chatty)
    run(trainer)
    assert all(row["raw"] > 0 for row in trainer.state.log_history if "loss" in row)


class Rate(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, False, num_items_in_batch)
        return loss * self.optimizer.param_groups[0]["lr"]


class Stopper(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


class Inherited(Stopper):
    pass


class Wrapped(Trainer):
    def _wrap_model(self, model, training=True, dataloader=None):
        return model


class Half(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        whole = super().compute_loss(model, dict(inputs), False, num_items_in_batch)
        return whole + super().compute_loss(model, inputs, False, None)


class OwnStep(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


class NeedsLock(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.lock = threading.Lock()

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        with self.lock:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


def changed(name, value, whose="args"):
    def make(folder):
        trainer = writer(folder)
        setattr(trainer.args if whose == "args" else trainer, name, value)
        return trainer

    return make


def without_data(folder):
    return Trainer(model=gpt(), args=trainers.arguments(folder))


REFUSED = {
    "fp16": (changed("fp16", True), "bf16=True"),
    "deepspeed": (changed("is_deepspeed_enabled", True, "trainer"), "DeepSpeed"),
    "fsdp": (changed("is_fsdp_enabled", True, "trainer"), "FSDP"),
    "layer-wise": (changed("optim", "galore_adamw_layerwise"), "layer by layer"),
    "no data": (without_data, "no train_dataset"),
    "no length": (changed("train_dataset", iter(()), "trainer"), "max_steps"),
    "own step": (lambda folder: writer(folder, OwnStep), "training_step"),
    "compiled": (changed("torch_compile", True), "torch_compile"),
    "any batch size": (changed("auto_find_batch_size", True), "per_device_train_batch_size"),
    "liger": (changed("use_liger_kernel", True), "use_liger_kernel"),
    "own model": (lambda folder: writer(folder, Wrapped), "_wrap_model"),
    "the optimizer": (lambda folder: writer(folder, Rate), "self.optimizer"),
    "a stop, inherited": (lambda folder: writer(folder, given={"callbacks": [Inherited()]}), "Inherited ends training"),
    "a term beside a sum": (lambda folder: writer(folder, Beside), "neither a sum"),
    "half a sum": (lambda folder: writer(folder, Half), "neither a sum"),
    "no labels": (lambda folder: writer(folder, data=no_labels_in(trainers.texts(), *range(90))), "-100"),
    "a lock": (lambda folder: writer(folder, NeedsLock), "self.lock"),
    "no trainer": (lambda folder: gpt(), "constructed transformers.Trainer"),
    "a class": (lambda folder: Trainer, "the class Trainer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_in_one_line(name, tmp_path):
    make, words = REFUSED[name]
    trainer = make(tmp_path)
    if name == "no length":
        trainer.args.max_steps = -1
    with pytest.raises(wide.WideError, match=words) as refused:
        job_of(trainer)
    assert "\n" not in str(refused.value)


class Shouting(transformers.TrainerCallback):
    pass


def test_callbacks_that_are_not_called_are_named_once(tmp_path):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        wide.hf.job(writer(tmp_path, given={"callbacks": [Shouting()]}))
    assert [str(each.message) for each in said if "wide" in str(each.message)] == [
        "wide.hf: callbacks are not called in a pool: Shouting"
    ]


def test_means_that_train_would_add_up_are_told_of(tmp_path):
    with pytest.warns(UserWarning, match="adds up 4 of them without dividing, a pool takes the mean"):
        wide.hf.job(classifier(tmp_path))


def test_another_version_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "6.1.0")  # it replaces itself
    with pytest.warns(UserWarning, match=r"tested with transformers 5.23, this is 6.1.0"):
        wide.hf.job(writer(tmp_path))
