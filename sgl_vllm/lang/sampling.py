"""Sampling options: what one `gen` sets, what `run()` sets for all of them, and the defaults.

Owns the list of options and how they combine. How an API spells them is up to each backend.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any, TypedDict, TypeVar  # Any: values that are not checked yet

from sgl_vllm.lang.text import check_unicode

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling options. None means "as given to `run()`", and otherwise SGLang's default."""

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
        """Index of the first prompt token to return a log-probability for; None for none."""
        start = self.logprob_start_len or 0
        return start if self.return_logprob and start >= 0 else None

    def over(self, defaults: Sampling) -> Sampling:
        """These options, with `defaults` wherever one is None."""
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


class GenOptions(TypedDict, total=False):
    """The sampling options that `gen` and `run` have under one name. None is as if omitted."""

    stop_token_ids: Sequence[int] | None
    stop_regex: str | Sequence[str] | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    ignore_eos: bool | None
    return_logprob: bool | None
    logprob_start_len: int | None
    top_logprobs_num: int | None
    return_text_in_logprobs: bool | None


class SamplingDefaults(GenOptions, total=False):
    """Options that `run()` and its variants set for every `gen`; SGLang's defaults if omitted."""

    max_new_tokens: int | None
    stop: str | Sequence[str] | None


def sampling_of(given: Mapping[str, Any]) -> Sampling:
    """Options as the user gives them. TypeError for a value of another type, and for names that
    `Sampling` does not have; ValueError for a number out of bounds."""
    read = {name: _READERS[name](name, given[name]) for name in _READERS.keys() & given.keys()}
    return Sampling(**{**given, **read})


def as_texts(option: str, texts: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """A text, or several. TypeError that names the `option` for anything else, ValueError for text
    that cannot be sent."""
    if texts is not None and not isinstance(texts, str):
        texts = _tuple_of(str, "a text or a list of texts", option, texts)
    for text in each_of(texts):
        check_unicode(text)
    return texts


def each_of(texts: str | Sequence[str] | None) -> Sequence[str]:
    """The texts of an option that takes none, one or several."""
    return (texts,) if isinstance(texts, str) else texts or ()


def as_patterns(option: str, patterns: str | Sequence[str] | None) -> str | tuple[str, ...] | None:
    """As `as_texts`, of patterns. ValueError that names the `option` for what is none."""
    given = as_texts(option, patterns)
    for pattern in each_of(given):
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{option} {pattern!r} is not a pattern: {error}") from None
    return given


def as_ids(option: str, ids: Sequence[int] | None) -> tuple[int, ...] | None:
    """Token ids. TypeError that names the `option` for anything else."""
    return None if ids is None else _tuple_of(int, "a list of token ids", option, ids)


def _tuple_of(kind: type[T], shown: str, option: str, values: Iterable[T]) -> tuple[T, ...]:
    given = tuple(values) if isinstance(values, Iterable) else None
    if given is None or not all(isinstance(value, kind) for value in given):
        raise TypeError(f"{option} must be {shown}, not {values!r}")
    return given


def _as_number(option: str, number: float | None) -> float | None:
    """Raises TypeError if `number` is not a number, ValueError if no server accepts it."""
    least, most = _BOUNDS[option]
    option = option.replace("_new", "")  # as `gen` and the API call it
    if number is None:
        return None
    if not isinstance(number, Real) or math.isnan(number):
        raise TypeError(f"{option} must be a number, not {number!r}")
    if not least <= number <= most:
        limit = f"at least {least:g}" if number < least else f"at most {most:g}"
        raise ValueError(f"{option} must be {limit}, not {number!r}")
    return number


_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("max_new_tokens", "n"), (1, math.inf)),
    **dict.fromkeys(("min_new_tokens", "top_logprobs_num", "temperature"), (0, math.inf)),
    **dict.fromkeys(("top_k", "logprob_start_len"), (-1, math.inf)),
    **dict.fromkeys(("top_p", "min_p"), (0, 1)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (-2, 2)),
}
"""The lower and the upper bound of each option."""

_READERS: dict[str, Callable[[str, Any], object]] = {
    **dict.fromkeys(_BOUNDS, _as_number),
    "stop": as_texts,
    "stop_regex": as_patterns,
    "stop_token_ids": as_ids,
}
