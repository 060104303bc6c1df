"""Stand-ins for packages that are missing here: enough to import a program for its `--help`."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from unittest.mock import MagicMock


def with_stand_ins(run: Callable[[], object]) -> None:
    """Call `run`, and again with a stand-in for each package that it does not find."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        while finder.misses_one_of(run):
            pass
    finally:
        sys.meta_path.remove(finder)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages in `_names`, and any module in them."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def misses_one_of(self, run: Callable[[], object]) -> bool:
        """Whether `run` misses a package, which is found from now on."""
        try:
            run()
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if not package or package in self._names:
                raise
            self._names.add(package)
            return True
        return False

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self._names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _StandIn(ModuleType):
    """A module from which any name can be imported."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")
