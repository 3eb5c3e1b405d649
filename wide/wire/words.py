"""Text from a peer, made fit to be shown: no escape sequences, no line breaks, no end that never comes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

T = TypeVar("T")

NAME_CHARS, LINE_CHARS, DETAILS_CHARS = 64, 1000, 64 * 1024


def name(text: str) -> str:
    return line(text[:NAME_CHARS]) or "unnamed"


def names(said: Mapping[str, T]) -> dict[str, T]:
    return {name(key): value for key, value in said.items()}


def line(text: str) -> str:
    """One line."""
    cut = text[:LINE_CHARS]
    return cut if cut.isprintable() else "".join(c if c.isprintable() else "?" for c in cut)


def details(text: str) -> str:
    """Several lines: a traceback."""
    cut = text[:DETAILS_CHARS]
    return "".join(c if c.isprintable() or c == "\n" else "?" for c in cut)
