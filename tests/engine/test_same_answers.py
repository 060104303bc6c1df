"""Same answers: under greedy sampling, every request gets token for token what stock vLLM gives it.

For requests with a grammar, what stock gives when it may spell forced text only canonically.
"""

from __future__ import annotations

import json
import random

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from tests.effort import requests
from tests.engine.engine import Ask
from tests.engine.one_by_one import decoding_one_by_one
from tests.engine.programs import CARD

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer"},
            "home": {"enum": ["Paris", "Rome", "Oslo"]},
        },
        "required": ["name", "age", "home"],
        "additionalProperties": False,
    }
)


def is_constrained(ask: Ask) -> bool:
    return ask.params.structured_outputs is not None


def mixed_requests(vocab_size: int, count: int, seed: int) -> list[Ask]:
    """Prompts share beginnings cut at any token; every kind of request is among them."""
    rng = random.Random(seed)
    trunks = [[rng.randrange(10, vocab_size) for _ in range(400)] for _ in range(3)]
    asks = []
    for number in range(count):
        prompt = rng.choice(trunks)[: rng.randrange(1, 400)]
        prompt = prompt + [rng.randrange(10, vocab_size) for _ in range(rng.randrange(0, 30))]
        kind = number % 8
        more = [
            {"max_tokens": rng.randrange(1, 24)},
            {"max_tokens": 48, "structured_outputs": StructuredOutputsParams(regex=CARD)},
            {"max_tokens": 40, "structured_outputs": StructuredOutputsParams(json=PERSON)},
            {"max_tokens": 6, "logprobs": 2},
            {"max_tokens": 12, "presence_penalty": 0.7, "repetition_penalty": 1.2},
            {
                "max_tokens": 9,
                "structured_outputs": StructuredOutputsParams(
                    choice=["Paris in France", "Parma", "Oslo"]
                ),
            },
            {"max_tokens": 1, "prompt_logprobs": 0},
            # Ends inside forced text, whichever comes first.
            {
                "max_tokens": rng.randrange(2, 30),
                "stop": ["continent"],
                "structured_outputs": StructuredOutputsParams(regex=CARD),
            },
        ][kind]
        salt = rng.choice([None, None, "tenant a", "tenant b"])
        asks.append(Ask(prompt, SamplingParams(temperature=0, **more), salt))
    return asks


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "max_num_batched_tokens"),
    [(32, 60, 1024), (128, 24, 1024), (32, 40, 128)],
    ids=["block 32", "block 128", "tiny cache, chunked prefill"],
)
def test_mixed_requests_get_the_same_tokens(start, block_size, num_blocks, max_num_batched_tokens):
    settings = {
        "block_size": block_size,
        "num_gpu_blocks_override": num_blocks,
        "max_num_batched_tokens": max_num_batched_tokens,
    }
    stock = start(async_scheduling=False, **settings)
    asks = mixed_requests(
        min(stock.tokenizer.vocab_size, 2000), count=requests(240), seed=block_size
    )
    with decoding_one_by_one(stock.scheduler):
        want = stock.tokens(asks)

    engine = start(plugin={}, **settings)
    got = engine.tokens(asks)
    stats = engine.scheduler.sgl_vllm.stats()
    engine.check_nothing_is_left()
    assert stats.radix.partial_block_hits > requests(20)
    assert stats.jump_forward.forced_tokens > requests(500)
    different = [index for index in range(len(asks)) if got[index] != want[index]]
    assert not different, [(i, i % 8, want[i], got[i]) for i in different[:3]]
