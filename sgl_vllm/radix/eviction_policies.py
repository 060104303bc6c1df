"""Eviction policies: which cached prefix is evicted first.

A policy is a function from a node to its *eviction key*; the leaf with the smallest key is evicted
first. The key of a node may only grow while the node lives, because using a node makes it more
valuable. `LeafQueue` relies on this, and is told of the exception (`forget`). Pure: no vLLM, no
torch, and no imports that would slow down reading the options.

To add a policy, decorate its function with `policy` and run `make options`, which writes the first
line of its docstring into docs/options.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any  # Any: a policy's key, of its own type

if TYPE_CHECKING:
    from sgl_vllm.radix.node import Node

EvictionPolicy = Callable[["Node"], Any]
"""From a node to its eviction key: any type whose values compare with each other."""

POLICIES: dict[str, EvictionPolicy] = {}
"""By name: the values of the option `radix_policy`."""


def policy(function: EvictionPolicy) -> EvictionPolicy:
    """Register a policy under its function's name."""
    POLICIES[function.__name__] = function
    return function


@policy
def lru(node: Node) -> float:
    """Least recently used."""
    return node.last_used


@policy
def lfu(node: Node) -> tuple[int, float]:
    """Least often hit; among equals the least recently used."""
    return (node.num_hits, node.last_used)


@policy
def slru(node: Node) -> tuple[bool, float]:
    """Segmented LRU: prefixes that were never hit first, then the rest; each least recently used.

    A flood of prompts that are never repeated does not evict those that are.
    """
    return (node.num_hits > 0, node.last_used)


@policy
def priority(node: Node) -> tuple[int, float]:
    """Prefixes used only by low-priority requests (vLLM's `priority`); among equals LRU."""
    return (-node.priority, node.last_used)
