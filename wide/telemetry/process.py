"""What this process uses of its machine, and which machine that is."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import socket
import sys
import uuid
from pathlib import Path

import psutil


@functools.cache
def _self() -> psutil.Process:
    return psutil.Process()


def rss_bytes() -> int:
    return int(_self().memory_info().rss)


def give_back_free_memory() -> None:
    """What was freed lately may be large: glibc was told to keep such blocks (launch/environment.py), because batches
    need theirs again at once. After a model was built, nobody does.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def machine() -> str:
    """The same word for all processes of this machine, and for no other's."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # cloned machines may share a name, and even an address
    known = (socket.gethostname(), uuid.getnode(), boot.read_text() if boot.exists() else "")
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]
