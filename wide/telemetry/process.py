"""What this process uses of its machine, and what its bits depend on."""

from __future__ import annotations

import functools
import hashlib
import socket
import uuid
from pathlib import Path

import psutil
import torch


@functools.cache
def _self() -> psutil.Process:
    return psutil.Process()


def rss_bytes() -> int:
    return int(_self().memory_info().rss)


@functools.cache
def machine() -> str:
    """The same word for all processes of this machine, and for no other's."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # cloned machines may share a name, and even an address
    known = (socket.gethostname(), uuid.getnode(), boot.read_text() if boot.exists() else "")
    return hashlib.sha256(repr(known).encode()).hexdigest()[:32]


def build(device: torch.device, threads: int) -> str:
    """Same words, same bits: torch build, kind of device, threads, instruction set."""
    return f"torch {torch.__version__}, {device.type}, {threads} threads, {torch.backends.cpu.get_cpu_capability()}"
