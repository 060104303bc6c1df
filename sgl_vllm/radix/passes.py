"""Tracks which token the recurrent state in a request's running block belongs to.

Owns this position, which speculative decoding changes. Does not own the blocks (`groups.py`).

A pass that verifies drafts ends in the *running block* and writes the state after its first token
there. The states after the drafts go to the next blocks (`MambaSpec.num_speculative_blocks` in
vLLM), but without their convolution part, which stays in the running block. So only the state after
the first token is complete. If the accepted drafts fill the running block, vLLM moves the state
after the last accepted draft there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class _Pass(NamedTuple):
    """The number of tokens that a pass computes, and its drafts, by request ID."""

    num_tokens: Mapping[str, int]
    drafts: Mapping[str, Sequence[int]]


_NO_PASS = _Pass({}, {})


class Passes:
    """The last pass that was scheduled, and the last whose output is known.

    Args:
        block_size: tokens per block of the recurrent groups.
        has_drafts: whether passes verify drafts.
    """

    def __init__(self, block_size: int, *, has_drafts: bool) -> None:
        self._block_size = block_size
        self.has_drafts = has_drafts
        self._scheduled = self._known = _NO_PASS
        self._num_accepted: dict[str, int] = {}  # in `_known`, with each pass's first token

    def scheduled(self, output: SchedulerOutput) -> None:
        """A pass was scheduled."""
        self._scheduled = _Pass(output.num_scheduled_tokens, output.scheduled_spec_decode_tokens)

    def sampled(self, output: SchedulerOutput, sampled: ModelRunnerOutput) -> None:
        """vLLM is about to read what a pass has sampled, and to cut it where an answer ends."""
        tokens, index = sampled.sampled_token_ids, sampled.req_id_to_index
        drafts = output.scheduled_spec_decode_tokens
        self._known = _Pass(output.num_scheduled_tokens, drafts)
        self._num_accepted = {
            name: len(tokens[index[name]]) for name in drafts if name in index and tokens
        }

    def state_end(self, request: Request) -> int | None:
        """Number of tokens covered by the state in the request's running block once all passes in
        flight have run. None if that block has no complete state, or if the number is unknown."""
        if not self.has_drafts:
            return request.num_computed_tokens
        in_flight, name = request.num_in_flight_tokens, request.request_id
        last = self._scheduled if in_flight else self._known
        num_scheduled = last.num_tokens.get(name, 0)
        if not num_scheduled or in_flight not in (0, num_scheduled):
            return None  # several passes are in flight, or the last pass did not run this request
        if name not in last.drafts:
            return request.num_computed_tokens
        num_accepted = 0 if in_flight else self._num_accepted.get(name, 0)
        if not (num_accepted or in_flight):
            return None
        start = request.num_computed_tokens - (num_accepted or num_scheduled)
        ends_with_block = (start + num_scheduled) % self._block_size == 0
        if ends_with_block and (in_flight or num_accepted == num_scheduled):
            return None if in_flight else request.num_computed_tokens
        running = (start + num_scheduled - 1) // self._block_size
        return start + 1 if start // self._block_size == running else None
