"""Canaries fit the engine, and reach what they are for."""

import pytest

from sgl_vllm.self_check import canaries
from sgl_vllm.self_check.canaries import Shape


def shape(block_size: int, num_blocks: int = 100, max_model_len: int = 4096) -> Shape:
    return Shape(block_size, num_blocks, max_model_len, range(10, 1000))


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_hits_end_inside_a_block_and_the_output_needs_another(block_size):
    made = shape(block_size)
    assert made.shared % block_size
    for one in canaries.hits(made):
        num_blocks = -(-len(one.prompt) // block_size)
        assert len(one.prompt) + one.max_tokens > num_blocks * block_size


@pytest.mark.parametrize("block_size", [8, 16, 32, 128])
def test_hits_begin_with_a_prefix_and_then_differ(block_size):
    made = shape(block_size)
    starts = {one.prompt for one in canaries.prefixes(made)}
    hits = [one.prompt for one in canaries.hits(made)]
    assert {prompt[: made.shared] for prompt in hits} == starts
    assert len(set(hits)) == len(hits) == 2 * len(starts)


def test_scores_are_asked_of_the_end_of_a_prompt():
    whole = canaries.scored(shape(32), by_select=True)
    scored = [one for one in whole if one.scores_from is not None]
    assert {len(one.prompt) - (one.scores_from or 0) for one in scored} == {canaries.CHOICE_TOKENS}
    assert all(one.by_select for one in scored)
    assert len(scored) < len(whole)


def test_an_engine_that_is_too_small_is_told_so():
    assert shape(16).why_not() is None
    assert "24" in (shape(16, num_blocks=20).why_not() or "")
    assert "max_model_len" in (shape(128, max_model_len=256).why_not() or "")
