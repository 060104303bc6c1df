"""Random programs: many requests that share, continue, fork, join, abort and repeat each other.

A program is data, drawn from one seed: which requests there are, what their prompts are made of,
in which step each is added and aborted. `play.py` runs it on an engine. Later prompts contain
earlier replies, so a prompt is a recipe (`Call.pieces`) that is known once these replies are.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

MAX_MODEL_LEN = 768
"""Of every engine that plays programs: it decides where a request ends, so all have the same."""

VOCABULARY = range(10, 2000)
MAX_STOP_TOKENS = 100
"""With more than 128 and `min_tokens`, vLLM's V2 runner ends the engine."""

CARD = r'\{"city": "[A-Z][a-z]{2,9}", "continent": "(Europe|Asia|Africa)", "people": [0-9]{1,3}\}'
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "maximum": 120},
            "home": {"enum": ["Paris", "Rome", "Oslo"]},
        },
        "required": ["name", "age", "home"],
        "additionalProperties": False,
    }
)
LETTER = r"Dear [A-Z][a-z]{2,6}, thank you for your letter of [A-Z][a-z]{2,8} the [0-9]{1,2}th\."
CHOICES = ["Paris in France", "Parma", "Paris", "Oslo"]


@dataclass(frozen=True)
class Earlier:
    """A piece of a prompt: what an earlier call said, with or without what it was asked."""

    call: int
    with_prompt: bool
    num_reply_tokens: int | None = None
    """Only the first so many; None: all."""


Piece = tuple[int, ...] | Earlier


@dataclass(frozen=True)
class Abort:
    """When a call is given up, if it has not ended by then. One of the three is set."""

    after_steps: int | None = None
    """So many steps after it was added; 0: it never saw one."""
    after_tokens: int | None = None
    """As soon as it has so many tokens; 1: right after its prompt."""
    at_step: int | None = None
    """In this step of its phase, together with all calls that have the same."""


@dataclass(frozen=True)
class Call:
    """One request of a program."""

    number: int
    shape: str
    pieces: tuple[Piece, ...]
    params: SamplingParams
    after: tuple[int, ...]
    """The calls that must have ended before it is added."""
    delay: int
    """How many steps later it is added."""
    cache_salt: str | None
    priority: int
    abort: Abort | None = None

    def prompt(
        self, prompts: Mapping[int, Sequence[int]], replies: Mapping[int, Sequence[int]]
    ) -> list[int]:
        """The prompt's tokens, from the prompts and replies of earlier calls."""
        tokens: list[int] = []
        for piece in self.pieces:
            if isinstance(piece, Earlier):
                if piece.with_prompt:
                    tokens += prompts[piece.call]
                tokens += replies[piece.call][: piece.num_reply_tokens]
            else:
                tokens += piece
        return tokens


@dataclass(frozen=True)
class Phase:
    """Calls that run together; after them the engine is idle."""

    calls: tuple[Call, ...]
    reset_cache_after: bool


@dataclass(frozen=True)
class Program:
    """Everything that a seed decides, but for the engines that it is played on."""

    seed: int
    phases: tuple[Phase, ...]

    @property
    def calls(self) -> Iterator[Call]:
        for phase in self.phases:
            yield from phase.calls


def random_program(seed: int, num_calls: int) -> Program:
    """The program of about `num_calls` requests that `seed` stands for."""
    return _Author(seed).write(num_calls)


class _Author:
    """Writes one program. Knows of each call how long its prompt and reply can be at most."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._rng = random.Random(seed)
        self._trunks = [self._words(400) for _ in range(3)]
        self._num_calls = 0
        self._phase: list[Call] = []
        self._lengths: dict[int, tuple[int, int, int]] = {}  # shortest, longest prompt; reply

    def write(self, num_calls: int) -> Program:
        rng = self._rng
        shapes = [
            self._questions,
            self._questions,
            self._chat,
            self._chat,
            self._fork_and_join,
            self._burst,
            self._long,
            self._retry,
            self._storm,
            self._crowd,
            self._standstill,
        ]
        phases = []
        while self._num_calls < num_calls:
            self._phase = []
            for shape in rng.choices(shapes, k=rng.randint(4, 12)):
                shape()
            rng.shuffle(self._phase)  # the order in which calls of the same step are added
            phases.append(Phase(tuple(self._phase), rng.random() < 0.15))
        return Program(self._seed, tuple(phases))

    # -- shapes -------------------------------------------------------------------------------

    def _questions(self) -> None:
        """Requests on one trunk, each cut at any token."""
        trunk, salt = self._rng.choice(self._trunks), self._salt()
        for _ in range(self._rng.randint(2, 8)):
            pieces = (self._cut(trunk), self._words(self._rng.randrange(30)))
            self._add("question", pieces, delay=self._rng.randrange(8), salt=salt, may_abort=True)

    def _chat(self) -> None:
        """Every turn has the turns before it, the replies included, as its beginning."""
        rng, salt = self._rng, self._salt()
        last = self._add("first turn", (self._cut(rng.choice(self._trunks)),), salt=salt)
        for _ in range(rng.randint(1, 4)):
            pieces = (Earlier(last, with_prompt=True), self._words(rng.randint(1, 40)))
            last = self._add("turn", pieces, after=(last,), delay=rng.randrange(4), salt=salt)

    def _fork_and_join(self) -> None:
        """Branches of one parent at once, then one prompt with what they all said."""
        rng, salt = self._rng, self._salt()
        parent = self._add("parent", (self._cut(rng.choice(self._trunks)),), salt=salt)
        branches = []
        spread = rng.choice([1, 1, 4])
        for _ in range(rng.randint(2, 5)):
            cut = rng.choice([None, None, rng.randint(1, 12)])
            pieces = (Earlier(parent, True, cut), self._words(rng.randint(0, 20)))
            delay = rng.randrange(spread)
            branches.append(self._add("branch", pieces, (parent,), delay, salt))
        everything: tuple[Piece, ...] = (
            Earlier(parent, with_prompt=True),
            *(Earlier(branch, with_prompt=False) for branch in branches),
            self._words(5),
        )
        self._add("join", everything, (parent, *branches), rng.randrange(3), salt)

    def _burst(self) -> None:
        """The same prompt many times in one step."""
        rng, salt = self._rng, self._salt()
        pieces = (self._cut(rng.choice(self._trunks)), self._words(rng.randrange(10)))
        params = self._params(1) if rng.random() < 0.5 else None
        delay = rng.randrange(8)
        for _ in range(rng.randint(3, 8)):
            self._add("burst", pieces, (), delay, salt, params=params, may_abort=True)

    def _long(self) -> None:
        """As long as the model allows, which is about the size of the smallest cache."""
        rng = self._rng
        params = {"max_tokens": rng.randint(1, 12)}
        length = MAX_MODEL_LEN - params["max_tokens"] - rng.choice([0, 0, 1, rng.randrange(64)])
        beginning = self._cut(rng.choice(self._trunks))
        pieces = (beginning, self._words(length - len(beginning)))
        first = self._add("long", pieces, delay=rng.randrange(8), salt=None, params=params)
        if rng.random() < 0.5:  # the same once more finds all of it in the cache
            self._add("long again", pieces, (first,), rng.randrange(3), None, params=params)

    def _retry(self) -> None:
        """Given up and asked again, or carried on from where it was cut."""
        rng, salt = self._rng, self._salt()
        pieces: tuple[Piece, ...] = (
            self._cut(rng.choice(self._trunks)),
            self._words(rng.randrange(30)),
        )
        first = self._add(
            "given up", pieces, delay=rng.randrange(6), salt=salt, abort=self._abort()
        )
        if rng.random() < 0.5:
            pieces = (Earlier(first, True, rng.randint(1, 6)), self._words(rng.randint(0, 9)))
        self._add("retry", pieces, (first,), rng.randrange(3), salt)

    def _storm(self) -> None:
        """Many given up in one step, whatever they are doing then."""
        rng, salt = self._rng, self._salt()
        trunk, abort = rng.choice(self._trunks), Abort(at_step=rng.randrange(12))
        for _ in range(rng.randint(2, 8)):
            pieces = (self._cut(trunk), self._words(rng.randrange(30)))
            self._add("storm", pieces, (), rng.randrange(8), salt, abort=abort)

    def _crowd(self) -> None:
        """Short prompts with long replies: they start together and soon outgrow the cache."""
        rng, salt = self._rng, self._salt()
        trunk = rng.choice(self._trunks)[:40]
        for _ in range(rng.randint(6, 14)):
            params = {"max_tokens": rng.randint(32, 72), "ignore_eos": True}
            if rng.random() < 0.3:
                params = self._params(1)
            pieces = (self._cut(trunk), self._words(rng.randint(0, 20)))
            self._add("crowd", pieces, (), rng.randrange(3), salt, params=params, may_abort=True)

    def _standstill(self) -> None:
        """Constrained requests whose prompts fill their blocks: what is forced needs another block
        for each, and jumped requests cannot be preempted."""
        rng = self._rng
        for _ in range(rng.randint(5, 9)):
            params = {"max_tokens": 40, "structured_outputs": StructuredOutputsParams(regex=CARD)}
            pieces = (self._words(128 - rng.randrange(6)),)
            self._add("standstill", pieces, params=params)

    # -- parts --------------------------------------------------------------------------------

    def _add(
        self,
        shape: str,
        pieces: tuple[Piece, ...],
        after: tuple[int, ...] = (),
        delay: int = 0,
        salt: str | None = None,
        params: dict[str, Any] | None = None,
        abort: Abort | None = None,
        may_abort: bool = False,
    ) -> int:
        """Add a call to the phase; its number."""
        rng = self._rng
        shortest, longest = self._bounds(pieces)
        params = dict(params or self._params(shortest))
        if longest + params["max_tokens"] > MAX_MODEL_LEN:  # too long a conversation: another one
            pieces = (self._cut(rng.choice(self._trunks)),)
            shortest = longest = len(pieces[0])
            if "extra_args" in params:
                params["extra_args"] = {"sgl_score_from": rng.randint(1, shortest)}
        if may_abort and rng.random() < 0.15:
            abort = self._abort()
        number, self._num_calls = self._num_calls, self._num_calls + 1
        self._lengths[number] = (shortest, longest, params["max_tokens"])
        params.setdefault("temperature", 0)
        priority = rng.randrange(3)
        self._phase.append(
            Call(
                number, shape, pieces, SamplingParams(**params), after, delay, salt, priority, abort
            )
        )
        return number

    def _bounds(self, pieces: Sequence[Piece]) -> tuple[int, int]:
        """How many tokens the pieces have at least and at most."""
        shortest = longest = 0
        for piece in pieces:
            if isinstance(piece, Earlier):
                low, high, reply = self._lengths[piece.call]
                shortest += 1 + low * piece.with_prompt
                longest += min(reply, piece.num_reply_tokens or reply) + high * piece.with_prompt
            else:
                shortest, longest = shortest + len(piece), longest + len(piece)
        return shortest, longest

    def _words(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.choices(VOCABULARY, k=count))

    def _cut(self, trunk: tuple[int, ...]) -> tuple[int, ...]:
        return trunk[: self._rng.randint(1, len(trunk))]

    def _salt(self) -> str | None:
        return self._rng.choice([None, None, None, "tenant a", "tenant b"])

    def _abort(self) -> Abort:
        rng = self._rng
        kind = rng.randrange(3)
        if kind == 0:
            return Abort(after_steps=0)
        if kind == 1:
            return Abort(after_steps=rng.randint(1, 20))
        return Abort(after_tokens=rng.choice([1, 1, 2, rng.randint(2, 12)]))

    def _params(self, min_prompt_tokens: int) -> dict[str, Any]:
        """Sampling parameters of a random kind, for a prompt of at least so many tokens."""
        rng = self._rng
        short, medium = rng.randint(1, 8), rng.randint(8, 24)

        def grammar(**constraint: Any) -> dict[str, Any]:
            return {
                "max_tokens": rng.choice([medium, 48]),
                "structured_outputs": StructuredOutputsParams(**constraint),
            }

        def card() -> dict[str, Any]:
            return grammar(regex=CARD)

        kinds: list[tuple[int, Any]] = [
            (6, lambda: {"max_tokens": medium}),
            (3, lambda: {"max_tokens": short, "ignore_eos": True}),
            (2, lambda: {"max_tokens": rng.randint(32, 80), "ignore_eos": True}),
            (3, card),
            (2, lambda: grammar(json=PERSON)),
            (2, lambda: grammar(choice=CHOICES)),
            (2, lambda: grammar(regex=LETTER)),
            (1, lambda: {**grammar(regex=LETTER), "logprobs": 2, "min_tokens": short}),
            (1, lambda: {**card(), "stop": [rng.choice(["continent", "eop", '"'])]}),
            (1, lambda: {**card(), "stop": ["ontin"], "include_stop_str_in_output": True}),
            (1, lambda: {**card(), "stop_token_ids": rng.sample(VOCABULARY, 60)}),
            (1, lambda: {**card(), "repetition_penalty": 1.3}),
            (1, lambda: {**card(), "min_tokens": 5}),
            (1, lambda: {**card(), "logprobs": 1}),
            (1, lambda: {"max_tokens": short, "logprobs": 2}),
            (1, lambda: {"max_tokens": short, "prompt_logprobs": 1}),
            (1, lambda: {"max_tokens": medium, "presence_penalty": 0.7, "frequency_penalty": 0.3}),
            (1, lambda: {"max_tokens": medium, "repetition_penalty": 1.2}),
            (1, lambda: {"max_tokens": medium, "stop": ["e", " t"]}),
            (1, lambda: {"max_tokens": medium, "stop": ["th"], "include_stop_str_in_output": True}),
            (
                1,
                lambda: {
                    "max_tokens": medium,
                    "min_tokens": short,
                    "stop_token_ids": rng.sample(VOCABULARY, MAX_STOP_TOKENS),
                },
            ),
            (1, lambda: {"max_tokens": medium, "bad_words": ["the", "a"]}),
            # vLLM refuses several samples at temperature 0; with one candidate all are greedy.
            (
                1,
                lambda: {"max_tokens": short, "n": rng.randint(2, 3), "temperature": 1, "top_k": 1},
            ),
            (1, lambda: {**card(), "n": 2, "temperature": 1, "top_k": 1}),
            (
                1,
                lambda: {
                    "max_tokens": 1,
                    "prompt_logprobs": 0,
                    "extra_args": {"sgl_score_from": rng.randint(1, min_prompt_tokens)},
                },
            ),
        ]
        weights, makers = zip(*kinds, strict=True)
        return rng.choices(makers, weights)[0]()
