"""The counters and gauges of the radix cache. Pure.

A counter or gauge declared here is shown in `/metrics` without further code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sgl_vllm.counters import counter, gauge

if TYPE_CHECKING:
    from sgl_vllm.radix.groups import Groups
    from sgl_vllm.radix.tree import RadixTree


@dataclass(slots=True)
class RadixCounters:
    """Hits since start, and what requests left for later hits. A request's hit counts once, at its
    first admission."""

    lookups: int = counter(
        "Admitted requests that were looked up in the prefix cache.",
        unit="requests",
        metric="prefix_lookups",
    )
    prompt_tokens: int = counter(
        "Tokens of these requests.", unit="tokens", metric="prefix_lookup_tokens"
    )
    hit_tokens: int = counter(
        "Tokens of these requests that were found in the tree.",
        unit="tokens",
        metric="prefix_hit_tokens",
    )
    whole_block_hit_tokens: int = counter(
        "Cached prompt tokens by where they were found: in whole blocks of the tree.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "whole_blocks"},
    )
    partial_block_hit_tokens: int = counter(
        "In the last, partial block of a hit. With `whole_blocks` this adds up to "
        "`prefix_hit_tokens`.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "partial_block"},
    )
    host_hit_tokens: int = counter(
        "Found beyond the tree by a KV connector, in host memory.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "host"},
    )
    disk_hit_tokens: int = counter(
        "Found by a KV connector on disk.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "disk"},
    )
    p2p_hit_tokens: int = counter(
        "Found by a KV connector on another server.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "p2p"},
    )
    other_tier_hit_tokens: int = counter(
        "Found by a KV connector that does not say where.",
        unit="tokens",
        metric="tier_hit_tokens",
        labels={"tier": "other_tier"},
    )
    tier_declined_tokens: int = counter(
        "Found by a KV connector, but computed because that is cheaper than loading.",
        unit="tokens",
    )
    tier_requests_not_asked: int = counter(
        "Requests too short for any load to pay off, so the KV connector was not asked.",
        unit="requests",
        metric=None,
    )
    partial_block_hits: int = counter("Hits that end inside a block.", unit="requests")
    retained_tails: int = counter(
        "Partial last blocks that requests left in the cache when they ended or were preempted. A "
        "block with the same tokens may have been there already.",
        unit="blocks",
    )
    checkpoints: int = counter(
        "Copies of a running request's recurrent state that were kept for later requests.",
        unit="states",
    )

    def record_tier_hit(self, tier: str, num_tokens: int) -> None:
        """Count tokens that a KV connector loads, by vLLM's name of the tier they come from."""
        name = f"{tier if tier in ('host', 'disk', 'p2p') else 'other_tier'}_hit_tokens"
        setattr(self, name, getattr(self, name) + num_tokens)


@dataclass(slots=True)
class EvictionCounters:
    """What the tree has evicted since start."""

    evicted_blocks: int = counter("KV blocks evicted from the tree to make room.", unit="blocks")
    evicted_tokens: int = counter("Tokens evicted from the tree to make room.", unit="tokens")
    expired_tokens: int = counter("Tokens evicted because of `radix_ttl_s`.", unit="tokens")
    evicted_states: int = counter(
        "States of recurrent layers evicted from the tree for either reason.", unit="states"
    )


@dataclass(frozen=True, slots=True)
class RadixGauges:
    """The size of the cache and of the tree at this moment."""

    tree_nodes: int = gauge("Nodes of the radix tree.", unit="nodes")
    tree_tokens: int = gauge("Tokens that the radix tree holds.", unit="tokens")
    tree_blocks: int = gauge("KV blocks that the radix tree holds.", unit="blocks")
    tree_states: int = gauge(
        "Prefixes after which the radix tree holds the state of the model's recurrent layers.",
        unit="states",
    )
    cache_tokens: int = gauge("Tokens that fit into all KV blocks.", unit="tokens")
    occupied_tokens: int = gauge(
        "Size of the tree's blocks. Blocks count whole, however full they are.", unit="tokens"
    )
    protected_tokens: int = gauge(
        "Size of the tree's blocks that cannot be evicted now, because a running request or a pin "
        "uses them. Blocks count whole, however full they are.",
        unit="tokens",
    )
    pinned_tokens: int = gauge("Size of the pinned blocks.", unit="tokens")
    block_size: int = 0


def gauges_of(tree: RadixTree, groups: Groups, num_blocks: int, num_pinned: int) -> RadixGauges:
    """The size of a cache of `num_blocks`, of which `num_pinned` are pinned."""
    return RadixGauges(
        tree_nodes=tree.num_nodes,
        tree_tokens=tree.num_tokens,
        tree_blocks=tree.num_blocks,
        tree_states=tree.num_states,
        cache_tokens=groups.tokens_in(num_blocks),
        occupied_tokens=groups.tokens_in(tree.num_blocks),
        protected_tokens=groups.tokens_in(tree.num_locked_blocks),
        pinned_tokens=groups.tokens_in(num_pinned),
        block_size=groups.block_size,
    )
