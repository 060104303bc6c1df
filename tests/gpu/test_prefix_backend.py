"""Prefix-grouped decode as an attention backend, in an engine, against FlashAttention.

Sums depend on who shares a prefix, so batch-invariant mode turns groups off: these tests want the
plain one. An answer may part from FlashAttention's where two tokens are next to equally likely.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.engine import Ask
from tests.gpu.conftest import CONFIGURATION, needs_cuda
from tests.gpu.numerics import NEAR_TIE, first_difference

pytestmark = [
    needs_cuda,
    pytest.mark.skipif(
        not {"v2", "plain", "flash"} <= {*str(CONFIGURATION).split("-")},
        reason="groups are for FlashAttention on V2, and off in the batch-invariant mode",
    ),
]

SHARED_TOKENS, NUM_REQUESTS = 4096, 64
SETTINGS = {
    "block_size": 16,
    "max_model_len": 6144,
    "max_num_seqs": NUM_REQUESTS,
    "max_num_batched_tokens": 8192,
}


def asks() -> list[Ask]:
    """Two levels of sharing: all share the first tokens, each eighth some more."""
    rng = random.Random(0)

    def words(count: int) -> list[int]:
        return [rng.randrange(10, 2000) for _ in range(count)]

    trunk, branches = words(SHARED_TOKENS), [words(512) for _ in range(8)]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=5)
    return [
        Ask([*trunk, *branches[number % 8], *words(20 + number)], params)
        for number in range(NUM_REQUESTS)
    ]


def gap(want: Any, got: Any) -> float:
    """Between the likelihoods of the two tokens where answers part, as the first sees them; 0 if
    they do not part, infinity if the other token is none of its likeliest."""
    at = first_difference(want.token_ids, got.token_ids)
    if at is None:
        return 0.0
    row = want.logprobs[at]
    other = row.get(got.token_ids[at])
    return row[want.token_ids[at]].logprob - other.logprob if other else float("inf")


@pytest.mark.parametrize("plugin", [None, {}], ids=["stock", "plugin"])
def test_it_groups_and_answers_as_flash_attention(
    start: Any, plugin: dict[str, Any] | None, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    from sgl_vllm.kernels import attention_backend

    want = [one.outputs[0] for one in start(plugin, **SETTINGS).run(asks())]

    calls = 0
    attend = attention_backend.attend

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return attend(*args)

    monkeypatch.setattr(attention_backend, "attend", counted)
    attention_backend.register()
    engine = start(plugin, attention_backend="CUSTOM", **SETTINGS)
    got = [one.outputs[0] for one in engine.run(asks())]
    engine.check_nothing_is_left()
    num_layers = engine.core.vllm_config.model_config.hf_text_config.num_hidden_layers
    assert calls >= 30 * num_layers, "too few decode steps were grouped"
    gaps = [gap(one, other) for one, other in zip(want, got, strict=True)]
    record_property("compared", len(gaps))
    record_property("near ties", sum(distance > 0 for distance in gaps))
    record_property("grouped steps", calls // num_layers)
    assert max(gaps) <= NEAR_TIE
