"""The ladder of codecs, from faithful to strong. Knows their names and order; knows no link."""

from __future__ import annotations

from wide.codec.lossless import LZ4, ZSTD, Planes
from wide.codec.lossy import Bf16, Int4, Int8, Lossy, TopK
from wide.errors import ProtocolError

RAW = "raw"
LADDER: dict[str, Planes | Lossy | None] = {
    RAW: None,  # the tensor's own memory
    **{codec.name: codec for codec in (LZ4, ZSTD, Bf16(), Int8(), Int4(), TopK())},
}
LOSSLESS = tuple(name for name, codec in LADDER.items() if codec is None or codec.is_lossless)


def codec_named(name: str) -> Planes | Lossy:
    """A codec that a peer has named."""
    codec = LADDER.get(name)
    if codec is None:
        raise ProtocolError("unknown codec", f"there is no codec {name!r}")
    return codec
