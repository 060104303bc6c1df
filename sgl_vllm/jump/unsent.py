"""Unsent tokens: forced tokens that were appended before a forward pass, not after one.

Owns the unsent tokens of each request, and how they reach the client. Does not own what is forced,
nor when it is appended (`jump.py`).

    before the pass    prompt, f1 .. fk
    the pass           computes f1 .. fk, samples the first undecided token t
    output             f1 .. fk, t                           (and the tokens forced after t)

None of them is sent before that pass has sampled a token.
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
class Unsent:
    """Forced tokens that the next output of a request begins with.

    Attributes:
        last: the next forced token, if it ends the request. vLLM ends requests only by the token
            that a forward pass samples, so `last` replaces the first sampled token.
    """

    request: Request
    tokens: list[int]
    last: int | None


class UnsentTokens:
    """The unsent tokens of requests whose next output has not come yet, by request id."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._unsent: dict[str, Unsent] = {}

    def __len__(self) -> int:
        return len(self._unsent)

    def add(self, request: Request, tokens: list[int], last: int | None = None) -> None:
        self._unsent[request.request_id] = Unsent(request, tokens, last)

    def replace_sampled(self, model_output: ModelRunnerOutput) -> None:
        """Put the forced token that ends a request in place of the sampled one."""
        for request_id, unsent in list(self._unsent.items()):
            if self._scheduler.requests.get(request_id) is not unsent.request:  # aborted
                del self._unsent[request_id]
            elif unsent.last is not None and model_output.sampled_token_ids:
                index = model_output.req_id_to_index.get(request_id)
                if index is not None and model_output.sampled_token_ids[index]:
                    model_output.sampled_token_ids[index] = [unsent.last]

    def deliver(self, outputs: Iterable[EngineCoreOutput]) -> None:
        """Put what is unsent in front of the next output of its request."""
        for output in outputs if self._unsent else ():
            if output.new_token_ids:
                unsent = self._unsent.pop(output.request_id, None)
                if unsent is not None:
                    _put_before(output, unsent)


def num_before_end(request: Request, forced: Sequence[int], max_model_len: int) -> int:
    """How many of the tokens forced after what `request` has come before the one that ends it; all
    of them if none does."""
    params = request.sampling_params
    assert params is not None
    room = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
    room -= request.num_output_tokens + 1
    stops = {params.eos_token_id, *(params.stop_token_ids or ())}
    num_before_stop = next((i for i, token in enumerate(forced) if token in stops), len(forced))
    return max(0, min(room, num_before_stop))


def _put_before(output: EngineCoreOutput, unsent: Unsent) -> None:
    output.new_token_ids = [*unsent.tokens, *output.new_token_ids]
    rows = output.new_logprobs
    if rows is not None:
        asked = asked_tokens(unsent.request)
        sampled = rows if unsent.last is None else rows_of_forced([unsent.last], rows, asked)
        output.new_logprobs = joined(rows_of_forced(unsent.tokens, rows, asked), sampled)
