"""What tracing may call: functions and methods without side effects.

Owns the lists, and the test whether a value is plain data, on which operators run no code but
Python's own. Tracing calls nothing that is not listed here.
"""

from __future__ import annotations

import collections
import datetime
import enum
import importlib
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any  # Any: functions of any signature

from sgl_vllm.lang.ir import Value

_FUNCTIONS: dict[str, str] = {
    "builtins": "abs all any ascii bin bool bytes chr complex dict divmod enumerate float format "
    "frozenset hex int isinstance issubclass len list max min oct ord pow range repr reversed "
    "round set slice sorted str sum tuple zip",
    "json": "dumps loads",
    "re": "compile escape findall fullmatch match search split sub subn",
    "textwrap": "dedent fill indent shorten wrap",
    "math": "ceil comb cos dist exp fabs factorial floor fmod fsum gcd hypot isclose isfinite "
    "isinf isnan isqrt lcm log log10 log1p log2 perm pow prod sin sqrt tan trunc",
    "html": "escape unescape",
    "itertools": "chain chain.from_iterable combinations combinations_with_replacement islice "
    "pairwise permutations product zip_longest",
    "statistics": "fmean mean median mode multimode pstdev stdev",
    "posixpath": "basename dirname join normpath splitext",
    "urllib.parse": "quote quote_plus unquote unquote_plus urlencode urljoin",
    "base64": "b64decode b64encode urlsafe_b64decode urlsafe_b64encode",
    "copy": "copy deepcopy",
    "datetime": "date datetime time timedelta date.fromisoformat datetime.fromisoformat "
    "datetime.strptime",
}


def _public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


# Pure methods by type, and those that change the object itself.
_METHODS: dict[type, list[str]] = {
    str: _public(str),
    bytes: _public(bytes),
    bool: [],
    int: _public(int),
    float: _public(float),
    list: ["copy", "count", "index"],
    tuple: _public(tuple),
    range: ["count", "index"],
    dict: ["copy", "get", "items", "keys", "values"],
    set: _public(frozenset),
    frozenset: _public(frozenset),
    re.Pattern: ["findall", "finditer", "fullmatch", "match", "search", "split", "sub", "subn"],
    re.Match: ["end", "expand", "group", "groupdict", "groups", "span", "start"],
    datetime.date: ["isoformat", "isoweekday", "replace", "strftime", "toordinal", "weekday"],
    datetime.datetime: ["date", "isoformat", "replace", "strftime", "time", "timestamp"],
    datetime.time: ["isoformat", "replace", "strftime"],
    datetime.timedelta: ["total_seconds"],
}
_MUTATORS: dict[type, list[str]] = {
    kind: ["__setitem__", *(name for name in _public(kind) if name not in _METHODS[kind])]
    for kind in (list, dict, set)
}
PURE_METHOD_NAMES = frozenset(name for names in _METHODS.values() for name in names)

CONTAINERS = frozenset({list, tuple, dict, set, frozenset})
_SCALARS = {
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
    *(re.Pattern, re.Match, uuid.UUID, pathlib.PurePosixPath, pathlib.PosixPath),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta),
}


def pure_name(function: object) -> str | None:
    """The name of a listed function, such as "json.dumps", or of a method of a plain type, such as
    ".lower" for ``str.lower``; None for any other object."""
    if isinstance(function, types.MethodDescriptorType):
        is_listed = function.__name__ in _METHODS.get(function.__objclass__, ())
        return f".{function.__name__}" if is_listed else None
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType, type)):
        return None
    name, module = function.__qualname__, function.__module__
    # Functions in C may name a private module, or none.
    homes = [module, module.removeprefix("_")] if module else ["itertools", "datetime"]
    for home in homes:
        if name in _FUNCTIONS.get(home, "").split() and home in sys.modules:
            found = _find(sys.modules[home], name)
            if found is function or (
                isinstance(found, types.BuiltinMethodType) and found == function
            ):
                return f"{home}.{name}"
    return None


def pure_function(name: str) -> Callable[..., Any]:
    """The listed function of a name that `pure_name` gave. KeyError for any other name."""
    for home, names in _FUNCTIONS.items():
        if name.startswith(f"{home}.") and name.removeprefix(f"{home}.") in names.split():
            return _find(importlib.import_module(home), name.removeprefix(f"{home}."))
    raise KeyError(name)


def _find(module: types.ModuleType, name: str) -> Value:
    found: Value = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def method_owner(value: object, name: str) -> type | None:
    """The plain type whose method `name` a call on `value` would run; None if there is none."""
    kind = type(value)
    for plain in kind.__mro__:
        if plain in _METHODS and name in (*_METHODS[plain], *_MUTATORS.get(plain, ())):
            return plain if getattr(kind, name) is getattr(plain, name) else None
    return None


def is_mutator(owner: type, name: str) -> bool:
    """Whether the method changes its object."""
    return name in _MUTATORS.get(owner, ())


def call_pure_method(name: str) -> Callable[..., Any]:
    """A function that calls the method `name` of its first argument.

    That raises TypeError unless the argument is plain data.
    """

    def call(owner: Value, /, *args: Any, **kwargs: Any) -> Value:
        plain = method_owner(owner, name)
        if plain is None or is_mutator(plain, name):
            raise TypeError(
                f"a traced program calls methods of plain data only, not {type(owner).__name__}."
                f"{name}: pass the result as an argument, or use sgl.tool(...)"
            )
        return getattr(owner, name)(*args, **kwargs)

    return call


def is_plain_scalar(value: object) -> bool:
    """Whether operators and formatting run only Python's own code on `value`."""
    kind = type(value)
    return kind in _SCALARS or (isinstance(value, enum.Enum) and _adds_no_code(kind))


def is_plain_container(value: object) -> bool:
    """Whether it is a list, tuple, dict or set, or a named tuple without code of its own."""
    kind = type(value)
    return kind in CONTAINERS or (isinstance(value, tuple) and _adds_no_code(kind))


_SPECIAL_NAMES = frozenset(
    f"__{name}__"
    for name in (
        *("add", "bool", "contains", "eq", "format", "ge", "getattribute", "getitem", "gt", "hash"),
        *("iter", "le", "len", "lt", "mod", "mul", "ne", "radd", "repr", "rmul", "str"),
    )
)
_NAMED_TUPLE_REPR = collections.namedtuple("_Empty", ()).__repr__.__code__


def _adds_no_code(kind: type) -> bool:
    """Whether all that operators and formatting call on it is Python's own."""
    for ancestor in kind.__mro__:
        if ancestor.__module__ in ("builtins", "enum"):
            continue
        for name in _SPECIAL_NAMES & vars(ancestor).keys():
            method = vars(ancestor)[name]
            if isinstance(method, (types.FunctionType, classmethod)) and not (
                method.__module__ == "enum"
                or getattr(method, "__code__", None) is _NAMED_TUPLE_REPR
            ):
                return False
    return True
