"""What may be called while a program is only traced: functions and methods without side effects.

Owns the lists. A callable that is not in them is not called, however harmless it looks.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import fractions
import operator
import pathlib
import re
import sys
import types
import uuid
from collections.abc import Callable
from typing import Any

_FUNCTIONS: dict[str, str] = {
    "builtins": "abs all any ascii bin bool bytes chr complex dict divmod enumerate float format "
    "frozenset hex int isinstance issubclass len list max min oct ord pow range repr reversed "
    "round set slice sorted str sum tuple type zip",
    "json": "dumps loads",
    "re": "compile escape findall fullmatch match search split sub subn",
    "textwrap": "dedent fill indent shorten wrap",
    "math": "ceil comb cos dist exp fabs factorial floor fmod fsum gcd hypot isclose isfinite "
    "isinf isnan isqrt lcm log log10 log1p log2 perm pow prod sin sqrt tan trunc",
    "html": "escape unescape",
    "string": "capwords",
    "itertools": "chain chain.from_iterable combinations combinations_with_replacement islice "
    "pairwise permutations product zip_longest",
    "operator": "add and_ contains eq ge getitem gt le lt mod mul ne neg not_ or_ sub truediv "
    "floordiv itemgetter",
    "statistics": "fmean mean median mode multimode pstdev stdev",
    "posixpath": "basename dirname join normpath splitext",
    "urllib.parse": "quote quote_plus unquote unquote_plus urlencode urljoin",
    "base64": "b64decode b64encode urlsafe_b64decode urlsafe_b64encode",
    "unicodedata": "category name normalize",
    "copy": "copy deepcopy",
    "datetime": "date datetime time timedelta date.fromisoformat datetime.fromisoformat "
    "datetime.strptime",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "collections": "Counter OrderedDict",
}

# Pure methods by type, and those that change the object itself.
_STR = [name for name in dir(str) if not name.startswith("_")]
_SET = [name for name in dir(frozenset) if not name.startswith("_")]
_METHODS: dict[type, list[str]] = {
    str: _STR,
    bytes: [name for name in dir(bytes) if not name.startswith("_")],
    bool: [],
    int: [name for name in dir(int) if not name.startswith("_")],
    float: [name for name in dir(float) if not name.startswith("_")],
    list: ["copy", "count", "index"],
    tuple: ["count", "index"],
    range: ["count", "index"],
    dict: ["copy", "get", "items", "keys", "values"],
    set: _SET,
    frozenset: _SET,
    re.Pattern: ["findall", "finditer", "fullmatch", "match", "search", "split", "sub", "subn"],
    re.Match: ["end", "expand", "group", "groupdict", "groups", "span", "start"],
    datetime.date: ["isoformat", "isoweekday", "replace", "strftime", "toordinal", "weekday"],
    datetime.datetime: ["date", "isoformat", "replace", "strftime", "time", "timestamp"],
    datetime.time: ["isoformat", "replace", "strftime"],
    datetime.timedelta: ["total_seconds"],
    decimal.Decimal: ["normalize", "quantize", "to_integral_value"],
    fractions.Fraction: ["limit_denominator"],
}
_MUTATORS: dict[type, list[str]] = {
    list: ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"],
    dict: ["clear", "pop", "popitem", "setdefault", "update"],
    set: [name for name in dir(set) if not name.startswith("_") and name not in _SET],
}

_SCALARS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    range,
    slice,
    type(...),
    re.Pattern,
    re.Match,
    datetime.date,
    datetime.datetime,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
    uuid.UUID,
    operator.itemgetter,
    pathlib.PurePosixPath,
    pathlib.PosixPath,
)
_SCALAR_TYPES = frozenset(_SCALARS)
CONTAINERS = frozenset({list, tuple, dict, set, frozenset})

# They look at no element, so that elements may be unknown.
STRUCTURAL_FUNCTIONS = frozenset({enumerate, len, list, reversed, tuple, zip, range})
STRUCTURAL_METHODS = frozenset(
    {(list, name) for name in ("append", "clear", "copy", "extend", "insert", "pop", "reverse")}
    | {(dict, name) for name in ("clear", "copy", "get", "items", "keys", "pop", "setdefault")}
    | {(dict, name) for name in ("update", "values")}
)

# What they return is a new object. Of others (dict.get, max, ...) it may be somebody else's.
_FRESH_FUNCTIONS = frozenset({dict, list, set, sorted, tuple, enumerate, zip, reversed, frozenset})


def is_pure_function(function: object) -> bool:
    """Whether `function` is one of the listed functions (or a method of a plain type, such as
    ``str.lower``)."""
    if isinstance(function, types.MethodDescriptorType):
        return function.__name__ in _METHODS.get(function.__objclass__, ())
    if not isinstance(function, (types.FunctionType, types.BuiltinFunctionType, type)):
        return False
    name = getattr(function, "__qualname__", None)
    module = getattr(function, "__module__", None)
    if not isinstance(name, str):
        return False
    for home in _homes(module, name):
        found: Any = sys.modules.get(home)
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is function or (isinstance(found, types.BuiltinMethodType) and found == function):
            return True
    return False


def _homes(module: object, name: str) -> list[str]:
    # C functions may say another module than that which people import.
    candidates = [module] if isinstance(module, str) else ["itertools", "datetime"]
    if isinstance(module, str) and module.startswith("_"):
        candidates.append(module[1:])
    return [home for home in candidates if name in _FUNCTIONS.get(home, "").split()]


def returns_new_object(function: object) -> bool:
    """Whether a list, dict or set that it returns is nobody else's."""
    if getattr(function, "__module__", None) in ("json", "re", "copy", "textwrap"):
        return True
    return any(function is known for known in _FRESH_FUNCTIONS)


def method_owner(value: object, name: str) -> type | None:
    """The plain type whose method `name` a call on `value` would run, None if it is not one."""
    kind = type(value)
    for plain in kind.__mro__:
        if plain in _METHODS and name in (*_METHODS[plain], *_MUTATORS.get(plain, ())):
            return plain if getattr(kind, name) is getattr(plain, name) else None
    return None


def is_mutator(owner: type, name: str) -> bool:
    """Whether the method changes the object itself."""
    return name in _MUTATORS.get(owner, ())


PURE_METHOD_NAMES = frozenset(name for names in _METHODS.values() for name in names)


def call_pure_method(name: str) -> Callable[..., Any]:
    """A function that calls the method `name` of its first argument, which must be plain data."""

    def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
        plain = method_owner(owner, name)
        if plain is None or is_mutator(plain, name):
            raise TypeError(
                f"a traced program calls methods of plain data only, not {type(owner).__name__}."
                f"{name}: give the program the result, or call it with sgl.tool(...)"
            )
        return getattr(owner, name)(*args, **kwargs)

    return call


def is_plain_scalar(value: object) -> bool:
    """Whether an operator, or formatting, runs nobody's code on it."""
    kind = type(value)
    if kind in _SCALAR_TYPES:
        return True
    if isinstance(value, BaseException):
        return kind.__module__ == "builtins"
    return isinstance(value, enum.Enum) and _adds_no_code(kind)


_SPECIAL_NAMES = frozenset(
    f"__{name}__"
    for name in (
        *("add", "bool", "contains", "eq", "format", "ge", "getattribute", "getitem", "gt", "hash"),
        *("iter", "le", "len", "lt", "mod", "mul", "ne", "radd", "repr", "rmul", "str"),
    )
) | {"_missing_"}


def _adds_no_code(kind: type) -> bool:
    """Whether all that operators and formatting call of it is Python's own."""
    for ancestor in kind.__mro__:
        if ancestor.__module__ in ("builtins", "enum"):
            continue
        for name, value in vars(ancestor).items():
            is_code = isinstance(value, (types.FunctionType, classmethod))
            if is_code and name in _SPECIAL_NAMES and not _is_pythons_own(value):
                return False
    return True


def _is_pythons_own(method: Any) -> bool:
    code = getattr(method, "__code__", None)
    return method.__module__ == "enum" or code is _EMPTY_NAMED_TUPLE.__repr__.__code__


_EMPTY_NAMED_TUPLE = collections.namedtuple("_EMPTY_NAMED_TUPLE", ())


def makes_members(kind: enum.EnumMeta) -> bool:
    """Whether looking up a member of the Enum by its value runs nobody's code."""
    return _adds_no_code(kind)


def is_plain_class(kind: object) -> bool:
    """Whether asking if something is an instance of it runs nobody's code."""
    if isinstance(kind, tuple):
        return all(map(is_plain_class, kind))
    if type(kind) in (type, enum.EnumMeta):
        return True
    return isinstance(kind, type) and kind.__module__ in ("collections.abc", "numbers", "typing")


def is_plain_container(value: object) -> bool:
    """Whether it is a list, tuple, dict or set, or a named tuple that adds no code of its own."""
    kind = type(value)
    if kind in CONTAINERS:
        return True
    return isinstance(value, tuple) and _adds_no_code(kind)
