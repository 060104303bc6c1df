"""Strings and numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any  # Any: JSON values that a schema lists

from sgl_vllm.fsm import numbers
from sgl_vllm.fsm.byte_dfa import ByteDfa
from sgl_vllm.fsm.errors import UnsupportedSchemaError
from sgl_vllm.fsm.expressions import Expression
from sgl_vllm.fsm.json_string import COUNTED_STRING, NAME_STRING, STRING, JsonString, dfa_of_length
from sgl_vllm.fsm.names import Names
from sgl_vllm.fsm.regex import of_pattern
from sgl_vllm.fsm.schema.context import Context, of_dfa, spelled, string
from sgl_vllm.fsm.schema.formats import format_dfa
from sgl_vllm.fsm.schema.keywords import decimal
from sgl_vllm.fsm.schema.nodes import Node
from sgl_vllm.fsm.schema.value_sets import ATOMS, Numbers, Strings, Text, ValueSet
from sgl_vllm.fsm.schema.workspace import Workspace

_MAX_LENGTH_WITH_PATTERN = 1_100


def any_text() -> ByteDfa:
    """All strings of characters that patterns know (`characters.ANY`), each in one spelling, that
    of `NAME_STRING`."""
    return of_pattern(f'"{NAME_STRING.pattern}')


def listed_scalars(context: Context, values: ValueSet) -> list[Any]:
    """What a set lists and the rest of it allows: strings, numbers, `true`, `false`, `null`."""
    found: list[Any] = [value for value in ATOMS if value in values.atoms]
    for strings in values.strings:
        if strings.values is not None:
            found += _listed_strings(context.workspace, strings, strings.values)
    for some in values.numbers:
        if some.values is not None:
            found += _listed_numbers(context, some, some.values)
    return found


def _listed_strings(workspace: Workspace, strings: Strings, values: Iterable[str]) -> list[str]:
    low, high = strings.low, strings.high
    found = [v for v in values if low <= len(v) and (high is None or len(v) <= high)]
    if not (strings.matched or strings.unmatched):
        return found
    dfa = language(workspace, Strings(matched=strings.matched, unmatched=strings.unmatched))
    return [value for value in found if dfa.accepts(spelled(value))]


def _listed_numbers(
    context: Context, some: Numbers, values: Iterable[int | float]
) -> list[int | float]:
    found, since_6 = [*values], context.algebra.draft >= 6
    if some.is_integer is not None:
        are_integers = [isinstance(v, int) or (since_6 and v.is_integer()) for v in found]
        pairs = zip(found, are_integers, strict=True)
        found = [value for value, is_integer in pairs if is_integer == some.is_integer]
    rest = replace(some, values=None, is_integer=None)
    if rest == Numbers():
        return found
    dfa = _number_dfa(context, rest)
    return [value for value in found if dfa.accepts(spelled(value))]


def compile_string(context: Context, strings: Strings) -> Expression | None:
    """The strings of a set that lists none."""
    low, high = strings.low, strings.high
    if high is not None and high < low:
        return None
    if strings.matched or strings.unmatched or (strings.excluded and high is not None):
        return of_dfa(language(context.workspace, strings))
    if strings.excluded:
        names = Names.of([spelled(value)[1:-1] for value in strings.excluded])
        return string(JsonString.of(NAME_STRING, 0, low, names=names))
    body = STRING if low == 0 and high is None else COUNTED_STRING
    return string(JsonString.of(body, 0, low, high))


def language(workspace: Workspace, strings: Strings) -> ByteDfa:
    """The strings of a set, among them each in the spelling of `any_text`."""
    automata = [_text_dfa(workspace, text) for text in strings.matched]
    if strings.low or strings.high is not None:
        longest = max(strings.low, strings.high or 0)
        if longest > _MAX_LENGTH_WITH_PATTERN:
            raise UnsupportedSchemaError(
                f"a pattern with a length above {_MAX_LENGTH_WITH_PATTERN}"
            )
        automata.append(dfa_of_length(strings.low, strings.high))
    if strings.values is not None:
        automata.append(workspace.texts(map(spelled, strings.values)))
    without = [_text_dfa(workspace, text) for text in strings.unmatched]
    if strings.excluded:
        without.append(workspace.texts(map(spelled, strings.excluded)))
    if without or not automata:
        automata.insert(0, any_text())
    dfa = automata[0]
    for other in automata[1:]:
        dfa = workspace.common(dfa, other)
    for other in without:
        dfa = workspace.common(dfa, other, minus=True)
    return dfa


def _text_dfa(workspace: Workspace, text: Text) -> ByteDfa:
    return workspace.pattern(text.value) if text.keyword == "pattern" else format_dfa(text.value)


def names(context: Context, node: Node) -> ByteDfa:
    """The strings that are valid against a node, each in the spelling of `any_text`."""
    common = context.workspace.common
    outside = any_text()
    for strings in context.algebra.of(node).strings:
        outside = common(outside, language(context.workspace, strings), minus=True)
    return common(any_text(), outside, minus=True)


def compile_number(context: Context, found: Numbers) -> Expression | None:
    """The numbers of a set that lists none. A number that something constrains is written without
    an exponent."""
    if found == Numbers():
        return of_pattern(numbers.NUMBER).expression
    return of_dfa(_number_dfa(context, found))


def _number_dfa(context: Context, found: Numbers) -> ByteDfa:
    """The numbers of a set, without an exponent. 1.0 is an integer from draft 6 on."""
    common = context.workspace.common
    integers = of_pattern(numbers.WHOLE if context.algebra.draft >= 6 else numbers.INTEGER)
    dfa = _within(found, integers)
    if found.is_integer is False:
        dfa = common(dfa, integers, minus=True)
    for one in found.multiples:
        dfa = common(dfa, numbers.multiples(one))
    for one in found.no_multiples:
        dfa = common(dfa, numbers.multiples(one), minus=True)
    for value in found.excluded:
        dfa = common(dfa, numbers.exactly(decimal(value)), minus=True)
    return dfa


def _within(found: Numbers, integers: ByteDfa) -> ByteDfa:
    low, high = found.low, found.high
    if low is None and high is None and found.is_integer:
        return integers
    return numbers.within(
        low and low.value,
        high and high.value,
        above_low=low is not None and low.is_strict,
        below_high=high is not None and high.is_strict,
        are_integers=bool(found.is_integer),
    )
