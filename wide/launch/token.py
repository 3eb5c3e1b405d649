"""The pool's token: from the environment or a file, never from the command line, where `ps` would show it."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from wide.errors import UsageError
from wide.launch.keys import write_secret


def read_token(file: str | None) -> str:
    """The token of --token-file or WIDE_TOKEN; empty if neither is given."""
    if file is None:
        return os.environ.get("WIDE_TOKEN", "").strip()
    try:
        token = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UsageError(f"--token-file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--token-file {file}: it is no text") from None
    if not token:
        raise UsageError(f"--token-file {file}: the file is empty")
    return token


def forget_token() -> None:
    """It was read, and is no business of child processes."""
    os.environ.pop("WIDE_TOKEN", None)


def token_file_in(folder: Path) -> tuple[str, Path]:
    """A new token, in a file that only its owner can read. A run that goes on keeps its own: nodes may come back."""
    path = folder / "token"
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if token := path.read_text(encoding="utf-8").strip():  # a full disk may have left it empty
            return token, path
    token = secrets.token_hex(16)
    write_secret(path, token + "\n")
    return token, path
