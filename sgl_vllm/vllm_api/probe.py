"""Every private contact with vLLM that the parts rely on, and whether the installed one has it.

Owns names and signatures only, as text, so that a change in vLLM switches a part off with a clear
reason instead of failing in the middle of a request. Imports vLLM when asked.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

PARTS = ("radix", "schedule", "fsm", "jump_forward", "select")

_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_GRAMMAR = "vllm.v1.structured_output.backend_xgrammar:XgrammarGrammar"
_MASKS = "vllm.v1.structured_output"
_RANKS = "vllm.v1.engine.core_client:DPLBAsyncMPClient"
_QUEUE = "vllm.v1.core.sched.request_queue:RequestQueue"

_HOOKS: dict[str, tuple[str, ...]] = {
    "radix": (
        f"{_MANAGER}.get_computed_blocks(request)",
        f"{_MANAGER}.allocate_slots"
        "(request, num_new_tokens, num_new_computed_tokens, num_external_computed_tokens)",
        f"{_MANAGER}.free(request)",
        f"{_MANAGER}.pop_blocks_for_free(request)",
        f"{_MANAGER}.new_step_starts",
        f"{_MANAGER}.reset_prefix_cache",
        f"{_MANAGER}.prefix_cache_lookup_enabled(request)",
        f"{_MANAGER}.record_prefix_cache_stats(request, num_hits)",
        f"{_MANAGER}.take_kv_cache_block_copies",
        f"{_POOL}.cache_full_blocks(request, blocks, num_cached_blocks, num_full_blocks)",
        f"{_POOL}.get_new_blocks(num_blocks)",
        f"{_POOL}.touch(blocks)",
        f"{_POOL}.free_blocks(ordered_blocks)",
        f"{_POOL}.unpin_blocks(blocks, on_reuse)",
        f"{_POOL}.reset_prefix_cache",
        f"{_POOL}._maybe_evict_cached_block(block)",
        f"{_POOL}._emit_block_removed_events(block_hashes)",
        f"{_POOL}._remove_cached_block_hashes(block)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove(block)",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.prepend_n(blocks)",
    ),
    "schedule": (
        f"{_SCHEDULER}.schedule",
        f"{_QUEUE}.add_request(request)",
        f"{_QUEUE}.peek_request",
        f"{_QUEUE}.pop_request",
        f"{_QUEUE}.prepend_request(request)",
        f"{_QUEUE}.prepend_requests(requests)",
        f"{_QUEUE}.remove_requests(requests)",
    ),
    "fsm": (
        f"{_MASKS}:StructuredOutputManager.grammar_init(request)",
        f"{_MASKS}.backend_types:StructuredOutputBackend.compile_grammar"
        "(request_type, grammar_spec, stop_token_ids)",
        f"{_MASKS}.backend_types:StructuredOutputBackend.allocate_token_bitmask(max_num_seqs)",
        f"{_MASKS}.backend_types:StructuredOutputGrammar.fill_bitmask(bitmask, batch_index)",
        f"{_MASKS}.backend_guidance:process_for_additional_properties",
        f"{_MASKS}.backend_xgrammar:has_xgrammar_unsupported_json_features",
    ),
    "jump_forward": (
        f"{_SCHEDULER}.update_from_output",
        f"{_SCHEDULER}._enqueue_waiting_request(request)",
        f"{_SCHEDULER}._holds_kv_blocks",
        f"{_SCHEDULER}._free_request(request)",
        f"{_SCHEDULER}._free_request_blocks(request)",
        "vllm.v1.core.sched.utils:check_stop(request, max_model_len)",
        f"{_GRAMMAR}.accept_tokens(tokens)",
        f"{_GRAMMAR}.validate_tokens(tokens)",
        f"{_GRAMMAR}.rollback(num_tokens)",
    ),
    "select": (f"{_SCHEDULER}.add_request(request)", f"{_SCHEDULER}.update_from_output"),
    "rank_routing": (
        f"{_RANKS}.get_core_engine_for_request(request)",
        f"{_RANKS}.process_engine_outputs(outputs)",
    ),
}
"""By part, or by option that has its own, as `module:path`, with the parameters it must have in
parentheses."""


def missing_hooks(part: str) -> list[str]:
    """What a part, or `rank_routing`, needs and this vLLM has not, as `path(parameters)`."""
    return [hook.partition(":")[2] for hook in _HOOKS[part] if not _has_hook(hook)]


def _has_hook(hook: str) -> bool:
    module_name, _, rest = hook.partition(":")
    path, _, parameters = rest.rstrip(")").partition("(")
    try:
        thing: Any = importlib.import_module(module_name)
        for name in path.split("."):
            thing = getattr(thing, name)
        return not parameters or set(parameters.split(", ")) <= set(
            inspect.signature(thing).parameters
        )
    except (ImportError, AttributeError):
        return False
