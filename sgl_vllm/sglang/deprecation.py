"""Warnings about what SGLang has, and for which there is something better here."""

from __future__ import annotations

import warnings

_warned: set[str] = set()


def deprecated(what: str, instead: str) -> None:
    """Warn the caller of the caller, once per process, that `what` is deprecated and what to do
    instead."""
    if what not in _warned:
        _warned.add(what)
        warnings.warn(f"{what} is deprecated: {instead}", DeprecationWarning, stacklevel=3)
