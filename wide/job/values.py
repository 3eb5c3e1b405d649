"""Hyperparameters: a job may be a function with defaults, `def job(lr=0.1, width=128) -> wide.Job`, and `--set lr=0.3`
fills them in. Which values such a function is called with, and what is wrong with those that were given. Calls nothing.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from wide.errors import UsageError
from wide.job import kinds
from wide.job.definition import Job
from wide.job.spec import TEXT, TOLD, Given, shown, written

VARIOUS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # *args, **kwargs: nobody can name them
EMPTY = inspect.Parameter.empty

Function = Callable[..., Any]
Values = dict[str, Any]


def is_function(value: object) -> TypeGuard[Function]:
    """Can it be what makes a job? A class cannot: nobody would know what calling it gives."""
    return callable(value) and not isinstance(value, type | Job)


class Filling:
    """A function's parameters, and the words for what does not fit them. `where` is its file, `name` what it is called
    there, `option` how values are given: `--set`, or `set=` in Python.
    """

    def __init__(self, function: Function, where: str, name: str, option: str) -> None:
        self.parameters = _parameters(function)
        self._name, self._where, self._option = name, where, option
        self._globals = getattr(_innermost(function), "__globals__", {})

    def fill(self, given: Mapping[str, Given]) -> Values:
        """A value for each parameter. What a run, or a pool, remembers of one that is there no more is left out."""
        for name, one in given.items():
            if name not in self.parameters and one.how != TOLD:
                self._unknown(name)
        values = {}
        for name, parameter in self.parameters.items():
            if name in given:
                values[name] = self._value(parameter, given[name])
            elif parameter.default is EMPTY:
                raise UsageError(f"{self._where}: {self._name}() needs {name}: say {self._say(name, '…')}")
            else:
                values[name] = parameter.default
        return values

    def split(self, values: Values) -> tuple[list[Any], Values]:
        """As a call takes them: by place, and by name."""
        by_place = [name for name, one in self.parameters.items() if one.kind is one.POSITIONAL_ONLY]
        return [values[name] for name in by_place], {k: v for k, v in values.items() if k not in by_place}

    def _value(self, parameter: inspect.Parameter, given: Given) -> Any:
        value, default = given.value, parameter.default
        if given.how == TOLD and default is not EMPTY and value == kinds.plain(default):
            return default  # which JSON may only name
        kind = kinds.kind_of(self._annotation(parameter), default, default is not EMPTY)
        try:
            return kinds.parse(value, kind) if given.how == TEXT else kinds.check(value, kind)
        except ValueError:
            is_long = isinstance(value, int | str) and re.fullmatch(r"[+-]?\d{19,}", str(value)[:4096])
            wanted = kinds.expected(kind) + " of at most 64 bits" * bool(is_long)
            usual = written({parameter.name: _usual(parameter)}) if default is not EMPTY else parameter.name
            where = f"{self._where}: {self._name}({usual})"
            raise UsageError(f"{self._say(parameter.name, shown(value))}: expected {wanted} ({where})") from None

    def _say(self, name: str, value: str) -> str:
        return f"--set {name}={value}" if self._option == "--set" else f"{self._option}{{{name!r}: {value}}}"

    def _annotation(self, parameter: inspect.Parameter) -> Any:
        """Modules that put annotations off have them as text; one that cannot be made out says nothing."""
        if not isinstance(parameter.annotation, str):
            return parameter.annotation
        try:
            return eval(parameter.annotation, self._globals)  # the user's own code, as everything in that module
        except Exception:
            return EMPTY

    def _unknown(self, name: str) -> NoReturn:
        close = difflib.get_close_matches(name, self.parameters, 1)
        hint = f"did you mean {close[0]}? " if close else ""
        usual = {key: _usual(one) for key, one in self.parameters.items()}
        has = f"it has {written(usual)}" if usual else "it names no parameters (a decorator needs functools.wraps)"
        raise UsageError(f"{self._where}: {self._name}() has no {shown(name)}; {hint}{has}")


def _usual(parameter: inspect.Parameter) -> Any:
    """Its default, as it is shown."""
    default = parameter.default
    return "…" if default is EMPTY else default if isinstance(default, tuple) else kinds.plain(default)


def name_of(function: Function) -> str:
    return str(getattr(_innermost(function), "__name__", "job"))


def line_of(function: Function) -> tuple[Path, int]:
    """Where it is written."""
    code = getattr(_innermost(function), "__code__", None)
    return (Path(code.co_filename), code.co_firstlineno) if code is not None else (Path(name_of(function)), 1)


def _parameters(function: Function) -> dict[str, inspect.Parameter]:
    """Those that can be named."""
    try:
        found = inspect.signature(function).parameters
    except (ValueError, TypeError):  # made in C
        return {}
    return {name: one for name, one in found.items() if one.kind not in VARIOUS}


def _innermost(function: Any) -> Any:
    """The function behind decorators, partials, methods, and objects that can be called."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif inspect.ismethod(function):
            function = function.__func__
        else:
            return function if inspect.isroutine(function) else type(function).__call__
