"""SGLang's programs, and the functions that they are made of, where their meaning differs from
`sgl_vllm`'s."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload  # Any: arguments of the user's function, and JSON

from sgl_vllm.lang import api as core
from sgl_vllm.lang import settings
from sgl_vllm.lang.backends.base import Backend, BackendHandle
from sgl_vllm.lang.choices import ChoicesMethod
from sgl_vllm.lang.constraints import Choices, Parser
from sgl_vllm.lang.ir import Gen, Select
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.program import Program
from sgl_vllm.lang.sampling import GenOptions
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.tracing.standin import deferrable
from sgl_vllm.lang.tracing.trace import Graph
from sgl_vllm.sglang.backends import BaseBackend, server_info_of
from sgl_vllm.sglang.choices import ChoicesSamplingMethod, token_length_normalized
from sgl_vllm.sglang.states import ProgramState

REGEX_INT = r"[-+]?[0-9]+[ \n]*"
REGEX_FLOAT = r"[-+]?[0-9]*\.?[0-9]+[ \n]*"
REGEX_BOOL = r"(True|False)"
REGEX_STR = r"\"[\w\d\s]*\""

_POSITIONS = (
    *("name", "max_tokens", "min_tokens", "n", "stop", *GenOptions.__annotations__),
    *("dtype", "choices", "choices_method", "regex", "json_schema"),
)
"""The arguments of `gen` by their places."""


class SglFunction(Program):
    """A program that runs with SGLang's meanings; made by `function`."""

    state_class = ProgramState

    def trace(self, /, *args: Any, backend: Any = None, **known: Any) -> TracedProgram:
        """As `sgl_vllm.Program.trace`."""
        return TracedProgram(**vars(super().trace(*args, **known)))


class TracedProgram(Graph):
    """A program's graph, with the names of SGLang's traces."""

    @property
    def last_node(self) -> TracedProgram:
        """The end of the program, from which the graph can be shown: the graph itself."""
        return self

    def print_graph_dfs(self) -> str:
        """The graph as text."""
        return str(self)


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...
@suggests
def function(func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None) -> Any:
    """As `sgl_vllm.function`; the program runs with SGLang's meanings."""
    make = functools.partial(SglFunction, num_api_spec_tokens=num_api_spec_tokens)
    return make if func is None else make(func)


@deferrable
@suggests
@functools.wraps(core.gen)
def gen(*args: Any, **kwargs: Any) -> Gen | Select:
    """As `sgl_vllm.gen`, with SGLang's meanings.

    The variable of `dtype` is the text. A text that does not have the form of `json_schema`'s
    class, because it was cut off, is the variable as it is. `dtype` wins over `regex`, with a
    warning. `max_tokens=0` generates one token, the fewest that vLLM generates.
    """
    given = dict(zip(_POSITIONS, args, strict=False))
    if len(given) < len(args) or given.keys() & kwargs.keys():
        raise TypeError("gen() got too many positional arguments, or one argument twice")
    given |= kwargs
    choices, method = given.pop("choices", None), given.pop("choices_method", None)
    if choices:
        return select(given.get("name"), choices, choices_method=method)
    if given.get("dtype") is not None and given.pop("regex", None) is not None:
        warnings.warn("gen was given dtype and regex: regex is ignored", stacklevel=2)
    if given.get("max_tokens") == 0:
        given["max_tokens"] = 1
    made = core.gen(**given)
    assert isinstance(made, Gen)
    if given.get("dtype") is not None or made.parse is None:
        return replace(made, parse=None)
    return replace(made, parse=functools.partial(_read_or_text, made.parse))


def _read_or_text(read: Parser, text: str) -> object:
    """The value that a text stands for, or the text if it does not have the required form."""
    try:
        return read(text)
    except ValueError:
        return text


gen_int = functools.partial(gen, dtype=int)
"""`gen` of an integer: the variable is its text."""
gen_string = functools.partial(gen, dtype=str)
"""`gen` of a string: the variable is its text, with the double quotes."""


@deferrable
@suggests
def select(
    name: str | None = None,
    choices: Choices | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | ChoicesMethod | None = None,
) -> Select:
    """As `sgl_vllm.select`. `temperature` is ignored."""
    method = choices_method or token_length_normalized
    known = method.method if isinstance(method, ChoicesSamplingMethod) else method
    return core.select(name, choices, choices_method=known)


def flush_cache(backend: BackendHandle | Backend | None = None) -> Any:
    """Empty the server's prefix cache and wait until that is done. Returns False if there is no
    backend."""
    chosen = backend or global_config.default_backend
    if chosen is None:
        return False
    if isinstance(chosen, BaseBackend):
        chosen.flush_cache()
    else:
        settings.flush_cache(settings.chosen_backend(chosen))
    return None


def get_server_info(backend: BackendHandle | Backend | None = None) -> dict[str, Any] | None:
    """What the server runs. None if there is no backend."""
    chosen = backend or global_config.default_backend
    if isinstance(chosen, BaseBackend):
        return chosen.get_server_info()
    return None if chosen is None else server_info_of(settings.chosen_backend(chosen))
