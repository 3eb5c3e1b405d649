"""What a job's functions and objects can reach: attributes, closures, the globals that their code names. So generators
of the user's own are found, to be seeded; and what is kept from batch to batch can be named.

Knows Python objects; runs none of the user's code. Looks at a bounded number of objects, the nearest first.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import random
import re
import sys
import sysconfig
import types
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

MOST_OBJECTS = 20_000
MOST_ITEMS = 64  # of one container: a list of a million samples is data, not state
DEEPEST = 4  # modules within modules
HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")  # of a tensor
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
LEAVES = (str, bytes, int, float, complex, type(None), torch.Tensor, torch.dtype, torch.device, np.generic, np.ndarray)
PLAIN = (
    bool,
    int,
    float,
    str,
    type(None),
    np.generic,
    torch.Tensor,
    np.ndarray,
    list,
    dict,
    set,
    deque,
    itertools.count,
)
KNOWN = frozenset(nn.Module().__dict__)  # what every module has: looked at one by one, or by others, or hooks
LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})


class Place(NamedTuple):
    """Where something is kept: in a namespace, a closure's cell, or as an attribute. A list is only a hand that holds
    what has no place of its own.
    """

    name: str  # as a person would write it: model.teacher.calls
    owner: Any
    key: Any

    def get(self) -> Any:
        if isinstance(self.owner, dict | list):
            return self.owner[self.key]
        return getattr(self.owner, self.key)

    @property
    def identity(self) -> tuple[int, Any]:
        return (id(self.owner[0]), "") if isinstance(self.owner, list) else (id(self.owner), self.key)

    def set(self, value: Any) -> None:
        if isinstance(self.owner, dict | list):
            self.owner[self.key] = value
        else:
            setattr(self.owner, self.key, value)


class Found(NamedTuple):
    generators: list[Any]  # but for the global ones
    places: list[Place]  # of plain values
    files: list[str]  # the user's own code
    caches: list[Any]  # functions that remember what they have returned
    numbers: set[int]  # that the user's code names: what a counter may be compared with


def reach(bound: Collection[tuple[int, str]] = (), **roots: Any) -> Found:
    """All that can be reached from these, the nearest first, in an order that is the same on every machine. `bound` are
    the namespaces of parameters and buffers that are restored for every batch: they are nobody's state.
    """
    found = Found([], [], [], [], set())
    seen: set[int] = set()
    waiting: deque[tuple[str, Any]] = deque((name, root) for name, root in roots.items() if root is not None)
    while waiting and len(seen) < MOST_OBJECTS:
        name, thing = waiting.popleft()
        if id(thing) in seen or isinstance(thing, LEAVES):
            continue
        seen.add(id(thing))
        if isinstance(thing, GENERATORS):
            if not _is_global(thing):
                found.generators.append(thing)
            continue
        if isinstance(thing, functools._lru_cache_wrapper):
            found.caches.append(thing)
        if isinstance(thing, types.FunctionType) and _is_users(thing.__code__.co_filename):
            found.files.append(thing.__code__.co_filename)
            found.numbers.update(_numbers(thing.__code__))
        for place in _inside(name, thing, bound):
            try:
                value = place.get()
            except Exception:  # an empty cell, gone meanwhile, or a descriptor that raises
                continue
            if isinstance(value, PLAIN):
                found.places.append(place)
            if type(value) is int:
                found.numbers.add(value)
            waiting.append((place.name, value))
    return found


def namespaces(model: nn.Module) -> set[tuple[int, str]]:
    """Where a model keeps its parameters and buffers: `bound`, for `reach`."""
    owners = [m._parameters for m in model.modules()] + [m._buffers for m in model.modules()]
    return {(id(owner), key) for owner in owners for key, value in owner.items() if value is not None}


def line_of(place: Place, found: Found) -> str:
    """Where it is changed, as far as a look at the source tells: `net.py:42`; empty if that is not to be seen."""
    name = re.escape(place.name.rpartition(".")[2])
    change = re.compile(
        rf"\b{name}\b(\[.*?\])?\s*([-+*/|&%@]|//|\*\*)?=[^=]|\b{name}\.(append|add|update|extend|pop|clear|insert|\w+_)\("
    )
    for file in dict.fromkeys(found.files):
        function = ""
        try:
            lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:  # typed into a notebook
            continue
        for number, line in enumerate(lines, 1):
            if match := re.match(r"\s*(?:def (\w+)|class )", line):
                function = match[1] or ""
            if function not in ("", "__init__") and change.search(line):
                return f"{Path(file).name}:{number}"
    return ""


def _inside(name: str, thing: Any, bound: Collection[tuple[int, str]]) -> Iterator[Place]:
    if isinstance(thing, types.ModuleType):
        return
    if isinstance(thing, types.FunctionType):
        yield from _of_function(name, thing)
    elif isinstance(thing, types.MethodType):
        yield from _these(name, thing.__self__, thing.__func__)
    elif isinstance(thing, functools.partial):
        yield from _these(name, thing.func, thing.args, thing.keywords)
    elif isinstance(thing, dict):
        yield from _these(f"{name}[…]", *(value for value in thing.values() if isinstance(value, GENERATORS)))
        for key in list(thing)[:MOST_ITEMS]:
            yield Place(f"{name}[{key!r}]" if isinstance(key, str | int) else f"{name}[…]", thing, key)
    elif isinstance(thing, list | tuple | set | frozenset | deque):
        items = list(thing)
        generators = (item for item in items[MOST_ITEMS:] if isinstance(item, GENERATORS))
        yield from _these(f"{name}[…]", *items[:MOST_ITEMS], *generators)
    elif isinstance(thing, type):
        yield from _of_class(thing)
    else:
        yield from _of_object(name, thing, bound)


def _these(name: str, *things: Any) -> Iterator[Place]:
    """What has no place that could be written to."""
    for thing in things:
        if not isinstance(thing, LEAVES):
            yield Place(name, [thing], 0)


def _of_object(name: str, thing: Any, bound: Collection[tuple[int, str]]) -> Iterator[Place]:
    try:
        attributes = object.__getattribute__(thing, "__dict__")
    except AttributeError:
        attributes = None
    if isinstance(attributes, dict):
        hidden = KNOWN if isinstance(thing, nn.Module) else ()
        for key in [key for key in attributes if key not in hidden or (key.endswith("_hooks") and attributes[key])]:
            yield Place(f"{name}.{key}", attributes, key)
    for base in type(thing).__mro__:
        slots = vars(base).get("__slots__", ())
        for key in [slots] if isinstance(slots, str) else list(slots):
            if not key.startswith("__"):
                yield Place(f"{name}.{key}", thing, key)
    if isinstance(thing, nn.Module):
        for key, child in thing._modules.items():
            yield from _these(f"{name}.{key}", child)
        for owner in (thing._parameters, thing._buffers):
            for key, tensor in owner.items():
                if (id(owner), key) not in bound:
                    yield Place(f"{name}.{key}", owner, key)
                for hooks in HOOKS:
                    yield from _these(f"a hook of {name}.{key}", *(getattr(tensor, hooks, None) or {}).values())
    yield from _these(type(thing).__name__, type(thing), inspect.getattr_static(thing, "__wrapped__", None))


def _of_class(kind: type) -> Iterator[Place]:
    """The methods of a class of the user's, and what it keeps for all of its objects."""
    for base in kind.__mro__:
        if not _is_users(getattr(sys.modules.get(base.__module__), "__file__", None)) or base is object:
            continue
        for key, value in list(vars(base).items()):
            inner = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
            function = inspect.unwrap(inner) if callable(inner) else None
            if isinstance(function, types.FunctionType):
                yield from _these(f"{base.__name__}.{key}", function)
            elif not key.startswith("__") and isinstance(value, (*PLAIN, *GENERATORS)):
                yield Place(f"{base.__name__}.{key}", base, key)


def _of_function(name: str, function: types.FunctionType) -> Iterator[Place]:
    for key, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        yield Place(key, cell, "cell_contents")
    yield from _these(f"a default of {name}", *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    for key in list(function.__dict__):
        yield Place(f"{function.__name__}.{key}", function.__dict__, key)
    if not _is_users(function.__code__.co_filename):
        return
    names = sorted(_names(function.__code__))
    for key in names:
        if key in function.__globals__:
            yield Place(key, function.__globals__, key)
        for module in (function.__globals__.get(key), sys.modules.get(key)):  # or it is imported by the function itself
            yield from _of_module(key, module, names, 0)


def _of_module(name: str, module: Any, names: list[str], depth: int) -> Iterator[Place]:
    """What code that has these names can mean by `helpers.augment.calls`."""
    is_one = isinstance(module, types.ModuleType) and _is_users(getattr(module, "__file__", "builtin"))
    if not is_one or depth == DEEPEST:
        return
    for key in names:
        if key in vars(module):
            yield Place(f"{name}.{key}", vars(module), key)
            yield from _of_module(f"{name}.{key}", vars(module)[key], names, depth + 1)


def _names(code: types.CodeType) -> set[str]:
    """All that this code, and functions within it, look up by name."""
    inner = [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return set(code.co_names).union(*(_names(constant) for constant in inner))


def _numbers(code: types.CodeType) -> set[int]:
    """Whole numbers that stand in this code, and in functions within it."""
    found = {constant for constant in code.co_consts if type(constant) is int}
    return found.union(*(_numbers(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _is_users(file: str | None) -> bool:
    """Not of Python or of an installed library. What was typed into a notebook is the user's."""
    return file is None or not file.startswith((*LIBRARIES, "builtin", "<frozen"))


def _is_global(generator: Any) -> bool:
    """Or one that nobody can seed."""
    known = (torch.default_generator, random._inst, np.random.mtrand._rand)
    return any(generator is one for one in known) or isinstance(generator, random.SystemRandom)
