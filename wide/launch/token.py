"""The pool's token: from the environment or a file, never from the command line, where `ps` would show it."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from wide.errors import UsageError


def read_token(file: str | None) -> str:
    """The token of --token-file or WIDE_TOKEN; empty if neither is given."""
    if file is None:
        return os.environ.get("WIDE_TOKEN", "").strip()
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"--token-file {file}: {error.strerror}") from None
    if not token:
        raise UsageError(f"--token-file {file}: the file is empty")
    return token


def forget_token() -> None:
    """It was read, and is no business of child processes."""
    os.environ.pop("WIDE_TOKEN", None)


def token_file_in(folder: Path) -> tuple[str, Path]:
    """A new token, in a file that only its owner can read. A run that goes on keeps its own: nodes may come back."""
    token, path = secrets.token_hex(16), folder / "token"
    if path.exists():
        return read_token(str(path)), path
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(token + "\n")
    return token, path
