"""A short digest of an update: two that are alike to the bit have the same. Knows bytes; knows no pool.

It is a MAC (GMAC) with a key of the run's own, which no node knows: nobody can make another update with the digest of
the right one. It reads memory about as quickly as a sum does (docs/findings.md).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from wide.codec.layout import Flat
from wide.job.here import Logged
from wide.wire import words

KEY_NBYTES = MAC_NBYTES = 16
MOST_NBYTES = 1 << 30  # that the library takes at once is twice that
SMALL_NBYTES = 32 << 10  # of these a copy costs less than a digest at a bad moment
NONCE = bytes(12)  # always the same: nodes never see a digest, so there is nothing to be learned from two of them


class Digest:
    """64 bits: what an update adds, which tensors it touched, what its batches weigh, their losses, and of what these
    have logged the metrics that the job `goes_by`. Others are only shown: honest nodes may differ (how long it took).
    """

    def __init__(self, key: bytes, goes_by: Callable[[str], bool] = lambda name: False) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # 25 ms, which nobody but a coordinator needs

        self._mac, self._goes_by = AESGCM(key).encrypt, goes_by

    def of(self, flat: Flat, losses: Sequence[float]) -> int:
        return self._of(flat.bytes, flat.touched, losses, flat.weights, flat.logged)

    def later(self, flat: Flat, losses: Sequence[float]) -> int | Later:
        """The same; of a small update, when somebody asks for it."""
        if len(flat.bytes) > SMALL_NBYTES:
            return self.of(flat, losses)
        return Later(self._of, (bytes(flat.bytes), flat.touched, losses, flat.weights, flat.logged))

    def _of(
        self, data: bytes | memoryview, touched: int, losses: Sequence[float], weights: Sequence[float], logged: Logged
    ) -> int:
        said = struct.pack(f"<{len(losses) + len(weights)}d", *losses, *weights)
        whole = b"%x;%b%b" % (touched, said, self._logged(logged))
        for at in range(0, len(data), MOST_NBYTES):
            whole = self._mac(NONCE, whole, data[at : at + MOST_NBYTES])[-MAC_NBYTES:]
        return int.from_bytes(whole[:8], "little", signed=True)  # as SQLite has numbers

    def _logged(self, logged: Logged) -> bytes:
        """In any order, by the names that are shown; nothing, if nothing of it matters."""
        if not logged:
            return b""
        mine = [(name, *said) for name, said in sorted(words.names(logged).items()) if self._goes_by(name)]
        said = b"".join(name.encode() + struct.pack("<x2d", *numbers) for name, *numbers in mine)
        return self._mac(NONCE, b"", said) if mine else b""


class Later:
    """A digest that is computed when it is looked at, of a copy: most are looked at when they are written down, many in
    a row. That takes a tenth of what one takes between other work, which finds nothing of it in the caches.
    """

    __slots__ = ("_value", "_work")

    def __init__(self, compute: Callable[..., int], content: tuple[Any, ...]) -> None:
        self._work: tuple[Callable[..., int], tuple[Any, ...]] | None = compute, content
        self._value = 0

    def __int__(self) -> int:
        if self._work is not None:
            compute, content = self._work
            self._value, self._work = compute(*content), None
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | Later) and int(self) == int(other)

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        return str(int(self))
