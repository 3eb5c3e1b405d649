"""Where this user's programs keep what they know (keys), and what they can get again (code)."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def state_folder() -> Path:
    return _folder("XDG_STATE_HOME", ".local/state")


def cache_folder() -> Path:
    return _folder("XDG_CACHE_HOME", ".cache")


def _folder(variable: str, elsewhere: str) -> Path:
    if named := os.environ.get(variable):
        return Path(named) / "wide"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home()) / "wide" / Path(elsewhere).name
    if sys.platform == "darwin":
        return Path.home() / "Library" / ("Caches" if elsewhere == ".cache" else "Application Support") / "wide"
    return Path.home() / elsewhere / "wide"


def private(folder: Path) -> Path:
    """That folder, made if need be, for its owner alone."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if os.name == "posix":
        folder.chmod(0o700)
    return folder
