"""Chunk rows: rows of a batch that compute further chunks of a prompt in the same pass.

Owns how a chunk becomes a row. Does not own which chunks there are (`reuse.py`).

A model runner computes one run of consecutive tokens of a request in a pass. So each further chunk
of a prompt is given to the workers as a request of its own, which has the prompt up to a token
after the chunk, and the blocks of the real request. It lives for one pass, and nothing is sampled
for it, because its prompt does not end. The scheduler knows nothing of it. So rows are added when
nothing else looks up the requests of a step any more.

    real request    [............................................ question)
    chunk rows             [B b)       [C c)       [D d)

In each layer, the keys and values of all rows are written before any row reads the cache. So a row
reads what the rows before it compute in the same pass, as if one row had computed all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData

from sgl_vllm.approximate.plan import Chunk

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request


MAX_LISTED_TOKENS = 1 << 19
"""Tokens of prompts that are listed again in the rows of one pass, each for about 40 ns."""


def add_rows(
    output: SchedulerOutput,
    scheduler: Scheduler,
    request: Request,
    blocks: Sequence[KVCacheBlock],
    chunks: Iterable[Chunk],
) -> None:
    """Let the pass of `output`, in which `request` is scheduled, compute chunks of its prompt. They
    must fit beside what is scheduled (`leave_room`).

    Args:
        blocks: of the request, from its first token on.
    """
    assert request.prompt_token_ids is not None
    block_ids = [block.block_id for block in blocks]
    for chunk in chunks:
        row_id = f"{request.request_id} chunk {chunk.start}"
        token_ids = request.prompt_token_ids[: chunk.end + 1]
        output.scheduled_new_reqs.append(
            NewRequestData(
                req_id=row_id,
                prompt_token_ids=token_ids,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0, max_tokens=1),
                pooling_params=None,
                block_ids=([*block_ids],),
                num_computed_tokens=chunk.start,
                lora_request=request.lora_request,
                prefill_token_ids=token_ids,
            )
        )
        output.num_scheduled_tokens[row_id] = chunk.num_tokens
        output.total_num_scheduled_tokens += chunk.num_tokens
        scheduler.finished_req_ids.add(row_id)  # the next step tells the workers


class Room:
    """How many chunk rows the next pass has room for.

    They get rows that no running request has. They get at most half of a pass's tokens, and leave
    one for each running request.

    Args:
        chunks: those that already have room in it.
    """

    def __init__(self, scheduler: Scheduler, chunks: Sequence[Chunk]) -> None:
        num_running, max_tokens = len(scheduler.running), scheduler.max_num_scheduled_tokens
        num_rows = scheduler.max_num_running_reqs - num_running
        num_tokens = min(max_tokens // 2, max_tokens - num_running)
        self._num_rows = num_rows - len(chunks)
        self._num_tokens = num_tokens - sum(chunk.num_tokens for chunk in chunks)
        self._num_listed = MAX_LISTED_TOKENS - sum(chunk.end for chunk in chunks)

    def take(self, chunk: Chunk) -> bool:
        """Whether there is room for a chunk. If there is, it has it from now on."""
        left = self._num_rows - 1, self._num_tokens - chunk.num_tokens, self._num_listed - chunk.end
        if min(left) < 0:
            return False
        self._num_rows, self._num_tokens, self._num_listed = left
        return True


@contextlib.contextmanager
def leave_room(scheduler: Scheduler, chunks: Sequence[Chunk]) -> Iterator[None]:
    """While inside, what vLLM schedules leaves room for chunk rows. Those of a request that it does
    not schedule keep their room until it does."""
    max_running, max_active = scheduler.max_num_running_reqs, scheduler.max_num_active_reqs
    max_tokens = scheduler.max_num_scheduled_tokens
    scheduler.max_num_running_reqs = max_running - len(chunks)
    scheduler.max_num_active_reqs = min(max_active, scheduler.max_num_running_reqs)
    scheduler.max_num_scheduled_tokens = max_tokens - sum(chunk.num_tokens for chunk in chunks)
    try:
        yield
    finally:
        scheduler.max_num_running_reqs = max_running
        scheduler.max_num_active_reqs = max_active
        scheduler.max_num_scheduled_tokens = max_tokens
