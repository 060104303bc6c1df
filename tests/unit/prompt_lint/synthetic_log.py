"""Logs of requests with faults that were put there on purpose, and the same logs without them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

WORDS = [
    *("river", "stone", "market", "copper", "letter", "window", "garden", "engine", "travel"),
    *("silver", "planet", "doctor", "winter", "camera", "bridge", "forest", "salmon", "ticket"),
]


@dataclass(frozen=True)
class Application:
    """What all requests of one application have in common."""

    instructions: str
    tools: list[Json]
    examples: list[str]


def timestamp(app: Application, question: str, rng: random.Random, *, faulty: bool) -> Json:
    time = f"2026-11-{rng.randint(10, 28)}T{rng.randint(10, 23)}:{rng.randint(10, 59)}:07Z"
    if faulty:
        return chat(f"Current time: {time}\n{app.instructions}", question)
    return chat(f"Current time: \n{app.instructions}", f"{question}\n{time}")


def tool_order(app: Application, question: str, rng: random.Random, *, faulty: bool) -> Json:
    tools = rng.sample(app.tools, len(app.tools)) if faulty else app.tools
    return {"tools": tools, **chat(app.instructions, question)}


def example_order(app: Application, question: str, rng: random.Random, *, faulty: bool) -> Json:
    examples = rng.sample(app.examples, len(app.examples)) if faulty else app.examples
    return {"prompt": "\n\n".join([app.instructions, *examples, question])}


def question_first(app: Application, question: str, _: random.Random, *, faulty: bool) -> Json:
    texts = (question, app.instructions) if faulty else (app.instructions, question)
    return {"prompt": "\n".join(texts)}


def salts(app: Application, question: str, rng: random.Random, *, faulty: bool) -> Json:
    salt = {"cache_salt": str(rng.random())} if faulty else {}
    return {**chat(app.instructions, question), **salt}


FAULTS: tuple[Callable[..., Json], ...] = (
    timestamp,
    tool_order,
    example_order,
    question_first,
    salts,
)


def log(
    faulty: Collection[Callable[..., Json]], num_requests: int = 20, seed: int = 0
) -> list[Json]:
    """Requests of five applications in turn, of which each can have one fault."""
    rng = random.Random(seed)
    applications = [
        # Of different lengths, so that their faults have different costs.
        Application(
            instructions=text(rng, 300 * (len(FAULTS) - number)),
            tools=[tool(rng, index) for index in range(8)],
            examples=[f"Example: {text(rng, 80)}" for _ in range(9)],
        )
        for number in range(len(FAULTS))
    ]
    return [
        build(application, text(rng, 12), random.Random(number), faulty=build in faulty)
        for number in range(num_requests)
        for build, application in zip(FAULTS, applications, strict=True)
    ]


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


def tool(rng: random.Random, number: int) -> Json:
    function = {"name": f"tool_{number}", "description": text(rng, 150), "parameters": {}}
    return {"type": "function", "function": function}


def chat(system: str, user: str) -> Json:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}]}


def lines(bodies: list[Json]) -> list[str]:
    return [json.dumps(body) for body in bodies]
