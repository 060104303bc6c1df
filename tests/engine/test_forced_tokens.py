"""The tokens that jump-forward forces are those of the oracle, along random texts of every format.

No model is needed: a random legal token stands for what one would sample.
"""

from __future__ import annotations

import json
import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import xgrammar
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import Request
from vllm.v1.structured_output.backend_xgrammar import XgrammarGrammar

from sgl_vllm.fsm.vllm.backend import SglBackend
from sgl_vllm.fsm.vllm.forced_tokens import ForcedTokens
from tests.engine.forced_oracle import ForcedOracle
from tests.engine.fsm_backends import OBJECT, backend, bits
from tests.engine.programs import CARD, LETTER, PERSON

WALKS, STEPS = 5, 40

FORMATS: dict[str, dict[str, Any]] = {
    "card": {"regex": CARD},
    "letter": {"regex": LETTER},
    "nothing to decide": {"regex": "Nothing is left to decide here"},
    "cut inside a character": {"regex": r'\{"city": "(München|Mönchengladbach|東京|杭州)"\}'},
    "optional spaces": {"regex": r"a {0,3}b {1,2}(cc|cd)+ ?e"},
    "numbers": {"regex": r"total: -?(3|31|314)(\.14159)?, exactly 20(24|25)-01-01"},
    "person": {"json": PERSON},
    "object with any whitespace": {"json": json.dumps(OBJECT)},
    "a schema of xgrammar's": {
        "json": {
            "type": "object",
            "properties": {
                "number of guests": {"type": "integer", "minimum": 10, "maximum": 12},
                "city": {"type": "string", "pattern": "^(München|Mönchengladbach|東京|杭州)$"},
                "date": {"const": "2026-01-01"},
            },
            "required": ["number of guests", "city", "date"],
            "additionalProperties": False,
        }
    },
    "a recursive schema of xgrammar's": {
        "json": {
            "type": "object",
            "properties": {"name": {"type": "string", "pattern": "^[ab]$"}, "next": {"$ref": "#"}},
            "required": ["name"],
            "additionalProperties": False,
        }
    },
    "a grammar": {
        "grammar": 'root ::= "Answer: " item ("; also: " item)* "."\nitem ::= [a-z]{2,4} " times"'
    },
    "a nested grammar": {
        "grammar": 'root ::= call\ncall ::= "function(" (call | "nothing at all" | [0-9]+) ")"'
    },
    "a grammar of xgrammar's": {
        "grammar": 'root ::= "Answer: " item ("; also: " item)* "."\nitem ::= p " times"\n'
        'p ::= "a" p "a" | [a-c]'
    },
}
STOPS = {"no stop tokens": (), "stop tokens": range(3, 60, 4), "others": range(300, 2000, 3)}


@pytest.fixture(scope="module")
def ours() -> SglBackend:
    return backend()


@pytest.fixture(scope="module")
def oracle(ours: SglBackend) -> ForcedOracle:
    tokenizer: Any = ours.tokenizer
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=ours.vocab_size)
    return ForcedOracle(partial(tokenizer.encode, add_special_tokens=False), info)


def walk(ours: SglBackend, oracle: ForcedOracle, params: SamplingParams, seed: int) -> int:
    """One random output, with what is forced compared before each random token; how much was."""
    rng = random.Random(seed)
    forced = ForcedTokens(SimpleNamespace(backend=ours, reasoner_cls=None))
    prompt = rng.choices(range(10, 2000), k=rng.randrange(1, 20))
    request = Request("request", prompt, params.clone(), None)
    structured = request.structured_output_request
    assert structured is not None
    stops = params.all_stop_token_ids
    kind, spec = structured.structured_output_key
    grammar = ours.compile_grammar(kind, spec, stops)
    stock = ours.xgrammar.compile_grammar(kind, spec, stops)
    assert isinstance(stock, XgrammarGrammar)
    structured.grammar = grammar
    num_forced = 0
    for _ in range(STEPS):
        output = list(request.output_token_ids)
        want = oracle.forced(stock.ctx, stops, prompt, output)
        assert forced.take(request) == want, (oracle.text(prompt), oracle.text(output))
        request.append_output_token_ids(want)
        num_forced += len(want)
        if grammar.is_terminated():
            break
        legal = sorted(bits(ours, grammar))
        if not legal:  # only a stop token could spell what follows
            break
        token = rng.choice(legal)
        assert grammar.accept_tokens("request", [token])
        request.append_output_token_ids(token)
        if grammar.is_terminated():
            break
    return num_forced


def walks(
    ours: SglBackend, oracle: ForcedOracle, constraint: dict[str, Any], stops: Any = ()
) -> int:
    params = SamplingParams(
        structured_outputs=StructuredOutputsParams(**constraint), stop_token_ids=[*stops]
    )
    end_of_text = ours.resources.end_token
    params.update_from_generation_config({}, end_of_text)
    return sum(walk(ours, oracle, params, seed) for seed in range(WALKS))


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
@pytest.mark.parametrize("name", FORMATS)
def test_what_is_forced_is_what_xgrammars_masks_force(ours, oracle, name, stops):
    num_forced = walks(ours, oracle, FORMATS[name], stops)
    assert num_forced > 0 or stops


def asked(ours: SglBackend, constraint: dict[str, Any]) -> tuple[Request, Any]:
    """A request, and its grammar."""
    params = SamplingParams(structured_outputs=StructuredOutputsParams(**constraint))
    params.update_from_generation_config({}, ours.resources.end_token)
    request = Request("request", [10], params, None)
    structured = request.structured_output_request
    assert structured is not None
    kind, spec = structured.structured_output_key
    structured.grammar = ours.compile_grammar(kind, spec, params.all_stop_token_ids)
    return request, structured.grammar


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_that_another_request_went_through_is_rolled_back_token_by_token(ours, name):
    def legal(grammar: Any) -> set[int]:
        return set() if grammar.is_terminated() else bits(ours, grammar)

    forced = ForcedTokens(SimpleNamespace(backend=ours, reasoner_cls=None))
    (first, of_first), (second, of_second), (_, plain) = [
        asked(ours, FORMATS[name]) for _ in range(3)
    ]
    rng = random.Random(name)
    for _ in range(STEPS):
        tokens = forced.take(first)
        assert forced.take(second) == tokens
        masks = [legal(plain)]
        for token in tokens:
            assert plain.accept_tokens("", [token])
            masks.append(legal(plain))
        assert legal(of_second) == masks[-1]
        for mask in reversed(masks[:-1]):
            of_second.rollback(1)
            assert legal(of_second) == mask
        assert of_second.accept_tokens("", tokens)
        if plain.is_terminated():
            break
        token = rng.choice(sorted(masks[-1]))
        for grammar in (of_first, of_second, plain):
            assert grammar.accept_tokens("", [token])
        for request in (first, second):
            request.append_output_token_ids([*tokens, token])
        if plain.is_terminated():
            break
    assert of_first.is_terminated() == of_second.is_terminated() == plain.is_terminated()
