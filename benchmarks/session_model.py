"""Sessions of coding agents: what they ask, how long they pause, and a trace of them.

Owns the model of a session and the trace that `benchmarks.simulate` runs; docs/benchmarks.md
shows how well it fits what is published, and says what is assumed. Pure: no vLLM,
no clock; the same arguments give the same sessions, token for token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import NormalDist
from typing import Literal

import numpy as np
import numpy.typing as npt

from benchmarks.traces import VOCABULARY, Call, Program, Tokens, Trace

NAME = "agent_sessions"

END_OF_TURN, END_OF_TOOL_CALL = VOCABULARY, VOCABULARY + 1
"""The last token of an answer to a person, and of one that calls tools, as in the chat formats of
many models."""

SECONDS_PER_TOKEN = 5.7 / 252
"""Generation of the published median step. Decides only which steps fall into a trace's window."""

STEPS_PER_S = 0.35
"""How many steps a trace's sessions take in a second, before `--load` says otherwise."""

BEGUN_BEFORE_S = 12 * 3600
"""The earliest that a trace's sessions began, before its window."""

Floats = npt.NDArray[np.float64]
Trigger = Literal["user", "tool", "compaction", "subagent"]


# -- the distributions ----------------------------------------------------------------------------


class Distribution:
    """A distribution with given quantiles, log-normal between each two of them.

    The logarithm of a value is a piecewise linear function of a normal variable. The first and the
    last piece go on outside, so the tail is as heavy as the last two quantiles say, up to `most`.
    """

    def __init__(self, *quantiles: tuple[float, float], most: float = math.inf) -> None:
        """From (share of values below, value) in rising order, at least two."""
        z = [NormalDist().inv_cdf(share) for share, _ in quantiles]
        log = [math.log(value) for _, value in quantiles]
        far = 10.0
        first = log[0] - (far + z[0]) * (log[1] - log[0]) / (z[1] - z[0])
        last = log[-1] + (far - z[-1]) * (log[-1] - log[-2]) / (z[-1] - z[-2])
        self._z = [-far, *z, far]
        self._log = [first, *log, last]
        self._most = most

    def draw(self, rng: np.random.Generator, *shape: int) -> Floats:
        logs = np.interp(rng.standard_normal(shape), self._z, self._log)
        return np.minimum(np.exp(logs), self._most)


@dataclass(frozen=True, slots=True)
class Agent:
    """A coding agent.

    Attributes:
        share: of sessions.
        num_opening_tokens: system prompt and tool definitions, the same in all its sessions.
        windows: context sizes at which it compacts, in tokens, and their shares.
        output: tokens of one step.
        human_wait_s: from an answer to the user's next request.
    """

    name: str
    share: float
    num_opening_tokens: int
    windows: tuple[tuple[int, float], ...]
    output: Distribution
    human_wait_s: Distribution


AGENTS = (
    Agent(
        "A",
        share=0.63,
        num_opening_tokens=22_000,
        windows=((190_000, 0.45), (1_000_000, 0.55)),
        output=Distribution((0.5, 252), (0.9, 1300), (0.99, 4500), most=32_000),
        human_wait_s=Distribution((0.5, 80), (0.796, 300), (0.9, 1100), (0.99, 50_400)),
    ),
    Agent(
        "B",
        share=0.37,
        num_opening_tokens=14_000,
        windows=((240_000, 1.0),),
        output=Distribution((0.5, 184), (0.9, 1300), (0.99, 5500), most=32_000),
        human_wait_s=Distribution((0.5, 100), (0.698, 300), (0.9, 1600), (0.99, 50_400)),
    ),
)

# Counts are rounded down, so 0.5 stands for none.
REQUESTS = Distribution((0.585, 1.99), (0.9, 18.5), (0.99, 137), most=600)
FIRST_TOOL_STEPS = Distribution((0.25, 3), (0.5, 9), (0.9, 40), (0.99, 150), most=400)
LATER_TOOL_STEPS = Distribution((0.3, 0.99), (0.5, 1.5), (0.9, 20), (0.99, 86), most=400)
SUBAGENT_STEPS = Distribution((0.5, 6), (0.9, 25), most=100)
NUM_TOOL_CALLS = (0.77, 0.15, 0.05, 0.03)  # shares of steps that call 1, 2, 3, 4 tools

TOOL_LATENCY_S = Distribution((0.5, 0.3), (0.9, 13.6), (0.99, 120), most=1800)
PROJECT_TOKENS = Distribution((0.5, 4000), (0.9, 15_000), most=30_000)
USER_TOKENS = Distribution((0.5, 150), (0.9, 1500), (0.99, 10_000), most=50_000)
TOOL_TOKENS = Distribution((0.5, 420), (0.9, 2600), (0.99, 12_000), most=50_000)
SUMMARY_TOKENS = Distribution((0.5, 3000), (0.9, 8000), most=16_000)
COMPACTION_PROMPT_TOKENS = 400
KEPT_TOKENS = Distribution((0.5, 15_000), (0.9, 40_000), most=60_000)  # files, last messages

SHARE_WITH_SUBAGENTS = 0.44
SHARE_OF_REQUESTS_WITH_SUBAGENTS = 0.15  # of those in such a session that run any tool
NUM_SUBAGENTS = (0.6, 0.25, 0.15)  # shares of these requests that start 1, 2, 3


# -- a session ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One request to the model, in published sizes. Its prompt, in order:

        [ prompt and answer of `continues` | answers of `reads` | `num_new` more tokens )

    Attributes:
        trigger: what is new is a user's message, a tool's result, the instruction to summarize the
            context, or a subagent's task.
        continues: the step before it in its context; None where a context begins, with the agent's
            and the session's own opening.
        reads: steps whose answers come next: a summary, or what subagents found.
        after: steps that it waits for.
        pause_s: from the last of their answers until it is sent: the longest latency of its tools,
            which run in parallel, or how long a person is away.
    """

    trigger: Trigger
    continues: int | None
    reads: tuple[int, ...]
    after: tuple[int, ...]
    pause_s: float
    num_new: int
    num_prompt: int
    num_output: int


@dataclass(frozen=True, slots=True)
class Session:
    """Steps in an order in which each comes after those that it waits for.

    `num_project_tokens` follow the agent's opening in all contexts of the session: notes about the
    project and its files.
    """

    agent: Agent
    num_project_tokens: int
    steps: tuple[Step, ...]

    def starts_s(self) -> list[float]:
        """When each step is sent on a server that always decodes at `SECONDS_PER_TOKEN`."""
        starts: list[float] = []
        ends: list[float] = []
        for step in self.steps:
            starts.append(max((ends[index] for index in step.after), default=0.0) + step.pause_s)
            ends.append(starts[-1] + step.num_output * SECONDS_PER_TOKEN)
        return starts


class _Author:
    """Writes the steps of one session."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._agent = AGENTS[rng.choice(len(AGENTS), p=[agent.share for agent in AGENTS])]
        sizes, shares = zip(*self._agent.windows, strict=True)
        self._window = int(rng.choice(sizes, p=shares))
        self._num_project_tokens = round(float(PROJECT_TOKENS.draw(rng)))
        self._steps: list[Step] = []

    def write(self) -> Session:
        rng = self._rng
        num_requests = max(1, int(REQUESTS.draw(rng)))
        num_tool_steps = LATER_TOOL_STEPS.draw(rng, num_requests).astype(int)
        num_tool_steps[0] = int(FIRST_TOOL_STEPS.draw(rng))
        starting = np.zeros(num_requests, dtype=bool)
        if rng.random() < SHARE_WITH_SUBAGENTS:
            if not num_tool_steps.any():
                num_tool_steps[0] = 1
            starting = self._some_of(num_tool_steps > 0)
        human_waits_s = self._agent.human_wait_s.draw(rng, num_requests)
        user_tokens = USER_TOKENS.draw(rng, num_requests)
        last: int | None = None
        for request, num_steps in enumerate(num_tool_steps):
            pause_s = float(human_waits_s[request]) if request else 0.0
            last = self._append("user", last, round(user_tokens[request]), pause_s)
            last = self._loop(last, int(num_steps), bool(starting[request]))
        return Session(self._agent, self._num_project_tokens, tuple(self._steps))

    def _some_of(self, possible: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """The requests that start subagents, one at least."""
        starting = possible & (self._rng.random(len(possible)) < SHARE_OF_REQUESTS_WITH_SUBAGENTS)
        if not starting.any():
            starting[self._rng.choice(np.flatnonzero(possible))] = True
        return starting

    def _loop(self, last: int, num_steps: int, starts_subagents: bool) -> int:
        """A tool's result and the next answer, `num_steps` times. Returns the last step.

        Subagents are started by one of the answers before, and run beside the loop until a later
        step reads what they found.
        """
        start, join = -1, -1
        if starts_subagents:
            start = int(self._rng.integers(num_steps))
            join = int(self._rng.integers(start, min(num_steps, start + 4)))
        answers: list[int] = []
        tokens, latencies_s = self._tools(num_steps)
        for index in range(num_steps):
            if index == start:
                answers = self._run_subagents(last)
            reads = answers if index == join else []
            last = self._append("tool", last, tokens[index], latencies_s[index], reads)
        return last

    def _run_subagents(self, parent: int) -> list[int]:
        """They begin with the parent's opening. Returns the last step of each."""
        num_subagents = 1 + int(self._rng.choice(len(NUM_SUBAGENTS), p=NUM_SUBAGENTS))
        answers = []
        for length in SUBAGENT_STEPS.draw(self._rng, num_subagents).astype(int):
            tokens, latencies_s = self._tools(max(1, int(length)))
            last = self._add("subagent", None, tokens[0], 0.0, (parent,), ())
            for num_new, pause_s in zip(tokens[1:], latencies_s[1:], strict=True):
                last = self._append("tool", last, num_new, pause_s)
            answers.append(last)
        return answers

    def _tools(self, num_steps: int) -> tuple[list[int], list[float]]:
        """For each of `num_steps` steps: the tokens that tools give, and the longest latency."""
        rng = self._rng
        num_calls = 1 + rng.choice(len(NUM_TOOL_CALLS), num_steps, p=NUM_TOOL_CALLS)
        latencies_s = TOOL_LATENCY_S.draw(rng, num_steps, len(NUM_TOOL_CALLS)).tolist()
        return (
            TOOL_TOKENS.draw(rng, num_steps).round().astype(int).tolist(),
            [max(row[:number]) for row, number in zip(latencies_s, num_calls, strict=True)],
        )

    def _append(
        self,
        trigger: Trigger,
        last: int | None,
        num_new: int,
        pause_s: float,
        reads: Sequence[int] = (),
    ) -> int:
        """The step after `last` in its context, which is compacted if it would be too large."""
        if last is None:
            return self._add(trigger, None, num_new, pause_s, (), ())
        num_read = sum(self._steps[index].num_output for index in reads)
        if self._num_context(last) + num_read + num_new > self._window:
            last = self._add("compaction", last, COMPACTION_PROMPT_TOKENS, 0.0, (last,), ())
            num_new += round(float(KEPT_TOKENS.draw(self._rng)))
            return self._add(trigger, None, num_new, pause_s, (last, *reads), (last, *reads))
        return self._add(trigger, last, num_new, pause_s, (last, *reads), tuple(reads))

    def _num_context(self, step: int | None) -> int:
        """The tokens before what a step adds."""
        if step is None:
            return self._agent.num_opening_tokens + self._num_project_tokens
        return self._steps[step].num_prompt + self._steps[step].num_output

    def _add(
        self,
        trigger: Trigger,
        continues: int | None,
        num_new: int,
        pause_s: float,
        after: tuple[int, ...],
        reads: tuple[int, ...],
    ) -> int:
        num_new = max(1, num_new)
        num_read = sum(self._steps[index].num_output for index in reads)
        output = SUMMARY_TOKENS if trigger == "compaction" else self._agent.output
        self._steps.append(
            Step(
                trigger=trigger,
                continues=continues,
                reads=reads,
                after=after,
                pause_s=pause_s,
                num_new=num_new,
                num_prompt=self._num_context(continues) + num_read + num_new,
                num_output=max(1, round(float(output.draw(self._rng)))),
            )
        )
        return len(self._steps) - 1


# -- a trace --------------------------------------------------------------------------------------


def trace(num_calls: int, seed: int = 0, scale: Fraction = Fraction(1)) -> Trace:
    """A window of a steady stream of sessions, as long as it takes for `num_calls` steps.

    Raises:
        ValueError: a scale that does not shorten.
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale {scale} is not above 0 and at most 1")
    programs: list[Program] = []
    num_drawn = 0
    for program in in_window(np.random.default_rng(seed), num_calls / STEPS_PER_S, scale):
        programs.append(program)
        num_drawn += len(program.calls)
        if num_drawn >= num_calls:
            break
    return Trace(NAME, tuple(programs))


def in_window(
    rng: np.random.Generator,
    window_s: float,
    scale: Fraction,
    begun_before_s: float = BEGUN_BEFORE_S,
) -> Iterator[Program]:
    """Sessions of which some steps fall into a window of time; these steps, without an end.

    Sessions last for hours, so one that is under way when the window opens is there with the
    context that it has by then, and what comes after the window is left out. None began more than
    `begun_before_s` earlier. `scale` shortens every text and every time (1/8: a pause of 80 s is
    one of 10 s).
    """
    openings = {agent.name: _text(rng, round(agent.num_opening_tokens * scale)) for agent in AGENTS}
    while True:
        session = _Author(rng).write()
        begin_s = rng.uniform(-begun_before_s, window_s)
        starts_s = [begin_s + start_s for start_s in session.starts_s()]
        kept = [index for index, start_s in enumerate(starts_s) if 0 <= start_s < window_s]
        if kept:
            calls = as_calls(session, openings[session.agent.name], rng, scale)
            arrival_s = min(starts_s[index] for index in kept)
            yield Program(_only(kept, calls), arrival_s * float(scale))


def as_calls(
    session: Session, opening: Tokens, rng: np.random.Generator, scale: Fraction
) -> list[Call]:
    """A call for each step. Prompts of one context are views of one array."""

    def scaled(num_tokens: int) -> int:
        return max(1, round(num_tokens * scale))

    project = _text(rng, scaled(session.num_project_tokens))
    calling_tools = {
        step.continues for step in session.steps if step.trigger in ("tool", "compaction")
    }
    replies: list[Tokens] = []
    contexts: list[list[Tokens]] = []  # of each, the parts
    places: list[tuple[int, int]] = []  # of each step, its context and the prompt's end in it
    ends: list[int] = []  # of each context, its tokens so far
    for number, step in enumerate(session.steps):
        if step.continues is None:
            contexts.append([opening, project])
            ends.append(len(opening) + len(project))
            context = len(contexts) - 1
        else:
            context, _ = places[step.continues]
        new = [*(replies[index] for index in step.reads), _text(rng, scaled(step.num_new))]
        reply = _text(rng, scaled(step.num_output))
        reply[-1] = END_OF_TOOL_CALL if number in calling_tools else END_OF_TURN
        contexts[context] += [*new, reply]
        places.append((context, ends[context] + sum(map(len, new))))
        ends[context] = places[-1][1] + len(reply)
        replies.append(reply)
    tokens = [np.concatenate(parts) for parts in contexts]
    return [
        Call(tokens[context][:end], reply, step.after, step.pause_s * float(scale))
        for step, reply, (context, end) in zip(session.steps, replies, places, strict=True)
    ]


def _text(rng: np.random.Generator, num_tokens: int) -> Tokens:
    return rng.integers(0, VOCABULARY, num_tokens, dtype=np.int32)


def _only(kept: Sequence[int], calls: Sequence[Call]) -> tuple[Call, ...]:
    """These of the calls. They no longer wait for the others."""
    numbers = {index: number for number, index in enumerate(kept)}
    found = []
    for index in kept:
        call = calls[index]
        after = tuple(numbers[before] for before in call.after if before in numbers)
        found.append(Call(call.prompt, call.reply, after, call.think_s if after else 0.0))
    return tuple(found)
