"""What this process uses of its machine, and what its bits depend on."""

from __future__ import annotations

import functools

import psutil
import torch


@functools.cache
def _self() -> psutil.Process:
    return psutil.Process()


def rss_bytes() -> int:
    return int(_self().memory_info().rss)


def build(device: torch.device, threads: int) -> str:
    """Same words, same bits: torch build, kind of device, threads, instruction set."""
    return f"torch {torch.__version__}, {device.type}, {threads} threads, {torch.backends.cpu.get_cpu_capability()}"
