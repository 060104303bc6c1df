"""Openings: forced tokens at the start of an output, appended before the first forward pass.

Owns the openings that have not been sent yet. Does not own what is forced, nor when a request is
opened (`jump.py`).

    waiting    the grammar is ready                  prompt, f1 .. fk
    step 1     computes all of it in one pass, samples the first undecided token t
    output     f1 .. fk, t                           (and the tokens forced after t)

Nothing of an opening is sent before that pass has sampled a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from sgl_vllm.jump.forced_logprobs import asked_tokens, joined, rows_of_forced


@dataclass(frozen=True, slots=True)
class Opening:
    """The forced start of a request's output.

    Attributes:
        last: the next forced token, if it ends the request. vLLM ends requests only by the token
            that a forward pass samples, so `last` replaces the first sampled token.
    """

    request: Request
    tokens: list[int]
    last: int | None


class Openings:
    """The openings of requests that have not got a token yet, by request id."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._openings: dict[str, Opening] = {}

    def __len__(self) -> int:
        return len(self._openings)

    def add(self, request: Request, tokens: list[int], last: int | None) -> None:
        self._openings[request.request_id] = Opening(request, tokens, last)

    def replace_sampled(self, model_output: ModelRunnerOutput) -> None:
        """Put the forced token that ends a request in place of the sampled one."""
        for request_id, opening in list(self._openings.items()):
            if self._scheduler.requests.get(request_id) is not opening.request:  # aborted
                del self._openings[request_id]
            elif opening.last is not None and model_output.sampled_token_ids:
                index = model_output.req_id_to_index.get(request_id)
                if index is not None and model_output.sampled_token_ids[index]:
                    model_output.sampled_token_ids[index] = [opening.last]

    def deliver(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Put each opening in front of the first output of its request."""
        for output in outputs if self._openings else ():
            if output.new_token_ids:
                opening = self._openings.pop(output.request_id, None)
                if opening is not None:
                    _put_before(output, opening)


def num_before_end(request: Request, forced: Sequence[int], max_model_len: int) -> int:
    """How many of the forced tokens at the start of an output come before the one that ends it."""
    params = request.sampling_params
    assert params is not None
    room = min(request.max_tokens, max_model_len - request.num_prompt_tokens) - 1
    stops = {params.eos_token_id, *(params.stop_token_ids or ())}
    num_before_stop = next((i for i, token in enumerate(forced) if token in stops), len(forced))
    return max(0, min(room, num_before_stop))


def _put_before(output: EngineCoreOutput, opening: Opening) -> None:
    output.new_token_ids = [*opening.tokens, *output.new_token_ids]
    rows = output.new_logprobs
    if rows is not None:
        asked = asked_tokens(opening.request)
        sampled = rows if opening.last is None else rows_of_forced([opening.last], rows, asked)
        output.new_logprobs = joined(rows_of_forced(opening.tokens, rows, asked), sampled)
