"""Finds candidates for faults in a group of prompts that belong together.

A detector may name too many: `lint` keeps those whose repair saves tokens. Pure.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations

from sgl_vllm.prompt_lint.faults import (
    BlockOrder,
    Fault,
    Salts,
    ToolOrder,
    ToolSpelling,
    VolatileValue,
    Window,
    canonical_json,
    is_tool,
    split_conversation,
)
from sgl_vllm.prompt_lint.prompts import Prompt

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

KINDS = (
    ("timestamp", r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?"),
    ("date", r"\d{4}-\d\d-\d\d|\d{1,2}/\d{1,2}/\d{2,4}"),
    ("time", r"\d\d:\d\d(?::\d\d)?"),
    ("UUID", r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"),
    ("id", r"(?=[0-9a-f]*\d)[0-9a-f]{8,}"),
    ("number", r"\d+"),
)
PIECE = re.compile("|".join([*(pattern for _, pattern in KINDS), r"\w+", r"\s+", "."]), re.DOTALL)


def detect(prompts: Sequence[Prompt]) -> list[Fault]:
    """Candidates for faults of a group. Of two that explain the same, the better one is first."""
    faults = [*salts(prompts), *tools(prompts), *windows(prompts)]
    places = _texts_by_place(prompts)
    for detector in (volatile_values, block_orders, static_behind_variable):
        for place, texts in places.items():
            faults += detector(place, texts)
    return faults


def salts(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    used = Counter(prompt.salt for prompt in prompts if prompt.salt)
    if len(used) > 1 and 2 * len(used) > used.total():
        yield Salts(
            "cache_salt",
            f"{used.total():,} requests have {len(used):,} different values of cache_salt, so "
            "nothing is shared",
            "Use one cache_salt for each tenant, or none",
        )


def tools(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    orders = defaultdict(set)
    spellings: dict[tuple[str, str], set[str]] = defaultdict(set)
    for prompt in prompts:
        listed = [part for part in prompt.parts if is_tool(part)]
        names = tuple(part.place for part in listed)
        orders[frozenset(names)].add(names)
        for part in listed:
            spellings[part.place, canonical_json(part.text)].add(part.text)
    most = max((len(found) for found in orders.values()), default=0)
    if most > 1:
        yield ToolOrder(
            "tools",
            f"The same tools come in {most:,} different orders",
            "Send tools in one order, for example sorted by name",
        )
    if any(len(found) > 1 for found in spellings.values()):
        yield ToolSpelling(
            "tools",
            "The same tools are written with their JSON keys in different orders",
            "Serialize tools with sorted keys, or only once",
        )


def windows(prompts: Sequence[Prompt]) -> Iterator[Fault]:
    """Conversations of which a request has a part from the middle of an earlier one on."""
    seen: dict[str, list[tuple[int, int]]] = defaultdict(list)
    continues = []
    texts_of = []
    for index, prompt in enumerate(prompts):
        texts = [part.text for part in split_conversation(prompt)[1]]
        texts_of.append(texts)
        if texts:
            for earlier, start in reversed(seen[texts[0]][-MAX_SAMPLES:]):
                rest = texts_of[earlier][start:]
                if start == 0 and texts[: len(rest)] == rest:
                    break  # goes on from there, and leaves out nothing
                if start > 0 and len(rest) < len(texts) and texts[: len(rest)] == rest:
                    continues.append((index, earlier, len(rest)))
                    break
        for position, text in enumerate(texts):
            seen[text].append((index, position))
    if continues:
        yield Window(
            "messages",
            f"{len(continues):,} requests leave out the oldest messages of their conversation, "
            "which moves all later ones",
            "Leave out many messages at once and rarely, not some in every turn",
            tuple(continues),
        )


# -- inside a part ---------------------------------------------------------------------------------


def volatile_values(place: str, texts: Sequence[str]) -> Iterator[Fault]:
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
                yield _volatile_value(place, "".join(base), before, before + len(value))
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


def _volatile_value(place: str, text: str, start: int, end: int) -> VolatileValue:
    """The fault whose value is `text[start:end]`."""
    before = text[max(start - CONTEXT_CHARACTERS, 0) : start]
    after = text[end : end + CONTEXT_CHARACTERS]
    pattern = re.compile(
        (r"\A" if start <= CONTEXT_CHARACTERS else "")
        + f"{re.escape(before)}(.{{1,200}}?){re.escape(after)}"
        + (r"\Z" if end + CONTEXT_CHARACTERS >= len(text) else ""),
        re.DOTALL,
    )
    label = before.rsplit("\n", 1)[-1].strip(" :=\"'")
    return VolatileValue(
        place,
        f"A {_kind_of(text[start:end].strip())} that changes{f' ({label})' if label else ''} comes "
        "before text that does not",
        "Move it to the end of the prompt, or leave it out",
        pattern,
    )


def _opcodes(one: Sequence[str], other: Sequence[str]) -> Sequence[tuple[str, int, int, int, int]]:
    return SequenceMatcher(None, one, other, autojunk=False).get_opcodes()


def _spans(marked: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Runs `[start, end)` of marked pieces; runs with little between them are one."""
    run: tuple[int, int] | None = None
    for index in (index for index, is_marked in enumerate(marked) if is_marked):
        if run is not None and index - run[1] < MIN_CONTEXT_PIECES:
            run = run[0], index + 1
            continue
        if run is not None:
            yield run
        run = index, index + 1
    if run is not None:
        yield run


def _kind_of(value: str) -> str:
    return next((kind for kind, pattern in KINDS if re.fullmatch(pattern, value)), "value")


def block_orders(place: str, texts: Sequence[str]) -> Iterator[Fault]:
    for separator in ("\n\n", "\n"):
        lists = [_blocks(text, separator)[:MAX_BLOCKS] for text in _samples(texts)]
        before = {pair for blocks in lists for pair in combinations(blocks, 2)}
        movable = {block for pair in before if pair[::-1] in before for block in pair}
        if len(movable) < 2:
            continue
        counts = Counter(block for text in texts for block in _blocks(text, separator))
        order = sorted(movable, key=lambda block: (-counts[block], block))
        yield BlockOrder(
            place,
            f"{len(order):,} blocks of text, such as examples or documents, come in different "
            "orders",
            "Keep one order, or let sgl.any_order choose it",
            separator,
            {block: rank for rank, block in enumerate(order)},
        )
        return


def static_behind_variable(place: str, texts: Sequence[str]) -> Iterator[Fault]:
    lists = [_blocks(text, "\n") for text in texts]
    counts = Counter(line for lines in lists for line in lines)
    static = {line: 0 for line, count in counts.items() if count >= COMMON_SHARE * len(texts)}
    if sum(_num_behind(lines, static) >= MIN_STATIC_CHARACTERS for lines in lists) * 2 < len(texts):
        return
    yield BlockOrder(
        place,
        "Text that is the same in most requests comes after text that changes",
        "Write what never changes first",
        "\n",
        static,
        other_rank=1,
    )


def _num_behind(lines: Sequence[str], static: Mapping[str, int]) -> int:
    """Characters of static lines behind the first line that is not."""
    first = next((index for index, line in enumerate(lines) if line not in static), len(lines))
    return sum(len(line) for line in lines[first:] if line in static)


def _blocks(text: str, separator: str) -> list[str]:
    """The different blocks of a text, in order, without those that are empty."""
    blocks = (block.strip() for block in text.split(separator))
    return list(dict.fromkeys(block for block in blocks if block))


def _texts_by_place(prompts: Sequence[Prompt]) -> dict[str, list[str]]:
    """Of each part that several prompts have."""
    texts: dict[str, list[str]] = defaultdict(list)
    for prompt in prompts:
        for part in prompt.parts:
            texts[part.place].append(part.text)
    return {place: found for place, found in texts.items() if len(found) > 1}


def _samples(texts: Sequence[str]) -> list[str]:
    """At most `MAX_SAMPLES` of the different ones, evenly spaced."""
    distinct = list(dict.fromkeys(texts))
    step = max(len(distinct) // MAX_SAMPLES, 1)
    return distinct[::step][:MAX_SAMPLES]
