"""Approximate reuse in an engine: which requests reuse segments, and where they go on computing.

Owns the life of a request that reuses: its plan, the jumps over what it reuses, the copies that
fill it, and the flag in its answer. Does not own the index (`segment_index.py`), the plan's rules
(`plan.py`), the copying (`copies.py`), the rows of further chunks (`chunk_rows.py`), nor that
inexact KV stays out of the tree (`radix/inexact.py`).

    pass        1                 2
    computes    [hit ... A a)     [B b)  [C c)  [question]
    before it                     copy [a ... A end)  [b ... B end)  [c ... C end)

The first pass of a request computes its first chunk. Before the second, its number of computed
tokens moves past all that it reuses. That pass first copies it, and computes the chunks between, as
rows beside that of the request. Where it has no room for all of them, the request moves as far as
it has room for, and goes on in the next pass. From admission on, the request holds the blocks that
it will copy from, so they stay as they are. A request that is preempted computes all of it when it
resumes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict  # Any: counters
from weakref import WeakKeyDictionary

from vllm.logger import init_logger

from sgl_vllm.approximate import copies as turned_copies
from sgl_vllm.approximate.characters import TokenTexts
from sgl_vllm.approximate.chunk_rows import Room, add_rows, leave_room
from sgl_vllm.approximate.copies import StepCopies, TurnedCopy
from sgl_vllm.approximate.part import why_exact
from sgl_vllm.approximate.plan import Chunk, Reuse, plan
from sgl_vllm.approximate.segment_index import SegmentIndex
from sgl_vllm.counters import counter
from sgl_vllm.output_records import follow
from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.protocol.request_keys import APPROXIMATE, PROMPT_CHARS, REUSE, SEGMENTS
from sgl_vllm.protocol.segments import intervals_of
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens
from sgl_vllm.step_hooks import StepHooks
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

    from sgl_vllm.protocol.cache_namespace import CacheNamespace
    from sgl_vllm.radix.manager import RadixKVCacheManager

logger = init_logger("vllm.sgl_vllm.approximate")

MAX_STEPS_FOR_ROOM = 32
"""Steps that a request waits for room beside the blocks that it would copy from."""

MAX_PROMPT_CHARS = 1 << 40
"""A prompt that is said to be longer is taken for one of unknown length."""

_AS_IS = nullcontext()


@dataclass(slots=True)
class ApproximateCounters:
    """Requests that asked for approximate reuse, and what they got, since start."""

    requests: int = counter(
        "Requests that asked for approximate reuse.",
        unit="requests",
        metric="approximate_requests",
    )
    reusing_requests: int = counter(
        "Of these, requests that reused a segment from another place.",
        unit="requests",
        metric="approximate_reusing_requests",
    )
    segments: int = counter(
        "Segments whose KV was copied from another place.",
        unit="segments",
        metric="approximate_segments",
    )
    tokens: int = counter(
        "Prompt tokens whose KV was copied from another place instead of computed.",
        unit="tokens",
        metric="approximate_tokens",
    )
    given_up: int = counter(
        "Requests that computed their segments, because they had no room while others held the "
        "cached ones.",
        unit="requests",
        metric="approximate_given_up",
    )


class ReuseReport(TypedDict):
    """What an answer tells of approximate reuse: how many of its prompt's tokens have KV that was
    computed at another place, and of how many segments they are. 0 for an exact answer."""

    reused_tokens: int
    reused_segments: int


@dataclass(slots=True)
class _Marked:
    """A request that marks segments.

    Attributes:
        segments: half-open intervals of its prompt's tokens.
        reuses: whether it asks for approximate reuse, and may have it.
        namespace, tokens: its key in the tree, known from its first lookup on.
        num_tries: in how many steps it had no room.
    """

    segments: list[tuple[int, int]]
    reuses: bool = False
    namespace: CacheNamespace | None = None
    tokens: Tokens = b""
    num_tries: int = 0


@dataclass(slots=True)
class _Planned:
    """A request with a plan.

    Attributes:
        left: what it has yet to reuse.
        to_copy: what it has moved past, and what its next pass copies.
        chunks: what lies between, and its next pass computes.
        is_admitted: whether it has been admitted with this plan.
    """

    request: Request
    left: list[Reuse]
    to_copy: list[Reuse] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    is_admitted: bool = False


class ApproximateReuse(StepHooks):
    """The requests of one engine that mark segments.

    Without such a request, a step costs a few checks of empty dictionaries.

    Args:
        recompute: the share of the segments' tokens that is computed anyway.
        token_texts: reads the tokenizer. Called when the first request marks segments.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        radix: RadixKVCacheManager,
        recompute: float,
        token_texts: Callable[[], TokenTexts],
    ) -> None:
        assert radix.tree is not None
        self._scheduler = scheduler
        self._radix = radix
        self._token_texts = token_texts
        self._texts: TokenTexts | None = None
        self._marked: WeakKeyDictionary[Request, _Marked] = WeakKeyDictionary()
        self._planned: dict[str, _Planned] = {}
        self._reports: dict[str, ReuseReport] = {}
        self.recompute = recompute
        self.index = SegmentIndex(radix.tree)
        self.counters = ApproximateCounters()

    # -- a request ------------------------------------------------------------------------------

    def install(self, scheduler: Scheduler) -> None:
        """Let chunks end where segments are reused. To be called once, when workers can copy."""
        wrap(scheduler, "_reserve_prefill_lookahead")(self._cut)

    def sections(self) -> Mapping[str, Any]:
        return {"approximate": copy.copy(self.counters)}

    def renew(self) -> None:
        """Forget all segments and counts. To be called when no request runs or waits."""
        self.index.clear()
        self.counters = ApproximateCounters()

    def expect(self, request: Request) -> None:
        """Note the segments of a new request, and whether it asks for approximate reuse. Marks that
        cannot be used are ignored, with a warning, and so is the wish to reuse."""
        params = request.sampling_params
        if params is None or not params.extra_args or SEGMENTS not in params.extra_args:
            return
        if request.prompt_token_ids is None:
            return
        name = quoted(request.request_id)
        try:
            intervals = intervals_of(params.extra_args[SEGMENTS])
        except ValueError as error:
            logger.warning("The segments of request %s are ignored: %s", name, error)
            return
        if self._texts is None:
            self._texts = self._token_texts()
        num_chars = params.extra_args.get(PROMPT_CHARS)
        if not isinstance(num_chars, int) or not 0 <= num_chars <= MAX_PROMPT_CHARS:
            num_chars = None
        segments = self._texts.token_intervals(request.prompt_token_ids, intervals, num_chars)
        marked = self._marked[request] = _Marked(segments)
        if params.extra_args.get(REUSE) == APPROXIMATE:
            self.counters.requests += 1
            report = ReuseReport(reused_tokens=0, reused_segments=0)
            self._reports[request.request_id] = report
            if reason := why_exact(request):
                logger.info("Request %s does not reuse segments: %s", name, reason)
            else:
                marked.reuses = True

    def looked_up(self, request: Request, num_hit: int) -> None:
        """A waiting request was looked up, and has a hit of `num_hit` tokens. Make its plan, if it
        is to reuse segments, and hold what it needs until this step's end, or for as long as it
        needs that if the step admits it."""
        marked = self._marked.get(request)
        if marked is None:
            return
        pool, request_id = self._radix.pool, request.request_id
        record = pool.records.of(request)
        if record is None or pool.is_off:
            return
        marked.namespace, marked.tokens = record.namespace, record.tokens
        if not marked.reuses or request.num_preemptions or marked.num_tries < 0:
            return
        if marked.num_tries and (
            not self._scheduler.running or marked.num_tries >= MAX_STEPS_FOR_ROOM
        ):
            marked.num_tries = -1
            self.counters.given_up += 1
            return
        reuses = self._plan(marked, num_hit, request.num_prompt_tokens)
        if not reuses:
            return
        blocks = pool.blocks
        needed = [[blocks[block_id] for block_id in reuse.block_ids] for reuse in reuses]
        pool.inexact.begin(request_id, reuses[0].start, needed)
        self._planned[request_id] = _Planned(request, reuses)

    def _plan(self, marked: _Marked, num_hit: int, num_prompt_tokens: int) -> list[Reuse]:
        found = []
        for start, end in marked.segments:
            segment = marked.tokens[start * TOKEN_BYTES : end * TOKEN_BYTES]
            donor = self.index.find(marked.namespace, segment) if end > num_hit else None
            # What this very step computes is not there before its forward pass.
            if donor is not None and self._radix.pool.may_be_copied(0, list(donor.block_ids)):
                found.append((start, end, donor))
        return plan(found, num_hit, num_prompt_tokens, self.recompute, self._radix.block_size)

    def _cut(
        self,
        original: Callable[[Request, int, int], int],
        request: Request,
        num_computed_tokens: int,
        num_new_tokens: int,
    ) -> int:
        """How many tokens a pass computes of a request. Wraps the last of vLLM's own rules for it:
        a chunk ends where the next segment is reused."""
        num_new_tokens = original(request, num_computed_tokens, num_new_tokens)
        planned = self._planned.get(request.request_id) if self._planned else None
        if planned is not None and planned.left and planned.request is request:
            num_new_tokens = min(num_new_tokens, planned.left[0].start - num_computed_tokens)
        return num_new_tokens

    # -- a step ---------------------------------------------------------------------------------

    def before_schedule(self, prompts_done: Sequence[Request]) -> None:
        """Note where the segments of these prompts are, which are in the tree as far as they are
        exact. Move requests that have computed a chunk past what they reuse after it, and past
        further chunks as far as the next pass has room for them."""
        for request in prompts_done:
            marked = self._marked.get(request)
            if marked is not None and marked.tokens and self._radix.tree is not None:
                self.index.add(marked.namespace, marked.tokens, marked.segments)
        if not self._planned:
            return
        self._forget_ended()
        room = Room(self._scheduler, self._waiting_chunks())
        for planned in self._planned.values():
            request, left = planned.request, planned.left
            if left and request.num_computed_tokens == left[0].start:
                request.num_computed_tokens = _move(planned, room)

    def while_scheduling(self) -> AbstractContextManager[None]:
        """While inside, what vLLM schedules leaves room for the chunks of the next pass."""
        return leave_room(self._scheduler, self._waiting_chunks()) if self._planned else _AS_IS

    def _waiting_chunks(self) -> list[Chunk]:
        return [chunk for planned in self._planned.values() for chunk in planned.chunks]

    def after_schedule(self, output: SchedulerOutput) -> list[tuple[Request, int]]:
        """Send the copies and the chunk rows of the step, and forget the plans of requests that
        were not admitted or were preempted. To be called when nothing else looks up the requests of
        `output` any more.

        Returns:
            Requests that have chunk rows, and the tokens that those compute.
        """
        self._forget_ended()
        copies: list[TurnedCopy] = []
        moved: set[str] = set()
        in_rows: list[tuple[Request, int]] = []
        inexact = self._radix.pool.inexact
        for request_id, planned in [*self._planned.items()]:
            if request_id in output.num_scheduled_tokens:
                if not planned.is_admitted:
                    planned.is_admitted = True
                    self.counters.reusing_requests += 1
                if planned.to_copy:
                    moved.add(request_id)
                if chunks := planned.chunks:
                    request = planned.request
                    add_rows(output, self._scheduler, request, self._blocks_of(request), chunks)
                    in_rows.append((request, sum(chunk.num_tokens for chunk in chunks)))
                    planned.chunks = []
                while planned.to_copy:
                    copies.append(self._copy(planned.request, planned.to_copy.pop(0)))
                    inexact.release_first(request_id)
                if not planned.left:
                    del self._planned[request_id]
            elif not planned.is_admitted:
                del self._planned[request_id]
                inexact.end(request_id)
                self._marked[planned.request].num_tries += 1
        if copies:
            turned_copies.send(output, StepCopies(copies, moved))
        return in_rows

    def _forget_ended(self) -> None:
        """Forget the plans of requests that have released their blocks since."""
        inexact = self._radix.pool.inexact
        for request_id in [one for one in self._planned if one not in inexact]:
            del self._planned[request_id]

    def _blocks_of(self, request: Request) -> Sequence[KVCacheBlock]:
        return self._radix.groups.main_blocks[request.request_id]

    def _copy(self, request: Request, reuse: Reuse) -> TurnedCopy:
        size = self._radix.block_size
        targets = self._blocks_of(request)[reuse.start // size : -(-reuse.end // size)]
        self.counters.segments += 1
        self.counters.tokens += reuse.num_tokens
        if (report := self._reports.get(request.request_id)) is not None:
            report["reused_tokens"] += reuse.num_tokens
            report["reused_segments"] += 1
        return TurnedCopy(
            reuse.block_ids,
            reuse.donor_start % size,
            tuple(block.block_id for block in targets),
            reuse.start % size,
            reuse.num_tokens,
            reuse.shift,
        )

    def follows_outputs(self) -> bool:
        return bool(self._reports)

    def after_update(
        self, outputs: Iterable[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """Flag the answers of requests that asked for approximate reuse, in the field that also
        carries forced reports."""
        for output, report, is_due in follow(self._reports, outputs, unfinished):
            if is_due:
                params = output.kv_transfer_params or {}
                output.kv_transfer_params = {**params, REUSE: report}


def _move(planned: _Planned, room: Room) -> int:
    """Note what a request's next pass copies, and which chunks it computes beside the request's
    own. Returns the position from which on the request computes."""
    left = planned.left
    position = left[0].start
    while left:
        chunk = Chunk(position, left[0].start)
        if chunk.num_tokens:
            if not room.take(chunk):
                return position
            planned.chunks.append(chunk)
        planned.to_copy.append(left.pop(0))
        position = planned.to_copy[-1].end
    return position
