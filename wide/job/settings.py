"""torch's global settings: part of the program, as its code is. They travel with a job from a script to its processes;
and the words in which a machine says what its bits depend on contain them. Knows torch; no job.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from wide.job import isa

FLAGS: dict[str, Any] = {  # what torch has them at, if nobody touches them
    "cudnn.allow_tf32": True,
    "cudnn.benchmark": False,
    "cudnn.deterministic": False,
    "cudnn.enabled": True,
    "mkldnn.enabled": True,
}


def settings() -> dict[str, Any]:
    """As they are now, in plain words."""
    found: dict[str, Any] = {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "device": str(torch.get_default_device()),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "only_warns": torch.is_deterministic_algorithms_warn_only_enabled(),
    }
    return found | {name: _flag(name) for name in FLAGS}


def use_settings(wanted: dict[str, Any]) -> None:
    """As another process had them."""
    now = settings()
    if wanted["dtype"] != now["dtype"]:
        torch.set_default_dtype(getattr(torch, wanted["dtype"]))
    if wanted["device"] != now["device"]:
        torch.set_default_device(wanted["device"])
    if wanted["matmul"] != now["matmul"]:
        torch.set_float32_matmul_precision(wanted["matmul"])
    torch.use_deterministic_algorithms(wanted["deterministic"], warn_only=wanted["only_warns"])
    for name in FLAGS:
        if wanted[name] != now[name]:
            backend, _, flag = name.partition(".")
            setattr(getattr(torch.backends, backend), flag, wanted[name])


def _flag(name: str) -> Any:
    backend, _, flag = name.partition(".")
    return getattr(getattr(torch.backends, backend), flag)


def be_exact(device: torch.device) -> None:
    """Ask for kernels that give the same bits again, where torch has a choice. What has no such kernel still runs, and
    torch warns of it by name.
    """
    if device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first matrix is multiplied there
        torch.backends.cudnn.benchmark = False
        if not torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(True, warn_only=True)


def build(device: torch.device, threads: int) -> str:
    """Same words, same bits: torch build, device, threads, instruction set and whose, and settings that are not torch's
    own.
    """
    used = isa.now()
    words = [
        f"torch {torch.__version__}",
        _device(device),
        f"{threads} threads",
        torch.backends.cpu.get_cpu_capability() + (f" ({used.maker})" if used.maker != isa.ANY else ""),
        *(f"{name}={os.environ[name]}" for name in isa.VARIABLES if os.environ.get(name)),
    ]
    now = settings()
    if now["dtype"] != "float32":
        words.append(f"default dtype {now['dtype']}")
    if now["matmul"] != "highest":
        words.append(f"matmul precision {now['matmul']}")
    if now["mkldnn.enabled"] is not True:
        words.append("no oneDNN")
    if device.type == "cuda":
        words += [f"{name}={now[name]}" for name in FLAGS if now[name] != FLAGS[name] and name != "mkldnn.enabled"]
    return ", ".join(words)


def _device(device: torch.device) -> str:
    """The kind of device, and for a GPU which one, and whose libraries it uses."""
    if device.type != "cuda":
        return device.type
    name, cudnn = torch.cuda.get_device_name(device), torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return f"cuda ({name}, {torch.version.cuda or torch.version.hip}, cuDNN {cudnn})"
