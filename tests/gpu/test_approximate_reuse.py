"""Segments that are reused at another place: their keys and values are those of the new place, and
several chunks of a prompt that one pass computes read each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sgl_vllm.approximate.chunk_rows import Room
from tests.engine.approximate_prompts import Prompt, ask, document, kv_of, reused
from tests.engine.engine import Engine

A, B, C, D = (document(number) for number in range(4))
REORDERED = Prompt((C, A, D, B), head="Read these now.\n")


@pytest.fixture(scope="module")
def engine(start: Any) -> Iterator[Engine]:
    engine: Engine = start({"approximate_reuse": True}, block_size=32, max_num_seqs=64)
    assert engine.scheduler.parts.approximate is not None, "the log says why"
    yield engine


def computed(engine: Engine, *, reuse: bool) -> list[torch.Tensor]:
    """The KV of the whole blocks of a prompt, whose segments are cached in another order."""
    assert engine.scheduler.reset_prefix_cache()
    ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
    return [layer.float() for layer in kv_of(engine, REORDERED, reuse)]


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().mean() / other.abs().mean())


def test_keys_and_values_are_those_of_the_new_place(engine: Engine) -> None:
    """In the first layer, they depend on the token and its position only."""
    approximate, exact = computed(engine, reuse=True), computed(engine, reuse=False)
    assert engine.scheduler.parts.approximate.counters.segments == 4
    assert distance(approximate[0], exact[0]) < 0.01
    assert distance(approximate[-1], exact[-1]) > 0.01  # there it is approximate


def test_chunks_of_one_pass_read_each_other(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = computed(engine, reuse=True)
    monkeypatch.setattr(Room, "take", lambda self, chunk: False)
    one_by_one = computed(engine, reuse=True)
    for layer, expected in zip(together, one_by_one, strict=True):
        assert distance(layer, expected) < 0.01


def test_many_at_once_reuse_all_segments(engine: Engine) -> None:
    assert engine.scheduler.reset_prefix_cache()
    ask(engine, [Prompt((A, B, C, D))], reuse=False, max_tokens=1)
    prompts = [Prompt((D, C, A, B), question=f"Is it {number}?") for number in range(24)]
    outputs = ask(engine, prompts, reuse=True, max_tokens=16)
    assert [reused(output)[1] for output in outputs] == [4] * 24
    engine.check_nothing_is_left()
