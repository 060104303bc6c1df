"""SGLang's functions that programs are made of, where their meaning differs from `sgl_vllm`'s."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, overload  # Any: arguments of the user's function, and JSON

from sgl_vllm.lang import api as core
from sgl_vllm.lang import settings
from sgl_vllm.lang.backends.base import Backend, BackendHandle
from sgl_vllm.lang.choices import ChoicesMethod
from sgl_vllm.lang.constraints import Choices, Reader, choices_of
from sgl_vllm.lang.ir import Gen, Select
from sgl_vllm.lang.keywords import suggests
from sgl_vllm.lang.settings import global_config
from sgl_vllm.lang.tracing.makers import deferrable
from sgl_vllm.sglang.backends import BaseBackend, server_info_of
from sgl_vllm.sglang.choices import ChoicesSamplingMethod, as_core_method, token_length_normalized
from sgl_vllm.sglang.programs import SglFunction

_GEN = inspect.signature(core.gen)


@overload
def function(func: Callable[..., Any], num_api_spec_tokens: int | None = None) -> SglFunction: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...
@suggests
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """As `sgl_vllm.function`; the program runs with SGLang's meanings."""
    if func is not None:
        return SglFunction(func, num_api_spec_tokens=num_api_spec_tokens)
    return functools.partial(SglFunction, num_api_spec_tokens=num_api_spec_tokens)


@deferrable
@suggests
@functools.wraps(core.gen)
def gen(*args: Any, **kwargs: Any) -> Gen | Select:
    """As `sgl_vllm.gen`, with SGLang's meanings.

    The variable of `dtype` is the text. A text that does not have the form of `json_schema`'s
    class, because it was cut off, is the variable as it is. `dtype` wins over `regex`, with a
    warning. `max_tokens=0` generates one token, the fewest that vLLM generates.
    """
    given = dict(_GEN.bind(*args, **kwargs).arguments)
    given |= given.pop("sampling", {})
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


def _read_or_text(read: Reader, text: str) -> object:
    """The value that a text stands for, or the text if it does not have the required form."""
    try:
        return read(text)
    except ValueError:
        return text


@deferrable
def gen_int(
    name: str | None = None, max_tokens: int | None = None, **sampling: Any
) -> Gen | Select:
    """`gen` of an integer: the variable is its text."""
    return gen(name, max_tokens, dtype=int, **sampling)


@deferrable
def gen_string(
    name: str | None = None, max_tokens: int | None = None, **sampling: Any
) -> Gen | Select:
    """`gen` of a string: the variable is its text, with the double quotes."""
    return gen(name, max_tokens, dtype=str, **sampling)


@deferrable
@suggests
def select(
    name: str | None = None,
    choices: Choices | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesSamplingMethod | ChoicesMethod | None = None,
) -> Select:
    """As `sgl_vllm.select`. `choices_method` may be a `ChoicesSamplingMethod` of the program's own.
    `temperature` is ignored."""
    texts, _ = choices_of(choices)
    method = as_core_method(choices_method or token_length_normalized, texts)
    return core.select(name, choices, choices_method=method)


def set_default_backend(backend: BackendHandle | Backend) -> None:
    """Use `backend` for every run without a `backend` of its own."""
    global_config.default_backend = backend


def flush_cache(backend: BackendHandle | Backend | None = None) -> Any:
    """Empty the server's prefix cache and wait until that is done. Returns False if there is no
    backend."""
    match backend or global_config.default_backend:
        case None:
            return False
        case BaseBackend() as handle:
            handle.flush_cache()
        case chosen:
            settings.flush_cache(settings.chosen_backend(chosen))
    return None


def get_server_info(backend: BackendHandle | Backend | None = None) -> dict[str, Any] | None:
    """What the server runs. None if there is no backend."""
    match backend or global_config.default_backend:
        case None:
            return None
        case BaseBackend() as handle:
            return handle.get_server_info()
        case chosen:
            return server_info_of(settings.chosen_backend(chosen))
