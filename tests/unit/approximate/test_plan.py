"""Which tokens of a prompt are reused: against a list of what every position needs."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.approximate.plan import MIN_TOKENS, WINDOW_SIZES, Reuse, first_windows, plan
from sgl_vllm.approximate.segment_index import Donor
from tests.effort import examples


@st.composite
def prompts(draw):
    """Segments with gaps between them, each cached somewhere, in part or not at all."""
    position, found = 0, []
    for _ in range(draw(st.integers(0, 5))):
        start = position + draw(st.integers(0, 40))
        end = start + draw(st.integers(1, 150))
        position = end
        if draw(st.booleans()):
            size = draw(st.integers(1, 32))
            at, length = draw(st.integers(0, 200)), draw(st.integers(1, end - start))
            num_blocks = -(-(at + length) // 32) - at // 32
            found.append((start, end, Donor(at, length, tuple(range(size, size + num_blocks)))))
    num_tokens = position + draw(st.integers(1, 60))
    return found, draw(st.integers(0, num_tokens - 1)), num_tokens


@settings(max_examples=examples(300), deadline=None)
@given(prompts(), st.sampled_from([0.0, 0.05, 0.15, 0.3, 0.5, 1.0]))
def test_plans_reuse_the_ends_of_segments_and_nothing_that_has_to_run(prompt, recompute) -> None:
    found, num_computed, num_tokens = prompt
    reuses = plan(found, num_computed, num_tokens, recompute, block_size=32)
    position = num_computed + 1
    for reuse in reuses:
        assert position <= reuse.start and reuse.num_tokens >= MIN_TOKENS
        position = reuse.end
        (segment,) = [one for one in found if one[0] <= reuse.start and reuse.end <= one[1]]
        start, end, donor = segment
        assert reuse.start - start >= recompute * (end - start)
        assert reuse.donor_start - donor.start == reuse.start - start
        assert reuse.donor_start + reuse.num_tokens <= donor.start + donor.num_tokens
        for index in (0, reuse.num_tokens - 1):  # the donor's blocks hold its first and last token
            number = (reuse.donor_start + index) // 32
            block = donor.block_ids[number - donor.start // 32]
            assert reuse.block_ids[number - reuse.donor_start // 32] == block
        assert len(reuse.block_ids) == number - reuse.donor_start // 32 + 1
    assert position <= num_tokens - 1 or not reuses
    # Nothing that could be reused is left out.
    planned = {reuse.end for reuse in reuses}
    for start, end, donor in found:
        first = max(start + math.ceil(recompute * (end - start)), num_computed + 1)
        last = min(start + donor.num_tokens, num_tokens - 1)
        assert (last in planned) == (last - first >= MIN_TOKENS)
    if recompute == 1:
        assert reuses == []


def test_a_plan_in_numbers() -> None:
    found = [(10, 110, Donor(0, 100, (7, 8, 9, 10))), (110, 210, Donor(300, 100, (1, 2, 3, 4)))]
    assert plan(found, 0, 220, 0.15, block_size=32) == [
        Reuse(25, 110, 15, (7, 8, 9, 10)),
        Reuse(125, 210, 315, (1, 2, 3, 4)),
    ]
    assert plan(found, 10, 211, 0.0, block_size=32) == [
        Reuse(11, 110, 1, (7, 8, 9, 10)),
        Reuse(110, 210, 300, (1, 2, 3, 4)),
    ]
    assert plan(found, 100, 220, 0.5, block_size=32) == [Reuse(160, 210, 350, (2, 3, 4))]


@settings(max_examples=examples(200), deadline=None)
@given(prompts(), st.sampled_from([0.05, 0.15, 0.3, 0.5]), st.sampled_from(WINDOW_SIZES))
def test_windows_together_have_all_tokens_of_what_is_reused(prompt, recompute, size) -> None:
    found, num_computed, num_tokens = prompt
    whole = plan(found, num_computed, num_tokens, 0.0, block_size=32)
    reuses = plan(found, num_computed, num_tokens, recompute, block_size=32, deviating=True)
    assert [(one.start, one.end, one.block_ids) for one in reuses] == [
        (one.start, one.end, one.block_ids)
        for one in whole
        if one.num_tokens - math.ceil(recompute * one.num_tokens) >= MIN_TOKENS
    ]
    for reuse in reuses:
        starts, (windows,) = reuse.window_starts(size), first_windows([reuse], size)
        covered = {token for start in starts for token in range(start, start + size)}
        assert covered == {*range(reuse.start, reuse.end)}
        assert starts == sorted({*starts})
        assert reuse.num_chosen == math.ceil(recompute * reuse.num_tokens)
        assert windows == [(start, start + size) for start in starts[: len(windows)]]
        assert size * (len(windows) - 1) < reuse.num_chosen <= size * len(windows)
        assert size * len(windows) < reuse.num_tokens
    together = first_windows(reuses, size)
    num_chosen = sum(reuse.num_chosen for reuse in reuses)
    assert sum(map(len, together)) == math.ceil(num_chosen / size)
    for reuse, windows in zip(reuses, together, strict=True):
        assert all(reuse.start <= window.start < window.end <= reuse.end for window in windows)


def test_what_is_left_after_the_first_tokens_has_the_blocks_of_its_tokens() -> None:
    reuse = Reuse(100, 200, 350, (1, 2, 3, 4, 5), num_chosen=20)  # blocks 10 to 14 of the donor
    assert reuse.without_first(1, 32) == Reuse(101, 200, 351, (1, 2, 3, 4, 5))
    assert reuse.without_first(2, 32) == Reuse(102, 200, 352, (2, 3, 4, 5))
    assert reuse.without_first(40, 32) == Reuse(140, 200, 390, (3, 4, 5))


def test_a_share_of_all_reuses_nothing_whichever_tokens_are_chosen() -> None:
    found = [(10, 100, Donor(300, 90, (1, 2, 3, 4)))]
    assert plan(found, 0, 220, 1.0, block_size=32, deviating=True) == []
