"""Host memory that an engine or a router keeps for the names that clients choose.

The names are as long as the server lets them be, of characters that take four bytes each, and there
are many more of them than are kept. What a test measures does not grow with their number.
"""

from __future__ import annotations

import gc
import itertools
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sgl_vllm.programs.continuations import Continuations, Origin
from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.protocol.hints import MAX_HINT_LENGTH
from sgl_vllm.protocol.request_ids import MAX_ID_CHARS
from sgl_vllm.radix.keys import TokenKeys
from sgl_vllm.radix.misses import Misses
from sgl_vllm.radix.tokens import pack
from sgl_vllm.radix.tree import RadixTree
from sgl_vllm.routing.router import PrefixRouter
from sgl_vllm.scheduler.fairness import DeficitCounters

MIB = 1 << 20
SALT_CHARS = 128
"""vLLM's own limit."""

_numbers = itertools.count()


def name(length: int) -> str:
    """Another one with each call."""
    return f"{next(_numbers):08}" + "\U0001f600" * (length - 8)


def tenant() -> CacheNamespace:
    return CacheNamespace(None, name(SALT_CHARS))


def explained(misses: Misses) -> None:
    misses.not_looked_up(100, "skipped")
    misses.admitted(name(MAX_ID_CHARS), name(SALT_CHARS), 100, 0, 0)


def ended(of: tuple[Continuations, RadixTree]) -> None:
    continuations, tree = of
    owner, program, prompt = tenant(), name(MAX_HINT_LENGTH), pack(range(48))
    leaf = tree.insert(owner, prompt, [0, 1, 2]).own_leaf
    assert leaf is not None
    origin = Origin(name(MAX_ID_CHARS), (owner, program), name(MAX_HINT_LENGTH))
    kinds = [("tool", name(MAX_HINT_LENGTH))]
    continuations.ended(owner, prompt, leaf, kinds, 0.0, origin=origin)
    continuations.program_ended((owner, program), 0.0)
    tree.unlock([0, 1, 2])
    tree.evict(3)


def evicted(tree: RadixTree) -> None:
    tree.insert(tenant(), pack(range(16)), [0])
    tree.unlock([0])
    tree.evict(1)


def charged(counters: DeficitCounters) -> None:
    for _ in range(12_000):
        counters.charge((name(SALT_CHARS), None), 10)
    counters.refill_if_due(())


def showed_image(keys: TokenKeys) -> None:
    position = SimpleNamespace(offset=0, length=2, is_embed=None)
    feature = SimpleNamespace(identifier=name(100_000), mm_position=position)
    request: Any = SimpleNamespace(_all_token_ids=[5, 6], mm_features=[feature])
    keys.pack(request)


def routed(router: PrefixRouter) -> None:
    namespace = CacheNamespace(name(10_000), name(100_000), name(1000).encode())
    group = "sgl_program", name(MAX_HINT_LENGTH)
    router.finished(router.choose(np.arange(8), group=group, namespace=namespace))


def one_worker() -> PrefixRouter:
    router = PrefixRouter()
    router.add_worker("a")
    return router


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kept", "use", "times", "most"),
    [
        (lambda: Misses(16, is_exact=False, shows_text=False), explained, 3000, 4 * MIB),
        (lambda: (Continuations(10.0), RadixTree(16)), ended, 3000, 8 * MIB),
        (lambda: RadixTree(16, max_evicted_bytes=MIB), evicted, 6000, 4 * MIB),
        (lambda: DeficitCounters(1), charged, 3, 16 * MIB),
        (TokenKeys, showed_image, 300, MIB // 8),
        (one_worker, routed, 300, MIB),
    ],
)
def test_what_is_kept_of_names_is_bounded(
    kept: Callable[[], Any], use: Callable[[Any], None], times: int, most: int
) -> None:
    keeper = kept()
    use(keeper)
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(times):
            use(keeper)
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < most
