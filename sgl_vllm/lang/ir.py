"""The expressions a program is made of, as immutable values, and the functions that make them.

Owns what a program *says*. Does not run anything: `interpreter.py` gives expressions their
meaning, backends carry them out. Expressions concatenate with ``+``, also with plain strings.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from sgl_vllm.lang.choices import ChoicesMethod, token_length_normalized

if TYPE_CHECKING:
    from pydantic import BaseModel

Role: TypeAlias = Literal["system", "user", "assistant"]
DType: TypeAlias = type | Literal["int", "float", "str", "bool"]
JsonSchema: TypeAlias = "Mapping[str, Any] | str | type[BaseModel]"


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
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    ignore_eos: bool | None = None
    return_logprob: bool | None = None
    top_logprobs_num: int | None = None

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
    top_logprobs_num=0,
)


@dataclass(frozen=True)
class Gen(Expr):
    """Generate text, store it under `name` and append it.

    `parse` turns the generated text into the variable's value (typed variables); the text that
    is appended stays as generated.
    """

    name: str | None
    sampling: Sampling
    regex: str | None = None
    json_schema: str | None = None
    parse: Callable[[str], object] | None = None

    def __str__(self) -> str:
        return f"gen {self.name!r}" if self.name else "gen"


@dataclass(frozen=True)
class Select(Expr):
    """Append the most likely of `choices` and store it under `name`."""

    name: str | None
    choices: tuple[str, ...]
    method: ChoicesMethod

    def __str__(self) -> str:
        return f"select {self.name!r}" if self.name else "select"


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


# The regular expression that generation is held to, and what reads the result, per dtype. Digits
# are bounded so that a generation always comes to its end.
_INT_REGEX = r"-?(0|[1-9][0-9]{0,17})"
_FLOAT_REGEX = r"-?(0|[1-9][0-9]{0,14})(\.[0-9]{1,15})?"
_BOOL_REGEX = r"(True|False)"
_STR_REGEX = r'"([^"\\\n\r\t]|\\["\\/bfnrt])*"'


def _parse_bool(text: str) -> bool:
    return {"True": True, "False": False}[text]


def _parse_str(text: str) -> str:
    value = json.loads(text)
    if not isinstance(value, str):
        raise ValueError(f"{text!r} is not a quoted string")
    return value


_DTYPES: dict[str, tuple[str, Callable[[str], object]]] = {
    "int": (_INT_REGEX, int),
    "float": (_FLOAT_REGEX, float),
    "bool": (_BOOL_REGEX, _parse_bool),
    "str": (_STR_REGEX, _parse_str),
}


def _dtype(dtype: DType) -> tuple[str, Callable[[str], object]]:
    name = dtype if isinstance(dtype, str) else dtype.__name__
    if name not in _DTYPES:
        raise ValueError(f"dtype must be int, float, str or bool, not {name}")
    return _DTYPES[name]


def _json_schema(schema: JsonSchema) -> tuple[str, Callable[[str], object] | None]:
    if isinstance(schema, str):
        return schema, None
    if isinstance(schema, Mapping):
        return json.dumps(schema), None
    if hasattr(schema, "model_json_schema"):
        return json.dumps(schema.model_json_schema()), schema.model_validate_json
    raise ValueError("json_schema must be a dict, a JSON string or a pydantic model class")


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
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    top_logprobs_num: int | None = None,
    dtype: DType | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: JsonSchema | None = None,
) -> Gen | Select:
    """Generate text at this place, store it under `name`, and append it.

    None inherits from `run()`. `n` > 1 makes the variable a list whose first item joins the text.
    `regex` and `json_schema` (a dict, a JSON string, or a pydantic model class) constrain the
    text; with a pydantic class the variable is an instance. `dtype` (int, float, str, bool)
    constrains it to a literal and the variable has that type; for `str` the literal is in double
    quotes, which the variable is without. `choices` makes this a `select`, for which the sampling
    options mean nothing. `return_logprob` and `top_logprobs_num` fill `get_meta_info(name)`.

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
    sampling = Sampling(
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        n=n,
        stop=as_stop(stop),
        stop_token_ids=as_ids(stop_token_ids),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        ignore_eos=ignore_eos,
        return_logprob=return_logprob,
        top_logprobs_num=top_logprobs_num,
    )
    parse: Callable[[str], object] | None = None
    schema: str | None = None
    if dtype is not None:
        regex, parse = _dtype(dtype)
    elif json_schema is not None:
        schema, parse = _json_schema(json_schema)
    return Gen(name, sampling, regex, schema, parse)


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
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod | None = None,
) -> Select:
    """Append the choice that the model finds most likely here and store it under `name`.

    `choices_method` is `token_length_normalized` (default), `greedy_token_selection` or
    `unconditional_likelihood_normalized`. The decision is deterministic: `temperature` is there
    for programs that pass SGLang's 0.0, and must be that. ValueError for no or empty choices.
    """
    if isinstance(choices, str) or not choices:
        raise ValueError("select needs a non-empty list of choices")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ValueError("every choice of a select must be a non-empty string")
    if temperature != 0.0:
        raise ValueError("select is deterministic: its temperature must be 0.0")
    return Select(name, tuple(choices), choices_method or token_length_normalized)


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
