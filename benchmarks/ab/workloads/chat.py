"""Conversations of four turns: long inputs, and short or long replies.

Conversations share nothing with each other; each turn's prompt is the whole conversation so far.
With `--data` inputs begin with the turns of MT-bench's questions, two questions a conversation,
and random words make them as long as drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from benchmarks.ab.workloads.questions import mtbench

NUM_TURNS = 4
INPUT_TOKENS = (256, 512)
SHORT_REPLY_TOKENS = (4, 8)
LONG_REPLY_TOKENS = (256, 512)
# Long conversations are drawn again until they have no more tokens. What a model has written can
# be some more tokens when it is read than when it was written.
MAX_CONVERSATION_TOKENS = 3328


@dataclass(frozen=True)
class Turn:
    """What the user says, and how many tokens the reply has."""

    text: str
    num_reply_tokens: int


@sgl.function
def conversation(s: sgl.ProgramState, turns: tuple[Turn, ...]) -> None:
    for turn in turns:
        length = turn.num_reply_tokens
        s += sgl.user(turn.text)
        s += sgl.assistant(sgl.gen("reply", min_tokens=length, max_tokens=length))


def items(reply_tokens: tuple[int, int], texts: Texts, num_requests: int) -> list[Item]:
    asked = [turn for turns in mtbench(texts) or [] for turn in turns]
    order = texts.order(NUM_TURNS * num_requests, len(asked)) if asked else []
    begins = iter([asked[index] for index in order])

    def turn(num_tokens: int, num_reply_tokens: int) -> Turn:
        begin = texts.vocabulary.beginning(next(begins, ""), num_tokens)
        missing = num_tokens - texts.vocabulary.num_tokens(begin)
        return Turn(begin + texts.text(missing), num_reply_tokens)

    return [
        {"turns": tuple(turn(*lengths) for lengths in _lengths(texts, reply_tokens))}
        for _ in range(num_requests)
    ]


def _lengths(texts: Texts, reply_tokens: tuple[int, int]) -> list[tuple[int, int]]:
    """Of each turn, how many tokens its input and its reply have."""
    while True:
        drawn = [
            (texts.number(*INPUT_TOKENS), texts.number(*reply_tokens)) for _ in range(NUM_TURNS)
        ]
        if sum(map(sum, drawn)) <= MAX_CONVERSATION_TOKENS:
            return drawn


SHORT = Workload.of("chat_short", conversation, partial(items, SHORT_REPLY_TOKENS))
LONG = Workload.of("chat_long", conversation, partial(items, LONG_REPLY_TOKENS))
