"""Flat buffers and batches: every tensor comes back, nothing is copied that need not be."""

from __future__ import annotations

from collections import namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.jobs import Odd
from wide.codec.batch import fingerprints, pack, unpack
from wide.codec.layout import ALIGN_NBYTES, Flat, Layout, bind, difference, unbind
from wide.errors import ProtocolError, TrainingFailed
from wide.store.checkpoint import Checkpoint, write
from wide.store.weights import load_weights, weights_sha256

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.int32]
Pair = namedtuple("Pair", ["x", "y"])


def through(batch):
    packed = pack(batch)
    raw = torch.empty(packed.nbytes, dtype=torch.uint8)
    raw.numpy()[:] = np.frombuffer(b"".join(packed.buffers), dtype=np.uint8)
    (out,) = unpack([packed.description], raw)
    return out, raw


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (5, 7)])
def test_tensors_of_every_kind_come_back(dtype, shape):
    tensor = (torch.rand(shape) * 100).to(dtype)
    out, _ = through(tensor)
    assert out.dtype == dtype
    assert torch.equal(out, tensor)


def test_nests_keep_their_shape():
    Named = Pair(torch.ones(2), {"a": [1, 2.5, "text", None, True, b"raw"], 7: (torch.zeros(1), np.arange(3))})  # noqa: N806
    out, _ = through(Named)
    assert out.x.equal(torch.ones(2))
    assert out.y["a"] == [1, 2.5, "text", None, True, b"raw"]
    assert isinstance(out.y[7], tuple)
    assert isinstance(out.y[7][1], np.ndarray)


def test_strides_are_kept_because_kernels_may_round_by_them():
    image = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (image, torch.rand(4, 5).t(), torch.rand(2, 3, 4).permute(2, 0, 1)):
        out, _ = through(tensor)
        assert (out.stride(), out.equal(tensor)) == (tensor.stride(), True)


@pytest.mark.parametrize("batch", [{("a", "b"): 1}, nn.utils.rnn.pack_sequence([torch.ones(2, 1)])])
def test_what_would_come_back_as_something_else_is_not_streamed(batch):
    with pytest.raises(TrainingFailed, match="cannot be streamed"):
        pack(batch)


def test_unpacked_tensors_are_aligned_views():
    out, raw = through([torch.ones(3), torch.ones(5, 5).t(), torch.ones(1)])
    assert all(tensor.untyped_storage().data_ptr() == raw.untyped_storage().data_ptr() for tensor in out)
    assert all((tensor.data_ptr() - raw.data_ptr()) % ALIGN_NBYTES == 0 for tensor in out)


def test_packing_a_contiguous_tensor_does_not_copy_it():
    tensor = torch.ones(100)
    assert np.asarray(pack(tensor).buffers[0]).ctypes.data == tensor.data_ptr()


def test_what_cannot_be_streamed_is_explained():
    with pytest.raises(TrainingFailed, match="a batch holds a set, .*--data local"):
        pack({"x": {1, 2}})


def test_a_description_that_does_not_fit_its_bytes_is_refused():
    with pytest.raises(ProtocolError):
        unpack([["tensor", "float32", [1 << 40], 1 << 42, [1]]], torch.empty(64, dtype=torch.uint8))
    with pytest.raises(ProtocolError):
        unpack([["tensor", "load", [1], 4, [1]]], torch.empty(64, dtype=torch.uint8))
    with pytest.raises(ProtocolError):
        unpack([["tensor", "float32", [2], 8, [1000]]], torch.empty(64, dtype=torch.uint8))


def test_binding_keeps_values_and_ties_and_makes_one_buffer():
    model = Odd()
    before = weights_sha256(model)
    layout = Layout(model)
    flat = Flat(layout, only_live=False)
    bind(model, flat, layout)
    assert weights_sha256(model) == before
    assert model.first.weight is model.second.weight
    storages = {p.untyped_storage().data_ptr() for p in model.parameters() if p.numel()}
    assert storages == {flat.raw.untyped_storage().data_ptr()}
    unbind(model)
    assert weights_sha256(model) == before
    assert flat.raw.untyped_storage().data_ptr() not in {b.untyped_storage().data_ptr() for b in model.buffers()}


def test_frozen_parameters_lie_behind_what_an_update_carries():
    layout = Layout(Odd())
    assert {slot.name for slot in layout.frozen} == {"frozen.weight", "frozen.bias"}
    assert all(slot.offset >= layout.live_nbytes for slot in layout.frozen)


def test_models_that_differ_are_told_apart_in_words():
    one, two = Layout(nn.Linear(3, 4)).describe(), Layout(nn.Linear(3, 5)).describe()
    assert difference(one, one) == ""
    assert difference(two, one) == "weight torch.float32 (5, 3) where the pool has weight torch.float32 (4, 3)"


def test_not_finite_is_noticed_in_any_dtype():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        flat = Flat(Layout(nn.Linear(3, 3).to(dtype)), only_live=True)
        flat.trainable[0].fill_(200.0)
        assert flat.is_finite()
        for bad in (float("nan"), float("inf"), float("-inf")):
            flat.trainable[1][1] = bad
            assert not flat.is_finite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_finite_is_so_however_long_it_is(dtype):
    """Exploding gradients, which clip_norm will cut."""
    flat = Flat(Layout(nn.Linear(3, 3).to(dtype)), only_live=True)
    flat.trainable[0].fill_(2.0**100)
    assert flat.norm() == 3 * 2.0**100


def test_the_fingerprint_sees_names_shapes_types_and_every_bit():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2)
    two.load_state_dict(one.state_dict())
    assert weights_sha256(one) == weights_sha256(two)
    with torch.no_grad():
        two.bias[0] = torch.nextafter(two.bias[0], torch.tensor(9.0))
    assert weights_sha256(one) != weights_sha256(two)


def test_saved_weights_are_loaded_again(tmp_path):
    model = Odd()
    copies = {key: value.clone() for key, value in model.state_dict().items()}
    folder = write(tmp_path / "checkpoints", Checkpoint(12, copies, {}, {}), keep=3)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == folder.name == "step-00000012"
    assert weights_sha256(load_weights(Odd(), tmp_path)) == weights_sha256(model)


def test_a_sample_has_one_fingerprint_wherever_it_lies_in_memory():
    found = set()
    for lead in range(8):
        room = np.zeros(64, dtype=np.float32)
        array = room[lead : lead + 12].reshape(3, 4)
        array[:] = np.arange(12).reshape(3, 4)
        sample = {"a": array, "t": torch.from_numpy(array.copy()).t().contiguous().t(), "b": array[:, ::-1], "n": None}
        found.add(fingerprints([(1, sample)])[0][1])
    assert len(found) == 1
    assert fingerprints([(1, object())]) == []
