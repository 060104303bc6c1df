"""Which methods of speculative decoding the parts work beside, as the table says."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

from sgl_vllm.speculation import METHODS, NO_DRAFTING, Drafting, drafting_of, is_tested, refusal

SUPPORT_PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"


@dataclass
class Speculative:
    """What the table reads of vLLM's `SpeculativeConfig`."""

    method: str | None
    num_speculative_tokens: int | None = 3


@dataclass
class Config:
    """What the table reads of vLLM's `VllmConfig`."""

    speculative_config: Any = None
    num_prefill_lookahead_tokens: int = 0
    kv_transfer_config: Any = None
    cache_config: Any = field(default_factory=lambda: SimpleNamespace(use_replayssm=False))


def test_every_method_of_vllm_is_in_the_table():
    named_after_models = set(get_args(MTPModelTypes)) - {"mtp"}  # vLLM resolves them to `mtp`
    of_vllm = {name for name in _flat(SpeculativeMethod) if name not in named_after_models}
    assert of_vllm <= METHODS.keys()


def _flat(literal: Any) -> set[str]:
    return {
        name
        for one in get_args(literal)
        for name in ([one] if isinstance(one, str) else _flat(one))
    }


def test_without_speculation_nothing_is_refused_and_nothing_is_drafted():
    assert refusal(Config()) is None
    assert is_tested(Config())
    assert drafting_of(Config()) == NO_DRAFTING


@pytest.mark.parametrize(
    ("methods", "num_lookahead"),
    [(["ngram", "draft_model", "ngram_gpu"], 0), (["eagle", "eagle3", "mtp"], 1)],
)
def test_drafters_that_read_at_most_one_token_ahead_are_allowed(methods, num_lookahead):
    for method in methods:
        config = Config(Speculative(method), num_prefill_lookahead_tokens=num_lookahead)
        assert refusal(config) is None
        assert drafting_of(config) == Drafting(num_lookahead, num_slots=7)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        (Config(Speculative("mtp"), 3), "mtp: its drafter reads 3 tokens ahead"),
        (Config(Speculative("eagle"), 1, object()), "a KV connector"),
        (Config(Speculative("dflash"), 1), "several tokens at once"),
        (Config(Speculative("suffix")), "no test of this project"),
        (Config(Speculative("of next year")), "of next year: it is not known to this version"),
        (Config(Speculative(None)), "not known"),
    ],
)
def test_what_is_not_verified_is_refused_with_the_reason(config, why):
    assert why in (refusal(config) or "")


def test_the_docs_name_every_method():
    section = SUPPORT_PAGE.read_text().split("## Speculative decoding")[1].split("\n## ")[0]
    assert [method for method in METHODS if f"`{method}`" not in section] == []
