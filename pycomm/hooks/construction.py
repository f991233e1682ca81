"""Watching the construction of classes whose packages a script may import later, or never."""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Act = Callable[[Any], None]


def after_construction(module: str, name: str, act: Act) -> None:
    """Call a function with every object of a class, at the end of its `__init__`.

    Args:
        module: full name of the class's module, which is imported already, later, or never.
        name: name of the class.
        act: the function; not called for a class that this version of the module does not have.
    """
    if (loaded := sys.modules.get(module)) is not None:
        _patch(loaded, name, act)
    else:
        sys.meta_path.insert(0, _Finder(module, lambda made: _patch(made, name, act)))


def _patch(module: ModuleType, name: str, act: Act) -> None:
    found = getattr(module, name, None)
    if found is None:
        return
    construct = found.__init__

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)
        act(self)

    found.__init__ = __init__


class _Finder(MetaPathFinder):
    """Finds one module as the others do, and acts when it has been executed."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:  # who asks may not import, or in vain
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Acting(spec.loader, self._act)
        return spec


class _Acting(Loader):
    """A loader that acts on the module after another loader has executed it."""

    def __init__(self, loader: Loader, act: Callable[[ModuleType], None]) -> None:
        self._loader, self._act = loader, act

    def __getattr__(self, name: str) -> Any:  # get_source, get_data and others
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._act(module)
