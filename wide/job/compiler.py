"""torch's compiler, put off until somebody wants it. The first optimizer imports it, which takes a second and 85 MB in
each process, for two functions that do nothing unless something is being compiled. Knows torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

import torch

NAME = "torch._dynamo"


class _Later(types.ModuleType):
    """In the compiler's place; whatever else is asked of it, it is the compiler itself that answers."""

    def graph_break(self, msg: str = "") -> None:
        """Nothing is being compiled."""

    def disable(self, fn: Any = None, *arguments: Any, **options: Any) -> Any:
        """An optimizer's own functions may stay as they are; for whoever else asks, the compiler decides."""
        if str(getattr(fn, "__module__", "")).startswith("torch.optim."):
            return fn
        return self.__getattr__("disable")(fn, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":
            raise AttributeError(name)
        if sys.modules.get(NAME) is self:
            del sys.modules[NAME]
        return getattr(importlib.import_module(NAME), name)


def put_off() -> None:
    """For processes of our own: in a user's, nothing is put in the place of anything."""
    if NAME not in sys.modules:
        later = _Later(NAME)
        later.__spec__ = importlib.util.find_spec(NAME)
        sys.modules[NAME] = later
        setattr(torch, NAME.rpartition(".")[2], later)
