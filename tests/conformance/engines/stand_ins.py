"""Modules that the engines import on the way to their parsers, replaced by empty ones.

Kernels, grammars and codecs decide nothing that a plan says, and bring gigabytes. Every attribute of a stand-in is a
class that does nothing; a parser that asked one a question would fail loudly in most cases, and silently in none that
the suites rest on: what they compare are flags and sizes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterable
from typing import Any


class _Members(type):
    """Members of a stand-in class: an enumeration's values, a class method …"""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class Nothing(metaclass=_Members):
    """Takes any arguments, is falsy, and returns itself where it is called."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *args: Any, **__: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self  # a decorator keeps what it decorates

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()


class _StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Members(name, (Nothing,), {"__module__": self.__name__}) if name[:1].isupper() else Nothing()
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)

    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if any(name == known or name.startswith(f"{known}.") for known in self.names):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__version__ = "0"


def install(*names: str) -> None:
    """Answer imports of ``names`` and of what lies below them with stand-ins."""
    sys.meta_path.insert(0, _Finder(names))
