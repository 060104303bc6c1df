"""Signatures of functions, read from source and compared without importing anything.

Owns what a call must look like for a function to accept it. Does not own where functions are found
(`vllm_source.py`, `stub_entries.py`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    has_default: bool


@dataclass(frozen=True, slots=True)
class Signature:
    """The parameters of a function, without the `self` or `cls` of a method.

    Attributes:
        positional: parameters that can be given by position, in order.
        num_positional_only: how many of them cannot be given by name.
        keyword_only: parameters that can be given by name only.
        varargs, kwargs: the names of `*args` and `**kwargs`, if there are any.
        is_async: it is a coroutine function.
        kind: "", "staticmethod", "classmethod" or "property".
    """

    positional: tuple[Parameter, ...]
    num_positional_only: int
    keyword_only: tuple[Parameter, ...]
    varargs: str | None
    kwargs: str | None
    is_async: bool
    kind: str

    def __iter__(self) -> Iterator[Parameter]:
        yield from self.positional
        yield from self.keyword_only

    def named(self, name: str) -> Parameter | None:
        """The parameter that a keyword argument of this name would go to."""
        by_name = (*self.positional[self.num_positional_only :], *self.keyword_only)
        return next((parameter for parameter in by_name if parameter.name == name), None)


def signature_of(function: Function, *, is_method: bool) -> Signature:
    """The signature of a function as it is written."""
    arguments = function.args
    kind = _kind_of(function)
    plain = [*arguments.posonlyargs, *arguments.args]
    num_without_default = len(plain) - len(arguments.defaults)
    positional = [
        Parameter(one.arg, number >= num_without_default) for number, one in enumerate(plain)
    ]
    num_positional_only = len(arguments.posonlyargs)
    if is_method and kind != "staticmethod" and positional:
        del positional[0]
        num_positional_only = max(0, num_positional_only - 1)
    keyword_only = [
        Parameter(one.arg, default is not None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return Signature(
        positional=tuple(positional),
        num_positional_only=num_positional_only,
        keyword_only=tuple(keyword_only),
        varargs=arguments.vararg.arg if arguments.vararg else None,
        kwargs=arguments.kwarg.arg if arguments.kwarg else None,
        is_async=isinstance(function, ast.AsyncFunctionDef),
        kind=kind,
    )


def differences(used: Signature, actual: Signature) -> list[str]:
    """Why calls that fit `used` may fail on a function with the signature `actual`."""
    problems = []
    names = [one.name for one in actual.positional]
    for position, parameter in enumerate(used.positional):
        if position < used.num_positional_only:
            if position >= len(names) and actual.varargs is None:
                problems.append(f"it takes {len(names)} positional arguments")
        elif parameter.name in names:
            if names.index(parameter.name) != position:
                problems.append(f"{parameter.name!r} is parameter {names.index(parameter.name)}")
        elif actual.named(parameter.name) is not None:
            problems.append(f"{parameter.name!r} is keyword-only")
        elif actual.varargs is None:
            problems.append(f"there is no parameter {parameter.name!r}")
    for parameter in used.keyword_only:
        if actual.named(parameter.name) is None and actual.kwargs is None:
            problems.append(f"there is no parameter {parameter.name!r}")
    used_names = {parameter.name: parameter for parameter in used}
    given_by_position = names[: used.num_positional_only]
    for parameter in actual:
        if parameter.has_default or parameter.name in given_by_position:
            continue
        if parameter.name not in used_names:
            if not (used.varargs or used.kwargs):
                problems.append(f"{parameter.name!r} is required")
        elif used_names[parameter.name].has_default:
            problems.append(f"{parameter.name!r} has no default")
    if used.kind != actual.kind:
        problems.append(f"it is {_article(actual.kind)}, not {_article(used.kind)}")
    if used.is_async and not actual.is_async:
        problems.append("it is not a coroutine function")
    return problems


def _article(kind: str) -> str:
    return {"": "a method", "property": "a property"}.get(kind, f"a {kind}")


def _kind_of(function: Function) -> str:
    for decorator in function.decorator_list:
        name = decorator.attr if isinstance(decorator, ast.Attribute) else decorator
        name = name.id if isinstance(name, ast.Name) else name
        if name in ("staticmethod", "classmethod"):
            return str(name)
        if name in ("property", "cached_property", "abstractproperty"):
            return "property"
    return ""
