"""Python functions as tools of a model: their schemas, and calls that the model has written.

Owns the way from a function to a JSON schema and to its description in a prompt, and from JSON to
calls and their results. Runs calls at the same time. Knows no prompts.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias  # Any: arguments and results of the user's functions

from sgl_vllm.lang.loop import background_loop

Function: TypeAlias = Callable[..., object]

OnError: TypeAlias = Literal["show", "raise"]

_MODE: Literal["validation"] = "validation"


@dataclass(frozen=True)
class ToolCall:
    """A call that the model has asked for.

    - `tool` and `arguments`: as the model wrote them.
    - `result`: what the function returned; None if it did not.
    - `error`: why it did not, as the model was told.
    - `exception`: what the function raised.
    - `elapsed_s`: how long the call took, in seconds.
    """

    tool: str
    arguments: Mapping[str, Any]
    result: Any = None
    error: str | None = None
    exception: Exception | None = None
    elapsed_s: float = 0.0


class CallsError(ValueError):
    """The text is not a list of calls, as the message says to the model."""


class Tools:
    """The functions that a model may call, by name.

    The calls of one turn are an object ``{"calls": [{"tool": ..., "arguments": {...}}, ...]}``.
    `schema` is its JSON schema. Arguments are validated, and converted to the annotated types.
    """

    def __init__(self, functions: Sequence[Function], max_parallel: int) -> None:
        """TypeError for a function whose parameters have no annotations, or have types that JSON
        cannot hold; ValueError for two functions of the same name, or none."""
        from pydantic import TypeAdapter, validate_call  # milliseconds: few programs use tools

        if not functions:
            raise ValueError("an agent needs at least one tool")
        names = [name_of(function) for function in functions]
        if len(set(names)) < len(names):
            raise ValueError(f"two tools have the same name: {', '.join(names)}")
        self._functions = dict(zip(names, functions, strict=True))
        self._validated: dict[str, Function] = {}
        adapters = []
        for name, function in self._functions.items():
            _refuse_untyped(name, function)
            called = _routine_of(function)
            adapters.append((name, _MODE, TypeAdapter(called)))
            self._validated[name] = validate_call(called)
        schemas, definitions = TypeAdapter.json_schemas(adapters)
        self._schemas = {name: schemas[name, _MODE] for name in names}
        self._definitions = definitions.get("$defs", {})
        self.schema = self._schema(max_parallel)

    @property
    def names(self) -> list[str]:
        return [*self._functions]

    def _schema(self, max_parallel: int) -> dict[str, Any]:
        each = [
            _object({"tool": {"type": "string", "enum": [name]}, "arguments": schema})
            for name, schema in self._schemas.items()
        ]
        item = each[0] if len(each) == 1 else {"anyOf": each}
        calls = _object({"calls": {"type": "array", "items": item, "maxItems": max_parallel}})
        return {**calls, "$defs": self._definitions} if self._definitions else calls

    def description(self) -> str:
        """What a model must know of the tools: a line for each, with the schema of its
        arguments."""
        lines = []
        for name, function in self._functions.items():
            doc = " ".join((inspect.getdoc(_named(function)) or "").split())
            schema = json.dumps(_without_titles(self._schemas[name]), ensure_ascii=False)
            lines.append(f"- {name}: {doc}{' ' * bool(doc)}Arguments: {schema}")
        if self._definitions:
            shown = json.dumps(_without_titles(self._definitions), ensure_ascii=False)
            lines.append(f"Definitions: {shown}")
        return "\n".join(lines)

    def read(self, text: str) -> list[ToolCall]:
        """The calls in a text. CallsError if it is no JSON of that form."""
        try:
            written = json.loads(text)["calls"]
            return [ToolCall(str(call["tool"]), dict(call["arguments"])) for call in written]
        except (ValueError, LookupError, TypeError) as error:
            raise CallsError(f"the calls are not valid JSON: {error}") from error

    async def run(self, calls: Sequence[ToolCall], deadline_s: float | None) -> list[ToolCall]:
        """Run calls at the same time. Returns them with their results or errors, in order.

        Args:
            deadline_s: when the loop's clock has reached it, calls that still run are ended.
        """
        return list(await asyncio.gather(*(self._run(call, deadline_s) for call in calls)))

    async def _run(self, call: ToolCall, deadline_s: float | None) -> ToolCall:
        if call.tool not in self._functions:
            known = ", ".join(self.names)
            return replace(call, error=f"there is no tool {call.tool!r}, only {known}")
        begin_s = time.monotonic()
        try:
            async with asyncio.timeout_at(deadline_s) as limit:
                result = await background_loop().call_tool(
                    self._validated[call.tool], **call.arguments
                )
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            is_late = isinstance(error, TimeoutError) and limit.expired()
            call = replace(
                call,
                error="it was ended, because no time is left" if is_late else _reason(error),
                exception=error if isinstance(error, Exception) else None,
            )
        else:
            call = replace(call, result=result)
        return replace(call, elapsed_s=time.monotonic() - begin_s)


def shown(calls: Sequence[ToolCall]) -> str:
    """The results of calls, as the model reads them: a JSON list."""
    return f"[{','.join(map(_shown, calls))}]"


def _shown(call: ToolCall) -> str:
    """The result of a call as JSON. What cannot be written as JSON is an error of the call."""
    from pydantic_core import to_json

    error = call.error
    if error is None:
        try:
            result = {"result": call.result}
            return to_json(result, fallback=str, inf_nan_mode="constants").decode()
        except Exception as problem:  # a `__str__` of the user's may raise anything
            error = f"its result cannot be written as JSON: {problem}"
    return to_json({"error": error.encode(errors="replace").decode()}).decode()


def _named(function: Function) -> Function:
    """What has the name and the docstring of a function."""
    return function.func if isinstance(function, functools.partial) else function


def name_of(function: Function) -> str:
    """What a model calls a function."""
    named = _named(function)
    return str(getattr(named, "__name__", type(named).__name__))


def _routine_of(function: Any) -> Any:  # pydantic's own types do not have functions
    """The function, or the method that an object is called by."""
    is_known = inspect.isroutine(function) or isinstance(function, functools.partial)
    return function if is_known else function.__call__


def _refuse_untyped(name: str, function: Function) -> None:
    kinds = inspect.Parameter
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY):
            raise TypeError(
                f"the tool {name} takes {parameter.name} by position only, or any number of "
                f"arguments: give it parameters with names"
            )
        if parameter.annotation is kinds.empty:
            raise TypeError(
                f"the tool {name} needs a type for its parameter {parameter.name}, such as "
                f"{parameter.name}: str"
            )


def _reason(error: BaseException) -> str:
    """An error in the words that the model is shown."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}"
            for one in error.errors(include_url=False)
        )
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _object(properties: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": [*properties],
        "additionalProperties": False,
    }


def _without_titles(schema: Any) -> Any:
    """A schema without pydantic's titles, which only repeat the names."""
    if isinstance(schema, list):
        return [_without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
