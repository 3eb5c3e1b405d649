"""Codecs: what goes in comes out, exactly or with the rest remembered; what is broken is refused."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from wide.codec.batch import pack, unpack
from wide.codec.feedback import Feedback
from wide.codec.ladder import LADDER, LOSSLESS, RAW, codec_named
from wide.codec.layout import Flat, Layout
from wide.codec.lossless import LZ4, ZSTD
from wide.codec.lossy import Lossy
from wide.codec.pieces import PIECE_NBYTES, cut, decode, encode
from wide.codec.planes import apply_difference, difference
from wide.codec.shadow import publish
from wide.codec.tensor import describe, rebuild
from wide.errors import ProtocolError, TrainingFailed

EVERY_DTYPE = sorted({v for v in vars(torch).values() if isinstance(v, torch.dtype)}, key=str)
DTYPES = [dtype for dtype in EVERY_DTYPE if not str(dtype).startswith(("torch.q",))]  # quantized ones are refused
LOSSY = [name for name, codec in LADDER.items() if isinstance(codec, Lossy)]
PACKED = [name for name in LOSSLESS if name != RAW]


def through(tensor):
    described, raw = describe(tensor)
    received = torch.empty(len(raw), dtype=torch.uint8)
    received.numpy()[:] = np.frombuffer(raw, np.uint8)
    return rebuild(described, received)


def bits(tensor):
    return bytes(describe(tensor)[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (4, 6)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(dtype, shape):
    count = int(np.prod(shape)) if shape else 1
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(shape)
    out = through(tensor)
    assert (out.dtype, out.shape, bits(out)) == (dtype, tensor.shape, bits(tensor))


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.randoms(use_true_random=False), st.booleans()
)
def test_any_layout_comes_back_bit_for_bit(dtype, shape, chance, requires_grad):
    """Transposed, sliced, expanded, with steps: whatever view of memory it is."""
    count = max(1, int(np.prod([2 * n + 1 for n in shape])))
    limit = 2 if dtype == torch.bool else 256
    raw = torch.tensor([chance.randrange(limit) for _ in range(count * dtype.itemsize)], dtype=torch.uint8)
    whole = raw.view(dtype).reshape([2 * n + 1 for n in shape])
    view = whole[tuple(slice(chance.randrange(2), None, 2) for _ in shape)]
    order = list(range(len(shape)))
    chance.shuffle(order)
    view = view.permute(order)
    if requires_grad and (dtype.is_floating_point or dtype.is_complex):
        view.requires_grad_()
    out = through(view)
    assert (out.shape, out.dtype, out.requires_grad) == (view.shape, view.dtype, view.requires_grad)
    assert element_bytes(out) == element_bytes(view)


def element_bytes(tensor):
    """In logical order, however they lie in memory."""
    words = tensor.detach().view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(tensor.itemsize, tensor.dtype)
    )
    return torch.empty(words.shape, dtype=words.dtype).copy_(words).reshape(-1).view(torch.uint8).numpy().tobytes()


def test_the_payload_of_a_dense_tensor_is_its_own_memory_on_both_sides():
    tensor = torch.rand(5, 7).t()
    described, raw = describe(tensor)
    assert np.frombuffer(raw, np.uint8).ctypes.data == tensor.data_ptr()
    received = torch.empty(len(raw), dtype=torch.uint8)
    assert rebuild(described, received).data_ptr() == received.data_ptr()


def test_device_is_kept_where_the_machine_has_it():
    described, raw = describe(torch.ones(2))
    assert described.device == "cpu"
    received = torch.from_numpy(np.frombuffer(raw, np.uint8).copy())
    assert rebuild(described._replace(device="cuda:7"), received).device.type in ("cpu", "cuda")
    assert rebuild(described._replace(device="no such thing"), received).device.type == "cpu"


def test_conjugates_are_resolved():
    tensor = torch.randn(3, dtype=torch.complex64).conj()
    assert through(tensor).equal(tensor.resolve_conj())


@pytest.mark.parametrize(
    "tensor", [torch.ones(2, 2).to_sparse(), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)]
)
def test_what_is_no_plain_tensor_is_explained(tensor):
    with pytest.raises(TrainingFailed, match="make it an ordinary one"):
        describe(tensor)


def test_a_batch_keeps_requires_grad_but_not_the_device_of_the_sender():
    packed = pack(torch.ones(3, requires_grad=True))
    (out,) = unpack([packed.description], torch.frombuffer(bytearray(b"".join(packed.buffers)), dtype=torch.uint8))
    assert out.requires_grad
    assert out.device.type == "cpu"


@pytest.mark.parametrize("name", PACKED)
@given(st.binary(max_size=40_000), st.sampled_from([1, 2, 4, 8]))
@settings(max_examples=60, deadline=None)
def test_lossless_codecs_give_back_every_byte(name, data, width):
    raw = np.frombuffer(data[: len(data) // width * width], np.uint8)
    codec = codec_named(name)
    packed = memoryview(b"".join(codec.encode(raw, width)))
    out = np.empty_like(raw)
    codec.decode(packed, out, width)
    assert (out == raw).all()
    assert len(packed) <= len(raw) + 4 * width


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1)), min_size=1))
def test_differences_of_bit_patterns_wrap_and_come_back(pairs):
    new, old = (np.array(column, np.uint32).view(np.uint8) for column in zip(*pairs, strict=True))
    target = old.copy()
    apply_difference(difference(new, old, 4), target, 4)
    assert (target == new).all()


def test_a_small_move_of_a_number_is_a_small_difference():
    old = np.array([1.0, -1.0], np.float32)
    new = np.nextafter(old, np.float32(2), dtype=np.float32)
    assert difference(new.view(np.uint8), old.view(np.uint8), 4).view(np.uint32).max() <= 2


class Mixed(nn.Module):
    """Parameters of several dtypes, large and small, buffers that must stay exact, and something frozen."""

    def __init__(self):
        super().__init__()
        self.large = nn.Parameter(torch.randn(70_001) * 0.1)
        self.brain = nn.Parameter(torch.randn(301).bfloat16())
        self.fine = nn.Parameter(torch.randn(17, dtype=torch.float64))
        self.wave = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.frozen = nn.Parameter(torch.randn(10), requires_grad=False)
        self.register_buffer("running", torch.rand(100))
        self.register_buffer("count", torch.tensor(12345678901))


def a_flat(seed, scale=1.0, only_live=True):
    torch.manual_seed(seed)
    layout = Layout(Mixed())
    flat = Flat(layout, only_live=only_live)
    for view in [*flat.trainable, *flat.averaged]:
        view.copy_(torch.randn(view.shape) * scale)
    for view in flat.kept:
        view.fill_(seed)
    return layout, flat


def test_pieces_cover_a_flat_buffer_once_and_only_parameters_may_lose():
    layout = Layout(Mixed())
    pieces = cut(layout, only_live=False)
    assert sum(piece.end - piece.start for piece in pieces) == layout.nbytes
    assert all(piece.end - piece.start <= PIECE_NBYTES for piece in pieces)
    assert all(piece.may_lose == (piece.end <= layout.buffers_start) for piece in pieces)


@pytest.mark.parametrize("name", PACKED)
def test_a_flat_buffer_goes_through_lossless_codecs_unchanged(name):
    layout, flat = a_flat(1)
    out = torch.empty_like(flat.raw)
    for piece in cut(layout, only_live=True):
        decode(piece, name, memoryview(b"".join(encode(piece, name, flat.raw))), out)
    assert out.equal(flat.raw)


@pytest.mark.parametrize("name", PACKED)
def test_a_version_as_a_difference_is_exact(name):
    layout, old = a_flat(1)
    _, new = a_flat(2)
    node = old.raw.clone()
    for piece in cut(layout, only_live=True):
        decode(piece, name, memoryview(b"".join(publish(piece, name, new.raw, old.raw))), node, is_difference=True)
    assert node.equal(new.raw)


@pytest.mark.parametrize("name", LOSSY)
def test_a_lossy_version_is_the_same_on_every_node_and_catches_up(name):
    layout, before = a_flat(1)
    _, target = a_flat(2)
    pieces = cut(layout, only_live=True)
    fast, slow, known = before.raw.clone(), before.raw.clone(), before.raw.clone()
    waiting = []
    for _ in range(40):  # the weights stand still, so what was lost must arrive in the end
        new = target.raw.clone()
        parts = [memoryview(b"".join(publish(piece, name, new, known))) for piece in pieces]
        known = new
        for piece, part in zip(pieces, parts, strict=True):
            decode(piece, name, part, fast, is_difference=True)
        assert fast.equal(known), "a node differs from what the coordinator thinks it has"
        waiting.append(parts)
    for parts in waiting:  # one that was away gets all differences at once
        for piece, part in zip(pieces, parts, strict=True):
            decode(piece, name, part, slow, is_difference=True)
    assert slow.equal(fast)
    exact = pieces[-1]
    assert exact.of(fast).equal(exact.of(target.raw))
    start, now = (numbers(raw, layout) - numbers(target.raw, layout) for raw in (before.raw, fast))
    assert np.linalg.norm(now) < (0.9 if name == "topk" else 0.01) * np.linalg.norm(start)


def numbers(raw, layout):
    (piece, *_) = [piece for piece in cut(layout, only_live=True) if piece.dtype == torch.float32 and piece.may_lose]
    return piece.of(raw).view(torch.float32).numpy().copy()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([*LOSSY, *PACKED, "pay"]), min_size=1, max_size=8), st.floats(1e-6, 1e3))
def test_what_was_sent_and_what_is_owed_are_all_gradients_whatever_the_codecs(names, scale):
    """Σ sent + e = Σ g, through any change of codec, for every dtype."""
    layout = Layout(Mixed())
    pieces = cut(layout, only_live=True)
    feedback = Feedback(pieces)
    sent, true = Sums(layout), Sums(layout)
    for i, name in enumerate(names):
        _, flat = a_flat(i, scale)
        true.add(flat.raw)
        received = torch.zeros_like(flat.raw)
        if name == "pay":
            feedback.pay(flat.raw)
            received.copy_(flat.raw)
        else:
            feedback.begin()
            for piece in pieces:
                decode(piece, name, memoryview(b"".join(feedback.encode(piece, name, flat.raw))), received)
            assert received.equal(flat.raw), "the sender's idea of what arrived is wrong"
        sent.add(received)
    last = torch.zeros(layout.live_nbytes, dtype=torch.uint8)
    feedback.pay(last)  # a node that leaves hands in what it owes
    sent.add(last)
    assert sent.is_close(true, scale * len(names))


class Sums:
    """Sums of updates in double precision."""

    def __init__(self, layout):
        self.pieces = [piece for piece in cut(layout, only_live=True) if piece.may_lose]
        self.totals = [0.0] * len(self.pieces)

    def add(self, raw):
        for i, piece in enumerate(self.pieces):
            self.totals[i] = self.totals[i] + piece.of(raw).view(piece.dtype).to(
                torch.complex128 if piece.dtype.is_complex else torch.float64
            )

    def is_close(self, other, scale):
        """Up to the rounding of the tensor's own dtype, which nothing can carry."""
        eps = {torch.bfloat16: 2.0**-8}
        return all(
            (mine - theirs).abs().max() <= 8 * eps.get(piece.dtype, 2.0**-22) * scale
            for piece, mine, theirs in zip(self.pieces, self.totals, other.totals, strict=True)
        )


def test_an_update_that_did_not_count_leaves_the_debt_as_it_was():
    layout, flat = a_flat(3)
    pieces = cut(layout, only_live=True)
    feedback = Feedback(pieces)
    for round_ in range(3):
        _, flat = a_flat(round_)
        feedback.begin()
        for piece in pieces:
            feedback.encode(piece, "int4", flat.raw)
    owed = torch.zeros(layout.live_nbytes, dtype=torch.uint8)
    again = owed.clone()
    feedback.pay(owed)
    feedback.undo()
    feedback.begin()
    _, refused = a_flat(9)
    for piece in pieces:
        feedback.encode(piece, "topk", refused.raw)
    feedback.undo()
    feedback.pay(again)
    assert again.equal(owed)


def test_unequal_leases_owe_in_the_same_units():
    """Two nodes, leases of 1 and of 7 samples of a step of 8: what both send and owe is the step's mean gradient."""
    layout = Layout(nn.Linear(10, 300))
    pieces = cut(layout, only_live=True)
    samples = [torch.randn(layout.live_nbytes // 4) for _ in range(8)]
    sent = torch.zeros(layout.live_nbytes // 4, dtype=torch.float64)
    for mine in (samples[:1], samples[1:]):
        feedback = Feedback(pieces)
        update = (sum(mine) / 8).view(torch.uint8)  # the mean of its samples, weighted n/N
        feedback.begin()
        for piece in pieces:
            feedback.encode(piece, "topk", update)
        debt = torch.zeros_like(update)
        feedback.pay(debt)
        sent += update.view(torch.float32) + debt.view(torch.float32).double()
    assert torch.allclose(sent, (sum(samples) / 8).double(), atol=1e-6)


@pytest.mark.parametrize("name", [name for name in LADDER if name != RAW])
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=3000))
def test_decoders_refuse_or_survive_whatever_comes(name, data):
    layout, flat = a_flat(1)
    for piece in cut(layout, only_live=True)[:3]:
        with contextlib.suppress(ProtocolError):
            decode(piece, name, memoryview(data), flat.raw)


def test_a_frame_that_states_a_huge_window_or_size_gets_no_memory():
    for codec, bomb in ((ZSTD, bytes.fromhex("28b52ffd") + b"\x04\xf8" + bytes(60)), (LZ4, b"\xff" * 60)):
        out = np.empty(4096, np.uint8)
        data = memoryview(np.array([len(bomb)], "<u4").tobytes() + bomb)
        with pytest.raises(ProtocolError, match=codec.name):
            codec.decode(data, out, 1)


def test_the_ladder_is_complete_and_names_what_the_command_offers():
    from typing import get_args

    from wide.config import Compress

    assert {*LADDER, "none", "lossless", "auto"} - {RAW} == set(get_args(Compress))
    with pytest.raises(ProtocolError, match="no codec 'snappy'"):
        codec_named("snappy")
