"""One run folder has one coordinator. Knows a lock file, which the system lets go of when its holder dies."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import time
from pathlib import Path
from typing import IO

from wide.errors import UsageError

TRIES, TRY_S = 4, 0.05
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
            _patiently(self._file)
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


def _patiently(file: IO[str]) -> None:
    """Somebody may only be looking."""
    for _ in range(TRIES - 1):
        with contextlib.suppress(OSError):
            _lock(file)
            return
        time.sleep(TRY_S)
    _lock(file)


def is_held(folder: Path) -> bool:
    """Does somebody coordinate the run in this folder right now? As far as whoever may read it can tell."""
    if folder.resolve() in _held:
        return True
    try:
        with open(folder / "lock", encoding="utf-8") as file:
            return _is_locked(file)
    except OSError:
        return False


if sys.platform == "win32":
    import msvcrt

    FAR = 1 << 30  # a byte that nobody reads: on Windows a locked one cannot be

    def _lock(file: IO[str]) -> None:
        os.lseek(file.fileno(), FAR, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        os.lseek(file.fileno(), 0, os.SEEK_SET)

    def _is_locked(file: IO[str]) -> bool:
        try:
            _lock(file)
        except OSError:
            return True
        os.lseek(file.fileno(), FAR, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
        return False
else:
    import fcntl

    def _lock(file: IO[str]) -> None:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _is_locked(file: IO[str]) -> bool:
        """Asked where that is possible, tried where not: then whoever begins at this very moment has to try again."""
        if sys.platform == "linux":
            asked = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            kind: int = struct.unpack("hhqqi4x", fcntl.fcntl(file, fcntl.F_GETLK, asked))[0]
            return kind != fcntl.F_UNLCK
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        return False
