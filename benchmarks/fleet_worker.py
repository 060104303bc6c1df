"""A light model of one engine: what it has cached, and when its passes end.

Owns the worker that `fleet` has up to a thousand of. It stands for stock vLLM's scheduler, which
`simulator` runs itself at a hundred times the cost; docs/routing.md says what it leaves out, and
`tests/engine/test_fleet.py` holds the two together at one worker. Pure: no vLLM, no clock.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.cost_model import CostModel
from tools.engine_harness.settings import EngineSettings


@dataclass(slots=True, eq=False)
class Request:
    """One call on its way through a worker.

    Attributes:
        block_ids: of the whole blocks of prompt and reply, each a number for all tokens up to its
            end.
        num_cached: prompt tokens found in the cache; None until it is admitted.
        num_computed: prompt tokens that are cached or computed.
    """

    num_prompt: int
    num_reply: int
    block_ids: Sequence[int]
    num_cached: int | None = None
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class Ended:
    """What the end of some passes brought."""

    first_tokens: list[Request]
    finished: list[Request]


class BlockCache:
    """Blocks by what they hold, the least recently used first to go.

    A block is named as soon as the prompt that fills it is admitted, or the reply ended that does.
    Room for the whole of a request is set aside when it is admitted.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._users: dict[int, int] = {}  # of the named blocks that are in use
        self._unused: OrderedDict[int, None] = OrderedDict()  # named ones; least recent first
        self._num_unnamed = 0

    def admit(self, request: Request) -> bool:
        """Finds what is cached and sets room aside for the rest; False if there is none."""
        users, unused = self._users, self._unused
        found = 0
        num_unused = 0
        # The last token is computed in any case.
        for block_id in request.block_ids[: (request.num_prompt - 1) // self.block_size]:
            if block_id in unused:
                num_unused += 1
            elif block_id not in users:
                break
            found += 1
        num_new = self._num_blocks_of(request) - found
        if len(users) + num_unused + self._num_unnamed + num_new > self.num_blocks:
            return False
        prompt_ids = request.block_ids[: request.num_prompt // self.block_size]
        for block_id in prompt_ids:
            unused.pop(block_id, None)
            users[block_id] = users.get(block_id, 0) + 1
        self._num_unnamed += self._num_blocks_of(request) - len(prompt_ids)
        while len(users) + len(unused) + self._num_unnamed > self.num_blocks:
            unused.popitem(last=False)
        request.num_cached = request.num_computed = found * self.block_size
        return True

    def release(self, request: Request) -> None:
        """It has ended: the end of its text goes first."""
        users, unused = self._users, self._unused
        num_prompt_ids = request.num_prompt // self.block_size
        self._num_unnamed -= self._num_blocks_of(request) - num_prompt_ids
        for block_id in reversed(request.block_ids[num_prompt_ids:]):
            if block_id not in users:
                unused[block_id] = None
                unused.move_to_end(block_id)
        for block_id in reversed(request.block_ids[:num_prompt_ids]):
            if users[block_id] > 1:
                users[block_id] -= 1
            else:
                del users[block_id]
                unused[block_id] = None

    def _num_blocks_of(self, request: Request) -> int:
        return -(-(request.num_prompt + request.num_reply) // self.block_size)


class Worker:
    """First come, first served, in passes of the cost model's length, prefill in chunks.

    Passes that only decode are taken as one *stretch*, to the end of the first request that ends;
    a new request cuts it short after the pass that runs. The caller calls `end_passes` at `end_s`,
    which is infinite while there is nothing to do, and can have changed after any call.
    """

    def __init__(self, settings: EngineSettings, cost: CostModel) -> None:
        self._settings = settings
        self._cost = cost
        self._cache = BlockCache(settings.num_blocks, settings.block_size)
        self._waiting: deque[Request] = deque()
        self._partial: Request | None = None  # admitted; some of its prompt is not computed
        self._decoding: list[tuple[int, int, Request]] = []  # heap: the pass that ends it
        self._context = 0  # tokens of those that decode
        self._num_decoded = 0  # passes so far, to count each one's to its end
        self._num_admitted = 0
        self._prefilled: list[tuple[Request, bool]] = []  # in this pass; whether to the end
        self._num_passes = 0
        self._begin_s = 0.0
        self.end_s = math.inf
        self.busy_s = 0.0

    def send(self, request: Request, now_s: float) -> None:
        if request.num_prompt + request.num_reply > self._settings.cache_tokens:
            raise ValueError("a request is larger than the cache")
        self._waiting.append(request)
        if self.end_s == math.inf:
            self._begin_passes(now_s)
        elif self._num_passes > 1 and len(self._decoding) < self._settings.max_num_seqs:
            self._cut_short(now_s)

    def end_passes(self) -> Ended:
        """What the passes until `end_s` bring; the next ones begin."""
        now_s = self.end_s
        self.busy_s += now_s - self._begin_s
        self._num_decoded += self._num_passes
        self._context += self._num_passes * len(self._decoding)
        ended = Ended([], [])
        while self._decoding and self._decoding[0][0] <= self._num_decoded:
            request = heapq.heappop(self._decoding)[2]
            self._context -= request.num_prompt + request.num_reply
            self._finish(request, ended)
        for request, is_whole in self._prefilled:
            if not is_whole:
                continue
            ended.first_tokens.append(request)
            if request.num_reply == 1:
                self._finish(request, ended)
                continue
            self._context += request.num_prompt + 1
            last = self._num_decoded + request.num_reply - 1
            heapq.heappush(self._decoding, (last, self._num_admitted, request))
            self._num_admitted += 1
        self._begin_passes(now_s)
        return ended

    def _finish(self, request: Request, ended: Ended) -> None:
        self._cache.release(request)
        ended.finished.append(request)

    def _begin_passes(self, now_s: float) -> None:
        """As vLLM fills a pass: all that decode, the prompt that was begun, those that wait."""
        budget = self._settings.max_num_batched_tokens - len(self._decoding)
        prefill = context = 0
        self._prefilled = []
        while budget > 0:
            request = self._partial or self._admit()
            if request is None:
                break
            num_new = min(budget, request.num_prompt - request.num_computed)
            context += request.num_computed
            request.num_computed += num_new
            is_whole = request.num_computed == request.num_prompt
            self._partial = None if is_whole else request
            self._prefilled.append((request, is_whole))
            prefill += num_new
            budget -= num_new
        self._begin_s = now_s
        if prefill:
            self._num_passes = 1
            self.end_s = now_s + self._cost.seconds(
                steps=1,
                prefill=prefill,
                decode=len(self._decoding),
                context=context + self._context,
            )
        elif self._decoding:
            self._num_passes = self._decoding[0][0] - self._num_decoded
            self.end_s = now_s + self._decoding_s(self._num_passes)
        else:
            self._num_passes = 0
            self.end_s = math.inf

    def _admit(self) -> Request | None:
        num_seqs = len(self._decoding) + len(self._prefilled)
        if (
            not self._waiting
            or num_seqs >= self._settings.max_num_seqs
            or not self._cache.admit(self._waiting[0])
        ):
            return None
        return self._waiting.popleft()

    def _decoding_s(self, num_passes: int) -> float:
        """So many passes in which the same requests decode: each has that many tokens more of
        context than the one before."""
        num_seqs = len(self._decoding)
        grown = num_seqs * num_passes * (num_passes - 1) / 2
        return self._cost.seconds(
            steps=num_passes,
            prefill=0,
            decode=num_passes * num_seqs,
            context=num_passes * self._context + grown,
        )

    def _cut_short(self, now_s: float) -> None:
        """The passes end with the one that runs at `now_s`."""
        elapsed_s = now_s - self._begin_s
        low, high = 1, self._num_passes
        while low < high:
            middle = (low + high) // 2
            if self._decoding_s(middle) >= elapsed_s:
                high = middle
            else:
                low = middle + 1
        self._num_passes = low
        self.end_s = self._begin_s + self._decoding_s(low)
