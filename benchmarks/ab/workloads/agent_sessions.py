"""Sessions of coding agents, with pauses for tools and people, and a cache too small for them.

A trace of `benchmarks.session_model` is replayed at a sixty-fourth of its texts and times. The
trace says what users and tools give, how long they take and how long each answer is; the model
writes the answers. What one context reads from another, which is a summary or a subagent's
findings, comes from the trace too, so that prompts are as long with any model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

import sgl_vllm as sgl
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Item, Texts, Workload
from benchmarks.session_model import in_window
from benchmarks.traces import Call, Tokens

SCALE = Fraction(1, 64)
WINDOW_S = 600.0  # each session is what falls into it, before it is scaled
BEGUN_BEFORE_S = 2 * 3600.0
MAX_STEPS = 40
# Longer sessions are drawn again. What a model has written can be more tokens when it is read.
MAX_TOKENS = 3072
CACHE_TOKENS = 12_288


@dataclass(frozen=True)
class Step:
    """Some text, and an answer of `num_tokens` tokens.

    Attributes:
        number: in its session.
        after: the steps, by their numbers, whose answers it waits for.
        pause_s: from then until it is asked.
    """

    number: int
    after: tuple[int, ...]
    pause_s: float
    text: str
    num_tokens: int


Context = tuple[Step, ...]
"""Steps that continue each other."""


@sgl.function
async def session(s: sgl.ProgramState, contexts: tuple[Context, ...]) -> None:
    branches = s.fork(len(contexts))
    answered = [asyncio.Event() for context in contexts for _ in context]

    async def ask(branch: sgl.ProgramState, step: Step) -> None:
        for number in step.after:
            await answered[number].wait()
        await asyncio.sleep(step.pause_s)
        name = f"answer{step.number}"
        branch += step.text
        branch += sgl.gen(name, min_tokens=step.num_tokens, max_tokens=step.num_tokens)
        await branch[name]

    async def run(branch: sgl.ProgramState, context: Context) -> None:
        for step in context:
            try:
                await ask(branch, step)
            finally:  # so that what waits for an answer that failed goes on, and fails too
                answered[step.number].set()

    await asyncio.gather(*map(run, branches, contexts))
    branches.join("concate_and_append")


def items(texts: Texts, num_requests: int) -> list[Item]:
    made: list[Item] = []
    for program in in_window(texts.rng, WINDOW_S, SCALE, BEGUN_BEFORE_S):
        is_short = max(call.num_tokens for call in program.calls) <= MAX_TOKENS
        if is_short and len(program.calls) <= MAX_STEPS:
            made.append({"contexts": _contexts(program.calls, texts)})
        if len(made) == num_requests:
            break
    return made


def _contexts(calls: Sequence[Call], texts: Texts) -> tuple[Context, ...]:
    contexts: list[list[Step]] = []
    context_of: list[list[Step]] = []  # of each call
    for number, call in enumerate(calls):
        num_before = 0
        context: list[Step] = []
        for index in call.after:
            before = np.concatenate([calls[index].prompt, calls[index].reply])
            if np.array_equal(call.prompt[: len(before)], before):
                num_before, context = len(before), context_of[index]
        if not num_before:
            contexts.append(context)
        context_of.append(context)
        text = _words(call.prompt[num_before:], texts)
        context.append(Step(number, call.after, call.think_s, text, len(call.reply)))
    return tuple(map(tuple, contexts))


def _words(tokens: Tokens, texts: Texts) -> str:
    words = texts.vocabulary.words
    return "".join(words[tokens % len(words)])


def server_args(block_size_tokens: int) -> tuple[str, ...]:
    return (
        *("--num-gpu-blocks-override", str(CACHE_TOKENS // block_size_tokens)),
        *("--max-model-len", str(MAX_MODEL_LEN)),
    )


WORKLOAD = Workload.of("agent_sessions", session, items, pauses=True, server_args=server_args)
