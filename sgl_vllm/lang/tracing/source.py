"""Finds the syntax of a function, and makes sure that it is that of the code which runs.

Owns reading source; evaluates nothing.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from sgl_vllm.lang.tracing.frames import TraceError


@functools.lru_cache(maxsize=64)
def _functions_in(text: str, filename: str) -> dict[int, list[Any]]:
    """The functions of a file by the line on which each begins, decorators included."""
    found: dict[int, list[Any]] = {}
    for node in ast.walk(ast.parse(text, filename)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min((node.lineno, *(d.lineno for d in node.decorator_list)))
            found.setdefault(first, []).append(node)
        elif isinstance(node, ast.Lambda):
            found.setdefault(node.lineno, []).append(node)
    return found


@functools.lru_cache(maxsize=256)
def definition_of(
    code: types.CodeType,
) -> ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda:
    """The syntax of a function. TraceError if its source is not there, or is another by now.

    Costs a parse per file and a compilation per function, once.
    """
    advice = "programs that are traced must be in a file or a notebook cell"
    try:
        lines, _ = inspect.findsource(code)
        candidates = _functions_in("".join(lines), code.co_filename).get(code.co_firstlineno, [])
    except (OSError, TypeError, SyntaxError, IndentationError):
        raise TraceError(f"the source of {code.co_qualname} is not available", advice) from None
    for node in candidates:
        name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
        if name == code.co_name and _is_source_of(node, code):
            return node
    raise TraceError(f"the source of {code.co_qualname} is not what runs: it changed", advice)


def _is_source_of(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, code: types.CodeType
) -> bool:
    """Whether the arguments are the same, and all the texts of the code are in the source."""
    signature = node.args
    arguments = [*signature.posonlyargs, *signature.args, *signature.kwonlyargs]
    names = tuple(argument.arg for argument in arguments)
    if code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] != names:
        return False
    if any(isinstance(part, ast.Assert) for part in ast.walk(node)):
        return True  # test runners rewrite them
    statement: ast.stmt = ast.Expr(node) if isinstance(node, ast.Lambda) else node
    if not isinstance(statement, ast.Expr):
        statement = _without_decorators(node)
    module = ast.fix_missing_locations(ast.Module([statement], []))
    future = code.co_flags & __future__.annotations.compiler_flag
    compiled = compile(module, "<source>", "exec", flags=future, dont_inherit=True)
    # Functions in its defaults come before it.
    *_, inner = (c for c in compiled.co_consts if isinstance(c, types.CodeType))
    if code.co_flags & inspect.CO_OPTIMIZED and sys.flags.optimize:
        return True  # texts that are documentation are stripped
    return set(_texts(code)) <= set(_texts(inner))


def _without_decorators(node: Any) -> Any:
    fields = {name: getattr(node, name) for name in node._fields if name != "decorator_list"}
    return ast.copy_location(type(node)(**fields, decorator_list=[]), node)


def _texts(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts(constant)
