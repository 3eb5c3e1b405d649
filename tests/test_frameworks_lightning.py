"""wide.lightning without Lightning: what it says then, and its parts that need none of it. What Lightning itself does
with the same programs is compared in tests/extras.
"""

import copy
import subprocess
import sys
import types
from collections import deque

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import wide
from wide.job.definition import on_metric, per_epoch
from wide.lightning.data import in_one_process
from wide.lightning.kept import MOST_KEPT, detached, tidy
from wide.lightning.optimizers import Seldom, keep_together, made_with, scheduler_of, understood
from wide.lightning.refuse import ROOTS
from wide.lightning.standin import StandIn
from wide.lightning.validation import Values, size_of


def nothing(*_, **__):
    return None


HOOKS = ("setup", "configure_model", "training_step", "validation_step", "configure_optimizers", "on_save_checkpoint")
AROUND = ("train_dataloader", "val_dataloader", "prepare_data", "on_train_epoch_end", "on_before_zero_grad")
VALIDATION = [
    f"on_validation_{when}" for when in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
]
Base = type(
    "LightningModule",
    (nn.Module,),
    {name: (lambda *_, **__: None) for name in (*HOOKS, *AROUND, *VALIDATION)}
    | {"__module__": "lightning.pytorch.core.module", "device": torch.device("cpu"), "hparams": None},
)


class Line(Base):
    def __init__(self):
        super().__init__()
        self.net, self.outputs = nn.Linear(4, 1), []

    def training_step(self, batch, batch_idx):
        loss = (self.net(batch[0]) - batch[1]).square().mean()
        self.outputs.append(loss)
        self.log("index", batch_idx)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", (self.net(batch[0]) - batch[1]).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    def train_dataloader(self):
        return DataLoader(line(), batch_size=4)

    def val_dataloader(self):
        return DataLoader(line(), batch_size=8)


def line():
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def test_whoever_gives_something_else_is_told_in_one_line():
    has_it = any(root in sys.modules or __import__("importlib").util.find_spec(root) for root in ROOTS)
    words = "Linear is no LightningModule" if has_it else r"pip install 'wiiiiide\[lightning\]'"
    with pytest.raises(wide.UsageError, match=words) as refused:
        wide.lightning.job(nn.Linear(1, 1), DataLoader(line()))
    assert "\n" not in str(refused.value)


def test_importing_wide_imports_no_lightning():
    code = "import sys, wide; wide.lightning.job; print([n for n in sys.modules if 'lightning' in n.partition('.')[0]])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


def test_a_program_trains_as_a_plain_loop_does(tmp_path):
    torch.manual_seed(1)
    module = Line()
    plain = copy.deepcopy(module.net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for _ in range(3):
        for x, y in DataLoader(line(), batch_size=4):
            optimizer.zero_grad()
            (plain(x) - y).square().mean().backward()
            optimizer.step()
    result = wide.run(
        wide.lightning.job(module, epochs=3, batches_per_step=1), nodes=0, out=tmp_path / "run", log="silent"
    )
    assert type(result.model) is type(module) is Line
    assert torch.equal(plain.weight, module.net.weight)
    assert module.outputs == []
    with torch.no_grad():
        loss = (plain(line().tensors[0]) - line().tensors[1]).square().mean().item()
    assert result.metrics["val_loss"] == pytest.approx(loss, abs=1e-6)
    found = torch.load(tmp_path / "run" / "model.ckpt", weights_only=True)
    assert found["global_step"] == 24
    assert torch.equal(found["state_dict"]["net.weight"], plain.weight)


def test_hooks_that_are_not_called_are_refused_or_named():
    with pytest.raises(wide.UsageError, match=r"Line\.on_before_zero_grad\(\) would not be called"):
        wide.lightning.job(type("Line", (Line,), {"on_before_zero_grad": nothing})())
    with pytest.warns(UserWarning, match=r"does not call Line's on_train_epoch_end\(\)"):
        wide.lightning.job(type("Line", (Line,), {"on_train_epoch_end": nothing})())


def test_another_version_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning", types.SimpleNamespace(__version__="2.4.1"))
    with pytest.warns(UserWarning, match=r"lightning 2\.6, this is 2\.4\.1"):
        wide.lightning.job(Line(), epochs=1)


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sgd():
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)


def test_schedulers_are_stepped_when_lightning_would():
    one = sgd()
    assert scheduler_of(understood(one)) is None
    assert isinstance(scheduler_of(understood(([one], [StepLR(one, 1)]))), per_epoch)
    by_step = {"optimizer": one, "lr_scheduler": {"scheduler": StepLR(one, 1), "interval": "step"}}
    assert scheduler_of(understood(by_step)) is made_with
    waiting = {"optimizer": one, "lr_scheduler": ReduceLROnPlateau(one), "monitor": "val_loss"}
    wish = scheduler_of(understood(waiting))
    assert isinstance(wish, on_metric)
    assert wish.metric == "val_loss"
    assert wish.build(keep_together(understood(waiting))) == [waiting["lr_scheduler"]]


def test_what_no_pool_can_step_is_refused_in_one_line():
    one, other = sgd(), sgd()
    step, epoch = {"scheduler": StepLR(one, 1), "interval": "step"}, StepLR(one, 1)
    for said, words in (
        (None, "returned None"),
        ([one, other], "2 optimizers"),
        ({"lr_scheduler": epoch}, 'without "optimizer"'),
        ((one, 3), "2 optimizers"),
        ([3], "returned int"),
        (([one], [StepLR(other, 1)]), "belongs to another optimizer"),
        (([one], [step, epoch]), "at different times"),
        (([one], [step | {"frequency": 2}]), "frequency 2"),
        (([one], [step | {"interval": "day"}]), "got 'day'"),
        (([one], [{"interval": "step"}]), 'no "scheduler"'),
        (([one], [ReduceLROnPlateau(one)]), "needs a metric"),
    ):
        with pytest.raises(wide.UsageError, match=words) as refused:
            understood(said)
        assert "\n" not in str(refused.value)


def test_a_scheduler_of_every_third_epoch_goes_on_where_it_was():
    one = sgd()
    first = Seldom(StepLR(one, 1, gamma=0.5), 3)
    one.step()
    for _ in range(4):
        first.step()
    second = Seldom(StepLR(sgd(), 1, gamma=0.5), 3)
    second.load_state_dict(first.state_dict())
    assert (second.calls, second.scheduler.last_epoch) == (4, 1)


# ── what batches leave behind, what is logged ────────────────────────────────────────────────────────────────────────


def test_lists_keep_little_and_no_graphs():
    value = torch.ones(1, requires_grad=True) * 2
    own = {"outputs": [1], "last": value, "recent": deque(maxlen=3)}
    keepers = [(own, {"outputs": 1, "recent": 0})]
    longest = 0
    for _ in range(10 * MOST_KEPT):
        own["outputs"].append({"loss": value, "parts": [value, (value,)]})
        own["recent"].append(value)
        tidy(keepers)
        longest = max(longest, len(own["outputs"]))
        assert own["outputs"][0] == 1
    assert longest == MOST_KEPT + 1
    assert own["last"].grad_fn is own["recent"][-1].grad_fn is None
    assert detached({"a": [value]})["a"][0].grad_fn is None


def test_means_weigh_by_samples():
    values = Values()
    for values.samples, value in ((3, 1.0), (1, 5.0)):
        values.log("mean", value, {})
        values.log("sum", value, {"reduce_fx": "sum"})
        values.log("most", value, {"reduce_fx": max})
        values.log("told", value, {"batch_size": 2, "on_step": True})
        values.log("left", value, {"on_epoch": False})
    assert values.result() == {"mean": 2.0, "sum": 6.0, "most": 5.0, "told": 3.0, "told_epoch": 3.0}
    with pytest.raises(wide.TrainingFailed, match="one number, got Tensor"):
        values.log("many", torch.zeros(2), {})


def test_the_size_of_a_batch_is_its_first_tensors():
    assert size_of({"a": ["x"], "b": (torch.zeros(5, 2), torch.zeros(3))}) == 5
    assert size_of("text") is None


def test_a_loader_needs_no_processes_for_the_same_batches():
    loader = DataLoader(line(), batch_size=7, num_workers=2, persistent_workers=True, prefetch_factor=3)
    assert [len(x) for x, _ in in_one_process(loader)] == [7, 7, 7, 7, 2]
    assert loader.num_workers == 2


def test_what_stands_in_for_a_trainer_names_what_it_does_not_have():
    plan = types.SimpleNamespace(epochs=2.0, steps=None, batches=None, batches_per_step=None)
    trainer = StandIn(plan, is_validating=True)
    assert (trainer.max_epochs, trainer.max_steps, trainer.num_training_batches) == (2, -1, float("inf"))
    assert (trainer.global_step, trainer.training, hasattr(trainer, "callbacks")) == (0, False, False)
    with pytest.raises(wide.TrainingFailed, match=r"self\.trainer\.callbacks"):
        _ = trainer.callbacks
