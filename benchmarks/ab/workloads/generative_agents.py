"""Generative agents: five kinds of short calls about what happens to each of some personas.

As in the simulation (arXiv 2304.03442): an event happens, and for each agent it is asked how much
it matters, what it is as subject, predicate and object, which emoji says it, where the agent goes
then, and what it uses there. Calls about an agent itself begin with its persona, the two others
with the examples of their kind, and the event comes last.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload

NUM_AGENTS = 8
PERSONA_TOKENS = (192, 384)
EXAMPLES_TOKENS = (96, 256)
EVENT_TOKENS = (8, 32)


@dataclass(frozen=True)
class Kind:
    """A kind of call: its question, the length of its answers, and which prefix it has."""

    question: str
    num_tokens: int
    begins_with_persona: bool


KINDS = (
    Kind("How much does this matter, from 1 to 10?", 2, True),
    Kind("This as (subject, predicate, object):", 20, False),
    Kind("This as one or two emojis:", 6, False),
    Kind("The area to go to then:", 10, True),
    Kind("The object to use there:", 5, True),
)


@sgl.function
def call(s: sgl.ProgramState, shared: str, event: str, question: str, num_tokens: int) -> None:
    s += shared + "\nEvent:" + event + "\n" + question
    s += sgl.gen("answer", min_tokens=num_tokens, max_tokens=num_tokens)


def items(texts: Texts, num_requests: int) -> list[Item]:
    """Event by event, in each agent by agent, of each every kind."""
    personas = [texts.text(texts.number(*PERSONA_TOKENS)) for _ in range(NUM_AGENTS)]
    examples = [texts.text(texts.number(*EXAMPLES_TOKENS)) for _ in KINDS]

    def calls() -> Iterator[Item]:
        while True:
            event = texts.text(texts.number(*EVENT_TOKENS))
            for persona in personas:
                for kind, of_kind in zip(KINDS, examples, strict=True):
                    yield {
                        "shared": persona if kind.begins_with_persona else of_kind,
                        "event": event,
                        "question": kind.question,
                        "num_tokens": kind.num_tokens,
                    }

    return list(islice(calls(), num_requests))


WORKLOAD = Workload.of("generative_agents", call, items)
