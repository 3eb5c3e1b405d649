"""A short digest of an update: two that are alike to the bit have the same. Knows bytes; knows no pool.

It is a MAC (GMAC) with a key of the run's own, which no node knows: nobody can make another update with the digest of
the right one. It reads memory about as quickly as a sum does (docs/findings.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from wide.codec.layout import Flat
from wide.wire import words

KEY_NBYTES = MAC_NBYTES = 16
MOST_NBYTES = 1 << 30  # that the library takes at once is twice that
NONCE = bytes(12)  # always the same: nodes never see a digest, so there is nothing to be learned from two of them


class Digest:
    """64 bits: what an update adds, which tensors it touched, what its batches weigh, their losses, and of what these
    have logged the metrics that the job `goes_by`. Others are only shown: honest nodes may differ (how long it took).
    """

    def __init__(self, key: bytes, goes_by: Callable[[str], bool] = lambda name: False) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 25 ms, which nobody but a coordinator needs

        self._mac, self._goes_by = AESGCM(key).encrypt, goes_by

    def of(self, flat: Flat, losses: Sequence[float]) -> int:
        touched = flat.touched.to_bytes(len(flat.trainable) // 8 + 1, "little")
        said = struct.pack(f"<{len(losses) + len(flat.weights)}d", *losses, *flat.weights)
        whole, data = touched + said, flat.bytes
        if flat.logged:
            whole += self._logged(flat)
        for at in range(0, len(data), MOST_NBYTES):
            whole = self._mac(NONCE, whole, data[at : at + MOST_NBYTES])[-MAC_NBYTES:]
        return int.from_bytes(whole[:8], "little", signed=True)  # as SQLite has numbers

    def _logged(self, flat: Flat) -> bytes:
        """In any order, by the names that are shown; nothing, if nothing of it matters."""
        mine = [(name, *said) for name, said in sorted(words.names(flat.logged).items()) if self._goes_by(name)]
        said = b"".join(name.encode() + struct.pack("<x2d", *numbers) for name, *numbers in mine)
        return self._mac(NONCE, b"", said) if mine else b""
