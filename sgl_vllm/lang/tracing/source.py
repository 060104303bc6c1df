"""Finds the syntax of a function, and checks that it is the syntax of the code that runs.

Owns reading source. Evaluates nothing.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import types
from collections.abc import Iterator

from sgl_vllm.lang.tracing.frames import FunctionNode, TraceError


@functools.lru_cache(maxsize=64)
def _functions_in(text: str, filename: str) -> dict[int, list[FunctionNode]]:
    """The functions of a file by the line on which each begins, decorators included."""
    found: dict[int, list[FunctionNode]] = {}
    for node in ast.walk(ast.parse(text, filename)):
        if isinstance(node, FunctionNode):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            first = min([node.lineno, *(d.lineno for d in decorators)])
            found.setdefault(first, []).append(node)
    return found


@functools.lru_cache(maxsize=256)
def definition_of(code: types.CodeType) -> FunctionNode:
    """The syntax of a function. TraceError if its source is missing or has changed.

    Costs a parse per file and a compilation per function, once.
    """
    advice = "define the program in a file or a notebook cell"
    try:
        lines, _ = inspect.findsource(code)
        candidates = _functions_in("".join(lines), code.co_filename).get(code.co_firstlineno, [])
    except (OSError, TypeError, SyntaxError):
        raise TraceError(f"the source of {code.co_qualname} is not available", advice) from None
    for node in candidates:
        name = "<lambda>" if isinstance(node, ast.Lambda) else node.name
        if name == code.co_name and _is_source_of(node, code):
            return node
    raise TraceError(
        f"the source of {code.co_qualname} has changed since it was loaded", "load it again"
    )


def _is_source_of(node: FunctionNode, code: types.CodeType) -> bool:
    """Whether the arguments are the same, and all strings of the code are in the source."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = tuple(argument.arg for argument in arguments)
    if code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] != names:
        return False
    if any(isinstance(part, ast.Assert) for part in ast.walk(node)):
        return True  # test runners rewrite assertions
    statement = ast.Expr(node) if isinstance(node, ast.Lambda) else node
    module = ast.fix_missing_locations(ast.Module([statement], []))
    future = code.co_flags & __future__.annotations.compiler_flag
    compiled = compile(module, "<source>", "exec", flags=future, dont_inherit=True)
    # Functions in its decorators and defaults come before it.
    *_, inner = (c for c in compiled.co_consts if isinstance(c, types.CodeType))
    return set(_texts(code)) <= set(_texts(inner))


def _texts(code: types.CodeType) -> Iterator[str]:
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, types.CodeType):
            yield from _texts(constant)
