"""Openings: forced text that the pass of a request's prompt computes.

Owns when an opening is sent, and what a KV connector sees of it. Does not own what is forced
(`jump.py`).

    before the pass    prompt, f1 .. fk
    the pass           computes both, samples the first undecided token t
    its output         f1 .. fk, t                       (and the tokens forced after t)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from sgl_vllm.jump.forced_logprobs import joined, rows_of_forced
from sgl_vllm.radix.request_record import is_first_admission
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request


class _Opening(NamedTuple):
    """Forced tokens that the first output of a request begins with.

    Attributes:
        last: the next forced token, if it ends the request. vLLM ends requests only by the token
            that a pass samples, so `last` replaces the first sampled token.
    """

    request: Request
    tokens: list[int]
    last: int | None


class Openings:
    """Those that have not been sent, by request id."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._unsent: dict[str, _Opening] = {}
        if scheduler.connector is not None:
            _hide_forced_text(scheduler.connector, scheduler.hash_block_size)

    def __len__(self) -> int:
        return len(self._unsent)

    def add(self, request: Request, tokens: list[int], last: int | None) -> None:
        self._unsent[request.request_id] = _Opening(request, tokens, last)

    def replace_sampled(self, sampled: ModelRunnerOutput) -> None:
        """Put the forced token that ends a request in place of the sampled one."""
        for request_id, opening in list(self._unsent.items()):
            if self._scheduler.requests.get(request_id) is not opening.request:  # aborted
                del self._unsent[request_id]
            elif opening.last is not None and sampled.sampled_token_ids:
                index = sampled.req_id_to_index.get(request_id)
                if index is not None and sampled.sampled_token_ids[index]:
                    sampled.sampled_token_ids[index] = [opening.last]

    def send(self, output: EngineCoreOutput) -> None:
        """Put an unsent opening before the tokens of its request's first output."""
        if not output.new_token_ids or output.request_id not in self._unsent:
            return
        request, tokens, last = self._unsent.pop(output.request_id)
        output.new_token_ids = [*tokens, *output.new_token_ids]
        rows = output.new_logprobs
        if rows is not None:
            sampled = rows if last is None else rows_of_forced([last], rows, request)
            output.new_logprobs = joined(rows_of_forced(tokens, rows, request), sampled)


def _hide_forced_text(connector: KVConnectorBase_V1, hash_block_size: int) -> None:
    """Let a connector that is asked what it can load see no more than the prompt. At a request's
    first admission vLLM counts all that is loaded as prompt."""

    def ask(
        original: Callable[[Request, int], tuple[int | None, bool]],
        request: Request,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        num_seen = request.num_prompt_tokens
        if request.num_tokens <= num_seen or not is_first_admission(request):
            return original(request, num_computed_tokens)
        whole = request._all_token_ids, request.block_hashes
        request._all_token_ids = whole[0][:num_seen]
        request.block_hashes = whole[1][: num_seen // hash_block_size]
        try:
            return original(request, num_computed_tokens)
        finally:
            request._all_token_ids, request.block_hashes = whole

    wrap(connector, "get_num_new_matched_tokens")(ask)
