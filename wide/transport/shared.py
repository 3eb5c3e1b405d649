"""Memory that processes of one machine and one user share: what is written there need not be sent. Knows the operating
system; what lies in it is the callers'.

A segment has no name in any file system. Who may look into a process of its own user finds it by that process's id and
the file's number there, so nothing is left behind, whoever is killed. It is sealed: nobody can make it shorter under
somebody's feet. Where there is no such thing (Windows, macOS, another user, another container) payloads are sent.
"""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import stat
import sys
from collections import OrderedDict

import torch

from wide.errors import NotShared
from wide.failpoint import reach

IS_POSSIBLE = sys.platform == "linux" and hasattr(os, "memfd_create")
PROOF_NBYTES = 16
MOST_MAPPED = 64  # segments that a node keeps at hand; more nodes than this seldom share one machine


class Segment:
    """Zeros, as many as were asked for. Its name has the system's own number of it, too: those of open files are used
    again, and who comes late must not write into what is somebody else's by now.
    """

    def __init__(self, nbytes: int) -> None:
        import fcntl  # not on Windows

        reach("memory.share")
        self._file = os.memfd_create("wide", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self._file, 0, max(nbytes, 1))  # now, or never: a full memory is no surprise later
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, seals)
            self.raw = mapped(self._file, nbytes)
        except OSError:
            os.close(self._file)
            raise
        self.bytes = self.raw.numpy().data
        self.name: tuple[int, int] | None = (self._file, os.fstat(self._file).st_ino)

    def close(self) -> None:
        """Nobody can find it any more; who has mapped it, has it until the end."""
        if self.name is not None:
            self.name = None
            os.close(self._file)


class Sharing:
    """A coordinator's side. `greeting` is what a node is told, and `proof` what it can only know if it has found it."""

    def __init__(self) -> None:
        self._greeting = Segment(PROOF_NBYTES)
        secret = secrets.token_bytes(PROOF_NBYTES)
        self._greeting.bytes[:] = secret
        assert self._greeting.name is not None
        self.greeting, self.proof = (os.getpid(), *self._greeting.name), secret.hex()

    def close(self) -> None:
        self._greeting.close()


class Neighbour:
    """A node's side: another process's segments, as they are needed."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._mapped: OrderedDict[tuple[int, int], torch.Tensor] = OrderedDict()

    def tensor(self, name: tuple[int, int], nbytes: int) -> torch.Tensor:
        """The segment of that name, as (nbytes,) uint8. Raises NotShared."""
        if name not in self._mapped:
            self._mapped[name] = self._open(name)
            if len(self._mapped) > MOST_MAPPED:
                self._mapped.popitem(last=False)
        self._mapped.move_to_end(name)
        if len(found := self._mapped[name]) < nbytes:
            raise NotShared(f"{len(found)} bytes of the coordinator's memory where {nbytes} were promised")
        return found[:nbytes]

    def proof(self, name: tuple[int, int]) -> str:
        """That this process can see the other one's memory; empty, if it cannot."""
        try:
            return self._open(name)[:PROOF_NBYTES].numpy().tobytes().hex()
        except NotShared:
            return ""

    def _open(self, name: tuple[int, int]) -> torch.Tensor:
        if not IS_POSSIBLE:
            raise NotShared("this system has no memory to share")
        file = -1
        try:
            reach("node.maps_memory")
            file = os.open(f"/proc/{self._pid}/fd/{name[0]}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            found = os.fstat(file)
            if not stat.S_ISREG(found.st_mode):
                raise OSError(errno.EINVAL, "it is no memory")
            if found.st_ino != name[1]:
                raise OSError(errno.ESTALE, "it is another one's by now")
            return mapped(file, found.st_size)
        except (OSError, ValueError) as error:  # a file without a byte in it
            why = error.strerror if isinstance(error, OSError) else error
            raise NotShared(f"the coordinator's memory cannot be mapped ({why})") from None
        finally:
            if file >= 0:
                os.close(file)


def mapped(file: int, nbytes: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, max(nbytes, 1)), dtype=torch.uint8)[:nbytes]
