"""What is exchanged: one frozen struct for the parts of an exchange. Knows what they are, and nothing of peers."""

from __future__ import annotations

from dataclasses import dataclass, field

from wide.codec.digest import Digest
from wide.codec.encoders import Encoders
from wide.codec.layout import Flat, Layout
from wide.codec.spare import Spare
from wide.exchange.common import Common
from wide.exchange.feed import Feed


@dataclass(frozen=True)
class Goods:
    """What is exchanged: the weights and how they lie, room for updates, the data; what encodes them, and memory that
    nodes on this machine can see.
    """

    layout: Layout
    weights: Flat
    spare: Spare
    feed: Feed
    encoders: Encoders
    digest: Digest
    common: Common = field(default_factory=lambda: Common(is_wanted=False))
