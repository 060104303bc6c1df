"""The workloads: each is a program of the language, its inputs, and the server it is meant for.

Owns the list. A new workload is a `Workload` in a module of this folder, with an entry in
`workloads.toml`; a module may have several. Knows no server: the same inputs go to both arms.
"""

from __future__ import annotations

import importlib
import pkgutil

from benchmarks.ab.workloads.base import TABLE, Workload

_FOUND = {
    value.name: value
    for module in pkgutil.iter_modules(__path__, f"{__name__}.")
    for value in vars(importlib.import_module(module.name)).values()
    if isinstance(value, Workload)
}
WORKLOADS = {name: _FOUND[name] for name in TABLE}

__all__ = ["WORKLOADS", "Workload"]
