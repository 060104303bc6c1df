"""Random formats over real vocabularies: is every access of the compiled loops inside its array?

Each format is compiled, and a random text of it is written token by token, with steps back and runs
of forced text. Before each token a bitmask is made, and some of its bits are compared with steps of
the automaton. A format may be refused, with an error of `sgl_vllm.fsm.errors`. Any other exception
counts as an error; numba raises `IndexError` for an access outside an array. It does so only with
NUMBA_BOUNDSCHECK, and such loops need a cache of their own.

The same seed gives the same formats. Cost: about 25 ms each.
"""

from __future__ import annotations

import base64
import json
import random
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files

import numpy as np

from sgl_vllm.fsm import regex
from sgl_vllm.fsm.automaton import Automaton, State
from sgl_vllm.fsm.errors import (
    TooComplexError,
    UnsupportedGrammarError,
    UnsupportedPatternError,
    UnsupportedSchemaError,
)
from sgl_vllm.fsm.expressions import Expression, Literals
from sgl_vllm.fsm.masks import Bitmasks, fill
from sgl_vllm.fsm.schema import compile_schema
from sgl_vllm.fsm.vocabulary import Vocabulary, Words
from tests.unit.fsm.parsed import compile_by
from tests.unit.fsm.random_formats import random_spec

REFUSALS = (
    TooComplexError,
    UnsupportedGrammarError,
    UnsupportedPatternError,
    UnsupportedSchemaError,
)
TEKKEN = "tekken_240911.json"
NUM_SPECIAL = 1_000
ALLOWANCE = 30_000
MAX_TOKENS = 12
NUM_COMPARED = 24


@dataclass
class Outcome:
    """What became of the formats.

    Attributes:
        refused: formats that were not compiled, or were given up on the way.
        errors: formats that failed in another way, each with its traceback.
    """

    formats: int = 0
    refused: int = 0
    masks: int = 0
    tokens: int = 0
    steps_back: int = 0
    errors: list[tuple[str, str]] = field(default_factory=list)


def vocabulary(num_tokens: int) -> Vocabulary:
    """The first tokens of Mistral's vocabulary, whose merges are in the order of their use."""
    read = json.loads((files("mistral_common") / "data" / TEKKEN).read_text())
    pieces = [base64.b64decode(t["token_bytes"]) for t in read["vocab"][: num_tokens - NUM_SPECIAL]]
    return Vocabulary([b""] * NUM_SPECIAL + pieces, num_tokens)


def compiled(kind: str, spec: str, by_spec: bool) -> Expression:
    match kind:
        case "json" if by_spec:
            return compile_schema(json.loads(spec))
        case "json":
            return compile_by("compile_json_schema", spec)
        case "regex":
            return regex.full_match(spec).expression
        case "grammar":
            return compile_by("compile_grammar", spec)
        case "choice":
            return Literals(tuple((text.encode(), None) for text in json.loads(spec)))
    return compile_by("compile_structural_tag", spec)


def write(
    start: State, masks: Bitmasks, v: Vocabulary, rng: random.Random, outcome: Outcome
) -> None:
    """A random text, token by token."""
    path = [start]
    words = np.zeros(v.num_words, np.uint32)
    for _ in range(MAX_TOKENS):
        state = path[-1]
        state.automaton.allowance = ALLOWANCE
        fill(masks.of(state), words)
        outcome.masks += 1
        legal = _legal(words, v, rng)
        compare(state, words, v, [*legal, *rng.choices(range(v.size), k=NUM_COMPARED)])
        _, state = state.forced()
        if len(path) > 2 and rng.random() < 0.2:
            outcome.steps_back += 1
            del path[-rng.randint(1, 2) :]
        elif legal:
            following = state.walk(v.token_bytes[rng.choice(legal)]) or path[-1]
            path.append(following)
            outcome.tokens += 1


def _legal(words: Words, v: Vocabulary, rng: random.Random) -> list[int]:
    """Some of the legal tokens: mostly long ones, which reach furthest."""
    legal = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    chosen = rng.choices(legal.tolist(), k=NUM_COMPARED) if len(legal) else []
    return sorted(chosen, key=lambda token: -len(v.token_bytes[token]))[: NUM_COMPARED // 2]


def compare(state: State, words: Words, v: Vocabulary, tokens: Iterable[int]) -> None:
    """A token is legal if and only if the automaton takes its bytes."""
    for token in tokens:
        piece = v.token_bytes[token]
        is_legal = bool(words[token >> 5] >> np.uint32(token & 31) & 1)
        assert is_legal == bool(piece and state.walk(piece)), f"token {token}, {piece!r}"


def fuzz(count: int, seed: int, num_tokens: int) -> Outcome:
    rng, outcome = random.Random(seed), Outcome()
    v = vocabulary(num_tokens)
    masks = Bitmasks(v)
    for _ in range(count):
        kind, spec = random_spec(rng)
        by_spec = rng.random() < 0.5
        outcome.formats += 1
        try:
            automaton = Automaton(compiled(kind, spec, by_spec))
            write(automaton.start, masks, v, rng, outcome)
        except REFUSALS:
            outcome.refused += 1
        except Exception:
            outcome.errors.append((f"{kind}: {spec}", traceback.format_exc()))
    return outcome
