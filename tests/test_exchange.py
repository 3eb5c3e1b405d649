"""The exchange on its own: what callers say in one breath, in which order it is told, and what becomes of the rest."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from tests.front import Front
from wide.codec.pieces import cut
from wide.codec.pieces import encode as encode_piece
from wide.exchange import happenings as happened
from wide.wire import messages as say
from wide.wire.frames import encode


def an_update(front, lease=1, batches=2, codec="raw"):
    """All bytes of it, as they travel."""
    nbytes = front.master.layout.live_nbytes
    update = say.Update(lease, [1.0] * batches, b"\x0f", 0.1, 0.0, 0.0, 0, codec=codec)
    if codec == "raw":
        return encode(update, nbytes) + bytes(nbytes)
    zeros = torch.zeros(nbytes, dtype=torch.uint8)
    parts = [b"".join(encode_piece(piece, codec, zeros)) for piece in cut(front.master.layout, only_live=True)]
    return encode(update) + b"".join(encode(say.Part(), len(part)) + part for part in parts)


def a_goodbye(front):
    """With what is still owed."""
    nbytes = front.master.layout.live_nbytes
    return encode(say.Leaving("bye"), nbytes) + bytes(nbytes)


def test_an_update_is_told_of_once_it_is_whole():
    with closing(Front()) as front:
        node = front.member()
        front.lease(1)
        data = an_update(front)
        node.stream.send([data[:-1]])
        front.turn()
        assert front.happened(happened.Updated) == []
        node.stream.send([data[-1:]])
        front.turn()
        (updated,) = front.happened(happened.Updated)
    assert (updated.node, updated.lease, updated.sizes, updated.losses) == (1, 1, [8, 8], [1.0, 1.0])
    assert (updated.journey.compute_s, updated.problem) == (0.1, "")


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_a_last_update_and_a_goodbye_with_its_debt_in_one_breath_both_count(codec):
    with closing(Front(codec)) as front:
        node = front.member()
        front.lease(1)
        node.stream.send([an_update(front, batches=1, codec=codec) + a_goodbye(front)])
        front.turn()
        told = front.happened(happened.Updated, happened.Owed, happened.Left, happened.Rejected)
        assert [type(it) for it in told] == [happened.Updated, happened.Owed, happened.Left]
        assert told[-1].why == "bye"
        assert front.master.spare.in_use == 2, "what was told of is for whoever heard it"


def test_two_goodbyes_in_one_breath_are_one():
    with closing(Front("int8")) as front:
        node = front.member()
        node.stream.send([a_goodbye(front) * 2])
        front.turn()
        told = front.happened(happened.Owed, happened.Left, happened.Rejected)
        assert [type(it) for it in told] == [happened.Owed, happened.Left]
        assert told[-1].why == "bye"
        assert front.master.spare.in_use == 1


def test_what_had_come_of_an_update_is_room_again_when_its_node_is_gone():
    for codec in ("none", "int8"):
        with closing(Front(codec)) as front:
            node = front.member()
            front.lease(1)
            data = an_update(front, codec="raw" if codec == "none" else codec)
            node.stream.send([data[:-1]])
            front.turn()
            assert front.master.spare.in_use == 1
            node.close()
            front.turn()
            assert [left.node for left in front.happened(happened.Left)] == [1]
            assert front.master.spare.in_use == 0
