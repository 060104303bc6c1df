"""Log-probabilities of all or the end of a prompt whose start comes from the cache.

Owns which rows a request asks for, and that its answer has these rows. Does not own the cap on the
hit, which is the cache's (`RadixKVCacheManager.first_scored` and `wanted_rows`), nor the rows of
cached tokens (`radix/prompt_logprobs.py`).

    prompt          [0 ............ n-1 | n ............ end)     sgl_score_from = n, or the tree
    from the cache  [0 ......... n-1)                             has the rows before n
    computed                    [n-1 ..................... end)
    new rows                            [n ............... end)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: counters

import torch
from vllm.logger import init_logger

from sgl_vllm.counters import counter
from sgl_vllm.part import EngineView, Part
from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.protocol.scoring import check_score_from
from sgl_vllm.radix.prompt_logprobs import MAX_TOP_K, Rows, WantedRows, joined
from sgl_vllm.step_hooks import StepHooks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
    from vllm.v1.request import Request

    from sgl_vllm.radix.manager import RadixKVCacheManager
    from sgl_vllm.radix.request_record import RequestRecord

logger = init_logger("vllm.sgl_vllm.select")


def _unsupported(engine: EngineView) -> str | None:
    return "it needs radix" if "radix" in engine.off else None


PART = Part("select", _unsupported)


@dataclass(slots=True)
class SelectCounters:
    """Prompts with log-probabilities since start."""

    scored_requests: int = counter(
        "Requests that got the scores of their prompt's end, from a cached prefix or without one.",
        unit="requests",
    )
    prompt_logprobs_cached: int = counter(
        "Log-probabilities of prompt tokens by source: read beside the cached tokens.",
        unit="tokens",
        metric="prompt_logprobs",
        labels={"source": "cache"},
    )
    prompt_logprobs_computed: int = counter(
        "Computed by the model.",
        unit="tokens",
        metric="prompt_logprobs",
        labels={"source": "model"},
    )


class ScoredRequests(StepHooks):
    """The live requests that ask for log-probabilities of their prompt.

    Args:
        radix: the cache, which caps their hits and keeps the rows of whole prompts.
    """

    def __init__(self, radix: RadixKVCacheManager) -> None:
        self._radix = radix
        self._num_rows: dict[str, int] = {}  # of the requests whose outputs are being made
        self._whole: dict[str, tuple[RequestRecord, WantedRows]] = {}  # of these, too
        self.counters = SelectCounters()

    def sections(self) -> Mapping[str, Any]:
        return {"select": copy.copy(self.counters)}

    def expect(self, request: Request) -> None:
        """Let a new request read the cache if it asks for log-probabilities of its prompt.

        A `SCORE_FROM` that cannot be used is ignored, with a warning.
        """
        params = request.sampling_params
        if params is None:
            return
        top_k, value = params.prompt_logprobs, (params.extra_args or {}).get(SCORE_FROM)
        if value is not None:
            try:
                check_score_from(value, request.num_prompt_tokens, has_logprobs=top_k is not None)
            except ValueError as error:  # not from the server (`routes/admission.py`)
                shown = quoted(request.request_id)
                logger.warning("%s of request %s is ignored: %s", SCORE_FROM, shown, error)
            else:
                request.skip_reading_prefix_cache = False
                self._radix.first_scored[request] = value
                return
        if (
            top_k is not None
            and 0 <= top_k <= MAX_TOP_K
            and request.prompt_token_ids is not None
            and not request.resumable
            and self._radix.keeps_logprobs
        ):
            request.skip_reading_prefix_cache = False
            self._radix.wanted_rows[request] = WantedRows(top_k)

    def before_update(
        self,
        scheduled: SchedulerOutput,
        sampled: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        """Note which rows the requests of a step ask for, as those that end in it are dropped with
        its outputs."""
        first_scored, wanted_rows = self._radix.first_scored, self._radix.wanted_rows
        self._num_rows, self._whole = {}, {}
        for name in scheduled.num_scheduled_tokens if first_scored or wanted_rows else ():
            if (request := requests.get(name)) is None:
                continue
            if request in first_scored:
                self._num_rows[name] = request.num_prompt_tokens - first_scored[request]
            elif request in wanted_rows:
                record = self._radix.pool.records.lagging(request)
                if record is not None:
                    self._whole[name] = record, wanted_rows[request]

    def follows_outputs(self) -> bool:
        return bool(self._num_rows or self._whole)

    def after_update(
        self, outputs: Sequence[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """Keep only the requested rows, and add the cached ones. If a row was not computed, keep
        none: the client gets no rows instead of wrong ones."""
        for output in outputs:
            tensors, name = output.new_prompt_logprobs_tensors, output.request_id
            if tensors is None:
                continue
            if (count := self._num_rows.get(name)) is not None:
                rows = output.new_prompt_logprobs_tensors = _last_rows(tensors, count, name)
                self.counters.scored_requests += rows is not None
            elif (found := self._whole.get(name)) is not None:
                output.new_prompt_logprobs_tensors = self._whole_prompt(tensors, *found)

    def _whole_prompt(
        self, tensors: LogprobsTensors, record: RequestRecord, wanted: WantedRows
    ) -> LogprobsTensors | None:
        """The rows of a whole prompt, which are kept for other requests."""
        num_new = record.request.num_prompt_tokens - wanted.num_known
        computed = _last_rows(tensors, num_new, record.request.request_id)
        if computed is None:
            return None
        new = Rows(*(tensor.numpy() for tensor in computed[:3]))
        rows = joined([*wanted.known, new])
        self._radix.pool.guarded(self._radix.keep_logprobs, record, rows)
        self.counters.prompt_logprobs_computed += num_new
        self.counters.prompt_logprobs_cached += wanted.num_known - 1
        if wanted.num_known == 1:
            return computed
        token_ids, logprobs, ranks = (torch.from_numpy(array[1:]) for array in rows)
        return computed._replace(
            logprob_token_ids=token_ids, logprobs=logprobs, selected_token_ranks=ranks
        )


def _last_rows(tensors: LogprobsTensors, count: int, request_id: str) -> LogprobsTensors | None:
    """The last `count` rows of a prompt's log-probabilities (one row per token but the first).
    Logs an error and returns None if there are fewer. The cache decides which earlier rows were
    computed: for the others, a model runner returns nothing, or uninitialized memory."""
    first = len(tensors.logprobs) - count
    if first < 0:
        logger.error(
            "Request %s asks for %d prompt log-probabilities, but only %d were computed. It gets "
            "none. Please report this",
            quoted(request_id),
            count,
            len(tensors.logprobs),
        )
        return None
    return tensors._replace(
        logprob_token_ids=tensors.logprob_token_ids[first:],
        logprobs=tensors.logprobs[first:],
        selected_token_ranks=tensors.selected_token_ranks[first:],
    )
