"""`wide doctor`: what on this machine would get in the way of lending it, or of serving a pool, and how to mend it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import ssl
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from wide.config import Sockets, usable_cores
from wide.errors import Unreachable, WideError
from wide.job import isa
from wide.launch import costs
from wide.launch.addresses import addresses
from wide.launch.places import cache_folder, private, state_folder
from wide.launch.visit import Target, target_of, visit
from wide.transport.tcp import shown

PORT = 9433
LEAST_DISK, LEAST_MEMORY = 2 << 30, 1 << 30
MOST_CLOCK_S = 120.0
SLOW_BYTES_PER_S = 1e6


class Finding(NamedTuple):
    """`advice` is empty where all is well."""

    what: str
    found: str
    advice: str = ""


def examine(invite: str | None) -> int:
    """A line for each; the exit code says whether anything is in the way."""
    target = target_of(invite, None, Sockets()) if invite is not None else None
    wrong = 0
    for finding in _findings(target):
        print(f"{'ok  ' if not finding.advice else 'MEND'}  {finding.what}: {finding.found}", flush=True)
        if finding.advice:
            wrong += 1
            print(f"      {finding.advice}", flush=True)
    print(f"{wrong} thing{'s' * (wrong != 1)} to mend" if wrong else "nothing is in the way", flush=True)
    return int(bool(wrong))


def _findings(target: Target | None) -> Iterator[Finding]:
    for check in (_python, _torch, _cores, _disk, _encryption, _network):
        yield from check()
    yield from _pool(target) if target is not None else _port()


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    is_good = sys.version_info >= (3, 11)
    yield Finding("Python", f"{version} on {platform.platform()}", "" if is_good else "install Python 3.11 or newer")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except Exception as error:
        yield Finding("torch", f"cannot be imported ({error})", "pip install torch")
        return
    yield Finding("torch", importlib.metadata.version("torch"))
    cuda = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    mps = ["Apple GPU (mps)"] if torch.backends.mps.is_available() else []
    advice = ""
    if not cuda and not mps and shutil.which("nvidia-smi"):
        advice = "there is an NVIDIA driver, but this torch cannot use it: install torch's CUDA build"
    yield Finding("devices", ", ".join([*cuda, *mps, "cpu"]), advice)


def _cores() -> Iterator[Finding]:
    usable, there = usable_cores(), os.cpu_count() or 1
    limit = f", of {there} (affinity, or a container's limit)" if usable < there else ""
    yield Finding("cores", f"{usable}{limit}")
    yield from _instructions()
    memory = psutil.virtual_memory()
    advice = (
        "close something: a node with torch takes some 300 MB, and its model" if memory.available < LEAST_MEMORY else ""
    )
    yield Finding("memory", f"{memory.available / 1e9:.1f} of {memory.total / 1e9:.1f} GB are free", advice)
    if sys.platform == "linux":
        shm = shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0
        yield Finding(
            "shared memory", f"{shm / 1e9:.1f} GB" if shm else "none: nodes on this machine are sent everything"
        )


def _instructions() -> Iterator[Finding]:
    """Which bits depend on; and what the lower sets would cost, should a pool need one."""
    best, used = isa.best_here(), isa.now()
    if best.family != "x86":
        yield Finding("instructions", best.name)
        return
    lower = [isa.wanted(rung, best) for rung in reversed(isa.RUNGS[: best.height])]
    told = [words for one in lower if (words := costs.words(one))]
    own = f"; this shell's variables say {used.name}" if used != best else ""
    yield Finding("instructions", "; ".join([f"up to {best.name}, {best.maker}'s{own}", *told]))


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free
    advice = "free some room: runs, checkpoints and logs are written here" if free < LEAST_DISK else ""
    yield Finding("disk", f"{free / 1e9:.1f} GB are free in {Path.cwd()}", advice)
    for what, folder in (("keys", state_folder()), ("code", cache_folder())):
        problem = _why_not_writable(folder)
        advice = "make it writable, or set XDG_STATE_HOME and XDG_CACHE_HOME" if problem else ""
        yield Finding(f"folder for {what}", f"{folder}{f' ({problem})' if problem else ''}", advice)


def _why_not_writable(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=private(folder)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _encryption() -> Iterator[Finding]:
    advice = "" if ssl.HAS_TLSv1_3 else "install a Python with OpenSSL 1.1.1 or newer"
    yield Finding("TLS 1.3", ssl.OPENSSL_VERSION, advice)
    has = importlib.util.find_spec("cryptography") is not None
    yield Finding("certificates", "can be made" if has else "cannot be made", "" if has else "pip install cryptography")


def _network() -> Iterator[Finding]:
    own = [address for address in addresses("0.0.0.0") if address != "127.0.0.1"]
    advice = "" if own else "no network: other machines cannot reach this one, or be reached"
    yield Finding("name and addresses", f"{socket.gethostname()}, {', '.join(own) or 'only its own'}", advice)


def _port() -> Iterator[Finding]:
    """For whoever serves; who joins opens none."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", PORT))
            yield Finding(f"port {PORT}", "is free, to serve a pool")
        except OSError as error:
            yield Finding(f"port {PORT}", f"is taken ({error.strerror}); a second pool needs --port N")


def _pool(target: Target) -> Iterator[Finding]:
    where = " or ".join(shown(*address) for address in target.endpoint.addresses)
    try:
        seen, _ = visit(target, socket.gethostname(), "guest")
    except Unreachable as error:
        yield Finding("the pool", f"{where}: {error}", "see docs/joining.md: tunnels, NAT, firewalls")
        return
    except WideError as error:
        yield Finding("the pool", f"{where}: {error}", "ask whoever runs the pool for another invite")
        return
    yield Finding("the pool", f"{seen.address} answers as it should; it trains {seen.offer.job[:64]!r}")
    ahead_s = seen.pools_clock_ahead_s
    advice = "set this machine's clock, or the pool's" if abs(ahead_s) > MOST_CLOCK_S else ""
    yield Finding("clock", f"the pool's is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}", advice)
    slow = "a slow link: the pool should use --compress auto, or --strategy local"
    advice = slow if seen.bytes_per_s < SLOW_BYTES_PER_S else ""
    yield Finding("bandwidth", f"{seen.width}, {1000 * seen.delay_s:.2g} ms away", advice)
