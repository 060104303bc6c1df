"""`jump_mode=exact` gives what stock gives, to the token, with any structured-output backend."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from sgl_vllm.jump.unique import UniqueTokens
from tests.effort import requests
from tests.engine.engine import Ask, Engine
from tests.engine.test_same_answers import PERSON

# Where letters and digits alternate, tokens hardly ever span two of them.
PATTERNS = [
    r"[A-Z]1[a-z]2[a-z]3x4y5z6[a-f]",
    r"7q8w9e1r2t[0-9]y",
    r"(ja|nein) 1a2b3c",
    r"Nothing is left to decide here",
    r"東京は[0-9]度です",
]
CONSTRAINTS: list[dict[str, Any]] = [
    *({"regex": pattern} for pattern in PATTERNS),
    {"json": PERSON},
    {"choice": ["Paris in France", "Parma", "Oslo"]},
    {"json": json.dumps({"enum": ["1a2b3c", "1a2b9z"]})},
]


def structured_requests(count: int, seed: int) -> list[Ask]:
    rng = random.Random(seed)
    asks = []
    for number in range(count):
        grammar = StructuredOutputsParams(**rng.choice(CONSTRAINTS))  # vLLM notes things in it
        variants: list[dict[str, Any]] = [
            {},
            {"logprobs": 2},
            {"min_tokens": 6},
            {"repetition_penalty": 1.2},
            {"stop": ["2"]},
            {"n": 2, "temperature": 1, "top_k": 1},
            {"presence_penalty": 0.5},
            {"stop_token_ids": rng.sample(range(30, 300), 40)},
        ]
        prompt = [rng.randrange(10, 2000) for _ in range(rng.randrange(1, 150))]
        options = {"temperature": 0, "max_tokens": rng.choice([6, 11, 40])}
        options |= variants[number % 8]
        asks.append(Ask(prompt, SamplingParams(structured_outputs=grammar, **options)))
    return asks


def answers(engine: Engine, asks: list[Ask]) -> list[Any]:
    return [
        [
            (list(one.token_ids), one.text, one.finish_reason, one.stop_reason, certain(one))
            for one in output.outputs
        ]
        for output in engine.run(asks)
    ]


def certain(sample: Any) -> list[bool] | None:
    """Which tokens had no alternative."""
    if sample.logprobs is None:
        return None
    rows = zip(sample.token_ids, sample.logprobs, strict=True)
    return [row[token].logprob == 0.0 for token, row in rows]


@pytest.mark.parametrize("backend", ["auto", "guidance"])
def test_every_structured_request_gets_what_stock_gives(start, backend):
    settings = {
        "block_size": 32,
        "num_gpu_blocks_override": 50,
        "max_num_batched_tokens": 128,
        "structured_outputs_config": {"backend": backend},
    }
    asks = structured_requests(requests(160), seed=3)
    want = answers(start(**settings), asks)
    engine: Engine = start(plugin={"jump_mode": "exact"}, **settings)
    got = answers(engine, asks)
    engine.check_nothing_is_left()
    assert [pair for pair in zip(want, got, strict=True) if pair[0] != pair[1]] == []
    stats = engine.scheduler.sgl_vllm.stats()
    assert stats.parts["jump_forward"] == "on"
    assert stats.jump_forward.forced_tokens > requests(300)
    assert stats.jump_forward.errors == 0


def test_canonical_spelling_forces_more(start):
    params = SamplingParams(
        temperature=0,
        max_tokens=60,
        structured_outputs=StructuredOutputsParams(regex=PATTERNS[0] + " and then the end"),
    )
    forced = {}
    for mode in ("canonical", "exact"):
        engine: Engine = start(plugin={"jump_mode": mode})
        output = engine.run([Ask([70, 71], params)])[0].outputs[0]
        counts = engine.scheduler.sgl_vllm.stats().jump_forward
        forced[mode] = counts.forced_tokens
        num_decoded = len(output.token_ids) - counts.forced_tokens
        assert engine.forward_passes in engine.may_take(num_decoded, counts.stale_tokens)
    assert forced["canonical"] > forced["exact"]


def test_a_backend_that_fails_ends_jumping_only(start, monkeypatch):
    engine: Engine = start(plugin={"jump_mode": "exact"})
    grammar = StructuredOutputsParams(regex=PATTERNS[0])
    ask = Ask([70, 71], SamplingParams(temperature=0, max_tokens=40, structured_outputs=grammar))
    want = engine.tokens([ask])
    find = UniqueTokens._only_legal_token
    calls = []

    def fail_at_second(self, grammar):
        calls.append(grammar)
        if len(calls) % 2 == 0:
            raise RuntimeError("no mask")
        return find(self, grammar)

    monkeypatch.setattr(UniqueTokens, "_only_legal_token", fail_at_second)
    assert engine.tokens([ask] * 8) == want * 8
    assert engine.scheduler.sgl_vllm.stats().jump_forward.errors == 8
