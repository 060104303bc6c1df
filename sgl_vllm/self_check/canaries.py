"""The requests of the self-check.

Owns their prompts, formats and lengths, which fit every engine that `Shape.why_not` accepts. Does
not own how they are sent (`driver.py`) or what is compared (`check.py`).

A prompt is random tokens, repeated: a trained model continues the repetition, so the next
tokens are nearly certain if the KV cache holds the first half, and not if it holds anything else.

    prompt of a hit     [0 .......... shared, ends inside a block ..........)[ own tail )
    scored prompt       [0 ................... prefix ....................)[ choice )
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sgl_vllm.self_check.language import Language

MAX_VOCABULARY = 5_000
"""Prompts draw on at most about this many different tokens."""
MIN_BLOCKS = 24
"""A smaller cache has no room for the canaries."""
NUM_PREFIXES = 4
TAIL_TOKENS = 3
PLAIN_TOKENS = 10
TEXT_TOKENS = 160
CHOICE_TOKENS = 4

_NAMES = ("Alice", "Bernard", "Charlotte", "Dimitri")
_CITIES = ("Berlin", "Lisbon", "Madrid", "Toronto")

FORMATS = (
    Language(('{"name": "', _NAMES, '", "city": "', _CITIES, '", "ok": ', ("true", "false"), "}")),
    Language((_CITIES, " is the answer, and the confidence is ", ("high", "medium"), ".")),
    Language(("The color of the house is ", ("red", "green"), " and its owner is ", _NAMES)),
)
"""Forced at the start, between choices and at the end; and not at the start."""


@dataclass(frozen=True, slots=True)
class Canary:
    """One request.

    Attributes:
        after_steps: it is sent after this many steps of its run, or earlier if nothing runs.
        language: the format of its output, if it has one.
        scores_from: with scores, the first prompt token that gets one; 1 for all of them.
        reads_cache: False makes vLLM compute the whole prompt. What it computes is cached all the
            same.
        by_select: asks the part `select` for the scores, not vLLM.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    after_steps: int = 0
    language: Language | None = None
    scores_from: int | None = None
    reads_cache: bool = True
    by_select: bool = False


@dataclass(frozen=True, slots=True)
class Shape:
    """What limits the canaries of an engine, in tokens unless it says otherwise.

    Attributes:
        vocabulary: the tokens that prompts are made of.
        can_be_tight: a request needs one block for so many tokens and no other, so that it is known
            how many blocks make requests preempt each other.
    """

    block_size: int
    num_blocks: int
    max_model_len: int
    vocabulary: Sequence[int]
    can_be_tight: bool = True

    @property
    def shared(self) -> int:
        """The length of a shared prefix. It ends inside its third block; with its tail and its
        output a request reaches the fourth."""
        return 3 * self.block_size - min(8, self.block_size // 2)

    @property
    def short(self) -> int:
        """The length of a prompt whose output soon needs another block."""
        return self.block_size * -(-24 // self.block_size) - 6

    def why_not(self) -> str | None:
        """Why the engine has no room for the canaries; None if it has."""
        if self.num_blocks < MIN_BLOCKS:
            return f"the cache has {self.num_blocks} blocks, and the check needs {MIN_BLOCKS}"
        needed = self.shared + TAIL_TOKENS + PLAIN_TOKENS
        if needed > self.max_model_len:
            return f"the check needs requests of {needed} tokens, more than max_model_len"
        return None


def repeated(shape: Shape, seed: int, length: int, more: int = 0) -> tuple[int, ...]:
    """A prompt of `length` tokens: random ones, and again from the start. `more` go on so."""
    rng = random.Random(seed)
    period = max(4, length // 2 - 1)
    once = [rng.choice(shape.vocabulary) for _ in range(period)]
    return tuple((once * 3)[: length + more])


def prefixes(shape: Shape) -> list[Canary]:
    """Leave prefixes in the cache that end inside a block."""
    return [Canary(repeated(shape, seed, shape.shared), 1) for seed in range(NUM_PREFIXES)]


def hits(shape: Shape) -> list[Canary]:
    """Continue these prefixes, several of them in one step, each in two ways."""
    goes_on = [repeated(shape, seed, shape.shared, TAIL_TOKENS) for seed in range(NUM_PREFIXES)]
    turns = [
        prefix.prompt + repeated(shape, 100 + seed, TAIL_TOKENS)
        for seed, prefix in enumerate(prefixes(shape))
    ]
    return [
        *(Canary(prompt, PLAIN_TOKENS) for prompt in goes_on),
        *(Canary(prompt, PLAIN_TOKENS, after_steps=2) for prompt in turns),
    ]


def structured(shape: Shape) -> list[Canary]:
    """Constrained requests, some of the same format, between requests without one."""
    room = shape.max_model_len - shape.short - 8
    beside = _background(shape, 3, min(room, 2 * PLAIN_TOKENS))
    constrained = [
        Canary(
            repeated(shape, 300 + number, shape.short - number % 3),
            min(room, TEXT_TOKENS),
            after_steps=number,
            language=FORMATS[number % len(FORMATS)],
        )
        for number in range(5)
    ]
    return [
        *(constrained[0], beside[0], constrained[1], constrained[2]),
        *(beside[1], constrained[3], beside[2], constrained[4]),
    ]


def scored(shape: Shape, *, by_select: bool) -> list[Canary]:
    """Choices after a common prefix that ends inside a block; beside requests that decode."""
    seed = 400
    prefix = repeated(shape, seed, shape.shared)
    goes_on = repeated(shape, seed, shape.shared, CHOICE_TOKENS)
    others = [prefix + repeated(shape, seed + number, CHOICE_TOKENS) for number in (1, 2)]
    choices = [
        Canary(prompt, 1, after_steps=1, scores_from=len(prefix), by_select=by_select)
        for prompt in (goes_on, *others)
    ]
    return [*_background(shape, 2, PLAIN_TOKENS // 2), *choices]


def _background(shape: Shape, count: int, max_tokens: int) -> list[Canary]:
    """Short prompts that decode beside others."""
    return [
        Canary(repeated(shape, 200 + seed, shape.short - seed), max_tokens, after_steps=seed)
        for seed in range(count)
    ]


def at_once(canaries: Sequence[Canary]) -> list[Canary]:
    """The same canaries, all sent before the first step."""
    return [replace(canary, after_steps=0) for canary in canaries]


def cold(canaries: Sequence[Canary]) -> list[Canary]:
    """The same, computed from the first token on."""
    return [replace(canary, reads_cache=False) for canary in canaries]
