"""A model runner without a model: which graph a pass runs in, and the token that it samples.

Follows vLLM's V2 runner as far as a scheduler can tell: rows added and removed, tokens known of a
row, and the choice between full and piecewise CUDA graphs. Takes forced tokens as the plugin's hook
in a runner does, by the `ForcedRow`s of a step.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import accumulate
from typing import Any  # Any: vLLM's outputs

import numpy as np
from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

from benchmarks.pace.devices import FULL, NONE, PIECEWISE, Clock, Device
from benchmarks.pace.workloads import Vocabulary
from benchmarks.schedulers import runner_output
from sgl_vllm.vllm_api.runners.runner import forced_in

LARGEST_GRAPH = 512
"""Tokens of the largest graph that vLLM captures by default."""

_LONGEST_TOKEN = 64
_WORD = re.compile(rb" [A-Za-z]{2,}")


class PaceError(Exception):
    """A scheduler and the runner disagree about a request."""


class Text:
    """A text that a model writes, in the tokens in which its tokenizer would split it.

    If forced text ends inside a token, the rest is split again from there.
    """

    def __init__(self, text: str, vocabulary: Vocabulary) -> None:
        self.data = text.encode()
        self._vocabulary = vocabulary
        self._next: dict[int, int] = {}
        self._split(0)

    def token_at(self, offset: int) -> int:
        if offset not in self._next:
            self._split(offset)
        return self._next[offset]

    def _split(self, offset: int) -> None:
        for token in self._vocabulary.tokens(self.data[offset:].decode(errors="replace")):
            self._next.setdefault(offset, token)
            offset += len(self._vocabulary.token_bytes[token])


@dataclass
class Row:
    """What the runner holds of a request.

    Attributes:
        num_known: prompt and output tokens that the scheduler has sent.
        offsets: the place in the text after each number of output tokens, from 0 on.
        last: the last token of noise.
    """

    num_prompt: int
    num_known: int
    num_computed: int
    text: Text | None
    offsets: list[int]
    last: int | None = None


class Runner:
    """Samples at once, and with a device says when its result would have come.

    Args:
        texts: what is to be written, by request; without one, noise.
        counts: passes by their graph, rows added to the batch, tokens computed, blocks copied.
        longest_query: the longest row of a full graph for rows of any length, in tokens; 1 as vLLM
            has it by default. Rows of a jump count as decoding only above 1.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        clock: Clock,
        texts: Mapping[str, Text],
        counts: Counter[str],
        *,
        longest_query: int = 1,
    ) -> None:
        self.device: Device | None = None
        self._clock, self._texts, self._counts = clock, texts, counts
        self._longest_query = longest_query
        self._rows: dict[str, Row] = {}
        self._sampling: list[tuple[str, bool]] = []
        self._lengths = [len(piece) for piece in vocabulary.token_bytes]
        self._token_of = {piece: token for token, piece in enumerate(vocabulary.token_bytes)}
        self._is_word = np.array([bool(_WORD.fullmatch(one)) for one in vocabulary.token_bytes])
        self._end: int = vocabulary.tokenizer.eos_token_id

    # -- a pass -----------------------------------------------------------------------------------

    def execute_model(self, scheduled: SchedulerOutput, non_block: bool = False) -> Future[Any]:
        for request_id in scheduled.finished_req_ids | (scheduled.preempted_req_ids or set()):
            self._rows.pop(request_id, None)
        for new in scheduled.scheduled_new_reqs:
            self._add(new)
        forced = forced_in(scheduled)
        for request_id, row in forced.items():
            self._force(request_id, row.start, row.tokens)
        future: Future[Any] = Future()
        if not scheduled.num_scheduled_tokens:
            future.set_result(EMPTY_MODEL_RUNNER_OUTPUT)
            return future
        graph, num_added = self._graph(scheduled, forced), len(scheduled.scheduled_new_reqs)
        num_tokens = scheduled.total_num_scheduled_tokens
        copies = len(scheduled.kv_cache_block_copies or ())
        self._counts.update(
            {graph: 1, "added": num_added, "computed_tokens": num_tokens, "copies": copies}
        )
        if self.device is not None:
            self._clock.launch(self.device, graph, num_tokens, num_added, copies=copies > 0)
        self._sampling = []
        for request_id, num_tokens in scheduled.num_scheduled_tokens.items():
            one = self._rows[request_id]
            one.num_computed += num_tokens
            self._sampling.append((request_id, one.num_computed >= one.num_known))
        future.set_result(None)
        return future

    def _graph(self, scheduled: SchedulerOutput, forced: Mapping[str, Any]) -> str:
        """As vLLM's V2 runner chooses: full if all rows decode one token, also the last one of a
        prompt; else piecewise, unless the batch is larger than any graph."""
        if scheduled.total_num_scheduled_tokens > LARGEST_GRAPH:
            return NONE
        longest = max(scheduled.num_scheduled_tokens.values())
        prefills = any(
            self._rows[request_id].num_computed < self._rows[request_id].num_known
            and not (request_id in forced and self._longest_query > 1)
            for request_id, num_tokens in scheduled.num_scheduled_tokens.items()
            if num_tokens > 1 or not self._rows[request_id].num_computed
        )
        return PIECEWISE if prefills or longest > self._longest_query else FULL

    def _add(self, new: NewRequestData) -> None:
        """Add the row of a new request, or of a preempted one with its output so far."""
        assert new.prompt_token_ids is not None
        assert new.prefill_token_ids is not None
        num_prompt = len(new.prompt_token_ids)
        text = self._texts.get(new.req_id)
        self._rows[new.req_id] = Row(num_prompt, num_prompt, new.num_computed_tokens, text, [0])
        self._force(new.req_id, num_prompt, new.prefill_token_ids[num_prompt:])

    def _force(self, request_id: str, start: int, tokens: Sequence[int]) -> None:
        """The row's tokens from `start` on are these."""
        row = self._rows[request_id]
        row.num_known = start + len(tokens)
        before = row.offsets[: start - row.num_prompt + 1]
        if len(before) != start - row.num_prompt + 1:
            raise PaceError(f"{request_id}: tokens are forced from {start} on, but not all before")
        lengths = (self._lengths[token] for token in tokens)
        row.offsets = before[:-1] + list(accumulate(lengths, initial=before[-1]))

    # -- sampling ---------------------------------------------------------------------------------

    def sample_tokens(
        self, grammar: GrammarOutput | None, non_block: bool = False
    ) -> Future[ModelRunnerOutput]:
        masks: dict[str, np.ndarray] = {}
        if grammar is not None:
            bitmask = np.asarray(grammar.grammar_bitmask)
            masks = dict(zip(grammar.structured_output_request_ids, bitmask, strict=True))
        sampled = [
            [self._sample(request_id, masks.get(request_id))] if is_sampled else []
            for request_id, is_sampled in self._sampling
        ]
        future: Future[ModelRunnerOutput] = Future()
        if self.device is not None:
            future = self._clock.sample(self.device)
        future.set_result(runner_output([request_id for request_id, _ in self._sampling], sampled))
        return future

    def take_draft_token_ids(self) -> None:
        return None

    def _sample(self, request_id: str, mask: np.ndarray | None) -> int:
        """The next token of the row's text, or noise. The same tokens are sampled each time."""
        row = self._rows[request_id]
        num_output = row.num_computed - row.num_prompt
        del row.offsets[num_output + 1 :]  # after a sample that has become stale
        token = None
        if row.text is not None and mask is not None:
            token = self._next_of_text(row.text, row.offsets[-1], mask)
        if token is None:
            seed = zlib.crc32(f"{request_id}|{row.num_computed}".encode())
            token = row.last = self._noise(seed, row.last, mask)
        row.offsets.append(row.offsets[-1] + self._lengths[token])
        return token

    def _noise(self, seed: int, last: int | None, mask: np.ndarray | None) -> int:
        """As the models of random weights in `benchmarks.models` write: the last token again, if
        that is legal, else a whole word, else any legal token."""
        if mask is None:
            return 10 + seed % (len(self._lengths) - 10)
        if last is not None and _allows(mask, last):
            return last
        legal = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        legal = legal[legal < len(self._lengths)]
        words = legal[self._is_word[legal]]
        choice = words if len(words) else legal
        return int(choice[seed % len(choice)]) if len(choice) else 0

    def _next_of_text(self, text: Text, offset: int, mask: np.ndarray) -> int | None:
        """The token that its tokenizer would take, else the longest that is legal. None while a
        jump makes this sample stale: the mask is that of the place after it."""
        if offset >= len(text.data):
            return self._end if _allows(mask, self._end) else None
        token = text.token_at(offset)
        if _allows(mask, token):
            return token
        for length in range(min(_LONGEST_TOKEN, len(text.data) - offset), 0, -1):
            shorter = self._token_of.get(text.data[offset : offset + length])
            if shorter is not None and _allows(mask, shorter):
                return shorter
        return None


def _allows(mask: np.ndarray, token: int) -> bool:
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)
