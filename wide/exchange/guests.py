"""Who may come in: by the pool's token, by an invite, or as a machine that was let in before. Knows secrets and what
became of invites; knows no sockets, and no database: what is written there it is told by `read`.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from wide.errors import Refused
from wide.wire.messages import Hello
from wide.wire.proof import Credential, derived, is_proven, proof

LOOK_S = 0.25  # a machine that is revoked is sent away within this time; and nobody comes in any more at once


class InviteRow(msgspec.Struct, frozen=True):
    """An invite as run.db has it; `machines` have come by it so far."""

    id: str
    expires_at: float
    uses: int
    is_revoked: bool
    machines: int


class Book(msgspec.Struct, frozen=True):
    """What was written about invites and machines, by this process or another one."""

    invites: dict[str, InviteRow] = {}
    revoked: frozenset[str] = frozenset()  # machines


class Guests:
    """`token` and `evaluator` are secrets of this pool's own processes and scripts; `root` is what all others follow
    from (empty: there are none).
    """

    def __init__(self, token: str, evaluator: str, root: bytes = b"", read: Callable[[], Book] = Book) -> None:
        self._fixed = {"token": token.encode(), "evaluator": evaluator.encode()}
        self._root, self._read = root, read
        self._book = read()
        self._enrolled: Counter[str] = Counter()  # by invite, and not in the book yet
        self._news: frozenset[str] = frozenset()  # machines that were revoked, and nobody was told
        self._looked_at = float("-inf")

    def look(self, now: float) -> frozenset[str]:
        """Now and then, at what was written meanwhile. The machines that were revoked since the last time."""
        if not self._root or now - self._looked_at < LOOK_S:
            return frozenset()
        self._looked_at = now
        self._refresh()
        news, self._news = self._news, frozenset()
        return news

    def _refresh(self) -> None:
        """What was written since the last time: machines that are counted there need not be counted here."""
        before, self._book = self._book, self._read()
        for name, count in list(self._enrolled.items()):
            if name in self._book.invites:
                known = before.invites[name].machines if name in before.invites else 0
                self._enrolled[name] = max(0, count - (self._book.invites[name].machines - known))
        self._news |= self._book.revoked - before.revoked

    def admit(self, hello: Hello, nonces: tuple[bytes, bytes] | None, binding: bytes, wall: float) -> Credential:
        """The secret that it has proven to know. What is wrong with an invite is told only to who has it."""
        kind, _, name = hello.credential.partition(" ")
        secret = self._secret(kind, name)
        if nonces is None:
            raise Refused("first knock, then say hello")
        is_known = secret is not None and is_proven(
            hello.proof, proof(secret, "node", hello.credential, nonces, binding)
        )
        if not is_known or secret is None:
            raise Refused(WRONG.get(kind, WRONG["token"]))
        if (hello.role == "evaluator") != (kind == "evaluator"):
            raise Refused("that secret is not for this role")
        if name:
            self._refresh()  # it may have been made, or revoked, a moment ago
        if kind == "machine" and name in self._book.revoked:
            raise Refused("this machine was sent away: whoever runs the pool has revoked it")
        if kind == "invite":
            self._check(name, wall)
        return Credential(hello.credential, secret)

    def enrol(self, invite: str) -> Credential:
        """A machine has come by this invite, and is one of the pool's from now on."""
        self._enrolled[invite] += 1
        name = secrets.token_hex(8)
        return Credential(f"machine {name}", derived(self._root, "machine", name))

    def _secret(self, kind: str, name: str) -> bytes | None:
        if kind in ("invite", "machine") and self._root and name:
            return derived(self._root, kind, name)  # type: ignore[arg-type]
        return self._fixed.get(kind) or None if not name else None

    def _check(self, name: str, wall: float) -> None:
        row = self._book.invites.get(name)
        if row is None:
            raise Refused("the pool does not know this invite any more: ask for a new one (`wide invite RUN`)")
        if row.is_revoked:
            raise Refused("this invite was revoked: ask for a new one (`wide invite RUN`)")
        if wall >= row.expires_at:
            raise Refused("this invite has expired: ask for a new one (`wide invite RUN`)")
        if row.machines + self._enrolled[name] >= row.uses:
            count = f"{row.uses} machine{'s' * (row.uses != 1)}"
            raise Refused(f"this invite is used up ({count}): ask for a new one (`wide invite RUN`)")


WRONG = {
    "token": "wrong token: set WIDE_TOKEN, or --token-file, to the token of `wide serve`",
    "evaluator": "wrong token",
    "invite": "this invite's secret is not the pool's: it is of another pool, or was misread",
    "machine": "this machine's key is not the pool's: join with an invite",
}


def book_of(invites: Iterable[InviteRow], revoked: Iterable[str]) -> Book:
    return Book({row.id: row for row in invites}, frozenset(revoked))
