"""A pool's keys and its invite, made before there is a pool: for engines that start coordinator and nodes at once.
Knows the four files; whoever has them all is the pool.
"""

from __future__ import annotations

import math
import secrets
import time
from pathlib import Path

from wide.errors import UsageError
from wide.launch.engines import EXPIRES_S, USES
from wide.launch.invites import FIRST
from wide.launch.keys import CERTIFICATE, KEY, ROOT, keys_in, write_secret
from wide.store.access import Access
from wide.store.reading import DATABASE
from wide.wire.invite import Address, Invite, parse
from wide.wire.proof import derived

FILES = (CERTIFICATE, KEY, ROOT, FIRST)


def make(folder: Path, places: tuple[Address, ...]) -> None:
    """In that folder: keys, and an invite to a pool that will be found at `places`."""
    keys, id_ = keys_in(folder), secrets.token_hex(4)
    expires_min = math.ceil((time.time() + EXPIRES_S) / 60)
    invite = Invite(id_, expires_min, places, keys.pin, derived(keys.root, "invite", id_))
    write_secret(folder / FIRST, invite.encode() + "\n")


def adopt(folder: Path, source: Path) -> None:
    """The run in `folder` has these keys from now on, and machines may come by that invite."""
    try:
        texts = {name: (source / name).read_text(encoding="utf-8") for name in FILES}
        theirs, invite = keys_in(source), parse(texts[FIRST])
    except (OSError, UnicodeDecodeError, UsageError) as error:
        raise UsageError(f"--keys {source}: {error}; `wide launch` makes {', '.join(FILES)}") from None
    if (theirs.pin, derived(theirs.root, "invite", invite.id)) != (invite.pin, invite.secret):
        raise UsageError(f"--keys {source}: the invite is another pool's; `wide launch` makes all of them together")
    if not (folder / ROOT).exists():
        for name in (KEY, CERTIFICATE, ROOT):  # the last of them says that all are there
            write_secret(folder / name, texts[name])
    keys = keys_in(folder)
    if (keys.pin, keys.root) != (theirs.pin, theirs.root):
        raise UsageError(
            f"--keys {source}: they are not those of the pool in {folder}; choose another folder with --out"
        )
    write_secret(folder / FIRST, texts[FIRST])
    access = Access(folder / DATABASE)
    if invite.id not in {row[0] for row in access.invites()}:
        access.add(invite.id, "launch", time.time(), invite.expires_at, USES)
