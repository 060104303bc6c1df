"""Opened requests beside a KV connector: forced text after a prompt that has never run.

Owns what a connector sees of such a request when it is asked what it can load.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from sgl_vllm.radix.request_record import is_first_admission
from sgl_vllm.vllm_api.patching import wrap

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.request import Request


def hide_forced_text(connector: KVConnectorBase_V1, hash_block_size: int) -> None:
    """Let a connector see no more than the prompt of an opened request. At a request's first
    admission vLLM counts all that is loaded as prompt."""

    def ask(
        original: Callable[[Request, int], tuple[int | None, bool]],
        request: Request,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        num_seen = request.num_prompt_tokens
        if request.num_tokens <= num_seen or not is_first_admission(request):
            return original(request, num_computed_tokens)
        all_token_ids, block_hashes = request._all_token_ids, request.block_hashes
        request._all_token_ids = all_token_ids[:num_seen]
        request.block_hashes = block_hashes[: num_seen // hash_block_size]
        try:
            return original(request, num_computed_tokens)
        finally:
            request._all_token_ids, request.block_hashes = all_token_ids, block_hashes

    wrap(connector, "get_num_new_matched_tokens")(ask)
