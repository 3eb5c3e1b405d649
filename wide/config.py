"""The options of a run: one frozen place, filled once and validated once. Knows nothing of jobs or processes."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from wide.errors import UsageError

Strategy = Literal["sync", "async", "local", "auto"]
Data = Literal["local", "stream", "auto"]
Compress = Literal["lossless", "auto", "none", "lz4", "zstd", "bf16", "int8", "int4", "topk"]
Robust = Literal["clip", "trimmed", "median"]
Log = Literal["silent", "normal", "verbose"]
Isa = Literal["auto", "default", "avx2", "avx512", "avx2-any", "avx512-any"]
Track = Literal["wandb", "trackio", "mlflow"]


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How many cores this process may use: by its affinity, and by the limit of the container that it runs in."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # version 2, version 1
        with contextlib.suppress(OSError, ValueError):
            quota, period, *_ = " ".join((cgroup / file).read_text() for file in files).split()
            if int(quota) > 0:
                cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


class Sockets(msgspec.Struct, frozen=True, kw_only=True):
    """The options of a TCP connection, set where the platform has them. The defaults are what measured best."""

    buffer_nbytes: int = 0  # each way; 0: the kernel's autotuning
    read_nbytes: int = 256 << 10  # at most, in one read; 0: as much as there is room for
    nodelay: bool = True
    quickack: bool = False
    keepalive_s: int = 15  # 0: off


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """What `wide run`, `wide serve` and `wide.run` share. None means: as the job says, or no such limit."""

    nodes: int | None = None
    strategy: Strategy | None = None
    steps: int | None = None
    epochs: float | None = None
    seconds: float | None = None
    seed: int | None = None
    out: Path | None = None
    resume: str | None = None
    without: str | None = None  # go on from before this node's first work
    checkpoint_every: float = 30.0
    keep: int = 3
    data: Data = "auto"
    compress: Compress | None = None
    robust: Robust | None = None  # how async and local add updates up; None: by their mean
    log: Log = "normal"
    plain: bool = False  # lines instead of a screen
    track: Track | None = None
    dashboard: str | None = None  # auto, PORT or HOST:PORT: where a page about the run is served
    control: bool = False  # with the admin's secret, it can be steered from there
    device: str = "auto"
    isa: Isa = "auto"  # the CPU's instruction set, which bits depend on: of this CPU, or what all of a pool's have
    workers: int | None = None  # for each node: processes that fetch batches ahead
    host: str = "127.0.0.1"
    port: int = 0
    insecure: bool = False
    socket: Sockets = Sockets()
    audit: float = 0.0  # of all leases, this share is computed by a second node, too
    check: bool = True  # try first whether the job gives the same numbers twice
    only_plans: bool = False  # train only until it is known how this pool should train
    on: str = "local"  # the engine that places nodes: ray, ray://HOST:PORT, slurm, dask://HOST:PORT, torchrun
    cpus_per_node: int = 1  # that an engine sets aside for each node
    gpus_per_node: int = 0
    partition: str | None = None  # of a Slurm cluster

    @property
    def codecs(self) -> Compress:
        """What --compress says. Whoever lets the pool choose its strategy lets it choose codecs too."""
        return self.compress or ("auto" if self.strategy == "auto" else "lossless")

    @property
    def node_count(self) -> int:
        """One node for each core that this process may use, unless the user said otherwise."""
        return self.nodes if self.nodes is not None else usable_cores()


LEAST = {"nodes": 0, "steps": 1, "seed": 0, "port": 0, "keep": 1, "workers": 0, "cpus_per_node": 1, "gpus_per_node": 0}
MOST = {"nodes": 4096, "workers": 256, "steps": 2**53, "seed": 2**63 - 1, "port": 65535}
MOST |= {"cpus_per_node": 4096, "gpus_per_node": 64}
ENGINES = r"local|ray|ray://[^\s/]+|slurm|dask://[^\s/]+|torchrun"


def resolve(given: Mapping[str, Any], environ: Mapping[str, str]) -> Options:
    """Flag, then environment (WIDE_STEPS=40), then default; the job's own values are looked up where None is left."""
    values: dict[str, Any] = {}
    hints = typing.get_type_hints(Options)
    unknown = sorted(set(given) - set(hints))
    if unknown:
        raise UsageError(f"there is no option {unknown[0]!r}; there are: {', '.join(sorted(hints))}")
    for name, kind in hints.items():
        value, source = given.get(name), f"--{name.replace('_', '-')}"
        if value is None and environ.get(variable := f"WIDE_{name.upper()}"):
            value, source = environ[variable], variable
        if value is not None:
            values[name] = _checked(name, value, kind, source)
    return Options(**values)


SERVE_AUDIT = 0.01  # of `wide serve`, whatever its strategy
EXACT_CODECS = ("lossless", "none", "lz4", "zstd")


def idle_audit(options: Options) -> str:
    """Why the audits that were asked for will never be; empty, if they will, or nobody has asked."""
    if options.audit in (0, SERVE_AUDIT):
        return ""
    if not options.check:
        return f"--audit {options.audit:g} does nothing: --no-check says that no two nodes need to compute the same"
    if options.strategy in ("async", "local"):
        return f"--audit {options.audit:g} does nothing: in --strategy {options.strategy} no two nodes compute the same"
    if options.compress not in (None, "auto", *EXACT_CODECS):
        return f"--audit {options.audit:g} does nothing: --compress {options.compress} leaves no bits to be compared"
    return ""


def check_robust(options: Options) -> None:
    """An exact sum has no other way to be added up."""
    if options.robust is not None and options.strategy in (None, "sync"):
        raise UsageError(
            f"--robust {options.robust} is for --strategy async, local or auto: sync adds up exactly, and --audit "
            "finds there who is wrong"
        )


def _checked(name: str, value: Any, kind: Any, source: str) -> Any:
    if kind is Sockets:
        return value if isinstance(value, Sockets) else _sockets(str(value), source)
    try:
        value = msgspec.convert(str(value), kind, strict=False, dec_hook=lambda to, text: to(text))
    except msgspec.ValidationError:
        raise UsageError(f"{source} {value}: expected {_describe(kind)}") from None
    if name in LEAST and not LEAST[name] <= value <= MOST.get(name, float("inf")):
        most = f" and at most {MOST[name]}" if name in MOST else ""
        raise UsageError(f"{source} {value}: must be at least {LEAST[name]}{most}")
    if name in ("epochs", "seconds", "checkpoint_every") and not 0 < value < 1e15:
        raise UsageError(f"{source} {value:g}: must be a number above 0")
    if name == "audit" and not 0 <= value <= 1:
        raise UsageError(f"{source} {value:g}: expected a share from 0 to 1, such as 0.02")
    if name == "device":
        _check_device(value, source)
    if name == "on" and not re.fullmatch(ENGINES, value):
        raise UsageError(f"{source} {value}: expected local, ray, ray://HOST:PORT, slurm, dask://HOST:PORT or torchrun")
    if name == "dashboard":
        value = "auto" if value.lower() in ("true", "on", "yes", "1") else value
        place_of(value, source)
    return value


HERE, DASHBOARD_PORT = "127.0.0.1", 9434


def place_of(text: str, source: str = "--dashboard") -> tuple[str, int | None]:
    """`auto`, `PORT`, `HOST:PORT`: the host and the port; None: any that is free."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or HERE
    if text == "auto":
        return HERE, None
    if not (port.isascii() and port.isdigit() and int(port) <= MOST["port"]) or not _is_address(host):
        raise UsageError(f"{source} {text}: expected PORT, or HOST:PORT such as 0.0.0.0:{DASHBOARD_PORT}")
    return host, int(port) or None


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def _check_device(device: str, source: str) -> None:
    kind, _, index = device.partition(":")
    if kind not in {"auto", "cpu", "cuda", "mps"} or (index and not index.isdigit()):
        raise UsageError(f"{source} {device}: expected auto, cpu, mps, cuda or cuda:0")


SOCKET_HELP = "buffer=SIZE read=SIZE nodelay=on|off quickack=on|off keepalive=SECONDS, with commas between"
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
MOST_KEEPALIVE_S = 32767  # the most that Linux takes


def _sockets(text: str, source: str) -> Sockets:
    """`buffer=8M,quickack=off`: what is not named keeps its default."""
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, _, value = part.partition("=")
        try:
            field, parse = SOCKET_KEYS[key.strip()]
            values[field] = parse(value.strip())
        except (KeyError, ValueError):
            raise UsageError(f"{source} {part}: expected {SOCKET_HELP}; a SIZE is 0, 256K or 8M, up to 1G") from None
    return Sockets(**values)


def _whole(text: str, most: int = MOST_KEEPALIVE_S) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= most):
        raise ValueError(text)
    return int(text)


def _size(text: str) -> int:
    return size_of(text, UNITS["G"])


def size_of(text: str, most: int) -> int:
    """`8M` in bytes. Raises ValueError."""
    unit = UNITS.get(text[-1:].upper(), 1)
    return unit * _whole(text[:-1] if unit > 1 else text, most // unit)


def _switch(text: str) -> bool:
    return {"on": True, "off": False}[text]


SOCKET_KEYS: dict[str, tuple[str, Callable[[str], int]]] = {
    "buffer": ("buffer_nbytes", _size),
    "read": ("read_nbytes", _size),
    "nodelay": ("nodelay", _switch),
    "quickack": ("quickack", _switch),
    "keepalive": ("keepalive_s", _whole),
}


def _describe(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return " or ".join(typing.get_args(kind))
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return _describe(next(part for part in typing.get_args(kind) if part is not type(None)))
    return {int: "a whole number", float: "a number", bool: "true or false", Path: "a folder"}.get(kind, "text")
