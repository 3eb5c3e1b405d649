"""Weights on their way to the nodes: each version as its difference to the one before. Knows pieces; knows no network.

Lossless: the integer difference of the bit patterns. Lossy: the coordinator remembers x̂, what the nodes have, and sends
C(x − x̂); x̂ += D(…) happens on both sides with the same roundings, so that all nodes hold the same weights, and what
was lost is part of the next difference.
"""

from __future__ import annotations

import torch

from wide.codec.lossless import Buffers
from wide.codec.lossy import Lossy
from wide.codec.pieces import Piece, codec_for, encode, settle, unpacked


def publish(piece: Piece, name: str, new: torch.Tensor, old: torch.Tensor) -> Buffers:
    """What turns a node's `old` into `new`; where that is lossy, `new` becomes what the nodes will have."""
    codec = codec_for(piece, name)
    if not isinstance(codec, Lossy):
        return encode(piece, name, new, base=old)
    target, known = piece.of(new).view(piece.dtype), piece.of(old).view(piece.dtype)
    change = target - known
    data = codec.encode((torch.view_as_real(change).reshape(-1) if change.is_complex() else change).float().numpy())
    target.copy_(known)
    settle(target, unpacked(codec, piece, memoryview(b"".join(data))), is_difference=True)
    return data
