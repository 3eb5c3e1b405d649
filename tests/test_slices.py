"""Steps by slices of the flat buffer: the same bits as tensor by tensor, or not at all."""

from __future__ import annotations

import contextlib
import copy
import threading

import pytest
import torch
from torch import nn

import wide
from wide.codec.layout import Flat, Layout, bind
from wide.job.descent import Descent, _bare_step
from wide.job.elementwise import elementwise_state
from wide.job.hands import ONE, Hands
from wide.job.slices import Place, Slices, Stretch, owners_of, stretches

ELEMENTWISE = {
    "SGD": {},
    "SGD with momentum": {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"amsgrad": True},
    "AdamW": {"weight_decay": 0.1},
    "AdamW for each": {"foreach": True},
    "Adagrad": {},
    "Adadelta": {},
    "Adamax": {},
    "ASGD": {},
    "NAdam": {},
    "RAdam": {},
    "RMSprop": {"momentum": 0.5, "centered": True},
    "Rprop": {},
}


def kind_of(name):
    return getattr(torch.optim, name.split()[0])


def model():
    torch.manual_seed(0)
    head = nn.Linear(13, 5).to(torch.float64)
    net = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.Linear(7, 13), nn.LayerNorm(13), head])
    net[0].to(memory_format=torch.channels_last)
    net.register_parameter("scale", nn.Parameter(torch.tensor(0.5)))
    net.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    return net


class Side:
    """A model in a flat buffer with its optimizer; `is_sliced`, or tensor by tensor."""

    def __init__(self, is_sliced, optimizer, scheduler=None, clip_norm=None, build=model, hands=ONE):
        self.model = build()
        self.layout = Layout(self.model)
        self.weights = Flat(self.layout, only_live=False)
        bind(self.model, self.weights, self.layout)
        job = wide.Job(
            model=build,
            dataset=list,
            loss=wide.supervised(nn.MSELoss()),
            optimizer=optimizer,
            scheduler=scheduler,
            clip_norm=clip_norm,
        )
        self.descent = Descent(job, self.model, [slot.name for slot in self.layout.trainable], 0)
        if is_sliced:
            self.descent.use_runs(self.layout.places, self.weights.trainable_runs, hands)
        self.steps = 0

    def step(self, touched=None):
        flat = Flat(self.layout, only_live=True)
        generator = torch.Generator().manual_seed(self.steps)
        for view in flat.trainable:
            view.copy_(torch.randn(view.shape, generator=generator, dtype=view.dtype))
        all_touched = (1 << len(flat.trainable)) - 1
        self.descent.step(flat.trainable, all_touched if touched is None else touched, self.steps, flat.trainable_runs)
        self.steps += 1
        self.descent.advance(self.steps, 0)

    @property
    def is_sliced(self):
        return self.descent._slices is not None and self.descent._slices._has_state

    def picture(self):
        state = self.descent.state()["optimizers"][0]["state"]
        return self.weights.fingerprint(), {
            (i, name): value.tolist() if isinstance(value, torch.Tensor) else value
            for i, values in state.items()
            for name, value in values.items()
        }


def groups(kind, **settings):
    """Weights and others apart, as people do for weight decay."""

    def build(parameters):
        matrices = [p for p in parameters if p.ndim > 1]
        others = [p for p in parameters if p.ndim <= 1]
        return kind([{"params": matrices}, {"params": others, "lr": 0.02}], lr=0.01, **settings)

    return build


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_slices_give_the_same_bits_and_the_same_state(name):
    def build(parameters):
        return kind_of(name)(parameters, lr=0.01, **ELEMENTWISE[name])

    for optimizer in (build, groups(kind_of(name), **ELEMENTWISE[name])):
        plain, sliced = Side(False, optimizer), Side(True, optimizer)
        for _ in range(5):
            plain.step()
            sliced.step()
        assert sliced.is_sliced
        assert sliced.picture() == plain.picture()


def test_neighbours_have_one_owner_and_owners_equally_many():
    assert owners_of(24, 3) == [0] * 8 + [1] * 8 + [2] * 8
    assert owners_of(17, 2) == [0] * 9 + [1] * 8
    assert owners_of(15, 2) == [0] * 15, "too few to wake anybody for"
    assert owners_of(0, 4) == []


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_several_owners_give_the_same_bits_and_the_same_state(name, monkeypatch):
    monkeypatch.setattr(Slices.__init__, "__defaults__", (128, ONE))  # so that a small model has many slices

    def large():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(31, 97), nn.LayerNorm(97), nn.Linear(97, 13))

    with contextlib.closing(Hands(3)) as hands:
        optimizer = groups(kind_of(name), **ELEMENTWISE[name])
        plain, shared = Side(False, optimizer, build=large), Side(True, optimizer, build=large, hands=hands)
        for _ in range(5):
            plain.step()
            shared.step()
        assert shared.is_sliced
        assert len(shared.descent._slices._copies) == 3
        assert shared.picture() == plain.picture()


def test_a_part_that_fails_is_told_once_the_others_are_done():
    done, may_end = [], threading.Event()

    def slow():
        may_end.wait()
        done.append(True)

    def fails():
        may_end.set()
        raise ValueError("no")

    with contextlib.closing(Hands(2)) as hands:
        for parts in ([fails, slow], [slow, fails]):
            may_end.clear()
            with pytest.raises(ValueError, match="no"):
                hands.do(parts)
    assert len(done) == 2


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_schedulers_and_clipping_stay_as_they_are(clip_norm):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    sides = [Side(is_sliced, groups(torch.optim.AdamW), schedule, clip_norm) for is_sliced in (False, True)]
    for _ in range(8):
        for side in sides:
            side.step()
    assert sides[1].is_sliced
    assert sides[0].picture() == sides[1].picture()


def test_a_parameter_without_gradient_ends_it_and_loses_nothing():
    sides = [Side(is_sliced, groups(torch.optim.AdamW)) for is_sliced in (False, True)]
    for touched in (None, None, None, 0b1011, None, None):
        for side in sides:
            side.step(touched)
    assert not sides[1].is_sliced
    assert sides[0].picture() == sides[1].picture()


def test_a_momentum_that_begins_later_ends_it():
    sides = [Side(is_sliced, lambda ps: torch.optim.SGD(ps, lr=0.01)) for is_sliced in (False, True)]
    for number in range(6):
        for side in sides:
            if number == 3:
                assert side.is_sliced == (side is sides[1])
                side.descent.optimizers[0].param_groups[0]["momentum"] = 0.9
            side.step()
    assert not sides[1].is_sliced
    assert sides[0].picture() == sides[1].picture()


def test_a_state_that_is_put_back_is_the_one_that_counts():
    sides = [Side(is_sliced, groups(torch.optim.AdamW)) for is_sliced in (False, True)]
    for side in sides:
        side.step()
        side.step()
        saved = copy.deepcopy(side.descent.state())
        side.step()
        side.descent.go_on_from(saved)
        side.step()
        side.step()
    assert sides[1].is_sliced
    assert sides[0].picture() == sides[1].picture()


def test_a_hook_is_called_and_slices_are_not_used():
    called = []

    def build(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.01)
        optimizer.register_step_post_hook(lambda *_: called.append(True))
        return optimizer

    side = Side(True, build)
    for _ in range(3):
        side.step()
    assert len(called) == 3
    assert not side.is_sliced


class Trusting(torch.optim.SGD):
    """Steps by the norm of a whole tensor."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad / (parameter.grad.norm() + 1))


def test_an_optimizer_that_looks_at_whole_tensors_fails_the_trial():
    optimizer = Trusting([nn.Parameter(torch.zeros(3))], lr=0.1)
    assert elementwise_state(optimizer, Trusting.step) is None


@pytest.mark.parametrize("kind", ["Adafactor", "Muon"])
def test_torchs_own_ones_that_look_at_whole_tensors_are_stepped_by_tensors(kind):
    side = Side(True, lambda ps: getattr(torch.optim, kind)([p for p in ps if p.ndim == 2], lr=0.01))
    side.step()
    assert not side.is_sliced


def test_a_complex_parameter_is_not_tried():
    optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(3, dtype=torch.complex64))], lr=0.1)
    assert elementwise_state(optimizer, _bare_step(optimizer)) is None


def test_neighbours_of_one_group_and_dtype_are_one_stretch():
    places = [Place(0, 0, 5), Place(0, 16, 20), Place(0, 32, 40), Place(1, 0, 3), Place(1, 16, 17)]
    assert stretches(places, [0, 0, 1, 1, None]) == [
        Stretch(0, 0, 0, 20, [0, 1]),
        Stretch(1, 0, 32, 40, [2]),
        Stretch(1, 1, 0, 3, [3]),
    ]


def test_a_long_stretch_is_cut():
    assert Stretch(0, 0, 16, 50, [0]).cut(16) == [slice(16, 32), slice(32, 48), slice(48, 50)]


def test_matrices_and_vectors_lie_apart_so_that_their_groups_are_one_stretch_each():
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    layout = Layout(net)
    assert [slot.name for slot in layout.trainable] == [
        "0.weight",
        "2.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        "2.bias",
    ]
    found = stretches(layout.places, [int(len(slot.shape) < 2) for slot in layout.trainable])
    assert [stretch.members for stretch in found] == [[0, 1], [2, 3, 4, 5]]
