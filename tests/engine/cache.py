"""The cache manager without a scheduler or a model: what a request finds, and what it leaves."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from sgl_vllm.config import Options
from sgl_vllm.radix.manager import RadixKVCacheManager
from sgl_vllm.radix.tree import RadixTree

SIZE = 16


class Cache:
    """`options` are those of the plugin's manager. With `hashes`, blocks have vLLM's hashes, as
    vLLM's own cache and connectors need them."""

    def __init__(
        self,
        num_blocks: int = 100,
        max_model_len: int = 1024,
        block_size: int = SIZE,
        hashes: bool = False,
        why_exact: bool = False,
        **options: Any,
    ) -> None:
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=64, dtype=torch.float32
        )
        groups = [KVCacheGroupSpec(["layer"], spec)]
        config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        sizes = {"scheduler_block_size": block_size, "hash_block_size": block_size}
        manager = KVCacheManager(config, max_model_len, **sizes)
        self.manager: Any = RadixKVCacheManager.adopt(
            manager, Options(why_exact=why_exact), **options
        )
        sha = get_hash_fn_by_name("sha256")
        init_none_hash(sha)
        self._hasher = get_request_block_hasher(block_size, sha) if hashes else None
        self._names = map(str, itertools.count())

    @property
    def tree(self) -> RadixTree:
        assert self.manager.tree is not None
        return self.manager.tree

    def request(self, tokens: list[int] | None, **more: Any) -> Request:
        params = SamplingParams(max_tokens=1)
        return Request(next(self._names), tokens, params, None, block_hasher=self._hasher, **more)

    def look_up(self, request: Request) -> tuple[Any, int]:
        """What it finds, in a step of its own, and how many tokens that is."""
        self.manager.new_step_starts()
        return self.manager.get_computed_blocks(request)[:2]

    def allocate(
        self,
        request: Request,
        found: tuple[Any, int] | None = None,
        external: int = 0,
        delay: bool = False,
    ) -> int:
        """As the scheduler admits it; how many tokens were cached."""
        manager = self.manager
        blocks, num_cached = found or manager.get_computed_blocks(request)[:2]
        num_new = 0 if delay else request.num_tokens - num_cached - external
        assert manager.allocate_slots(
            request,
            num_new,
            num_cached,
            blocks,
            num_external_computed_tokens=external,
            delay_cache_blocks=delay,
        )
        manager.record_prefix_cache_stats(request, num_cached)
        manager.block_pool.free_blocks(manager.take_kv_cache_block_copies()[1])
        request.num_computed_tokens = num_cached + external + num_new
        return num_cached

    def serve(self, tokens: list[int] | None, **more: Any) -> Request:
        """A request from its admission to its end."""
        request = self.request(tokens, **more)
        self.allocate(request, self.look_up(request))
        self.manager.free(request)
        return request

    def hit(self, tokens: list[int] | None, **more: Any) -> int:
        """How many tokens it would find. It leaves nothing."""
        request = self.request(tokens, **more)
        num_tokens = self.look_up(request)[1]
        self.manager.free(request)
        return num_tokens
