"""What wide.lightning.job makes of Lightning programs, against Lightning's own Trainer."""

import copy
import math
import threading
import warnings

import pytest

lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")

import pytorch_lightning  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR, ReduceLROnPlateau, StepLR  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset, random_split  # noqa: E402

import wide  # noqa: E402

SAMPLES, SIZE = 162, 8  # 21 batches, the last one of two samples
QUIET = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)


@pytest.fixture(autouse=True)
def _seeded():
    """A module's first weights are the same each time."""
    torch.manual_seed(3)


def points(count=SAMPLES):
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x[:, :3].argmax(1))


def loader(size=SIZE, **options):
    return DataLoader(points(), batch_size=size, **options)


class Classifier(lightning.LightningModule):
    def __init__(self, width=16, lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3))

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


class Validated(Classifier):
    def __init__(self, *given):
        super().__init__(*given)
        self.right = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        x, y = batch
        scores = self.net(x)
        self.right(scores, y)
        self.log_dict({"val_loss": F.cross_entropy(scores, y), "val_most": scores.max()}, prog_bar=True)
        self.log("val_acc", self.right)
        self.log("val_max", scores.max(), reduce_fx="max")

    def on_validation_epoch_end(self):
        self.log("val_epoch", float(self.current_epoch))
        self.log("val_step", float(self.global_step))


class Digits(lightning.LightningDataModule):
    def __init__(self, shuffle=False):
        super().__init__()
        self.shuffle, self.prepared = shuffle, 0

    def prepare_data(self):
        self.prepared += 1

    def setup(self, stage):
        self.train, self.val = random_split(points(), [130, 32], torch.Generator().manual_seed(2))

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=SIZE, shuffle=self.shuffle, num_workers=2, persistent_workers=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=5, num_workers=1, persistent_workers=True)


class Losses(lightning.Callback):
    def __init__(self):
        self.said = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.said.append(float(outputs["loss"]) * trainer.accumulate_grad_batches if outputs else math.nan)


def fitted(module, *data, package=lightning, **options):
    """The same module, trained by Lightning itself: it, its Trainer, and the loss of each batch."""
    theirs, seen = copy.deepcopy(module), Losses()
    callbacks = [seen] if package is lightning else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = package.Trainer(accelerator="cpu", callbacks=callbacks, **QUIET, **options)
        trainer.fit(theirs, *data)
    return theirs, trainer, seen.said


def trained(tmp_path, module, data=None, nodes=0, **fields):
    """A copy of this module, trained by a pool: it, and the result."""
    ours = copy.deepcopy(module)
    job = wide.lightning.job(ours, data, **fields)
    return ours, wide.run(job, nodes=nodes, out=tmp_path / f"run-{nodes}", log="silent")


def distance(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return max((a.double() - b.double()).abs().max().item() for a, b in pairs)


def steps_of(result):
    rows = result.history
    return rows.to_dict("records") if hasattr(rows, "to_dict") else rows


class Scheduled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": CosineAnnealingLR(optimizer, 30), "interval": "step"},
        }


# ── the same training ────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_loss_and_the_weights_are_trainer_fits_whatever_the_pool(tmp_path):
    torch.manual_seed(3)
    module = Scheduled()
    whole = DataLoader(points(160), batch_size=SIZE)  # 20 batches: two of them make a step, always
    theirs, trainer, said = fitted(module, whole, max_epochs=4, gradient_clip_val=0.5, accumulate_grad_batches=2)
    means = [(a + b) / 2 for a, b in zip(said[::2], said[1::2], strict=True)]
    digests = set()
    for nodes in (0, 1, 3):
        fields = dict(epochs=4, clip_norm=0.5, batches_per_step=2)
        ours, result = trained(tmp_path, module, whole, nodes, **fields)
        losses = [row["loss"] for row in steps_of(result)]
        assert len(losses) == trainer.global_step == 40
        assert losses == pytest.approx(means, abs=1e-5)
        assert distance(ours, theirs) < 1e-5
        digests.add(result.weights_sha256)
        again = Scheduled.load_from_checkpoint(f"{result.run_dir}/model.ckpt")
        assert again.hparams == module.hparams
        assert distance(again, ours) == 0
    assert len(digests) == 1


@pytest.mark.parametrize("each", [None, 1])
def test_a_short_last_batch_weighs_as_it_does_for_lightning(tmp_path, each):
    module = Classifier()
    theirs, _, _ = fitted(module, loader(), max_epochs=2)
    fields = dict(batches_per_step=each) if each else {}
    ours, _ = trained(tmp_path, module, loader(), epochs=2, **fields)
    assert distance(ours, theirs) < 1e-5


def test_of_accumulated_batches_a_short_one_weighs_as_much(tmp_path):
    module = Classifier()
    theirs, _, _ = fitted(module, loader(), max_epochs=2, accumulate_grad_batches=3)  # 21 batches: 7 steps
    ours, _ = trained(tmp_path, module, loader(), epochs=2, batches_per_step=3)
    assert distance(ours, theirs) < 1e-5


class Fixed(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([5 * i % SAMPLES for i in range(SAMPLES)])

    def __len__(self):
        return SAMPLES


def test_a_sampler_is_asked_as_lightning_asks_it(tmp_path):
    module = Classifier()
    theirs, _, _ = fitted(module, loader(sampler=Fixed()), max_epochs=2)
    ours, _ = trained(tmp_path, module, loader(sampler=Fixed()), epochs=2, batches_per_step=1)
    assert distance(ours, theirs) < 1e-5


class Skipping(Classifier):
    """Leaves out every third batch, in one of the ways that Lightning has."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else {"loss": loss, "more": 1}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


class SkippingAdam(Skipping):
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("kind", [Skipping, SkippingAdam])
def test_none_leaves_a_step_out_and_dicts_have_a_loss(tmp_path, kind, each):
    module = kind()
    theirs, _, _ = fitted(module, loader(), max_epochs=2, accumulate_grad_batches=each)
    ours, _ = trained(tmp_path, module, loader(), epochs=2, batches_per_step=each)
    assert distance(ours, theirs) < 1e-5


class WithoutIndex(Classifier):
    def training_step(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


def test_training_step_may_leave_out_the_index(tmp_path):
    module = WithoutIndex()
    theirs, _, _ = fitted(module, loader(), max_epochs=1)
    ours, _ = trained(tmp_path, module, loader(), epochs=1)
    assert distance(ours, theirs) < 1e-5


class Normed(Classifier):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
        self.right = torchmetrics.MetricCollection({"acc": torchmetrics.Accuracy(task="multiclass", num_classes=3)})
        self.outputs, self.last = [], None

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self.net(x)
        self.right(scores, y)
        self.log_dict(self.right)
        loss = F.cross_entropy(scores, y)
        self.outputs.append({"loss": loss, "parts": [scores]})
        self.last = loss
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]))


def test_batch_norm_metrics_and_lists_are_no_obstacle(tmp_path):
    module, data = Normed(), Digits()
    theirs, trainer, _ = fitted(module, data, max_epochs=6)  # 102 steps: more than a list keeps
    results = {nodes: trained(tmp_path, module, Digits(), nodes, epochs=6, batches_per_step=1) for nodes in (0, 2)}
    for ours, result in results.values():
        assert distance(ours, theirs) < 1e-5
        assert ours.outputs == []
        assert set(result.metrics) == {"acc", "val_loss"}
        assert 0 <= result.metrics["acc"] <= 1
        assert result.metrics["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), abs=1e-5)
    assert len({result.weights_sha256 for _, result in results.values()}) == 1


# ── optimizers and schedulers ────────────────────────────────────────────────────────────────────────────────────────


def adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.02)


def with_scheduler(make, **more):
    def configure(module):
        optimizer = adam(module)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer), **more}}

    return configure


def two_lists(module):
    optimizer = adam(module)
    return [optimizer], [StepLR(optimizer, 1, gamma=0.5), {"scheduler": StepLR(optimizer, 2, gamma=0.5)}]


def bare_scheduler(module):
    optimizer = adam(module)
    return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1, gamma=0.5)}


def plateau(module):
    optimizer = adam(module)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=10.0)
    return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}


FORMS = {
    "optimizer": adam,
    "list": lambda module: [adam(module)],
    "tuple": lambda module: (adam(module),),
    "two lists": two_lists,
    "a list of a dict": lambda module: [bare_scheduler(module)],
    "dict": lambda module: {"optimizer": adam(module)},
    "a scheduler as it is": bare_scheduler,
    "every step": with_scheduler(lambda o: StepLR(o, 5, gamma=0.5), interval="step"),
    "every second epoch": with_scheduler(lambda o: StepLR(o, 1, gamma=0.1), frequency=2),
    "by a metric": plateau,
    "by a metric, in a dict": with_scheduler(
        lambda o: ReduceLROnPlateau(o, factor=0.1, patience=0, threshold=10.0), monitor="val_loss", name="lr"
    ),
}


class Configured(Validated):
    def __init__(self, form):
        super().__init__()
        self.form = form

    def configure_optimizers(self):
        return FORMS[self.form](self)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_configure_optimizers(tmp_path, form):
    module = Configured(form)
    theirs, _, _ = fitted(module, Digits(), max_epochs=5)
    ours, _ = trained(tmp_path, module, Digits(), epochs=5, batches_per_step=1)
    assert distance(ours, theirs) < 1e-5


class Cycled(Classifier):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches)
        assert self.trainer.num_training_batches == 17
        assert self.trainer.datamodule.train is not None
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def test_a_schedule_is_told_how_long_the_run_will_be(tmp_path):
    module = Cycled()
    theirs, _, _ = fitted(module, Digits(), max_epochs=3, accumulate_grad_batches=17)
    ours, _ = trained(tmp_path, module, Digits(), nodes=2, epochs=3, batches_per_step=17)
    assert distance(ours, theirs) < 1e-5


# ── data, validation, what the module asks ──────────────────────────────────────────────────────────────────────────


def test_metrics_are_those_of_lightnings_validate(tmp_path):
    data = Digits()
    ours, result = trained(tmp_path, Validated(), data, nodes=2, epochs=3, batches_per_step=1)
    assert data.prepared == 1
    trainer = lightning.Trainer(accelerator="cpu", **QUIET)
    (theirs,) = trainer.validate(ours, Digits(), verbose=False)
    for name in ("val_loss", "val_acc", "val_most", "val_max"):
        assert result.metrics[name] == pytest.approx(theirs[name], abs=1e-5), name


def test_epoch_and_step_within_validation_are_lightnings(tmp_path):
    module = Validated()
    _, trainer, _ = fitted(module, Digits(), max_epochs=3)
    _, result = trained(tmp_path, module, Digits(), epochs=3, batches_per_step=1)
    for name in ("val_epoch", "val_step"):
        assert result.metrics[name] == float(trainer.callback_metrics[name])


class OwnLoaders(Validated):
    def setup(self, stage):
        assert stage == "fit"
        self.points = points()

    def train_dataloader(self):
        return DataLoader(self.points, batch_size=SIZE)

    def val_dataloader(self):
        return [DataLoader(points(50), batch_size=20), DataLoader(points(30), batch_size=20)]


def test_the_module_may_have_the_loaders(tmp_path):
    module = OwnLoaders()
    theirs, trainer, _ = fitted(module, max_epochs=2)
    ours, result = trained(tmp_path, module, nodes=2, epochs=2, batches_per_step=1)
    assert distance(ours, theirs) < 1e-5
    for name in ("val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"):
        assert result.metrics[name] == pytest.approx(float(trainer.callback_metrics[name]), abs=1e-5)


class Asking(Classifier):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        trainer = self.trainer
        assert not hasattr(trainer, "strategy")
        assert (trainer.training, trainer.validating, trainer.sanity_checking) == (True, False, False)
        assert (trainer.is_global_zero, trainer.world_size, self.logger) == (True, 1, None)
        assert (trainer.max_steps, trainer.max_epochs, trainer.num_training_batches) == (-1, 2, 21)
        assert (trainer.global_step, trainer.current_epoch) == (self.global_step, self.current_epoch)
        assert self.device == torch.device("cpu")
        self.log_dict({"index": batch_idx, "logged_step": self.global_step, "at": self.current_epoch})
        return loss


@pytest.mark.parametrize("each", [1, 4])
def test_the_module_is_told_where_it_is(tmp_path, each):
    _, result = trained(tmp_path, Asking(), loader(), epochs=2, batches_per_step=each)
    rows = steps_of(result)
    per_epoch = len(rows) // 2
    assert [row["logged_step"] for row in rows] == list(range(len(rows)))
    assert [row["at"] for row in rows] == [0] * per_epoch + [1] * per_epoch
    if each == 1:
        assert [row["index"] for row in rows] == [*range(21), *range(21)]
    else:
        assert rows[0]["index"] == 1.5
        assert rows[per_epoch - 1]["index"] == 20


class WantsMore(Classifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * self.trainer.strategy.scale


def test_what_a_pool_does_not_have_is_said_by_name(tmp_path):
    with pytest.raises(wide.WideError, match=r"self\.trainer\.strategy: a pool has no such thing"):
        trained(tmp_path, WantsMore(), loader(), epochs=1)


class Moving(Classifier):
    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] + 1, batch[1]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]


def test_hooks_around_batches_are_called(tmp_path):
    module = Moving()
    theirs, _, _ = fitted(module, loader(), max_epochs=1)
    ours, _ = trained(tmp_path, module, loader(), epochs=1)
    assert distance(ours, theirs) < 1e-5


class OldClassifier(pytorch_lightning.LightningModule):
    def __init__(self, width=4):
        super().__init__()
        self.net = nn.Linear(8, 3)

    training_step = WithoutIndex.training_step

    def configure_optimizers(self):
        return adam(self)


def test_pytorch_lightning_is_the_same(tmp_path):
    module = OldClassifier()
    theirs, _, _ = fitted(module, loader(), package=pytorch_lightning, max_epochs=2)
    ours, result = trained(tmp_path, module, loader(), epochs=2)
    assert distance(ours, theirs) < 1e-5
    assert distance(OldClassifier.load_from_checkpoint(f"{result.run_dir}/model.ckpt"), ours) == 0
    path = wide.lightning.save(
        wide.load(result.run_dir, wide.lightning.job(module, loader())), module, tmp_path / "x.ckpt"
    )
    assert distance(OldClassifier.load_from_checkpoint(path), ours) == 0


class Odd(Classifier):
    def __init__(self, width=16, lr=0.01, activation=None, names=("a", "b")):
        super().__init__(width, lr)
        self.save_hyperparameters()

    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 7


def test_odd_hyperparameters_are_left_out_by_name(tmp_path):
    with pytest.warns(UserWarning, match="hyperparameter activation cannot be pickled"):
        ours, result = trained(tmp_path, Odd(activation=lambda x: x), loader(), epochs=1)
    path = f"{result.run_dir}/model.ckpt"
    assert torch.load(path, weights_only=False)["mine"] == 7
    assert distance(Odd.load_from_checkpoint(path, activation=None), ours) == 0


def test_a_run_goes_on_where_it_was(tmp_path):
    module = Scheduled()
    _, whole = trained(tmp_path, module, loader(), epochs=2, batches_per_step=1)
    parts = []
    for more in (dict(steps=9, out=tmp_path / "parts"), dict(steps=42, resume=tmp_path / "parts")):
        again = copy.deepcopy(module)
        job = wide.lightning.job(again, loader(), epochs=2, batches_per_step=1)
        parts.append(wide.run(job, nodes=2, log="silent", **more))
    assert [part.steps for part in parts] == [9, 42]
    assert parts[1].weights_sha256 == whole.weights_sha256
    assert distance(again, whole.model) == 0


def test_making_a_job_changes_nothing(tmp_path):
    module = Validated()
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    attributes = {name: id(value) for name, value in vars(module).items()}
    job = wide.lightning.job(module, Digits(), epochs=1)
    assert type(module) is Validated
    assert attributes == {name: id(value) for name, value in vars(module).items()}
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert list(job.model().state_dict()) == list(before)


# ── refused ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def changed(**members):
    return type("Changed", (Classifier,), members)()


def manual():
    module = Classifier()
    module.automatic_optimization = False
    return module


def two_optimizers(self):
    return [adam(self), adam(self)]


def nothing(*_, **__):
    return None


class Counting(Classifier):
    calls = 0

    def training_step(self, batch, batch_idx):
        self.calls += 1
        return super().training_step(batch, batch_idx) / self.calls


REFUSED = {
    "automatic_optimization is False": manual,
    "2 optimizers": lambda: changed(configure_optimizers=two_optimizers),
    "returned None": lambda: changed(configure_optimizers=nothing),
    "has no training_step": lambda: changed(training_step=lightning.LightningModule.training_step),
    "has no configure_optimizers": lambda: changed(configure_optimizers=lightning.LightningModule.configure_optimizers),
    r"training_step\(dataloader_iter\)": lambda: changed(training_step=lambda self, dataloader_iter: None),
    "is compiled": lambda: torch.compile(Classifier()),
    "Linear is no LightningModule": lambda: nn.Linear(1, 1),
    "Classifier is a class": lambda: Classifier,
    r"on_train_epoch_start\(\) would not be called, and it has freeze": lambda: changed(
        on_train_epoch_start=lambda self: self.net.freeze()
    ),
    "step once an epoch|leave out interval": lambda: changed(
        configure_optimizers=with_scheduler(lambda o: StepLR(o, 1), interval="step", frequency=2)
    ),
    **{
        rf"{name}\(\) would not be called": lambda name=name: changed(**{name: nothing})
        for name in (
            "backward",
            "configure_gradient_clipping",
            "lr_scheduler_step",
            "on_after_backward",
            "on_before_backward",
            "on_before_optimizer_step",
            "on_before_zero_grad",
            "on_train_batch_end",
            "on_train_batch_start",
            "optimizer_step",
            "optimizer_zero_grad",
        )
    },
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_the_same_is_refused_in_one_line(words):
    with pytest.raises(wide.UsageError, match=words) as refused:
        wide.lightning.job(REFUSED[words](), loader(), epochs=1)
    assert "\n" not in str(refused.value)


class Several(Digits):
    def train_dataloader(self):
        return {"a": super().train_dataloader(), "b": super().train_dataloader()}


class Transferring(Digits):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


def test_data_that_a_pool_cannot_read_is_refused_in_one_line(tmp_path):
    for data, words in (
        (None, "Classifier has no train_dataloader"),
        ([loader(), loader()], "several train loaders"),
        (points(), "got TensorDataset"),
        (Transferring(), "write it into the LightningModule"),
    ):
        with pytest.raises(wide.UsageError, match=words):
            wide.lightning.job(Classifier(), data, epochs=1)
    with pytest.raises(wide.WideError, match=r"train_dataloader\(\) returned several loaders"):
        trained(tmp_path, Classifier(), Several(), epochs=1)


def test_fields_that_lightning_calls_otherwise_are_named():
    for name, words in (
        ("max_epochs", "called epochs"),
        ("loss", "what the LightningModule says"),
        ("epoch", "epochs?"),
    ):
        with pytest.raises(wide.UsageError, match=words):
            wide.lightning.job(Classifier(), loader(), **{name: 1})


def test_hooks_that_only_look_are_named_once():
    class Looking(Classifier):
        def on_train_epoch_end(self):
            self.outputs.clear()

        def on_fit_start(self):
            print("begins")

    with pytest.warns(UserWarning, match=r"does not call Looking's on_fit_start\(\), on_train_epoch_end\(\)") as said:
        wide.lightning.job(Looking(), loader(), epochs=1)
    assert len(said) == 1
    assert said[0].filename == __file__


def test_a_counter_that_matters_is_refused(tmp_path):
    with pytest.raises(
        wide.WideError, match=r"model\.calls \(test_lightning\.py:\d+\) changes from batch to batch, and the loss"
    ):
        trained(tmp_path, Counting(), loader(), nodes=1, epochs=1)


class Locked(Digits):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


def test_a_data_module_that_cannot_travel_is_said_in_one_line(tmp_path):
    ours, _ = trained(tmp_path, Classifier(), Locked(), epochs=1)
    assert ours is not None
    with pytest.raises(wide.UsageError, match="cannot be sent to node processes"):
        trained(tmp_path, Classifier(), Locked(), nodes=1, epochs=1)


ON_TORCHRUN = """
import torch, wide, wide.lightning
from tests.extras.test_lightning import Classifier, loader

torch.manual_seed(1)
job = wide.lightning.job(Classifier(), loader(), batches_per_step=6, epochs=4)
"""


def test_on_torchrun_it_learns_the_same(tmp_path):
    """There gradients of a step's batches add up in the parameters themselves."""
    from tests.processes import result_of

    (tmp_path / "job.py").write_text(ON_TORCHRUN)
    alone = result_of("run", "job.py", "--nodes", 0, cwd=tmp_path)
    ranks = result_of("run", "job.py", "--nodes", 2, "--on", "torchrun", cwd=tmp_path)
    assert ranks["loss_last"] == pytest.approx(alone["loss_last"], rel=1e-5)
