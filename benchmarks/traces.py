"""What is asked of a server: recorded and generated traces, and what they allow at best.

Owns the shapes (`Trace`, `Program`, `Call`), the reader of Mooncake's trace format, the generators
and the bound on prefix reuse. Pure: no vLLM, no clock; the same arguments give the same tokens.

A trace is a list of programs. A program is a list of calls, each with its prompt, the reply that
the simulated model gives, and the calls whose replies it waits for. As replies are known, prompts
are too; only the *time* at which a call is sent depends on the run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]

MOONCAKE_BLOCK_TOKENS = 512
"""So many tokens stand behind one hash id of a Mooncake trace."""

VOCABULARY = 128_000
"""Generated texts draw their tokens from so many: two may begin with the same one, as real ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One request.

    Attributes:
        prompt: token ids, shape (n,), n >= 1.
        reply: token ids, shape (m,), m >= 1: what the simulated model answers.
        after: indices, within the program, of the calls that must have ended before it is sent.
        think_s: how long after the last of these it is sent: a person reads, a tool runs.
    """

    prompt: Tokens
    reply: Tokens
    after: tuple[int, ...] = ()
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if not len(self.prompt) or not len(self.reply):
            raise ValueError("a call has at least one token of prompt and one of reply")

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.reply)


@dataclass(frozen=True, slots=True)
class Program:
    """Calls in an order in which each comes after those that it waits for.

    `arrival_s` is in seconds from the trace's start; None if the run decides.
    """

    calls: tuple[Call, ...]
    arrival_s: float | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    name: str
    programs: tuple[Program, ...]

    def calls(self) -> Iterator[Call]:
        for program in self.programs:
            yield from program.calls

    @property
    def num_calls(self) -> int:
        return sum(len(program.calls) for program in self.programs)

    @property
    def is_timed(self) -> bool:
        """Whether every program says when it came."""
        return all(program.arrival_s is not None for program in self.programs)

    @property
    def max_call_tokens(self) -> int:
        """Prompt and reply of the longest call."""
        return max(call.num_tokens for call in self.calls())


def with_span(trace: Trace, span_s: float, seed: int) -> Trace:
    """The same programs, arriving over about `span_s` seconds.

    Arrivals that the trace has, and the pauses in its programs, are stretched or compressed to it;
    programs without get those of a Poisson process with that many programs in that time.
    """
    if trace.is_timed:
        last = max(program.arrival_s or 0.0 for program in trace.programs)
        programs = [
            _stretched(program, span_s / last if last else 1.0) for program in trace.programs
        ]
    else:
        gaps = np.random.default_rng(seed).exponential(1.0, len(trace.programs))
        times = np.cumsum(gaps) * (span_s / len(trace.programs))
        programs = [
            dataclasses.replace(program, arrival_s=float(arrival_s))
            for program, arrival_s in zip(trace.programs, times, strict=True)
        ]
    return Trace(trace.name, tuple(programs))


def _stretched(program: Program, factor: float) -> Program:
    calls = (dataclasses.replace(call, think_s=factor * call.think_s) for call in program.calls)
    arrival_s = factor * (program.arrival_s or 0.0)
    return dataclasses.replace(program, calls=tuple(calls), arrival_s=arrival_s)


# -- recorded -----------------------------------------------------------------------------------


def read_mooncake(
    path: Path, num_requests: int | None = None, scale: Fraction = Fraction(1)
) -> Trace:
    """The first `num_requests` (all by default) of a trace in Mooncake's format.

    One JSON object a line: `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and
    `hash_ids`, one for every 512 tokens of the prompt begun. Equal ids stand for equal tokens after
    equal beginnings, so a prefix is shared in whole ids only, and what it shares with an earlier
    *reply* is not recorded: replies here are never met again.

    `scale` shortens every block, prompt and reply alike (1/4: 128 tokens for an id).

    Raises:
        ValueError: a line that is not of this form, or a scale that does not divide a block.
    """
    block = MOONCAKE_BLOCK_TOKENS * scale
    if block.denominator != 1 or not 1 <= block <= MOONCAKE_BLOCK_TOKENS:
        raise ValueError(f"scale {scale} does not give whole tokens for a block of 512")
    programs: list[Program] = []
    next_reply = 1 << 30  # hash ids begin at 0: prompts stay below
    with path.open() as lines:
        for number, line in enumerate(lines, start=1):
            if num_requests is not None and len(programs) >= num_requests:
                break
            try:
                row = json.loads(line)
                prompt = _mooncake_prompt(row["hash_ids"], row["input_length"], int(block))
                num_output = max(1, round(row["output_length"] * scale))
                arrival_s = row["timestamp"] / 1000
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error!r}") from error
            reply = np.arange(next_reply, next_reply + num_output, dtype=np.int32)
            next_reply += num_output
            programs.append(Program((Call(prompt, reply),), arrival_s))
    if not programs:
        raise ValueError(f"{path} holds no request")
    return Trace(path.stem, tuple(programs))


def _mooncake_prompt(hash_ids: list[int], input_length: int, block: int) -> Tokens:
    """Id h stands for the tokens [h * block, (h + 1) * block): equal exactly if the ids are."""
    num_full = len(hash_ids) - 1
    num_last = input_length - num_full * MOONCAKE_BLOCK_TOKENS
    if not 0 < num_last <= MOONCAKE_BLOCK_TOKENS:
        raise ValueError(f"{len(hash_ids)} hash ids do not fit {input_length} tokens")
    num_last = max(1, num_last * block // MOONCAKE_BLOCK_TOKENS)
    ids = np.array(hash_ids, dtype=np.int64)
    if ids.min() < 0 or (int(ids.max()) + 1) * block > 1 << 30:
        raise ValueError("a hash id is out of range")
    tokens = ids[:, None] * block + np.arange(block)
    return tokens.reshape(-1)[: num_full * block + num_last].astype(np.int32)


# -- generated ----------------------------------------------------------------------------------


class _Writer:
    """Texts of random tokens and lengths, each of `scale` times the length asked for."""

    def __init__(self, seed: int, scale: Fraction = Fraction(1)) -> None:
        self.rng = np.random.default_rng(seed)
        self._scale = scale

    def number(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def text(self, low: int, high: int) -> Tokens:
        length = self.number(low, high)
        if length:
            length = max(1, int(length * self._scale))
        return self.rng.integers(0, VOCABULARY, length, dtype=np.int32)

    def pause_s(self, mean_s: float) -> float:
        return float(self.rng.exponential(mean_s))

    def then(self, prompt: Tokens, reply: Tokens, before: list[Call], pause_s: float) -> Call:
        """The call that follows the last of `before`, if there is one."""
        return Call(prompt, reply, (len(before) - 1,), pause_s) if before else Call(prompt, reply)


def _join(*parts: Tokens) -> Tokens:
    return np.concatenate(parts)


def _conversations(
    writer: _Writer, reply_tokens: tuple[int, int], kept: Callable[[Tokens], Tokens]
) -> Iterator[Program]:
    """A person's conversation of 3 to 6 turns under one of 4 system prompts; 10 s between turns.
    The next prompt has what is `kept` of each reply."""
    system_prompts = [writer.text(100, 900) for _ in range(4)]
    while True:
        history = system_prompts[writer.number(0, 3)]
        calls: list[Call] = []
        for _ in range(writer.number(3, 6)):
            prompt, reply = _join(history, writer.text(20, 300)), writer.text(*reply_tokens)
            calls.append(writer.then(prompt, reply, calls, writer.pause_s(10.0)))
            history = _join(prompt, kept(reply))
        yield Program(tuple(calls))


def _chat(writer: _Writer) -> Iterator[Program]:
    """Conversations that keep the replies."""
    return _conversations(writer, (40, 260), lambda reply: reply)


def _thinking_chat(writer: _Writer) -> Iterator[Program]:
    """Those of a model that thinks before it answers: the second half of each reply is kept."""
    return _conversations(writer, (80, 400), lambda reply: reply[len(reply) // 2 :])


def _tree_of_thought(writer: _Writer) -> Iterator[Program]:
    """3 levels, 3 wide: 39 calls. Siblings have the same prompt and differ in their replies."""
    width, num_levels = 3, 3
    instructions = [writer.text(30, 80) for _ in range(num_levels)]
    examples = writer.text(300, 300)
    while True:
        calls: list[Call] = []
        level: list[tuple[Tokens, tuple[int, ...]]] = [(_join(examples, writer.text(60, 200)), ())]
        for instruction in instructions:
            next_level: list[tuple[Tokens, tuple[int, ...]]] = []
            for history, after in level:
                prompt = _join(history, instruction)
                for _ in range(width):
                    calls.append(Call(prompt, writer.text(100, 256), after))
                    next_level.append((_join(prompt, calls[-1].reply), (len(calls) - 1,)))
            level = next_level
        yield Program(tuple(calls))


def _react(writer: _Writer) -> Iterator[Program]:
    """6 examples shared by all, a question, then 2 to 7 steps, each with a tool of about 0.5 s."""
    examples = writer.text(1800, 1800)
    while True:
        history = _join(examples, writer.text(15, 60))
        calls: list[Call] = []
        for _ in range(writer.number(2, 7)):
            reply, observation = writer.text(30, 200), writer.text(30, 200)
            calls.append(writer.then(history, reply, calls, writer.pause_s(0.5)))
            history = _join(history, reply, observation)
        yield Program(tuple(calls))


def _fork_join(writer: _Writer) -> Iterator[Program]:
    """A skeleton, 5 points of it written in parallel, and a last call over all of them."""
    instruction = writer.text(120, 120)
    while True:
        prompt = _join(instruction, writer.text(30, 300))
        skeleton = Call(prompt, writer.text(50, 120))
        history = _join(prompt, skeleton.reply)
        points = [
            Call(_join(history, writer.text(5, 30)), writer.text(40, 128), (0,)) for _ in range(5)
        ]
        joined = _join(history, *(point.reply for point in points), writer.text(10, 30))
        yield Program((skeleton, *points, Call(joined, writer.text(60, 200), (1, 2, 3, 4, 5))))


def _compiled(writer: _Writer) -> Iterator[Program]:
    """Runs of 6 compiled programs, in any order: agents of 2, 3, 5, 9, 17 and 33 steps, each with a
    system prompt of its own. The tool between two steps takes about as long in each run, 0.2 to 20
    s."""
    kinds = []
    for num_steps in (2, 3, 5, 9, 17, 33):
        tools_s = 0.2 * 100 ** writer.rng.random(num_steps)
        kinds.append((writer.text(500, 1500), tools_s))
    while True:
        history, tools_s = kinds[writer.number(0, len(kinds) - 1)]
        calls: list[Call] = []
        for tool_s in tools_s:
            prompt, reply = _join(history, writer.text(50, 400)), writer.text(20, 200)
            calls.append(writer.then(prompt, reply, calls, tool_s * writer.rng.uniform(0.8, 1.2)))
            history = _join(prompt, reply)
        yield Program(tuple(calls))


def _tight_cache(writer: _Writer) -> Iterator[Program]:
    """Single calls, in turn from 100 groups that each have a prefix: first come, first served
    meets a prefix again when a small cache has long forgotten it."""
    prefixes = [writer.text(1000, 3000) for _ in range(100)]
    while True:
        for group in writer.rng.permutation(len(prefixes)):
            prompt = _join(prefixes[group], writer.text(10, 40))
            yield Program((Call(prompt, writer.text(4, 16)),))


def _no_sharing(writer: _Writer) -> Iterator[Program]:
    """One call with nothing in common with any other."""
    while True:
        yield Program((Call(writer.text(100, 2000), writer.text(20, 300)),))


GENERATORS: dict[str, Callable[[_Writer], Iterator[Program]]] = {
    one.__name__.removeprefix("_"): one
    for one in (
        *(_chat, _thinking_chat, _tree_of_thought, _react, _fork_join),
        *(_compiled, _tight_cache, _no_sharing),
    )
}


def generate(name: str, num_requests: int, seed: int = 0, scale: Fraction = Fraction(1)) -> Trace:
    """As many whole programs of the kind `name` as it takes for `num_requests` calls. `scale`
    shortens every text.

    Raises:
        KeyError: no such kind.
    """
    programs: list[Program] = []
    num_calls = 0
    for program in GENERATORS[name](_Writer(seed, scale)):
        if num_calls >= num_requests:
            break
        programs.append(program)
        num_calls += len(program.calls)
    return Trace(name, tuple(programs))


# -- what is possible ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reuse:
    """What a trace allows, whoever serves it.

    Attributes:
        prompt_tokens: of all calls.
        must_compute_tokens: so many of them are computed as prompt in *any* run.
        working_set_tokens: distinct prefixes of all prompts and replies: what a cache must hold to
            forget nothing.
    """

    prompt_tokens: int
    must_compute_tokens: int
    working_set_tokens: int

    @property
    def best_hit_rate(self) -> float:
        """No schedule, however it orders or delays calls, and no cache can have a higher one."""
        return 1 - self.must_compute_tokens / self.prompt_tokens


@dataclass(slots=True)
class _Edge:
    """A run of tokens in the trie of all calls: its continuations, and the calls that pass it."""

    tokens: Tokens
    children: dict[int, _Edge] = field(default_factory=dict)
    in_prompt: bool = False
    in_reply: bool = False
    num_ends: int = 0  # prompts that end with its last token

    def split(self, position: int) -> None:
        """Keep the tokens before `position`; the rest becomes the only child."""
        rest = dataclasses.replace(self, tokens=self.tokens[position:])
        self.tokens, self.num_ends = self.tokens[:position], 0
        self.children = {int(rest.tokens[0]): rest}

    @property
    def num_must_compute(self) -> int:
        num_new = len(self.tokens) if self.in_prompt and not self.in_reply else 0
        return num_new + max(0, self.num_ends - bool(num_new))


def _follow(edge: _Edge, tokens: Tokens) -> list[_Edge]:
    """The edges below `edge` that spell `tokens` exactly; made or split where needed."""
    path = []
    while len(tokens):
        child = edge.children.setdefault(int(tokens[0]), _Edge(tokens))
        length = min(len(tokens), len(child.tokens))
        different = np.flatnonzero(child.tokens[:length] != tokens[:length])
        num_common = int(different[0]) if len(different) else length
        if num_common < len(child.tokens):
            child.split(num_common)
        path.append(child)
        edge, tokens = child, tokens[num_common:]
    return path


def reuse(trace: Trace) -> Reuse:
    """The bounds of a trace, from a trie of its calls.

    A prefix counts once if it occurs in any prompt, unless decoding some reply computes it anyway
    (all of the reply but its last token, which is never fed back). And each call computes the last
    token of its prompt itself, as its reply is sampled from there: siblings with one prompt compute
    that token once each. All calls count as known from the start, so this is a bound for every
    order of admission and every overlap; a run with an unlimited cache comes close to it when what
    shares a prefix is not admitted before that prefix is computed.
    """
    root = _Edge(np.empty(0, dtype=np.int32))
    for call in trace.calls():
        path = _follow(root, call.prompt)
        for edge in path:
            edge.in_prompt = True
        path[-1].num_ends += 1
        for edge in _follow(path[-1], call.reply[:-1]):
            edge.in_reply = True
    must_compute = working_set = 0
    edges = [*root.children.values()]
    while edges:
        edge = edges.pop()
        edges.extend(edge.children.values())
        must_compute += edge.num_must_compute
        working_set += len(edge.tokens)
    return Reuse(sum(len(call.prompt) for call in trace.calls()), must_compute, working_set)
