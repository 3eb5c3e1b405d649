"""What a value of a job's function must be: its annotation, or else the type of its default. Text becomes such a value,
or a ValueError. Knows Python's types; knows nothing of jobs.
"""

from __future__ import annotations

import ast
import enum
import math
import numbers
import types
import typing
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any, Literal

from wide.job.spec import is_text

MOST_INT = 2**63 - 1  # beyond that neither torch nor SQLite knows numbers
YES, NO = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
NOTHING = ("none", "None", "null")
NoneType = type(None)


class Other:
    """A default that nobody can write as text: a function, a dictionary. Python may give another one of its kind."""

    def __init__(self, default: object) -> None:
        self.default = default

    def fits(self, value: object) -> bool:
        return isinstance(value, type(self.default)) or (callable(value) and callable(self.default))


def kind_of(annotation: Any, default: Any, has_default: bool) -> Any:
    """The annotation if it is one of those that are known here, else by the default; Any, if nothing is known."""
    if (known := _known(annotation)) is not None:
        return known
    if not has_default:
        return str
    if default is None:
        return Any
    if isinstance(default, list | tuple):
        kinds = {_plain_kind(item) for item in default}
        shape: Any = tuple if isinstance(default, tuple) else list
        return Other(default) if None in kinds else shape[_common(kinds)]
    return _plain_kind(default) or Other(default)


def parse(text: str, kind: Any) -> Any:
    """Of text, as it stands behind `--set lr=`. Raises ValueError."""
    if kind is str or kind is Path:
        return check(text, kind)
    if kind is Any:
        return _literal_or_text(text)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _one_of(option for option in args if str(option) == text)
    if origin in (types.UnionType, typing.Union):
        if NoneType in args and text in NOTHING:
            return None
        return _first(parse, text, sorted(args, key=lambda one: one is str))  # text fits everything: it comes last
    if origin in (tuple, list):
        return check(_literal(text), kind)
    if kind is bool:
        word = text.strip().lower()
        return _one_of(flag for flag, words in ((True, YES), (False, NO)) if word in words)
    if kind in (int, float):
        return check(kind(text), kind)
    raise ValueError(text)


def check(value: Any, kind: Any) -> Any:
    """Of a Python object, or of what JSON made of one: lists may stand for tuples. Raises ValueError."""
    if isinstance(kind, Other):
        return _one_of([value] if kind.fits(value) else [])
    if kind is Any:
        return _frozen(value)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return _one_of(option for option in args if option == value and type(option) is type(value))
    if origin in (types.UnionType, typing.Union):
        return _first(check, value, args)
    if origin in (tuple, list) and isinstance(value, list | tuple):
        return origin(check(item, args[0]) for item in value)
    if kind is float and isinstance(value, numbers.Real) and not isinstance(value, bool):
        return _finite(value)
    if kind is int and isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return _bounded(int(value))
    if kind is Path and isinstance(value, str | PurePath):
        return Path(check(str(value), str))
    if kind in (bool, NoneType) and isinstance(value, kind):
        return value
    if kind is str and isinstance(value, str) and is_text(value):
        return value
    raise ValueError(value)


def expected(kind: Any) -> str:
    """In words."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return " or ".join(map(str, args))
    if origin in (types.UnionType, typing.Union):
        return " or ".join(dict.fromkeys(expected(one) for one in args))
    if origin in (tuple, list):
        what = {int: "whole numbers", float: "numbers", bool: "booleans", str: "texts"}.get(args[0], "values")
        return f"a {origin.__name__} of {what}, such as {'(1, 2)' if origin is tuple else '[1, 2]'}"
    if isinstance(kind, Other):
        return f"a {type(kind.default).__name__}, which Python can give (wide.run(…, set=…)), but no text"
    words = {int: "a whole number", float: "a finite number", bool: "true or false", Path: "a path", NoneType: "none"}
    return words.get(kind, "finite numbers, or text" if kind is Any else "text")


def plain(value: Any) -> Any:
    """As JSON has it: what is no number, text or tuple of such is only named."""
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or _plain_kind(value) in (bool, str):
        return value
    if isinstance(value, numbers.Real) and not isinstance(value, enum.Enum):
        try:
            return check(value, int if isinstance(value, numbers.Integral) else float)
        except ValueError:
            return str(value)
    if isinstance(value, PurePath | enum.Enum):
        return str(value)
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__


def _known(annotation: Any) -> Any:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is None or any(annotation is kind for kind in (bool, int, float, str, Path, NoneType)):
        return NoneType if annotation is None else annotation
    if origin is Literal and all(isinstance(option, int | str) for option in args):
        return annotation
    if origin is typing.Annotated:
        return _known(args[0])
    if origin in (types.UnionType, typing.Union):
        known = [_known(one) for one in args]
        return None if None in known else typing.Union[tuple(known)]  # noqa: UP007  (of a number that is not known)
    if origin in (tuple, list) and args:
        items = {_known(one) for one in args if one is not Ellipsis}
        return None if None in items else origin[_common(items)]
    return None


def _plain_kind(value: Any) -> Any:
    if isinstance(value, enum.Enum):  # also if it is a number, or text
        return None
    return next((kind for kind in (bool, int, float, str, Path) if isinstance(value, kind)), None)


def _common(kinds: set[Any]) -> Any:
    """Of all items: numbers of both kinds are numbers."""
    return kinds.pop() if len(kinds) == 1 else float if kinds == {int, float} else Any


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        raise ValueError(text) from None


def _literal_or_text(text: str) -> Any:
    """A number that is too large, or not finite, is not taken for text."""
    if text in NOTHING:
        return None
    try:
        value = _literal(text)
    except ValueError:
        value = text
    is_number = isinstance(value, int | float | list | tuple)
    return _frozen(value) if is_number or value is None else check(value if isinstance(value, str) else text, str)


def _frozen(value: Any) -> Any:
    """In the one form that a value has when it has travelled."""
    if isinstance(value, list | tuple):
        return tuple(_frozen(item) for item in value)
    kind = _plain_kind(value)
    return value if kind is None else check(value, kind)


def _first(convert: Callable[[Any, Any], Any], value: Any, kinds: Iterable[Any]) -> Any:
    """What the first kind makes of it that can."""
    for kind in kinds:
        try:
            return convert(value, kind)
        except ValueError:
            continue
    raise ValueError(value)


def _one_of(fitting: Iterable[Any]) -> Any:
    for value in fitting:
        return value
    raise ValueError


def _finite(value: Any) -> float:
    try:
        return float(_one_of([number] if math.isfinite(number := float(value)) else []))
    except OverflowError:  # of a whole number
        raise ValueError(value) from None


def _bounded(number: int) -> int:
    return int(_one_of([number] if -MOST_INT <= number <= MOST_INT else []))
