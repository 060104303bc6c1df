"""The expressions a program is made of, as immutable values, and the functions that make them.

Owns what a program *says*. Does not run anything: `interpreter.py` gives expressions their
meaning, backends carry them out. Expressions concatenate with ``+``, also with plain strings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import Any, Literal, TypeAlias

from sgl_vllm.lang import media
from sgl_vllm.lang.choices import ChoicesMethod, token_length_normalized
from sgl_vllm.lang.reasoning import ReasoningFormat, reasoning_format
from sgl_vllm.lang.values import (
    DType,
    JsonSchema,
    Reader,
    Regex,
    choices_of,
    regex_and_reader_of,
    regex_of,
    schema_and_reader_of,
)

Role: TypeAlias = Literal["system", "user", "assistant"]
Choices: TypeAlias = Sequence[str] | type[Enum]


class Expr:
    """Anything that can be appended to a program with ``s += ...``."""

    def __add__(self, other: Expr | str) -> ExprList:
        return ExprList((*parts_of(self), *parts_of(other)))

    def __radd__(self, other: str) -> ExprList:
        return ExprList((*parts_of(other), *parts_of(self)))


@dataclass(frozen=True)
class ExprList(Expr):
    """Expressions to run one after the other."""

    items: tuple[Expr, ...]


@dataclass(frozen=True)
class Text(Expr):
    """Constant text."""

    value: str

    def __str__(self) -> str:
        shown = self.value if len(self.value) <= 40 else self.value[:37] + "..."
        return f"text {shown!r}"


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample. None means: as given to `run()`, and failing that SGLang's default."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: str | tuple[str, ...] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None

    @property
    def prompt_logprobs_from(self) -> int | None:
        """The first prompt token whose log-probability is wanted; None if none is."""
        start = self.logprob_start_len or 0
        return start if self.return_logprob and start >= 0 else None

    def over(self, defaults: Sampling) -> Sampling:
        """These values, with `defaults` wherever one is None."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(defaults, **{k: v for k, v in given.items() if v is not None})


DEFAULT_SAMPLING = Sampling(
    max_new_tokens=128,
    min_new_tokens=0,
    n=1,
    temperature=1.0,
    top_p=1.0,
    top_k=-1,
    min_p=0.0,
    frequency_penalty=0.0,
    presence_penalty=0.0,
    ignore_eos=False,
    return_logprob=False,
    logprob_start_len=-1,
    top_logprobs_num=0,
    return_text_in_logprobs=True,
)


@dataclass(frozen=True)
class Gen(Expr):
    """Generate text, store it under `name` and append it.

    `parse` turns the generated text into the variable's value (typed variables); the text that
    is appended stays as generated. A text that `parse` refuses is generated anew, `retries`
    times at most. With `reasoning`, what the model thought is split off before anything else
    and kept as a variable of its own.
    """

    name: str | None
    sampling: Sampling
    regex: str | None = None
    json_schema: str | None = None
    parse: Reader | None = None
    retries: int = 0
    reasoning: ReasoningFormat | None = None

    @property
    def reasoning_name(self) -> str | None:
        """The variable that the reasoning goes to."""
        if self.reasoning is None or self.name is None:
            return None
        return f"{self.name}_reasoning_content"

    def __str__(self) -> str:
        return f"gen {self.name!r}" if self.name else "gen"


@dataclass(frozen=True)
class Select(Expr):
    """Append the most likely of `choices` and store it under `name`."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod
    parse: Reader | None = None

    def __str__(self) -> str:
        return f"select {self.name!r}" if self.name else "select"


@dataclass(frozen=True)
class Var(Expr):
    """Append the text of a variable that the program makes before, without waiting for it."""

    name: str

    def __str__(self) -> str:
        return f"var {self.name!r}"


@dataclass(frozen=True, eq=False)
class Computed(Expr):
    """What `function` makes of the variables that it `needs`, once they are there.

    `function` gets their values by name and returns a string or an expression, whose operations
    run in this place. `name` is the variable that they make, if they make one. It runs on the
    language's event loop: it must be quick, and must not wait.
    """

    function: Callable[[Mapping[str, Any]], Expr | str]
    needs: tuple[str, ...] = ()
    name: str | None = None

    def __str__(self) -> str:
        return "computed text" if self.name is None else f"computed {self.name!r}"


@dataclass(frozen=True, eq=False)
class Tool(Expr):
    """Call `function`, append its result as text and store it under `name`.

    `Var` arguments are the variables' values. A plain function runs in a thread, a coroutine
    function on the language's event loop.
    """

    name: str | None
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        called = getattr(self.function, "__name__", type(self.function).__name__)
        return f"tool {called}" + (f" for {self.name!r}" if self.name else "")


@dataclass(frozen=True)
class Show(Expr):
    """Put an image or a video into the open turn."""

    media: media.Media

    def __str__(self) -> str:
        return self.media.kind


@dataclass(frozen=True)
class RoleBegin(Expr):
    """Open a turn."""

    role: Role

    def __str__(self) -> str:
        return f"{self.role}_begin"


@dataclass(frozen=True)
class RoleEnd(Expr):
    """Close the open turn, which must be `role`'s."""

    role: Role

    def __str__(self) -> str:
        return f"{self.role}_end"


@dataclass(frozen=True)
class VarScopeBegin(Expr):
    """Start recording text for the variable `name`."""

    name: str

    def __str__(self) -> str:
        return f"var_scope {self.name!r}"


@dataclass(frozen=True)
class VarScopeEnd(Expr):
    """Store the text appended since the matching begin under `name`."""

    name: str

    def __str__(self) -> str:
        return f"var_scope {self.name!r}"


def parts_of(value: object) -> tuple[Expr, ...]:
    """`value` as a flat sequence of expressions; TypeError for what a program cannot append."""
    match value:
        case ExprList(items):
            return items
        case Expr():
            return (value,)
        case str():
            return (Text(value),) if value else ()
    raise TypeError(
        f"a program appends strings and expressions (gen, select, ...), not "
        f"{type(value).__name__}: use str(...) for other values"
    )


def as_stop(stop: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    return stop if stop is None or isinstance(stop, str) else tuple(stop)


def as_ids(ids: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def gen(
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: DType | None = None,
    choices: Choices | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: Regex | None = None,
    json_schema: JsonSchema | None = None,
    *,
    retries: int = 0,
) -> Gen | Select:
    """Generate text at this place, store it under `name`, and append it.

    What is None is inherited from `run()`. Lengths are in tokens.

    - `n` > 1 makes the variable a list, whose first item joins the text.
    - `stop` texts end the generation and are left out; so does whatever matches a `stop_regex`
      (the text is watched as it streams in, and cut before the match; not with `n` > 1).
    - `regex`: a pattern, or a term of `outlines.types`; the text matches it entirely.
    - `json_schema`: a dict, JSON text, a pydantic model, a dataclass or a TypedDict; for the
      classes the variable is an instance.
    - `dtype`: int, float, str or bool; the text is such a literal (a str in double quotes), and
      the variable has that type.
    - `choices`: the same as `select`; the sampling options then mean nothing.
    - `return_logprob`, `top_logprobs_num`, `logprob_start_len` (the first prompt token whose
      log-probability is wanted; -1: none) fill `get_meta_info(name)`.
    - `retries`: so many more times the text is generated if it has not the wanted form (it was
      cut off, or the class's own validators refuse it); each counts as a call.

    ValueError when more than one of `dtype`, `choices`, `regex`, `json_schema` is given.
    """
    constraints = {"dtype": dtype, "choices": choices, "regex": regex, "json_schema": json_schema}
    given = [key for key, value in constraints.items() if value is not None]
    if len(given) > 1:
        raise ValueError(f"gen takes only one of {' and '.join(given)}")
    if choices is not None:
        return select(name, choices, choices_method=choices_method)
    if choices_method is not None:
        raise ValueError("choices_method needs choices")
    if retries < 0:
        raise ValueError(f"retries must be 0 or more, not {retries}")
    sampling = Sampling(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=as_stop(stop),
        stop_token_ids=as_ids(stop_token_ids),
        stop_regex=as_stop(stop_regex),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        logprob_start_len=logprob_start_len,
        top_logprobs_num=top_logprobs_num,
        return_text_in_logprobs=return_text_in_logprobs,
    )
    pattern, schema, parse = None, None, None
    if dtype is not None:
        pattern, parse = regex_and_reader_of(dtype)
    elif regex is not None:
        pattern = regex_of(regex)
    elif json_schema is not None:
        schema, parse = schema_and_reader_of(json_schema)
    return Gen(name, sampling, pattern, schema, parse, retries)


def gen_int(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Gen:
    """`gen` of an integer; the variable is an int. Other arguments as in `gen`."""
    return _gen_of(int, name, max_tokens, sampling)


def gen_string(name: str | None = None, max_tokens: int | None = None, **sampling: Any) -> Gen:
    """`gen` of a string in double quotes; the variable is without them. Others as in `gen`."""
    return _gen_of(str, name, max_tokens, sampling)


def _gen_of(dtype: type, name: str | None, max_tokens: int | None, sampling: dict[str, Any]) -> Gen:
    expr = gen(name, max_tokens, dtype=dtype, **sampling)
    assert isinstance(expr, Gen)
    return expr


def select(
    name: str | None = None,
    choices: Choices | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Select:
    """Append the choice that the model finds most likely here and store it under `name`.

    `choices` are texts, or an Enum whose values are texts: the variable is then its member.
    `choices_method` is `token_length_normalized` (default), `greedy_token_selection` or
    `unconditional_likelihood_normalized`. The decision is deterministic: `temperature` is there
    for programs that pass SGLang's 0.0, and must be that. ValueError for no or empty choices.
    """
    texts, reader = choices_of(choices)
    if temperature != 0.0:
        raise ValueError("select is deterministic: its temperature must be 0.0")
    return Select(name, texts, choices_method or token_length_normalized, reader)


def var(name: str) -> Var:
    """The text of variable `name`, appended as soon as it is there.

    Unlike ``s[name]`` it does not wait in the program's body. As an argument of `tool` it is the
    variable's value.
    """
    return Var(name)


def tool(name: str | None, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Tool:
    """Call `function`, append its result as text and store the result under `name`.

    It runs when everything before it has run. An argument ``var("x")`` is the value of the
    variable x. A plain function runs in a thread, a coroutine function on the language's event
    loop. It must not wait for the prompt that waits for it. What it raises is the cause of the
    ProgramError.
    """
    return Tool(name, function, args, tuple(kwargs.items()))


def image(path: Any) -> Show:
    """An image: a path, an http(s) or data URL, bytes, or a PIL image; belongs in a turn."""
    return Show(media.read_image(path))


def video(path: Any, num_frames: int | None = None) -> Show:
    """A video: a path, an http(s) or data URL, or bytes; belongs in a turn. The model sees
    `num_frames` frames of it (None: as many as the server takes by default)."""
    return Show(media.read_video(path, num_frames))


def separate_reasoning(expr: Expr | str, model_type: str = "qwen3") -> ExprList:
    """`expr`, with what the model thinks in its `gen`s split off.

    The variable ``name`` and the prompt's text get the answer without the reasoning, the variable
    ``name_reasoning_content`` the reasoning; with `n` > 1 both are lists. `model_type` is one of
    `sgl_vllm.lang.reasoning.FORMATS`.
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
    """A system turn holding `expr`."""
    return _turn("system", expr)


def user(expr: Expr | str | None = None) -> ExprList:
    """A user turn holding `expr`."""
    return _turn("user", expr)


def assistant(expr: Expr | str | None = None) -> ExprList:
    """An assistant turn holding `expr`: where `gen` belongs in a chat."""
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
