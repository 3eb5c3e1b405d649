"""A job's spec: one text that says where a job is and what it is told, so that whoever is given it, in whatever
process, loads the same job. `file.py:name`, then the module that the file is, the values of the job's function
(`--set`), and the words for its sys.argv (behind `--`). Knows text and names of files; runs nothing.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from wide.errors import UsageError

MODULE, SET, SEPARATOR = "\x1d", "\x1e", "\x1f"  # before a module, a value, an argument; no file's name has them
TEXT, TOLD, PYTHON = "text", "told", "python"
MOST_CHARS = 4096  # of one value: a spec travels in the environment, too
SHOWN = 80


class Given(NamedTuple):
    """A value for a job's function: text, as a person wrote it; told by a run or a pool that had it; or an object."""

    value: Any
    how: str


@dataclass(frozen=True)
class Spec:
    """The parts. A value is kept as a word: `lr="0.3"`, which is text, or `lr:=0.3`, which is JSON."""

    place: str  # `file.py` or `file.py:name`
    module: str = ""
    values: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    def __str__(self) -> str:
        module = [self.module] if self.module else []
        marked = ((MODULE, module), (SET, self.values), (SEPARATOR, self.arguments))
        return self.place + "".join(mark + word for mark, words in marked for word in words)


def parts(spec: str) -> Spec:
    head, *arguments = spec.split(SEPARATOR)
    head, *values = head.split(SET)
    place, _, module = head.partition(MODULE)
    return Spec(place, module, tuple(values), tuple(arguments))


def with_arguments(spec: str, arguments: Sequence[str]) -> str:
    """The spec of the job that this file makes of these words."""
    if any(mark in word for word in arguments for mark in (SEPARATOR, "\0")):
        raise UsageError("a job's arguments are printable text")
    return str(replace(parts(spec), arguments=tuple(arguments)))


def arguments_of(spec: str) -> list[str]:
    return list(parts(spec).arguments)


def with_set(spec: str, pairs: Sequence[str]) -> str:
    """With these values, as a person writes them behind --set: `lr=0.3`."""
    given: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = unicodedata.normalize("NFKC", name.strip())  # as Python reads names
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {shown(pair)}: expected NAME=VALUE, such as lr=0.3")
        if name in given:
            raise UsageError(f"--set {name}: it is given twice, as {shown(given[name])} and as {shown(text)}")
        if len(text) > MOST_CHARS or not is_text(text):
            raise UsageError(f"--set {name}={shown(text)}: expected at most {MOST_CHARS} characters of Unicode text")
        given[name] = text
    return str(replace(parts(spec), values=tuple(f"{name}={json.dumps(text)}" for name, text in given.items())))


def with_told(spec: str, values: Mapping[str, Any]) -> str:
    """With these values, as a run or a pool has them; but for those that a person has given."""
    found, own = parts(spec), values_in(spec)
    words = told_words({name: value for name, value in values.items() if name not in own})
    return str(replace(found, values=(*found.values, *words)))


def told_words(values: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f"{name}:={json.dumps(value)}" for name, value in values.items())


def values_in(spec: str) -> dict[str, Given]:
    return values_of_words(parts(spec).values)


def values_of_words(words: Sequence[str]) -> dict[str, Given]:
    """Raises ValueError for words that nobody here has made."""
    found: dict[str, Given] = {}
    for word in words:
        name, _, text = word.partition("=")
        value, is_told = json.loads(text), name.endswith(":")
        name = name.removesuffix(":")
        if not name.isidentifier() or name in found or not (is_told or isinstance(value, str)):
            raise ValueError(word)
        found[name] = Given(value, TOLD if is_told else TEXT)
    return found


def split_spec(spec: str) -> tuple[Path, str]:
    """`path/file.py:name` in its two parts; the name is `job` unless given."""
    place = parts(spec).place
    path, colon, name = place.rpartition(":")
    if colon and name.isidentifier():
        return Path(path), name
    return Path(place), "job"


def title_of(path: Path) -> str:
    """How a run of that file is called: a package by its own name."""
    return path.resolve().parent.name if path.stem in ("__init__", "__main__") else path.stem


def is_text(text: str) -> bool:
    """Or are there bytes in it that are no text in any language?"""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """On one line, whatever it is."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…"


def written(values: Mapping[str, Any]) -> str:
    """`lr=0.3, width=64`."""
    return ", ".join(f"{name}={shown(value)}" for name, value in values.items())
