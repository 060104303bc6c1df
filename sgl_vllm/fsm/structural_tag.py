"""Structural tags -> expressions over bytes: free text, tool calls in tags, free text again.

Owns which formats of xgrammar's structural tags are compiled here. Any other raises
`UnsupportedTagError` and goes to another backend. Does not own schemas (`schema/`), patterns
(`regex.py`), grammars (`ebnf/`) and free text (`free_text.py`). Pure.

    triggered_tags         free text <tool_call>{"name": "a", ... }</tool_call> free text ...
                                     |-trigger-|
    tags_with_separator              <tool_call>{"name": "a", ... }</tool_call><tool_call> ...

Free text ends where the output does, at a trigger, at the end of the tag that contains it, or
before a string that begins with a text it excludes. Where something else follows, it could end
anywhere: that is not compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any, TypeAlias  # Any: the JSON of a tag

from sgl_vllm.fsm import regex
from sgl_vllm.fsm.byte_dfa import CompiledFormat
from sgl_vllm.fsm.ebnf import compile_grammar
from sgl_vllm.fsm.errors import TooComplexError, UnsupportedTagError
from sgl_vllm.fsm.expressions import EMPTY, Alt, Expression, Lazy, Literals, Seq, literal
from sgl_vllm.fsm.free_text import MAX_TABLE_BYTES, begins_in, free_text
from sgl_vllm.fsm.regex import of_pattern

MAX_FORMATS = 2_000
MAX_REPETITIONS = 100

MAX_S = 5.0
"""A tag whose parts take longer together is left to another backend. Each part has limits of its
own."""

Json = dict[str, Any]
Ends = tuple[bytes, ...] | None
"""What ends the free text in a format: the end of the output, `()`; one of several texts, which the
format then consumes, and of which an empty one is anywhere; or something else, None."""

_NEUTRAL: Json = {
    "any_order": False,
    "excludes": [],
    "max_chars": None,
    "max_tokens": None,
    "max_whitespace_cnt": None,
}
"""Options that change nothing with these values. A format with any other option is not compiled."""


SchemaCompiler: TypeAlias = Callable[[Any, str], CompiledFormat]
"""Compiles a schema, given the style of its texts: `json`, or one of xgrammar's in XML."""


def compile_structural_tag(tag: Json, compile_schema: SchemaCompiler) -> CompiledFormat:
    """The texts that a structural tag allows.

    Args:
        tag: its JSON, with `format`, or with `structures` and `triggers`.
        compile_schema: compiles the schema of a part.

    Raises:
        UnsupportedTagError: the tag is not compiled here; ask another backend.
        UnsupportedSchemaError, UnsupportedPatternError, UnsupportedGrammarError, TooComplexError:
            nor is a part of it.
    """
    compiler = _Compiler(compile_schema)
    try:
        expression = compiler.format(_triggered(tag) if "structures" in tag else tag["format"], ())
        return CompiledFormat(expression, compiler.table_bytes)
    except (AttributeError, LookupError, TypeError, UnicodeEncodeError):
        raise UnsupportedTagError("not a structural tag") from None
    except RecursionError:
        raise UnsupportedTagError("the structural tag is nested too deeply") from None


def _triggered(tag: Json) -> Json:
    """vLLM's older form of a tag as a format."""
    tags = [
        {
            "begin": one["begin"],
            "content": {"type": "json_schema", "json_schema": one["schema"]},
            "end": one["end"],
        }
        for one in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


class _Compiler:
    """Compiles one tag. Each method is called with a format and with what ends its free text, and
    returns the format's texts, followed by that end where `ends` names texts."""

    def __init__(self, compile_schema: SchemaCompiler) -> None:
        self.table_bytes = 0
        self._compile_schema = compile_schema
        self._tag_ends: tuple[bytes, ...] = ()  # of the tag around; no free text contains them
        self._num_formats = 0
        self._started = monotonic()

    def format(self, form: Json, ends: Ends) -> Expression:
        self._num_formats += 1
        if self._num_formats > MAX_FORMATS:
            raise UnsupportedTagError(f"more than {MAX_FORMATS} formats")
        if monotonic() - self._started > MAX_S:
            raise TooComplexError("the parts of the structural tag take too long to compile")
        match form["type"]:
            case "any_text":
                _check_options(form, "excludes")
                return self._text({}, ends, form)
            case "triggered_tags":
                return self._triggered_tags(form, ends)
            case "sequence":
                _check_options(form, "elements")
                return self._sequence(form["elements"], ends)
            case "or":
                _check_options(form, "elements")
                return Alt([self.format(one, ends) for one in form["elements"]])
        closed = self._closed(form)
        return Seq(closed, _any_of(ends)) if ends else closed

    def _sequence(self, elements: list[Json], ends: Ends) -> Expression:
        if not elements:
            raise UnsupportedTagError("a sequence of nothing")
        parts: list[tuple[Json, Ends]] = []
        for form in elements:
            before, its_ends = parts[-1] if parts else (None, None)
            if before and its_ends is None and _ends_text(before, form):
                parts[-1] = before, (form["value"].encode(),)
            else:
                parts.append((form, None))
        last, its_ends = parts[-1]
        if its_ends is None:
            parts[-1] = last, ends
            ends = None
        return Seq(*[self.format(*part) for part in parts], _any_of(ends) if ends else EMPTY)

    def _closed(self, form: Json) -> Expression:
        """A format that ends by itself."""
        match form["type"]:
            case "const_string":
                _check_options(form, "value")
                return literal(form["value"].encode())
            case "json_schema":
                _check_options(form, "json_schema", "style")
                style = form.get("style", "json")
                return self._counted(self._compile_schema(form["json_schema"], style))
            case "grammar":
                _check_options(form, "grammar")
                return self._counted(CompiledFormat.of_tables(compile_grammar(form["grammar"])))
            case "regex":
                _check_options(form, "pattern")
                dfa = regex.full_match(form["pattern"])
                if dfa.is_empty:
                    raise UnsupportedTagError("nothing matches a pattern")
                return self._counted(CompiledFormat.of_tables(dfa.expression))
            case "tag":
                return self._tags([form])
            case "tags_with_separator":
                return self._tags_with_separator(form)
            case "optional":
                return self._repeated(form, 0, 1)
            case "star":
                return self._repeated(form, 0, -1)
            case "plus":
                return self._repeated(form, 1, -1)
            case "repeat":
                return self._repeated(form, form["min"], form["max"], "min", "max")
            case name:
                raise UnsupportedTagError(f"a {name} is not supported")

    def _tags(self, tags: Iterable[Json], num_read: int = 0) -> Expression:
        """Any one of several tags, of whose beginning `num_read` bytes have been read."""
        entries = []
        others = []
        for tag in tags:
            _check_options(tag, "begin", "content", "end")
            ends = _words(tag["end"] if isinstance(tag["end"], list) else [tag["end"]])
            around, self._tag_ends = self._tag_ends, ends
            inside = self.format(tag["content"], ends)
            self._tag_ends = around
            begin = tag["begin"].encode()[num_read:]
            if begin:
                entries.append((begin, inside))
            else:
                others.append(inside)
        return Alt([*([Literals(tuple(entries))] if entries else []), *others])

    def _triggered_tags(self, form: Json, ends: Ends) -> Expression:
        options = ("triggers", "tags", "at_least_one", "stop_after_first", "excludes")
        _check_options(form, *options)
        triggers = _words(form["triggers"])
        by_trigger: dict[bytes, list[Json]] = {trigger: [] for trigger in triggers}
        for tag in form["tags"]:
            begin = tag["begin"].encode()
            matching = [trigger for trigger in by_trigger if begin.startswith(trigger)]
            if len(matching) != 1:
                raise UnsupportedTagError("a tag has not exactly one trigger")
            by_trigger[matching[0]].append(tag)
        end = _any_of(ends) if ends else EMPTY
        more: Expression = Lazy(lambda: text)
        after_tag = end if form.get("stop_after_first") else more
        following: dict[bytes, Expression] = {
            trigger: Seq(self._tags(tags, len(trigger)), after_tag)
            for trigger, tags in by_trigger.items()
        }
        text = self._text(following, ends, form)
        if form.get("at_least_one"):
            return Seq(self._tags(form["tags"]), after_tag)
        return text

    def _tags_with_separator(self, form: Json) -> Expression:
        _check_options(form, "tags", "separator", "at_least_one", "stop_after_first")
        tags = self._tags(form["tags"])
        if not form.get("stop_after_first"):
            separator = literal(form["separator"].encode())
            more: Expression = Lazy(lambda: Alt((EMPTY, Seq(separator, tags, more))))
            tags = Seq(tags, more)
        return tags if form.get("at_least_one") else Alt((EMPTY, tags))

    def _repeated(self, form: Json, low: int, high: int, *options: str) -> Expression:
        """The content `low` to `high` times; without a limit if that is -1."""
        _check_options(form, "content", *options)
        if max(low, high) > MAX_REPETITIONS:
            raise UnsupportedTagError(f"a repetition of more than {MAX_REPETITIONS} times")
        content = self.format(form["content"], None)
        more: Expression = EMPTY
        if high < 0:
            again: Expression = Lazy(lambda: Alt((EMPTY, Seq(content, again))))
            more = again
        for _ in range(high - low):
            more = Alt((EMPTY, Seq(content, more)))
        return Seq(*[content] * low, more)

    def _text(self, following: dict[bytes, Expression], ends: Ends, form: Json) -> Expression:
        """Free text, up to a word of `following` and then what follows it, or up to one of `ends`.

        xgrammar takes any bytes for text if it has to look for words in it, else valid UTF-8 only.
        """
        if ends is None:
            raise UnsupportedTagError("free text with something else after it")
        banned = _words(form.get("excludes", []))
        excluded = _shortest({*banned, *self._tag_ends} - {b""})
        followed = {word: then for word, then in following.items() if word not in banned}
        if any(word in one for word in followed for one in banned):
            raise UnsupportedTagError("a trigger in an excluded word")
        for end in filter(None, ends):
            # An end that begins with an excluded word begins where that word is read first.
            word = next(filter(end.startswith, excluded), end)
            if word in followed:
                raise UnsupportedTagError("two words end free text in the same place")
            if any(begins_in(one, word) for one in (*followed, *excluded, word)):
                raise UnsupportedTagError("a word may begin before an end and be completed in it")
            followed[word] = literal(end[len(word) :])
        if not followed and not excluded:
            return of_pattern(r"[\s\S]*").expression
        text = free_text(tuple(followed), frozenset(excluded - followed.keys()))
        self._count(text.table_bytes)
        options: list[Expression] = [
            Seq(dfa.expression, then)
            for dfa, then in zip(text.until, followed.values(), strict=True)
        ]
        may_stop = not ends or b"" in ends
        return Alt([*options, text.without.expression] if may_stop else options)

    def _counted(self, compiled: CompiledFormat) -> Expression:
        self._count(compiled.table_bytes)
        return compiled.expression

    def _count(self, table_bytes: int) -> None:
        self.table_bytes += table_bytes
        if self.table_bytes > MAX_TABLE_BYTES:
            raise TooComplexError("the parts of the structural tag are too large")


def _ends_text(form: Json, following: Json) -> bool:
    """Whether `form` is free text that ends where the string `following` begins."""
    if form["type"] != "any_text" or following["type"] != "const_string":
        return False
    return any(map(following["value"].startswith, form.get("excludes", [])))


def _shortest(words: set[bytes]) -> frozenset[bytes]:
    """Those that contain no other one: a text without these has none of `words`."""
    return frozenset(one for one in words if not any(other in one for other in words - {one}))


def _words(texts: list[str]) -> tuple[bytes, ...]:
    return tuple(dict.fromkeys(text.encode() for text in texts))


def _any_of(texts: tuple[bytes, ...]) -> Expression:
    return Alt([literal(text) for text in texts])


def _check_options(form: Json, *known: str) -> None:
    """Refuse a format with an option that would change its meaning."""
    for name, value in form.items():
        if name not in (*known, "type") and (name not in _NEUTRAL or value != _NEUTRAL[name]):
            raise UnsupportedTagError(f"{name} is not supported")
