"""How an option is declared, how its values are read from a command line, and how they are checked.

Does not own the list of options (`config.py`). Imports no vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar  # Any: options before they are checked

from sgl_vllm.spelling import did_you_mean

Value = TypeVar("Value", bool, int, float, str)


class OptionError(ValueError):
    """An unknown option, or a value that an option does not accept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionInfo:
    """The declaration of one option, beyond its name, type and default.

    Attributes:
        help: one or two sentences for `--help` and docs/options.md. May use backticks.
        heading: of this option and those that follow, up to the next heading.
        choices: the accepted values, each with a description or "". A function, so that a registry
            is imported only when an option is checked or listed. None if every value of the type
            and within the bounds is accepted.
        minimum, maximum: bounds of a number, both inclusive.
        pattern: the form of a text that has no fixed set of values, as a regular expression.
        form: `pattern` in words, for the error message.
        hint: what to do instead, at the end of the error message.
        page: the page in docs/ that explains the option.
    """

    help: str
    heading: str = ""
    choices: Callable[[], Mapping[str, str]] | None = None
    minimum: float = 0.0
    maximum: float = math.inf
    pattern: str = ""
    form: str = ""
    hint: str = ""
    page: str = ""

    @staticmethod
    def of(field: dataclasses.Field[Any]) -> OptionInfo:
        info = field.metadata["option"]
        assert isinstance(info, OptionInfo)
        return info


def option(default: Value, help: str, **declared: Any) -> Value:  # Any: see `OptionInfo`
    """A dataclass field. Typed as its default, as `dataclasses.field` is."""
    info = OptionInfo(help=help, **declared)
    made: Value = dataclasses.field(default=default, metadata={"option": info})
    return made


def words_to_mapping(words: Sequence[str], source: str = "--plugin-config") -> dict[str, Any]:
    """Parse command-line words: JSON objects and `key=value` pairs, whose values are read as JSON.
    Later ones win.

    Args:
        source: where the words come from, for the message of an error.

    Raises:
        OptionError: a word has neither form.
    """
    values: dict[str, Any] = {}
    malformed: list[str] = []
    for word in words:
        name, equals, text = word.partition("=")
        if word.lstrip().startswith("{"):
            try:
                values.update(json.loads(word))
            except ValueError as error:
                raise OptionError(f"{source}: {word!r} is not valid JSON: {error}") from None
            except RecursionError:
                raise OptionError(f"{source}: the JSON is nested too deeply") from None
        elif not (name and equals):
            malformed.append(repr(word))
        else:
            values[name] = _value_of(text)
    if malformed:
        raise OptionError(
            f"{source} takes a JSON object or key=value pairs, not {' '.join(malformed)}; write "
            "jump_forward=false, for example"
        )
    return values


def _value_of(text: str) -> Any:
    """The value of text in JSON, or of Python's `True` and `False`; other text is a string."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except (ValueError, RecursionError):
        return text


def problem_of(field: dataclasses.Field[Any], value: object) -> str | None:
    """Why `value` is refused, in words that follow the option's name; None if it is accepted."""
    info = OptionInfo.of(field)
    if isinstance(field.default, bool):
        return None if isinstance(value, bool) else f"must be true or false, not {value!r}"
    if info.choices is not None:
        choices = info.choices()
        if isinstance(value, str) and value in choices:
            return None
        near = did_you_mean(value, choices)
        return f"must be one of {', '.join(choices)}, not {value!r}{near}"
    if info.pattern:
        is_of_form = isinstance(value, str) and re.fullmatch(info.pattern, value)
        return None if is_of_form else f"must be {info.form}, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"must be a number, not {value!r}"
    if isinstance(field.default, int) and not isinstance(value, int):
        return f"must be a whole number, not {value!r}"
    if not math.isfinite(value) or value < info.minimum:
        return f"must be at least {info.minimum:g}, not {value!r}"
    if value > info.maximum:
        return f"must be at most {info.maximum:g}, not {value!r}"
    return None
