"""xgrammar without torch and transformers, for a process that compiles and does nothing else.

Its package imports both, for bitmasks on a device and for tokenizers: seconds, and 250 MB. The
compiler needs neither. So empty modules stand in for them in this process. If the import then
fails, as it may with another version of xgrammar, it is imported as it is.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any  # Any: what is imported by name

_NOT_NEEDED = ("torch", "transformers")


class _Empty(ModuleType):
    """A module that has every name. What it has takes any arguments, and does nothing."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": lambda self, *args, **kwargs: None})


def import_alone() -> Any:
    """The package. Call this only in a process that needs neither torch nor transformers."""
    modules: dict[str, Any] = sys.modules
    before = {*modules}
    try:
        modules["torch"] = None  # tvm_ffi, by which xgrammar calls C++, does without
        importlib.import_module("tvm_ffi")
        for name in _NOT_NEEDED:
            modules[name] = _Empty(name)
        return importlib.import_module("xgrammar")
    except Exception:
        for name in {*sys.modules} - before:
            if name.partition(".")[0] in ("xgrammar", "tvm_ffi", *_NOT_NEEDED):
                del sys.modules[name]
        return importlib.import_module("xgrammar")
