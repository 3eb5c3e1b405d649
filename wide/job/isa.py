"""Instruction sets: what this CPU has, what this process uses, and what two machines have in common. The same set, the
same bits. Knows the environment's words for them, which count only before torch is loaded; does not import torch.

A ladder for each architecture: `default < avx2 < avx512` on x86, one rung elsewhere. MKL has its quick branches for one
maker's CPUs only (elsewhere it takes MKL_CBWR=AVX2 for AUTO, without a word), so above `default` the maker matters,
unless MKL is told to use the branch that all have: `avx2-any`.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from wide.errors import UsageError

RUNGS = ("default", "avx2", "avx512")
FLAGS = {"avx2": {"avx2", "fma"}, "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}}
TORCH = "ATEN_CPU_CAPABILITY"
MKL = {"default": "COMPATIBLE", "avx2": "AVX2", "avx512": "AVX512"}
ONEDNN = {"default": "SSE41", "avx2": "AVX2", "avx512": "AVX512_CORE"}
VARIABLES = (TORCH, "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
BEST = "WIDE_ISA_BEST"  # for a process that was started again with less: what its machine could do
NATIVE, FIXED, OWN = "native", "fixed", "own"
ANY = "any"


@dataclass(frozen=True)
class Isa:
    """A set. `how`: as torch, MKL and oneDNN choose it by themselves; or fixed, by our variables; or by the user's own
    variables, which may be any. `maker`: whose CPUs have it.
    """

    family: str
    maker: str
    rung: str
    how: str = FIXED

    def __str__(self) -> str:
        """On the wire, and in run.json."""
        return "/".join((self.family, self.maker, self.rung, self.how))

    @property
    def name(self) -> str:
        """For people, and for --isa."""
        if self.family != "x86":
            return self.family
        return f"{self.rung}-{ANY}" if self.maker == ANY and self.rung != RUNGS[0] else self.rung

    @property
    def height(self) -> int:
        return RUNGS.index(self.rung)

    @property
    def variables(self) -> dict[str, str]:
        """What fixes it, for a process that has not loaded torch yet."""
        if self.how != FIXED or self.family != "x86":
            return {}
        mkl = MKL[RUNGS[0] if self.maker == ANY else self.rung]
        return {TORCH: self.rung, "MKL_CBWR": mkl, "ONEDNN_MAX_CPU_ISA": ONEDNN[self.rung]}

    def has(self, other: Isa) -> bool:
        """Can a machine whose best set is this one use that one?"""
        if other.how != FIXED:
            return self == other
        return self.family == other.family and other.maker in (ANY, self.maker) and other.height <= self.height


def parse(text: str) -> Isa | None:
    """None: it is said in words that are not known here."""
    words = text.split("/")
    if len(words) != 4 or words[2] not in RUNGS or words[3] not in (NATIVE, FIXED, OWN):
        return None
    return Isa(*words)


def common(one: Isa, other: Isa) -> Isa | None:
    """The best set that both have, fixed; None: they have nothing in common."""
    if one.family != other.family:
        return None
    rung = RUNGS[min(one.height, other.height)]
    is_everybodys = rung == RUNGS[0] or one.maker != other.maker
    return Isa(one.family, ANY if is_everybodys else one.maker, rung)


# ── this machine ─────────────────────────────────────────────────────────────────────────────────────────────────────


def of_cpu(machine: str, cpuinfo: str) -> Isa | None:
    """By what the kernel says of it; None: that says nothing."""
    family = {"x86_64": "x86", "amd64": "x86", "i686": "x86", "aarch64": "arm64"}.get(machine.lower(), machine.lower())
    if family != "x86":
        return Isa(family, ANY, RUNGS[0], NATIVE)
    told: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        told.setdefault(name.strip(), value.strip())
    if "flags" not in told:
        return None
    flags = set(told["flags"].split())
    rung = next((rung for rung in reversed(RUNGS) if FLAGS.get(rung, set()) <= flags), RUNGS[0])
    return Isa("x86", _maker(told.get("vendor_id", "")), rung, NATIVE)


def _maker(vendor: str) -> str:
    return {"GenuineIntel": "intel", "AuthenticAMD": "amd"}.get(vendor) or vendor.lower().replace("/", "") or "unknown"


@functools.cache
def cpu() -> Isa:
    """What this CPU has. Where the kernel does not tell, torch is asked, in a process of its own."""
    path = Path("/proc/cpuinfo")
    found = of_cpu(platform.machine(), path.read_text() if path.exists() else "")
    if found is not None:
        return found
    words = [sys.executable, "-c", "import torch; print(torch.backends.cpu.get_cpu_capability())"]
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    said = subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout.strip().lower()
    vendor = next((name for name in ("GenuineIntel", "AuthenticAMD") if name in platform.processor()), "")
    return Isa("x86", _maker(vendor), said if said in RUNGS else RUNGS[0], NATIVE)


def in_use(environ: Mapping[str, str], has: Isa) -> Isa:
    """What a process with this environment uses, on a CPU that has so much."""
    said = _said(environ, has)
    if not said:
        return has
    fixed = (Isa(has.family, maker, rung) for rung in RUNGS for maker in (ANY, has.maker))
    own = replace(has, rung=_most(said, has), how=OWN)
    return next((isa for isa in fixed if isa.variables == said and has.has(isa)), own)


def best(environ: Mapping[str, str], has: Isa) -> Isa:
    """The most that it could use. What the user has set is respected; what we have set is not the user's word."""
    if (before := parse(environ.get(BEST, ""))) is not None:
        return before
    if not (said := _said(environ, has)):
        return has
    rung = _most(said, has)
    return Isa(has.family, ANY if rung == RUNGS[0] else has.maker, rung)


def _said(environ: Mapping[str, str], has: Isa) -> dict[str, str]:
    """Variables that make a difference on this CPU."""
    said = {name: environ[name] for name in VARIABLES if environ.get(name)}
    if said == {TORCH: has.rung}:
        return {}
    return said if has.family == "x86" else {}


def _most(said: Mapping[str, str], has: Isa) -> str:
    """The highest rung that all of these allow."""
    heights = [has.height]
    for name, word in said.items():
        word = word.upper().removeprefix("BRANCH=").partition(",")[0]
        if word.startswith("AVX512"):
            heights.append(2)
        elif word.startswith("AVX2"):
            heights.append(1)
        elif name == TORCH or word.startswith(("SSE", "SSSE", "AVX", "COMPATIBLE")):
            heights.append(0)
    return RUNGS[min(heights)]


def now() -> Isa:
    """What this process uses."""
    return in_use(os.environ, cpu())


def best_here() -> Isa:
    return best(os.environ, cpu())


# ── choosing ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def wanted(word: str, has: Isa) -> Isa:
    """What --isa says. Raises, if this CPU has no such set."""
    rung, _, maker = word.partition("-")
    if has.family != "x86" and rung == RUNGS[0]:
        return has
    isa = Isa("x86", ANY if maker or rung == RUNGS[0] else has.maker, rung)
    if not has.has(isa):
        names = ", ".join(RUNGS[: has.height + 1]) if has.family == "x86" else RUNGS[0]
        raise UsageError(f"--isa {word}: this CPU ({has.family}) has no {rung}; it has {names}")
    return isa


def use(isa: Isa, environ: MutableMapping[str, str]) -> None:
    """Before torch is loaded. What the machine could do is remembered, so that it can be asked for again."""
    most = best(environ, cpu())
    for name in VARIABLES:
        environ.pop(name, None)
    environ.update(isa.variables)
    environ[BEST] = str(most)
