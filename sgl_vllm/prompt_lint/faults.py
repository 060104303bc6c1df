"""What a fault is: a habit of a client that keeps prompts from being shared, and its repair.

Owns the repairs. Finding faults is `detectors`' part. A repair looks only at what it repairs, so
the repairs of several faults can follow each other in any order. Pure.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sgl_vllm.prompt_lint.prompts import APPENDED, TOOLS, Part, Prompt


@dataclass(frozen=True)
class Fault(ABC):
    """A fault in a group of prompts.

    Attributes:
        place: the part of the prompts that has it.
        what: what is wrong, as a sentence without a final period.
        advice: what to do about it, as a sentence without a final period.
    """

    place: str
    what: str
    advice: str

    @abstractmethod
    def repaired(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        """The prompts as a client without this habit would have sent them, in the same order."""


@dataclass(frozen=True)
class Salts(Fault):
    """Every request has a `cache_salt` of its own."""

    def repaired(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [Prompt(prompt.parts, prompt.model) for prompt in prompts]


@dataclass(frozen=True)
class VolatileValue(Fault):
    """A short value that changes from prompt to prompt, with text behind it that does not.

    Attributes:
        pattern: finds it; group 1 is the value.
    """

    pattern: re.Pattern[str]

    def repaired(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt.with_parts(self._moved(prompt)) for prompt in prompts]

    def _moved(self, prompt: Prompt) -> Iterator[Part]:
        """The parts without the value, and the value behind them."""
        values = []
        for part in prompt.parts:
            match = self.pattern.search(part.text) if part.place == self.place else None
            if match is None:
                yield part
                continue
            start, end = match.span(1)
            yield Part(part.place, part.text[:start] + part.text[end:])
            values.append(Part(APPENDED, match[1]))
        yield from values


@dataclass(frozen=True)
class ToolOrder(Fault):
    """The same tools in different orders."""

    def repaired(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        repaired = []
        for prompt in prompts:
            tools = [part for part in prompt.parts if part.place.startswith(TOOLS)]
            others = [part for part in prompt.parts if not part.place.startswith(TOOLS)]
            repaired.append(prompt.with_parts(sorted(tools, key=lambda t: t.place) + others))
        return repaired


@dataclass(frozen=True)
class ToolSpelling(Fault):
    """The same tools with the keys of their JSON in different orders."""

    def repaired(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [
            prompt.with_parts(
                Part(part.place, canonical_json(part.text)) if is_tool(part) else part
                for part in prompt.parts
            )
            for prompt in prompts
        ]


@dataclass(frozen=True)
class BlockOrder(Fault):
    """Blocks of one part in an order that keeps them from being shared.

    Attributes:
        separator: what is between two blocks.
        ranks: of the blocks that are to be put in order, by their text. The others stay where they
            are, unless there is an `other_rank`.
        other_rank: of all other blocks.
    """

    separator: str
    ranks: Mapping[str, int]
    other_rank: int | None = None

    def repaired(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [
            prompt.with_parts(
                Part(part.place, self._ordered(part.text)) if part.place == self.place else part
                for part in prompt.parts
            )
            for prompt in prompts
        ]

    def _ordered(self, text: str) -> str:
        blocks = text.split(self.separator)
        ranks = [self.ranks.get(block.strip(), self.other_rank) for block in blocks]
        ranked = [(rank, slot) for slot, rank in enumerate(ranks) if rank is not None]
        ordered = list(blocks)
        for (_, slot), (_, source) in zip(ranked, sorted(ranked), strict=True):
            ordered[slot] = blocks[source]
        return self.separator.join(ordered)


@dataclass(frozen=True)
class Window(Fault):
    """Conversations that leave out their oldest turns, which moves all others.

    Attributes:
        continues: for each prompt that does, by its index: the index of the prompt that it goes on
            from, and how many of its own messages that one has too. Ascending.
    """

    continues: tuple[tuple[int, int, int], ...]

    def repaired(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        repaired = list(prompts)
        for index, earlier, num_common in self.continues:
            head, messages = split_conversation(prompts[index])
            _, kept = split_conversation(repaired[earlier])
            repaired[index] = prompts[index].with_parts((*head, *kept, *messages[num_common:]))
        return repaired


def is_tool(part: Part) -> bool:
    return part.place.startswith(TOOLS)


def canonical_json(text: str) -> str:
    """The same JSON with sorted keys; other text as it is."""
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, sort_keys=True)
    except ValueError:
        return text


def split_conversation(prompt: Prompt) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
    """The parts that come before a conversation (tools, system messages), and its messages."""
    parts = prompt.parts
    for index, part in enumerate(parts):
        if not is_tool(part) and not part.place.endswith((".system", ".developer")):
            return parts[:index], parts[index:]
    return parts, ()
