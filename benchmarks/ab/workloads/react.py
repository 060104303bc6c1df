"""Agents that think, act and observe (ReAct): one prefix of examples, and several steps each.

A trace is replayed: how many steps there are, how long each thought with its action is and what is
observed then is drawn beforehand, so that any model takes the same way. With `--data` examples and
observations are those of ReAct's authors, and the questions HotPotQA's.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import Item, Texts, Workload
from benchmarks.ab.workloads.questions import HOTPOT_FILE

PROMPTS_FILE = "react_prompts.json"
EXAMPLES_KEY = "webthink_simple6"

NUM_EXAMPLES = 6
MAX_PREFIX_TOKENS = 2048
MAX_QUESTION_TOKENS = 64
NUM_STEPS = (3, 7)
OUTPUT_TOKENS = (24, 128)  # as long as thoughts with actions in the examples; the paper allows 200
MAX_OBSERVATION_TOKENS = 96


@dataclass(frozen=True)
class Step:
    """A thought and action of so many tokens, and what is observed then."""

    num_tokens: int
    observation: str


@sgl.function
def agent(s: sgl.ProgramState, examples: str, question: str, steps: tuple[Step, ...]) -> None:
    s += examples + "\nQuestion:" + question + "\n"
    for number, step in enumerate(steps, start=1):
        length = step.num_tokens
        forks = s.fork(1)
        forks += f"Thought {number}:"
        forks += sgl.gen("thought", min_tokens=length, max_tokens=length)
        forks.join("concate_and_append")
        s += f"\nObservation {number}:" + step.observation + "\n"


@dataclass(frozen=True)
class _World:
    """What agents are told and may meet."""

    examples: str
    questions: list[str]
    observations: list[str]


def items(texts: Texts, num_requests: int) -> list[Item]:
    world = _real_world(texts) or _made_up_world(texts, num_requests)
    cut = texts.vocabulary.beginning
    examples = cut(world.examples, MAX_PREFIX_TOKENS)

    def step() -> Step:
        observation = world.observations[texts.number(0, len(world.observations) - 1)]
        return Step(texts.number(*OUTPUT_TOKENS), cut(observation, MAX_OBSERVATION_TOKENS))

    return [
        {
            "examples": examples,
            "question": cut(world.questions[index], MAX_QUESTION_TOKENS),
            "steps": tuple(step() for _ in range(texts.number(*NUM_STEPS))),
        }
        for index in texts.order(num_requests, len(world.questions))
    ]


def _real_world(texts: Texts) -> _World | None:
    prompts, asked = texts.file(PROMPTS_FILE), texts.file(HOTPOT_FILE)
    if prompts is None or asked is None:
        return None
    try:
        examples = json.loads(prompts)[EXAMPLES_KEY].strip()
        questions = [" " + one["question"] for one in json.loads(asked)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--data: {PROMPTS_FILE} has no {EXAMPLES_KEY}, or {HOTPOT_FILE} no list of "
            f"questions: {error!r}"
        ) from error
    observations = re.findall(r"^Observation [0-9]+:(.+)", examples, re.MULTILINE)
    if not questions or not observations:
        raise ValueError(f"--data: {PROMPTS_FILE} or {HOTPOT_FILE} has nothing to replay")
    return _World(examples, questions, observations)


def _made_up_world(texts: Texts, num_questions: int) -> _World:
    def observation() -> str:
        return texts.text(texts.number(16, MAX_OBSERVATION_TOKENS))

    def example() -> str:
        lines = ["Question:" + texts.text(20)]
        for number in range(1, texts.number(2, 4)):
            lines += [
                f"Thought {number}:" + texts.text(texts.number(*OUTPUT_TOKENS)),
                f"Action {number}:" + texts.text(4),
                f"Observation {number}:" + observation(),
            ]
        return "\n".join(lines)

    return _World(
        examples="\n".join(example() for _ in range(NUM_EXAMPLES)),
        questions=[texts.text(texts.number(16, 48)) for _ in range(num_questions)],
        observations=[observation() for _ in range(64)],
    )


WORKLOAD = Workload.of("react", agent, items)
