"""Runners without a model, whose tokens come late. They keep what vLLM's V2 and V1 runners keep, by
the same rules, and know only what the scheduler tells them.

What a pass samples depends on every token that it has fed for the request so far, and `KvMemory`
holds that these are the tokens whose keys and values it reads, and after which it finds its states.
With a `Drafter`, a pass also feeds drafts. It samples a token after each of them, up to the first
one that is wrong.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    DraftTokenIds,
    LogprobsTensors,
    ModelRunnerOutput,
)

from benchmarks.schedulers import runner_output
from sgl_vllm.vllm_api.runners.runner import forced_in as forced_rows_of
from tests.engine.kv_memory import KvMemory, Reader, StateStep
from tests.engine.late_states import LateStates

UNKNOWN = -1
"""A token that only the device knows yet."""


@dataclass
class Row:
    """What a runner holds of one request.

    Attributes:
        prompt, output: as the runner was told, and as it has sampled since.
        blocks: a list for each KV-cache group.
        fed: of every computed position, the token that is there.
        scores: of prompt tokens, each by the pass that computed the token before; None if the
            request does not ask for them, or not any more.
    """

    prompt: list[int]
    blocks: list[list[int]]
    num_computed: int
    output: list[int] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    scores: dict[int, float] | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    def add_blocks(self, new_blocks: Sequence[Sequence[int]]) -> None:
        for blocks, more in zip(self.blocks, new_blocks, strict=True):
            blocks += more


class Drafter:
    """Proposes the tokens that a request gets, of which one in four is wrong.

    Args:
        whole: by request id, its prompt and its answer.
        num_drafts: how many tokens it proposes at a time.
        wrong_share: of the tokens.
    """

    def __init__(
        self,
        whole: Mapping[str, Sequence[int]],
        num_drafts: int,
        seed: int = 0,
        wrong_share: float = 0.25,
    ) -> None:
        self.num_drafts = num_drafts
        self._whole = whole
        self._rng = random.Random(seed)
        self._wrong_share = wrong_share

    def propose(self, request_id: str, num_tokens: int) -> list[int]:
        """What follows the first `num_tokens` of a request."""
        drafts = list(self._whole.get(request_id, ())[num_tokens : num_tokens + self.num_drafts])
        drafts += [7] * (self.num_drafts - len(drafts))
        return [8 if self._rng.random() < self._wrong_share else draft for draft in drafts]


class Runner(ABC):
    """Stands in for the executor. The rules that differ are the subclasses'.

    Attributes:
        drafter: None without speculative decoding.
        num_accepted, num_rejected: drafts.
    """

    def __init__(
        self, scheduler: Scheduler, num_blocks: int, drafter: Drafter | None = None
    ) -> None:
        config = scheduler.vllm_config
        self.is_async = bool(config.scheduler_config.async_scheduling)
        self.max_num_reqs = config.scheduler_config.max_num_seqs
        self.vocab_size = config.model_config.get_vocab_size()
        self.rows: dict[str, Row] = {}
        self.num_passes = 0
        self.sessions: set[str] = set()
        self._block_size = scheduler.block_size
        num_drafts = drafter.num_drafts if drafter is not None else 0
        self._memory = KvMemory(num_blocks + 1, scheduler.block_size, num_drafts)
        self._groups = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._states = LateStates(self._memory, scheduler.block_size)
        self._state_steps: list[tuple[StateStep, int]] = []  # of this pass, with where it ends
        self.drafter = drafter
        self.num_accepted = self.num_rejected = 0
        self._drafts: dict[str, list[int]] = {}  # for the next pass
        self._verified: dict[str, list[int]] = {}  # in this pass
        self._chosen: dict[str, list[int]] = {}
        self._scores: dict[str, LogprobsTensors] = {}

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Future[Any]:
        self.update(scheduled)
        result: Future[Any] = Future()
        if not scheduled.num_scheduled_tokens:
            result.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return result
        self.num_passes += 1
        reads, states = [], []
        self._chosen, self._scores, self._verified = {}, {}, {}
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start, end = row.num_computed, row.num_computed + num_tokens
            planned = scheduled.scheduled_spec_decode_tokens.get(request_id, [])
            num_drafts = len(planned)
            drafts = planned
            if self.is_async:  # they are on the device, unless the request has just begun
                drafts = self._drafts.get(request_id, planned)[:num_drafts]
            tokens = self.input_tokens(request_id, start, end - num_drafts)
            # vLLM pads drafts with -1, for which its runners feed the token 0, and reject it.
            tokens = [*tokens, *(max(draft, 0) for draft in drafts)]
            assert len(tokens) == num_tokens and UNKNOWN not in tokens, (request_id, tokens)
            row.fed = (row.fed if len(row.fed) >= start else row.tokens)[:start] + tokens
            contents = KvMemory.contents(np.array(row.fed))
            place = self._states.move(request_id, start, end)
            keeps_each = self.keeps_each(request_id, start, num_tokens, num_drafts)
            for number, (blocks, group) in enumerate(zip(row.blocks, self._groups, strict=True)):
                # What a block holds is of no use to another group.
                of_group = contents + np.uint64(number)
                if isinstance(group, MambaManager):
                    last = of_group[start - 1] if start else None
                    new = of_group[start:]
                    step = StateStep(request_id, blocks, *place, keeps_each, last, new)
                    states.append((step, end))
                    continue
                num_unread = group.get_num_skipped_tokens(start)
                size = group.block_size
                reads.append(Reader(request_id, blocks, of_group, start, num_unread, size))
            is_chunk = end < self.num_known(request_id)
            last = [] if is_chunk else contents[len(contents) - 1 - num_drafts :].tolist()
            self._chosen[request_id] = [content >> 20 for content in last]
            self._verified[request_id] = drafts
            row.num_computed = end
            if row.scores is not None:
                for index in range(start, min(end, len(row.prompt) - 1)):
                    row.scores[index + 1] = score(int(contents[index]), row.prompt[index + 1])
                if end >= len(row.prompt):
                    self._scores[request_id] = self.score_rows(row, row.scores)
                    row.scores = None
        self._memory.run(scheduled.kv_cache_block_copies or (), reads, [one for one, _ in states])
        self._state_steps = states
        result.set_result(None)
        return result

    def sample_tokens(self, grammar: GrammarOutput | None, non_block: bool = False) -> Any:
        legal = self._legal_tokens(grammar) if grammar is not None else {}
        sampled: dict[str, list[int]] = {}
        for request_id, numbers in self._chosen.items():
            masks, num_acceptable = legal.get(request_id, ([], None))
            drafts = self._verified[request_id][:num_acceptable]
            tokens: list[int] = []
            sampled[request_id] = tokens
            for place, number in enumerate(numbers):
                choices = masks[place] if masks else np.arange(self.vocab_size)
                # Where nothing is legal, a sampler takes the first token.
                tokens.append(int(choices[number % len(choices)]) if len(choices) else 0)
                if [tokens[-1]] != drafts[place : place + 1]:
                    break
            if tokens:
                self.num_accepted += len(tokens) - 1
                self.num_rejected += len(numbers) - len(tokens)
        ids = list(sampled)
        self._states.accept(self._state_steps, sampled, self._verified)
        self.keep_sampled(sampled)
        if self.drafter is not None:
            proposed = {
                request_id: self.drafter.propose(request_id, len(self.rows[request_id].tokens))
                for request_id, tokens in sampled.items()
                if tokens
            }
            # With asynchronous scheduling they stay on the device until they are fed.
            self._drafts = self._drafts | proposed if self.is_async else proposed
        output = runner_output(ids, [*sampled.values()])
        output.prompt_logprobs_dict = self._scores
        if not non_block:
            return output
        result: Future[ModelRunnerOutput] = Future()
        result.set_result(output)
        return result

    def _legal_tokens(
        self, grammar: GrammarOutput
    ) -> dict[str, tuple[list[NDArray[np.intp]], int]]:
        """By request id, the legal tokens after its last token and after each of its drafts, and
        how many of these can be accepted."""
        masks, ids = grammar.grammar_bitmask, grammar.structured_output_request_ids
        num_rows = [1 + len(self._verified[request_id]) for request_id in ids]
        if hasattr(grammar, "num_acceptable_drafts"):
            limits = grammar.num_acceptable_drafts or [0] * len(ids)
        else:  # vLLM 0.31
            limits = [number - 1 for number in num_rows]
        ends = list(itertools.accumulate(num_rows))
        if len(masks) > ends[-1]:  # since vLLM 0.33, every request has rows for all its drafts
            stride = len(masks) // len(ids)
            ends = [place * stride + number for place, number in enumerate(num_rows)]
        legal = {}
        for request_id, limit, end, number in zip(ids, limits, ends, num_rows, strict=True):
            rows = masks[end - number : end]
            bits = [np.unpackbits(row.view(np.uint8), bitorder="little") for row in rows]
            legal[request_id] = [np.flatnonzero(one[: self.vocab_size]) for one in bits], limit
        return legal

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What the drafter has proposed last."""
        return DraftTokenIds([*self._drafts], [list(one) for one in self._drafts.values()])

    @abstractmethod
    def update(self, scheduled: SchedulerOutput) -> None: ...

    @abstractmethod
    def input_tokens(self, request_id: str, start: int, end: int) -> list[int]: ...

    @abstractmethod
    def keeps_each(self, request_id: str, start: int, num_tokens: int, num_drafts: int) -> bool:
        """Whether recurrent layers keep their state after each token of a pass."""

    @abstractmethod
    def num_known(self, request_id: str) -> int:
        """How many tokens have to be computed before one is sampled."""

    @abstractmethod
    def keep_sampled(self, sampled: dict[str, list[int]]) -> None: ...

    @abstractmethod
    def score_rows(self, row: Row, scores: dict[int, float]) -> LogprobsTensors: ...


def score(content: int, token: int) -> float:
    """What the model makes of a prompt token after these."""
    return -((content >> 20) + token) % 1000 / 100


def rows_of(tokens: list[int], scores: list[float]) -> LogprobsTensors:
    return LogprobsTensors(
        torch.tensor(tokens).reshape(-1, 1),
        torch.tensor(scores).reshape(-1, 1),
        torch.ones(len(tokens), dtype=torch.int64),
    )


class V1Runner(Runner):
    """By `GPUModelRunner._update_states`, `_prepare_input_ids` and `_bookkeeping_sync`.

    A batch persists from step to step, and with it which rows have a token of the step before on
    the device. A request that leaves the batch loses it; the scheduler's output rebuilds it.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._batch: set[str] = set()
        self._on_device: dict[str, int] = {}

    def _leave_batch(self, request_id: str) -> None:
        self._batch.discard(request_id)
        self._on_device.pop(request_id, None)

    def update(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.finished_req_ids:
            self.rows.pop(request_id, None)
            self._leave_batch(request_id)
        cached = scheduled.scheduled_cached_reqs
        # By `cleanup_mamba_state_idx`.
        preempted = scheduled.preempted_req_ids or set()
        for request_id in scheduled.finished_req_ids | preempted | cached.resumed_req_ids:
            self._states.forget(request_id)
        for request_id in self._batch - (
            scheduled.num_scheduled_tokens.keys() - cached.resumed_req_ids
        ):
            self._leave_batch(request_id)
        for new in scheduled.scheduled_new_reqs:
            self._leave_batch(new.req_id)
            assert new.prompt_token_ids is not None
            known = self.rows.get(new.req_id)
            self.rows[new.req_id] = row = Row(
                list(new.prompt_token_ids), [*map(list, new.block_ids)], new.num_computed_tokens
            )
            row.scores = known.scores if known is not None else no_scores_yet(new)
        for index, request_id in enumerate(cached.req_ids):
            row = self.rows[request_id]
            row.num_computed = cached.num_computed_tokens[index]
            num_output = cached.num_output_tokens[index]
            del row.output[num_output:]
            if request_id in self._batch and request_id not in forced_rows_of(scheduled):
                assert len(row.output) == num_output  # with drafts, the real runner relies on it
            new_blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert request_id not in self._batch and new_blocks is not None
                row.blocks = [*map(list, new_blocks)]
            elif new_blocks is not None:
                row.add_blocks(new_blocks)
            if request_id not in self._batch and self.is_async and num_output > 0:
                row.output = cached.all_token_ids[request_id][-num_output:]
        for request_id, forced in forced_rows_of(scheduled).items():
            row = self.rows[request_id]
            row.output[forced.start - len(row.prompt) :] = forced.tokens
            self._on_device.pop(request_id, None)
        self._batch |= scheduled.num_scheduled_tokens.keys()
        assert len(self._batch) <= self.max_num_reqs

    def input_tokens(self, request_id: str, start: int, end: int) -> list[int]:
        tokens = self.rows[request_id].tokens[start:end]
        if request_id in self._on_device:
            tokens[-1] = self._on_device[request_id]
        return tokens

    def keeps_each(self, request_id: str, start: int, num_tokens: int, num_drafts: int) -> bool:
        """By `num_decode_draft_tokens` of `_prepare_inputs`."""
        is_decode = num_tokens == 1 and start >= len(self.rows[request_id].prompt)
        return self.drafter is not None and (is_decode or 0 < num_drafts == num_tokens - 1)

    def num_known(self, request_id: str) -> int:
        return len(self.rows[request_id].tokens)

    def keep_sampled(self, sampled: dict[str, list[int]]) -> None:
        for request_id, tokens in sampled.items():
            self.rows[request_id].output += [UNKNOWN] * len(tokens) if self.is_async else tokens
        if self.is_async:
            self._on_device = {name: tokens[0] for name, tokens in sampled.items() if tokens}

    def score_rows(self, row: Row, scores: dict[int, float]) -> LogprobsTensors:
        """A row for every token but the first, without meaning where nothing was computed."""
        places = range(1, len(row.prompt))
        return rows_of(row.prompt[1:], [scores.get(place, float("nan")) for place in places])


class V2Runner(Runner):
    """By `add_requests`, `update_requests` and the kernels of `v1/worker/gpu/input_batch.py`.

    Everything is on the device: it counts computed tokens itself, and what it sampled last it feeds
    next. A request has a slot until the scheduler says that it has ended or was preempted.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._last_sampled: dict[str, int] = {}
        self._prefill_len: dict[str, int] = {}

    def update(self, scheduled: SchedulerOutput) -> None:
        for request_id in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self.rows.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._add(new)
        cached = scheduled.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            row = self.rows[request_id]
            if (forced := forced_rows_of(scheduled).get(request_id)) is not None:
                row.output[forced.start - len(row.prompt) :] = forced.tokens
                row.num_computed = forced.start
                self._prefill_len[request_id] = len(row.tokens)
            # vLLM counts drafts in flight as computed.
            num_unknown = self.drafter.num_drafts if self.drafter and self.is_async else 0
            assert 0 <= cached.num_computed_tokens[index] - row.num_computed <= num_unknown
            new_blocks = cached.new_block_ids[index]
            if new_blocks is not None:
                row.add_blocks(new_blocks)

    def _add(self, new: NewRequestData) -> None:
        assert new.prompt_token_ids is not None and new.prefill_token_ids is not None
        known = self.rows.pop(new.req_id, None)
        self._drafts.pop(new.req_id, None)  # by `RequestState.add_request`, which clears them
        assert len(self.rows) < self.max_num_reqs, "no free slot"
        if known is not None and new.req_id not in self.sessions:  # it counts from the prompt's end
            assert new.prompt_token_ids == known.prompt
        num_prompt = len(new.prompt_token_ids)
        assert new.prefill_token_ids[:num_prompt] == new.prompt_token_ids
        blocks = [*map(list, new.block_ids)]
        output = new.prefill_token_ids[num_prompt:]
        self.rows[new.req_id] = Row(
            list(new.prompt_token_ids), blocks, new.num_computed_tokens, output
        )
        self._prefill_len[new.req_id] = len(new.prefill_token_ids)
        self._states.begin(new.req_id, new.num_computed_tokens)
        if not output:
            self.rows[new.req_id].scores = no_scores_yet(new)

    def input_tokens(self, request_id: str, start: int, end: int) -> list[int]:
        if start < self._prefill_len[request_id]:
            return self.rows[request_id].tokens[start:end]
        return [self._last_sampled[request_id]]

    def keeps_each(self, request_id: str, start: int, num_tokens: int, num_drafts: int) -> bool:
        """By `MambaHybridModelState.prepare_attn`."""
        is_decode = start >= self._prefill_len[request_id]
        is_decode |= start > 0 and num_tokens - num_drafts == 1
        return self.drafter is not None and is_decode and num_tokens <= self.drafter.num_drafts + 1

    def num_known(self, request_id: str) -> int:
        return self._prefill_len[request_id]

    def keep_sampled(self, sampled: dict[str, list[int]]) -> None:
        for request_id, tokens in sampled.items():
            if tokens:
                row = self.rows[request_id]
                row.output += tokens
                row.num_computed -= len(self._verified[request_id]) - (len(tokens) - 1)
                self._last_sampled[request_id] = tokens[-1]

    def score_rows(self, row: Row, scores: dict[int, float]) -> LogprobsTensors:
        """Rows of what was computed."""
        return rows_of([row.prompt[place] for place in scores], list(scores.values()))


def no_scores_yet(new: NewRequestData) -> dict[int, float] | None:
    params = new.sampling_params
    return None if params is None or params.prompt_logprobs is None else {}
