"""Which tokens of a prompt are reused: against a list of what every position needs."""

from __future__ import annotations

import math
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_vllm.approximate.chunk_rows import Room
from sgl_vllm.approximate.plan import MIN_TOKENS, Reuse, plan
from sgl_vllm.approximate.reuse import _move, _Planned
from sgl_vllm.approximate.segment_index import Donor
from tests.effort import examples


@st.composite
def prompts(draw):
    """Segments with gaps between them, each cached somewhere, in part or not at all."""
    position, found = 0, []
    for _ in range(draw(st.integers(0, 5))):
        start = position + draw(st.integers(0, 40))
        end = start + draw(st.integers(1, 150) | st.just(MIN_TOKENS))
        position = end
        if draw(st.booleans()):
            size = draw(st.integers(1, 32))
            at = draw(st.integers(0, 200))
            length = draw(st.integers(1, end - start) | st.just(end - start))
            num_blocks = -(-(at + length) // 32) - at // 32
            found.append((start, end, Donor(at, length, tuple(range(size, size + num_blocks)))))
    num_tokens = max(1, position + draw(st.just(0) | st.integers(1, 60)))
    return found, draw(st.integers(0, num_tokens - 1)), num_tokens


@settings(max_examples=examples(150), deadline=None)
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


@st.composite
def moves(draw):
    """What a request has yet to reuse, and the room that its passes have."""
    position, left = 1, []
    for _ in range(draw(st.integers(1, 6))):
        start = position + draw(st.integers(0, 20))
        position = start + draw(st.integers(MIN_TOKENS, 300))
        left.append(Reuse(start, position, 7, tuple(range(20))))
    rooms = st.tuples(st.integers(-1, 6), st.integers(2, 60))
    return left, draw(st.lists(rooms, min_size=12, max_size=12))


@settings(max_examples=examples(150), deadline=None)
@given(moves())
def test_each_token_is_copied_or_computed_whatever_room_there_is(move) -> None:
    left, rooms = move
    first, last = left[0].start, left[-1].end
    planned = _Planned(None, [*left])
    position, computed, copied = first, set(), set()
    for num_rows, max_tokens in rooms:
        if not planned.left:
            break
        if position < planned.left[0].start:  # the request's own row
            computed |= {*range(position, planned.left[0].start)}
            position = planned.left[0].start
        scheduler = SimpleNamespace(
            running=[None], max_num_scheduled_tokens=max_tokens, max_num_running_reqs=num_rows + 1
        )
        position = _move(planned, Room(scheduler, ()))
        assert len(planned.chunks) <= max(num_rows, 0)
        assert sum(chunk.num_tokens for chunk in planned.chunks) <= max_tokens // 2
        copied |= {token for one in planned.to_copy for token in range(one.start, one.end)}
        computed |= {token for chunk in planned.chunks for token in range(*chunk)}
        planned.chunks, planned.to_copy = [], []
    assert not planned.left and position == last
    assert computed.isdisjoint(copied) and computed | copied == {*range(first, last)}
