"""A job's code on its way to other machines: which files, their hash, consent, and a folder named by that hash. Data is
never among it, nor anything outside the job's folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from wide.errors import ProtocolError, Refused, UsageError
from wide.job.place import module_at, place_of
from wide.job.program import files_of
from wide.job.spec import Spec, arguments_of, split_spec, told_words, values_of_words, written
from wide.launch.places import cache_folder, private
from wide.telemetry.log import log
from wide.wire.messages import Offer

MOST_FILES, MOST_NBYTES, MOST_ARGUMENTS = 1000, 8 << 20, 100
LEFTOVER_S = 3600.0
SHOWN = 16  # letters of a hash that a person compares, and the fewest that --allow-code takes
NAME = re.compile(r"[^\x00-\x1f\x7f\\:*?\"<>|/]{1,120}")


@dataclass(frozen=True)
class Code:
    """Files by their names in the job's folder, in order; `main` is `file.py:name`, and `values` are those that its
    function is called with.
    """

    files: tuple[tuple[str, bytes], ...]
    main: str
    arguments: tuple[str, ...] = ()
    values: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Over names, contents, which of them is the job, and what it is told: each with its length."""
        files = [(name, hashlib.sha256(data).digest()) for name, data in self.files]
        values = (self.values,) if self.values else ()
        return hashlib.sha256(msgspec.msgpack.encode((self.main, self.arguments, files, *values))).hexdigest()

    @property
    def offer(self) -> tuple[Offer, memoryview]:
        """As it is sent, but for what is said about the job."""
        listed = [(name, len(data)) for name, data in self.files]
        payload = memoryview(b"".join(data for _, data in self.files))
        return Offer("", 0, 0, listed, self.main, list(self.arguments), values=list(self.values)), payload

    @property
    def words(self) -> str:
        """`job.py, data.py (2 files, 4 KB, sha256 91be…)`."""
        names = [name for name, _ in self.files]
        shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if names[6:] else "")
        size = sum(len(data) for _, data in self.files)
        count = f"{len(names)} file{'s' * (len(names) != 1)}"
        values = {name: given.value for name, given in values_of_words(self.values).items()}
        words = f", with {written(values)}" if values else ""
        words += f", with the arguments {' '.join(map(repr, self.arguments))}" if self.arguments else ""
        return f"{shown} ({count}, {max(1, round(size / 1000))} KB, sha256 {self.digest[:SHOWN]}){words}"


def code_of(spec: str, values: Mapping[str, Any] | None = None) -> Code | None:
    """What would be sent of a job that was loaded, made with these values; None, if it is too large to be only code."""
    place = place_of(spec)
    try:
        files = sorted((name, file.read_bytes()) for name, file in files_of(spec).items())
    except OSError as error:
        log.warning("the job's code is not sent to nodes: %s", error)
        return None
    size = sum(len(data) for _, data in files)
    if len(files) > MOST_FILES or size > MOST_NBYTES:
        log.warning(
            "the job's code is not sent to nodes: %d files, %d MB; they need --job FILE", len(files), size >> 20
        )
        return None
    main = f"{place.file}:{place.name}"
    code = Code(tuple(files), main, tuple(arguments_of(spec)), told_words(values or {}))
    try:
        return offered(*code.offer)
    except ProtocolError as error:
        log.warning("the job's code is not sent to nodes, who would refuse it (%s); they need --job FILE", error)
        return None


def offered(offer: Offer, payload: memoryview) -> Code:
    """What a pool sends, checked: a file may be put only into its own folder."""
    files, start = [], 0
    for name, nbytes in offer.files[: MOST_FILES + 1]:
        path = PurePosixPath(name)
        is_plain = name.isprintable() and all(NAME.fullmatch(part) and part not in (".", "..") for part in path.parts)
        if not is_plain or path.is_absolute() or path.as_posix() != name or path.suffix != ".py" or nbytes < 0:
            raise ProtocolError("wrong names", f"the pool's code has a file called {name[:80]!r}")
        files.append((name, bytes(payload[start : start + nbytes])))
        start += nbytes
    names = {name.casefold() for name, _ in files}
    if start != len(payload) or len(files) > MOST_FILES or len(names) != len(files):
        raise ProtocolError("wrong payload", "the pool's code is not what it says")
    main = split_spec(offer.main)[0].as_posix()
    if main not in {name for name, _ in files}:
        raise ProtocolError("wrong names", "the pool's code does not hold its job")
    told = (*offer.arguments, *offer.values)
    if not "".join((offer.main, *told)).isprintable() or len(told) > MOST_ARGUMENTS:
        raise ProtocolError("wrong names", "the job's arguments are not such as can be shown")
    try:
        values_of_words(offer.values)
    except (ValueError, RecursionError):
        raise ProtocolError("wrong names", "the job's values are not such as can be read") from None
    return Code(tuple(files), offer.main, tuple(offer.arguments), tuple(offer.values))


def check_consent(code: Code, allowed: str | None, remembered: Sequence[str]) -> None:
    """Does the owner of this machine want to run it? Asked once, on a terminal. Raises Refused."""
    digest = code.digest
    if allowed == "any" or (allowed is None and digest in remembered):
        return
    if allowed is not None:
        if not re.fullmatch(rf"[0-9a-f]{{{SHOWN},64}}", wish := allowed.lower().rstrip("….")):
            raise UsageError(f"--allow-code {allowed}: expected {SHOWN} letters or more of the code's sha256, or any")
        if digest.startswith(wish):
            return
        raise Refused(f"the pool's code is {digest[:SHOWN]}, not {wish[:SHOWN]}: it has changed; look at it again")
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()):
        raise Refused(
            f"the pool sends its code ({code.words}), and nobody is here to be asked: "
            f"--allow-code {digest[:SHOWN]} says yes to it, --job FILE uses your own copy"
        )
    print("It will run here as you. Look at it: " + str(folder_of(code)), file=sys.stderr)
    print(f"Run it? [y/N; --allow-code {digest[:SHOWN]} says yes] ", file=sys.stderr, end="", flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise Refused("you did not want to run the pool's code")


def code_folder() -> Path:
    """Where all code lies that pools have sent."""
    return cache_folder() / "code"


def folder_of(code: Code) -> Path:
    return code_folder() / code.digest[:32]


def put_down(code: Code) -> str:
    """The files, in the cache, under their hash; whatever is there already is looked through. The job's spec."""
    folder = folder_of(code)
    try:
        if not _holds(folder, code):
            _write(folder, code)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can, or give --job FILE"
        ) from None
    path = PurePosixPath(split_spec(code.main)[0].as_posix())
    module = module_at(Path(path), len(path.parts) - 1)
    return str(Spec(str(folder / code.main), module, code.values, code.arguments))


def _holds(folder: Path, code: Code) -> bool:
    found = {file.relative_to(folder).as_posix() for file in folder.rglob("*.py")} if folder.is_dir() else set()
    return found == {name for name, _ in code.files} and all(
        (folder / name).read_bytes() == data for name, data in code.files
    )


def _write(folder: Path, code: Code) -> None:
    private(folder.parent)
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        for name, data in code.files:
            (temporary / name).parent.mkdir(parents=True, exist_ok=True)
            (temporary / name).write_bytes(data)
        if folder.exists() and not _holds(folder, code):  # changed, or half a folder; not another join's, just now
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    except OSError:
        if not _holds(folder, code):  # or another join was quicker
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        _forget_leftovers(folder.parent)


def _forget_leftovers(folder: Path) -> None:
    """Of joins that were killed just then."""
    for path in folder.glob(".new-*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(path, ignore_errors=True)
