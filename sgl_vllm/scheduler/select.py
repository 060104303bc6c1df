"""Scored requests: log-probabilities of the end of a prompt whose beginning comes from the cache.

Owns which prompt tokens a request asks for, and that its answer has the rows of these tokens only.
Does not own the cap on the hit, which is the cache's (`RadixKVCacheManager.first_scored`).

    prompt          [0 ............ n-1 | n ............ end)     sgl_score_from = n
    from the cache  [0 ......... n-1)
    computed                    [n-1 ..................... end)
    rows                                [n ............... end)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any  # Any: counters

from vllm.logger import init_logger

from sgl_vllm.counters import counter
from sgl_vllm.part import EngineView, Part
from sgl_vllm.protocol.quoting import quoted
from sgl_vllm.protocol.request_keys import SCORE_FROM
from sgl_vllm.protocol.scoring import check_score_from
from sgl_vllm.step_hooks import StepHooks

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsTensors, ModelRunnerOutput
    from vllm.v1.request import Request

logger = init_logger("vllm.sgl_vllm.select")


def _unsupported(engine: EngineView) -> str | None:
    return "it needs radix" if "radix" in engine.off else None


PART = Part("select", _unsupported)


@dataclass(slots=True)
class SelectCounters:
    """Scored requests since start."""

    scored_requests: int = counter(
        "Requests that got the scores of their prompt's end, from a cached prefix or without one.",
        unit="requests",
    )


class ScoredRequests(StepHooks):
    """The live requests that ask for scores.

    Args:
        first_token: the first scored token of each, for the cache to read.
    """

    def __init__(self, first_token: MutableMapping[Request, int]) -> None:
        self._first_token = first_token
        self._num_rows: Mapping[str, int] = {}  # of the requests whose outputs are being made
        self.counters = SelectCounters()

    def sections(self) -> Mapping[str, Any]:
        return {"select": copy.copy(self.counters)}

    def expect(self, request: Request) -> None:
        """Let a new request read the cache if it asks for scores of its prompt's end.

        A value that cannot be used is ignored, with a warning: the whole prompt is computed.
        """
        params = request.sampling_params
        value = params.extra_args.get(SCORE_FROM) if params and params.extra_args else None
        if params is None or value is None:
            return
        has_logprobs = params.prompt_logprobs is not None
        try:
            check_score_from(value, request.num_prompt_tokens, has_logprobs=has_logprobs)
        except ValueError as error:  # not from the server, which refuses it (`routes/admission.py`)
            shown = quoted(request.request_id)
            logger.warning("%s of request %s is ignored: %s", SCORE_FROM, shown, error)
            return
        request.skip_reading_prefix_cache = False
        self._first_token[request] = value

    def before_update(
        self,
        scheduled: SchedulerOutput,
        sampled: ModelRunnerOutput,
        requests: Mapping[str, Request],
    ) -> None:
        """Note how many rows the requests of a step ask for, as those that end in it are dropped
        with its outputs."""
        self._num_rows = {
            name: request.num_prompt_tokens - first_token
            for name in (scheduled.num_scheduled_tokens if self._first_token else ())
            if (request := requests.get(name)) is not None
            and (first_token := self._first_token.get(request)) is not None
        }

    def follows_outputs(self) -> bool:
        return bool(self._num_rows)

    def after_update(
        self, outputs: Sequence[EngineCoreOutput], unfinished: Mapping[str, Request]
    ) -> None:
        """Leave only the rows that were asked for. If some of these were not computed, leave none:
        the client finds no scores instead of wrong ones."""
        for output in outputs:
            tensors = output.new_prompt_logprobs_tensors
            count = self._num_rows.get(output.request_id)
            if tensors is None or count is None:
                continue
            if count > len(tensors.logprobs):
                logger.error(
                    "Request %s asks for %d prompt log-probabilities, but only %d were "
                    "computed. It gets none. Please report this",
                    quoted(output.request_id),
                    count,
                    len(tensors.logprobs),
                )
                output.new_prompt_logprobs_tensors = None
                continue
            output.new_prompt_logprobs_tensors = _last_rows(tensors, count)
            self.counters.scored_requests += 1


def _last_rows(tensors: LogprobsTensors, count: int) -> LogprobsTensors:
    """The last `count` rows of a prompt's log-probabilities, which has one for each token but the
    first. How many of the rows before were computed depends on the cache: the V1 runner leaves
    uninitialized memory in place of the others, the V2 runner leaves them out."""
    first = len(tensors.logprobs) - count
    return tensors._replace(
        logprob_token_ids=tensors.logprob_token_ids[first:],
        logprobs=tensors.logprobs[first:],
        selected_token_ranks=tensors.selected_token_ranks[first:],
    )
