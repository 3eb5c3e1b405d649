"""One run folder has one coordinator. Knows a lock file, which the system lets go of when its holder dies."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import sys
from pathlib import Path
from typing import IO

from wide.errors import UsageError

_held: set[Path] = set()


class FolderLock:
    """Held from the beginning until `close`, or until this process ends, however it ends. Its forked children do not
    hold it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        if self._folder in _held:  # the system would not mind: its locks are between processes
            raise UsageError(f"{folder} is in use by this process: one run folder has one coordinator")
        path = folder / "lock"
        self._file: IO[str] = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (held as long as this object)
        try:
            _lock(self._file)
        except OSError:
            self._file.seek(0)
            holder = self._file.read().strip() or "another process"
            self._file.close()
            raise UsageError(f"{folder} is in use by {holder}: one run folder has one coordinator") from None
        _held.add(self._folder)
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def close(self) -> None:
        _held.discard(self._folder)
        with contextlib.suppress(OSError):
            self._file.truncate(0)
        self._file.close()


def is_held(folder: Path) -> bool:
    """Does somebody coordinate the run in this folder right now?"""
    if folder.resolve() in _held:
        return True
    try:
        with open(folder / "lock", "r+", encoding="utf-8") as file:
            _lock(file)
        return False
    except FileNotFoundError:
        return False
    except OSError as error:
        return error.errno in (errno.EAGAIN, errno.EACCES, errno.EDEADLK)


if sys.platform == "win32":
    import msvcrt

    FAR = 1 << 30  # a byte that nobody reads: on Windows a locked one cannot be

    def _lock(file: IO[str]) -> None:
        os.lseek(file.fileno(), FAR, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        os.lseek(file.fileno(), 0, os.SEEK_SET)
else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
