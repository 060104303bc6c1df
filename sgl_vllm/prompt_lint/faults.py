"""Habits of a client that keep its prompts from being shared: how each is found, and its repair.

A detector yields candidates, and may yield too many: `lint` keeps those whose repair saves tokens.
A repair looks only at what it repairs, so the repairs of several faults can follow each other in
any order. Pure.
"""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import combinations

from sgl_vllm.prompt_lint.prompts import APPENDED, TOOLS, Part, Prompt

MAX_SAMPLES = 40
"""Texts of one part that are compared with each other."""

MAX_VALUE_PIECES = 12
"""Words, spaces and marks: a longer difference is not a value."""

MIN_SIMILARITY = 0.3
"""Of two lines, for their differences to be values: the share of pieces around all of them."""

MAX_LINE_PIECES = 400
"""From the first to the last difference of a line."""

MIN_CONTEXT_PIECES = 3
"""Equal pieces between two differences, for these to be two values."""

CONTEXT_CHARACTERS = 32
"""On each side of a value, to find it in other prompts."""

MAX_BLOCKS = 60
"""Blocks of a part whose order is looked at."""

COMMON_SHARE = 0.6
"""Of a group's prompts: a block that as many have is static text."""

MIN_STATIC_CHARACTERS = 80
"""Static text behind variable text is worth mentioning from this length on."""

VALUES = (
    ("timestamp", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"),
    ("date", r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{2,4}"),
    ("time", r"\d\d:\d\d(?::\d\d)?"),
    ("UUID", r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
    ("id", r"(?=[0-9a-f]*\d)[0-9a-f]{8,}"),
    ("number", r"\d+"),
)
PIECE = re.compile("|".join([*(pattern for _, pattern in VALUES), r"\w+", r"\s+", "."]), re.DOTALL)

Repair = Callable[[Sequence[Prompt]], list[Prompt]]
"""The prompts as a client without this habit would have sent them, in the same order."""


@dataclass(frozen=True)
class Fault:
    """A fault in a group of prompts.

    Attributes:
        place: the part of the prompts that has it.
        what: what is wrong, as a sentence without a final period.
        advice: what to do about it, as a sentence without a final period.
    """

    place: str
    what: str
    advice: str
    repaired: Repair


def detect(prompts: Sequence[Prompt]) -> list[Fault]:
    """Candidates for faults of a group. Of two that explain the same, the better one is first."""
    faults = [*_salts(prompts), *_tools(prompts), *_windows(prompts)]
    places: dict[str, list[str]] = defaultdict(list)
    for part in (part for prompt in prompts for part in prompt.parts):
        places[part.place].append(part.text)
    for detector in (_values, _block_orders, _static_behind_variable):
        for place, texts in places.items():
            faults += detector(place, texts) if len(texts) > 1 else ()
    return faults


def _each(change: Callable[[Prompt], Iterable[Part]]) -> Repair:
    """The repair that changes the parts of each prompt."""
    return lambda prompts: [prompt.with_parts(change(prompt)) for prompt in prompts]


def _each_text(is_changed: Callable[[Part], bool], change: Callable[[str], str]) -> Repair:
    """The repair that changes the texts of some parts."""
    return _each(
        lambda prompt: (
            Part(part.place, change(part.text)) if is_changed(part) else part
            for part in prompt.parts
        )
    )


def _is_tool(part: Part) -> bool:
    return part.place.startswith(TOOLS)


# -- salts, tools and conversations ----------------------------------------------------------------


def _salts(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    used = Counter(prompt.salt for prompt in prompts if prompt.salt)
    if len(used) > 1 and 2 * len(used) > used.total():
        yield Fault(
            "cache_salt",
            f"{used.total():,} requests have {len(used):,} different values of cache_salt, so "
            "nothing is shared",
            "Use one cache_salt for each tenant, or none",
            lambda prompts: [Prompt(prompt.parts, prompt.model) for prompt in prompts],
        )


def _tools(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    orders = defaultdict(set)
    spellings: dict[tuple[str, str], set[str]] = defaultdict(set)
    for prompt in prompts:
        listed = [part for part in prompt.parts if _is_tool(part)]
        names = tuple(part.place for part in listed)
        orders[frozenset(names)].add(names)
        for part in listed:
            spellings[part.place, _canonical_json(part.text)].add(part.text)
    most = max((len(found) for found in orders.values()), default=0)
    if most > 1:
        yield Fault(
            "tools",
            f"The same tools come in {most:,} different orders",
            "Send tools in one order, for example sorted by name",
            _each(lambda prompt: sorted(prompt.parts, key=_tools_first)),
        )
    if any(len(found) > 1 for found in spellings.values()):
        yield Fault(
            "tools",
            "The same tools are written with their JSON keys in different orders",
            "Serialize tools with sorted keys, or only once",
            _each_text(_is_tool, _canonical_json),
        )


def _tools_first(part: Part) -> tuple[int, str]:
    """The key that sorts tools by name, and leaves all else behind them as it is."""
    return (0, part.place) if _is_tool(part) else (1, "")


def _canonical_json(text: str) -> str:
    """The same JSON with sorted keys; other text as it is."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return text


def _windows(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    """Conversations of which a request has a part from the middle of an earlier one on."""
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    continues: list[tuple[int, int, int]] = []
    """A request, the one that it goes on from, and how many messages it has of that one."""
    texts_of = []
    for index, prompt in enumerate(prompts):
        texts = [part.text for part in _split_conversation(prompt)[1]]
        texts_of.append(texts)
        if texts:
            for earlier, start in reversed(seen[texts[0]][-MAX_SAMPLES:]):
                rest = texts_of[earlier][start:]
                if texts[: len(rest)] != rest:
                    continue
                if start == 0:
                    break  # goes on from there, and leaves out nothing
                if len(rest) < len(texts):
                    continues.append((index, earlier, len(rest)))
                    break
        for position, text in enumerate(texts):
            seen[text].append((index, position))

    def repaired(prompts: Sequence[Prompt]) -> list[Prompt]:
        whole = list(prompts)
        for index, earlier, num_common in continues:
            head, messages = _split_conversation(prompts[index])
            _, kept = _split_conversation(whole[earlier])
            whole[index] = prompts[index].with_parts((*head, *kept, *messages[num_common:]))
        return whole

    if continues:
        yield Fault(
            "messages",
            f"{len(continues):,} requests leave out the oldest messages of their conversation, "
            "which moves all later ones",
            "Leave out many messages at once and rarely, not some in every turn",
            repaired,
        )


def _split_conversation(prompt: Prompt) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The parts that come before a conversation (tools, system messages), and its messages."""
    parts = prompt.parts
    for index, part in enumerate(parts):
        if not _is_tool(part) and not part.place.endswith((".system", ".developer")):
            return parts[:index], parts[index:]
    return parts, ()


# -- values inside a part --------------------------------------------------------------------------


def _values(place: str, texts: Sequence[str]) -> Iterator[Fault]:
    """Short differences to the first text, inside lines that are otherwise the same."""
    base, *others = (sample.splitlines(keepends=True) for sample in _samples(texts))
    lines = [PIECE.findall(line) for line in base]
    differs = [[False] * len(pieces) for pieces in lines]
    for other in others:
        for tag, start, end, other_start, other_end in _opcodes(base, other):
            if tag == "replace" and end - start == other_end - other_start:
                for number, line in enumerate(other[other_start:other_end], start=start):
                    _mark(differs[number], lines[number], PIECE.findall(line))
    offset = 0
    for pieces, marked in zip(lines, differs, strict=True):
        for start, end in _spans(marked):
            if end - start <= MAX_VALUE_PIECES:
                before = offset + len("".join(pieces[:start]))
                value = "".join(pieces[start:end])
                yield _value(place, "".join(base), before, before + len(value))
        offset += len("".join(pieces))


def _mark(marked: list[bool], pieces: Sequence[str], others: Sequence[str]) -> None:
    """Mark the pieces of a line that another line has differently, if it has most of them."""
    length = min(len(pieces), len(others))
    head = next((n for n in range(length) if pieces[n] != others[n]), length)
    rest = length - head
    tail = next((n for n in range(rest) if pieces[~n] != others[~n]), rest)
    if 2 * (head + tail) < MIN_SIMILARITY * (len(pieces) + len(others)):
        return
    end = len(pieces) - tail
    if max(end, len(others) - tail) - head > MAX_LINE_PIECES:
        return
    for tag, first, last, _, _ in _opcodes(pieces[head:end], others[head : len(others) - tail]):
        if tag != "equal":
            for index in range(head + first, min(head + max(last, first + 1), len(marked))):
                marked[index] = True


def _spans(marked: Sequence[bool]) -> list[tuple[int, int]]:
    """Runs `[start, end)` of marked pieces; runs with little between them are one."""
    runs: list[tuple[int, int]] = []
    for index in (index for index, is_marked in enumerate(marked) if is_marked):
        if runs and index - runs[-1][1] < MIN_CONTEXT_PIECES:
            runs[-1] = runs[-1][0], index + 1
        else:
            runs.append((index, index + 1))
    return runs


def _value(place: str, text: str, start: int, end: int) -> Fault:
    """The fault whose value is `text[start:end]`."""
    before = text[max(start - CONTEXT_CHARACTERS, 0) : start]
    after = text[end : end + CONTEXT_CHARACTERS]
    pattern = re.compile(
        (r"\A" if start <= CONTEXT_CHARACTERS else "")
        + f"{re.escape(before)}(.{{1,200}}?){re.escape(after)}"
        + (r"\Z" if end + CONTEXT_CHARACTERS >= len(text) else ""),
        re.DOTALL,
    )

    def moved(prompt: Prompt) -> Iterator[Part]:
        """The parts without the value, and the value behind them."""
        values = []
        for part in prompt.parts:
            match = pattern.search(part.text) if part.place == place else None
            if match is None:
                yield part
                continue
            yield Part(place, part.text[: match.start(1)] + part.text[match.end(1) :])
            values.append(Part(APPENDED, match[1]))
        yield from values

    value = text[start:end].strip()
    kind = next((kind for kind, form in VALUES if re.fullmatch(form, value)), "value")
    label = before.rsplit("\n", 1)[-1].strip(" :=\"'")
    return Fault(
        place,
        f"A {kind} that changes{f' ({label})' if label else ''} comes before text that does not",
        "Move it to the end of the prompt, or leave it out",
        _each(moved),
    )


def _opcodes(one: Sequence[str], other: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, one, other, autojunk=False).get_opcodes()


# -- blocks inside a part --------------------------------------------------------------------------


def _block_orders(place: str, texts: Sequence[str]) -> Iterator[Fault]:
    for separator in ("\n\n", "\n"):
        lists = [_blocks(text, separator)[:MAX_BLOCKS] for text in _samples(texts)]
        before = {pair for blocks in lists for pair in combinations(blocks, 2)}
        movable = {block for pair in before if pair[::-1] in before for block in pair}
        if len(movable) < 2:
            continue
        counts = Counter(block for text in texts for block in _blocks(text, separator))
        order = sorted(movable, key=lambda block: (-counts[block], block))
        yield Fault(
            place,
            f"{len(order):,} blocks of text, such as examples or documents, come in different "
            "orders",
            "Keep one order, or let sgl.any_order choose it",
            _in_order(place, separator, {block: rank for rank, block in enumerate(order)}),
        )
        return


def _static_behind_variable(place: str, texts: Sequence[str]) -> Iterator[Fault]:
    lists = [_blocks(text, "\n") for text in texts]
    counts = Counter(line for lines in lists for line in lines)
    static = {line: 0 for line, count in counts.items() if count >= COMMON_SHARE * len(texts)}

    def num_behind(lines: Sequence[str]) -> int:
        """Characters of static lines behind the first line that is not."""
        first = next((index for index, line in enumerate(lines) if line not in static), len(lines))
        return sum(len(line) for line in lines[first:] if line in static)

    if 2 * sum(num_behind(lines) >= MIN_STATIC_CHARACTERS for lines in lists) >= len(texts):
        yield Fault(
            place,
            "Text that is the same in most requests comes after text that changes",
            "Write what never changes first",
            _in_order(place, "\n", static, other_rank=1),
        )


def _in_order(
    place: str, separator: str, ranks: Mapping[str, int], other_rank: int | None = None
) -> Repair:
    """Sorts the blocks of a part by rank. Others stay where they are, unless they have one too."""

    def ordered(text: str) -> str:
        blocks = text.split(separator)
        of_blocks = [ranks.get(block.strip(), other_rank) for block in blocks]
        ranked = [(rank, slot) for slot, rank in enumerate(of_blocks) if rank is not None]
        in_order = list(blocks)
        for (_, slot), (_, source) in zip(ranked, sorted(ranked), strict=True):
            in_order[slot] = blocks[source]
        return separator.join(in_order)

    return _each_text(lambda part: part.place == place, ordered)


def _blocks(text: str, separator: str) -> list[str]:
    """The different blocks of a text, in order, without those that are empty."""
    blocks = (block.strip() for block in text.split(separator))
    return list(dict.fromkeys(block for block in blocks if block))


def _samples(texts: Sequence[str]) -> list[str]:
    """At most `MAX_SAMPLES` of the different ones, evenly spaced."""
    distinct = list(dict.fromkeys(texts))
    step = max(len(distinct) // MAX_SAMPLES, 1)
    return distinct[::step][:MAX_SAMPLES]
