"""The functions that make expressions: `gen`, `select`, `tool`, and turns. Media are in
`media_api.py`.

Owns their arguments and the checks on them. The expressions themselves are in `ir.py`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Unpack, cast, overload  # Any: values of the user's types

from typing_extensions import TypeVar

from sgl_vllm.lang.choices import ChoicesMethod, token_length_normalized
from sgl_vllm.lang.constraints import (
    ARGUMENTS,
    Choices,
    DType,
    JsonSchema,
    Regex,
    choices_of,
    only_one_of,
    validated,
)
from sgl_vllm.lang.ir import (
    AnyOrder,
    Expr,
    ExprList,
    Gen,
    Role,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    Tool,
    Var,
    VariableExpr,
    parts_of,
)
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.reasoning import reasoning_format
from sgl_vllm.lang.sampling import GenOptions, sampling_of
from sgl_vllm.lang.text import filled
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.protocol.request_keys import APPROXIMATE

T = TypeVar("T")
ValueT = TypeVar("ValueT", default=str)
"""The type of a variable: str, unless an argument determines it."""


@deferrable
@suggests
def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    *,
    dtype: DType[ValueT] | None = None,
    choices: Choices[ValueT] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: Regex | None = None,
    json_schema: JsonSchema[ValueT] | None = None,
    retries: int = 0,
    validate: bool = False,
    **sampling: Unpack[GenOptions],
) -> VariableExpr[ValueT]:
    """Generate text here, append it to the prompt, and store it in the variable `name`.

    Options that are omitted or None are inherited from `run()`. Lengths are in tokens.

    - `n` > 1 generates `n` texts: the variable is a list, and its first item joins the prompt. At
      temperature 0 they are equal, and vLLM generates one.
    - `stop`: texts that end the generation and are not part of it. `stop_regex`: patterns that do
      the same; the text is watched as it streams in, and cut before the first match. The request
      ends once text follows a match, so a look-ahead may see one token of it. With `n` > 1, texts
      are cut when they are complete.
    - `regex`: a pattern as for Python's `re`, or a term of `outlines.types`, that the whole text
      matches. It must be regular: no look-around, back references or possessive repetitions.
    - `json_schema`: a dict, JSON text, a pydantic model, a dataclass or a TypedDict. With one of
      the classes, the variable is an instance of it.
    - `dtype`: int, float, str or bool. The text is a literal of that type (a str in double
      quotes), and the variable has the type.
    - `choices`: the same as `select`; the sampling options then have no effect.
    - `return_logprob`, `top_logprobs_num` and `logprob_start_len` (index of the first prompt token
      to return a log-probability for; -1: none) fill `get_meta_info(name)`.
    - `retries`: how many times to generate again if the text does not have the required form,
      because it was cut off, or the class's own validators or `validate` reject it. Each retry is a
      call, and gives the same text again at temperature 0.
    - `validate`: check the text against `json_schema` here, too, with the `jsonschema` package. A
      server may ignore keywords that its backend does not know. If it refuses the schema (status
      400), it is asked again with no more than types, members, items, listed values and
      alternatives, and the check sees to the rest.

    Raises ValueError if more than one of `dtype`, `choices`, `regex`, `json_schema` is given, or
    `validate` without `json_schema` or with a schema that is not valid itself, and for a number
    that no server accepts, such as a negative temperature.
    """
    arguments = {"dtype": dtype, "choices": choices, "regex": regex, "json_schema": json_schema}
    constrained_by = only_one_of(arguments)
    if choices is not None:
        return select(name, choices, choices_method=choices_method)
    if choices_method is not None:
        raise ValueError("choices_method needs choices")
    if retries < 0:
        raise ValueError(f"retries must be 0 or more, not {retries}")
    if validate and json_schema is None:
        raise ValueError("validate needs json_schema")
    if not sampling.keys() <= GenOptions.__annotations__.keys():
        raise TypeError("gen() got an unexpected keyword argument")  # `suggests` says which
    options = sampling_of(
        {"max_new_tokens": max_tokens, "min_new_tokens": min_tokens, "n": n, "stop": stop}
        | sampling
    )
    constraint, parse = None, None
    if constrained_by is not None:
        constraint, parse = ARGUMENTS[constrained_by](arguments[constrained_by])
        if validate:
            parse = validated(constraint, parse)
    return Gen(name, options, constraint, parse, retries)


@deferrable
def gen_int(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen[int]:
    """`gen` of an integer: the variable is an int. The other arguments are those of `gen`."""
    return cast(Gen[int], gen(name, max_tokens, dtype=int, **options))


@deferrable
def gen_string(name: str | None = None, max_tokens: int | None = None, **options: Any) -> Gen[str]:
    """`gen` of a string in double quotes: the variable has none. The other arguments are those of
    `gen`."""
    return cast(Gen[str], gen(name, max_tokens, dtype=str, **options))


@deferrable
@suggests
def select(
    name: str | None = None,
    choices: Choices[ValueT] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Select[ValueT]:
    """Append the choice that the model finds most likely here and store it in the variable `name`.

    `choices` are texts, or an Enum whose values are texts; the variable is then its member.
    `choices_method` is `token_length_normalized` (default), `greedy_token_selection` or
    `unconditional_likelihood_normalized`. The decision is deterministic: `temperature` exists for
    SGLang's programs and must be 0.0. Raises ValueError if there are no choices, or an empty one.
    """
    texts, reader = choices_of(choices)
    if temperature != 0.0:
        raise ValueError("select is deterministic: its temperature must be 0.0")
    return Select(name, texts, choices_method or token_length_normalized, reader)


def var(name: str) -> Var:
    """Append the text of variable `name` as soon as it is known.

    Unlike ``s[name]``, this does not block the program's function. As an argument of `tool` it
    stands for the variable's value.
    """
    return Var(name)


@overload
def tool(
    name: str | None, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any
) -> Tool[T]: ...
@overload
def tool(name: str | None, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Tool[T]: ...
@deferrable
def tool(name: str | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tool:
    """Call `function`, append its result as text and store the result in the variable `name`.

    The call runs once everything before it has run. An argument ``var("x")`` is replaced by the
    value of variable x. A plain function runs in a thread, a coroutine function on the language's
    event loop. The function must not read the prompt it is called from, because that prompt waits
    for it. An exception it raises becomes the cause of the ProgramError.
    """
    return Tool(name, function, args, tuple(kwargs.items()))


@overload
def read_only_tool(
    name: str | None, function: Callable[..., Awaitable[T]], /, *args: Any, **kwargs: Any
) -> Tool[T]: ...
@overload
def read_only_tool(
    name: str | None, function: Callable[..., T], /, *args: Any, **kwargs: Any
) -> Tool[T]: ...
@deferrable
def read_only_tool(
    name: str | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Tool:
    """`tool`, for a function that changes nothing, such as a search: it may be called early.

    The call runs as soon as its arguments exist and the tools before it that are not read-only are
    done, while generations and read-only tools before it still run. Its result is appended in its
    turn. If something before it fails, the function may have been called although its turn never
    came.
    """
    return Tool(name, function, args, tuple(kwargs.items()), is_read_only=True)


@deferrable
@suggests
def any_order(
    *segments: str | Expr | Sequence[str | Expr],
    key: Callable[[str], Any] | None = None,
    repeated: str | None = None,
    reuse: Literal["approximate"] | None = None,
) -> AnyOrder:
    """Append all `segments`, in an order that lets the server find more of the prompt in its cache.

    For parts of a prompt whose order does not matter, such as retrieved documents, tools or
    examples. Each is a text or ``var(name)``, and is appended as it is: put line ends into it. One
    list stands for its items. The model reads another prompt than the one given and may answer
    differently.

    The order is chosen when the program gets here: in `run_batch` so that its programs share most,
    else from what this process has sent after the same prompt, and from what the server has if it
    has the plugin. The same segments after the same prompt keep the order they had.
    `s.orders()` tells the order and its gain. Cost: less than 1 ms, and up to four small requests
    where only the server can know.

    - `key`: sort by ``key(text)`` instead, as `sorted` does. The order then depends on the segments
      alone, so all processes choose the same one.
    - `repeated`: the text in the place of a segment that an earlier `any_order` of this prompt has
      appended, after all other segments. Fields: ``{rank}`` here and ``{earlier}`` there, from 1.
      "" leaves the segment out.
    - `reuse`: with "approximate", the server may take the KV of a segment from another prompt, in
      which it stands at another place. **The answer is then not exact.** A server without
      ``approximate_reuse`` computes everything. `Usage.reused_tokens` says what was taken.

    Raises ValueError for another `reuse` and a template with other fields, TypeError for a segment
    that is not a text or a variable.
    """
    if reuse not in (None, APPROXIMATE):
        raise ValueError(f"reuse={reuse!r}: only {APPROXIMATE!r} is known, or None")
    if len(segments) == 1 and isinstance(segments[0], list | tuple):
        segments = tuple(segments[0])
    parts: list[Text | Var] = []
    for segment in segments:
        if isinstance(segment, str):
            parts.append(Text(segment))
        elif isinstance(segment, Text | Var):
            parts.append(segment)
        else:
            raise TypeError(f"a segment is a text or var(name), not {type(segment).__name__}")
    filled(repeated or "", rank=1, earlier=1)
    return AnyOrder(tuple(parts), key, repeated, reuse == APPROXIMATE)


def separate_reasoning(expr: Expr | str, model_type: str = "qwen3") -> ExprList:
    """`expr`, with the model's reasoning split off in each of its `gen`s.

    The variable ``name`` and the prompt get the answer without the reasoning, and the variable
    ``name_reasoning_content`` gets the reasoning. With `n` > 1 both are lists. `model_type` is one
    of `sgl_vllm.lang.reasoning.FORMATS`.
    """
    thinking = reasoning_format(model_type)
    return ExprList(
        tuple(
            replace(part, reasoning=thinking) if isinstance(part, Gen) else part
            for part in parts_of(expr)
        )
    )


def _turn(role: Role, expr: Expr | str | None) -> ExprList:
    content = () if expr is None else parts_of(expr)
    return ExprList((RoleBegin(role), *content, RoleEnd(role)))


def system(expr: Expr | str | None = None) -> ExprList:
    """A system turn containing `expr`."""
    return _turn("system", expr)


def user(expr: Expr | str | None = None) -> ExprList:
    """A user turn containing `expr`."""
    return _turn("user", expr)


def assistant(expr: Expr | str | None = None) -> ExprList:
    """An assistant turn containing `expr`. In a chat, `gen` belongs here."""
    return _turn("assistant", expr)


def system_begin() -> RoleBegin:
    """Open a system turn."""
    return RoleBegin("system")


def system_end() -> RoleEnd:
    """Close a system turn."""
    return RoleEnd("system")


def user_begin() -> RoleBegin:
    """Open a user turn."""
    return RoleBegin("user")


def user_end() -> RoleEnd:
    """Close a user turn."""
    return RoleEnd("user")


def assistant_begin() -> RoleBegin:
    """Open an assistant turn."""
    return RoleBegin("assistant")


def assistant_end() -> RoleEnd:
    """Close an assistant turn."""
    return RoleEnd("assistant")
