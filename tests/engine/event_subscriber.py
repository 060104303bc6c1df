"""A subscriber to KV events of a model with any KV-cache groups: which blocks it would know.

It believes what an event says, and checks that it fits together: that the tokens of a block are
those that its hash stands for, that nothing is announced twice, and nothing unknown removed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.request import Request

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.node import HOLE, Node
from sgl_vllm.radix.tokens import unpack
from sgl_vllm.radix.tree import RadixTree
from tests.engine.late import LateCore


class Block(NamedTuple):
    """A whole block of a group, by what its layers have computed it from."""

    group: int
    salt: str | None
    tokens: tuple[int, ...]


class Subscriber:
    """Stands for vLLM's event publisher, and for its subscriber.

    Attributes:
        known: the blocks announced, and not removed since.
        kinds: by group, what the events say of its layers.
        listeners: get all events, too.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.known: set[Block] = set()
        self.kinds: dict[int, str | None] = {}
        self.listeners: list[Callable[[list[Any]], None]] = []
        self._scheduler: Any = scheduler
        self._requests: list[Request] = []
        self._sizes = [
            one.block_size
            for one in self._scheduler.kv_cache_manager.coordinator.single_type_managers
        ]
        add_request = self._scheduler.add_request

        def remember(request: Request) -> None:
            self._requests.append(request)
            add_request(request)

        self._scheduler.add_request = remember
        self._scheduler.kv_event_publisher = self

    def publish(self, batch: Any) -> None:
        self._apply_all(batch.events)

    def shutdown(self) -> None:
        pass

    def read_all(self) -> None:
        """Also what has not been published yet."""
        self._apply_all(self._scheduler.kv_cache_manager.take_events())

    def _apply_all(self, events: Iterable[Any]) -> None:
        events, meanings = list(events), self._meanings()
        for event in events:
            self._apply(event, meanings)
        for listener in self.listeners:
            listener(events)

    def _meanings(self) -> dict[Any, tuple[str | None, tuple[int, ...]]]:
        """What vLLM's hashes of all requests stand for: a tenant, and all tokens up to there."""
        size = self._scheduler.hash_block_size
        return {
            maybe_convert_block_hash(block_hash): (
                request.cache_salt,
                tuple(request.all_token_ids[: (number + 1) * size]),
            )
            for request in self._requests
            for number, block_hash in enumerate(request.block_hashes)
        }

    def _apply(self, event: Any, meanings: dict[Any, Any]) -> None:
        if isinstance(event, AllBlocksCleared):
            self.known.clear()
            return
        blocks = [Block(event.group_idx, *meanings[one]) for one in event.block_hashes]
        if isinstance(event, BlockRemoved):
            assert self.known.issuperset(blocks), "an unknown block is removed"
            self.known.difference_update(blocks)
            return
        assert isinstance(event, BlockStored)
        size = self._sizes[event.group_idx]
        assert event.block_size == size and len(event.token_ids) == size * len(blocks) > 0
        before = () if event.parent_block_hash is None else meanings[event.parent_block_hash][1]
        for number, block in enumerate(blocks):
            assert block.tokens == (*before, *event.token_ids[: (number + 1) * size])
        assert self.known.isdisjoint(blocks), "a block is announced twice"
        self.known.update(blocks)
        self.kinds[event.group_idx] = event.kv_cache_spec_kind


def watch(core: LateCore) -> None:
    """Check after every eighth step that a subscriber knows the whole blocks of every group."""
    subscriber, advance = Subscriber(core.scheduler), core.advance
    steps = itertools.count()

    def advance_and_check() -> None:
        advance()
        if next(steps) % 8:
            return
        subscriber.read_all()
        assert subscriber.known == whole_blocks(core.scheduler)

    core.advance = advance_and_check  # type: ignore[method-assign]


def whole_blocks(scheduler: Scheduler) -> set[Block]:
    """Every whole block in the tree; of recurrent layers, every state after whole blocks."""
    specs = [group.kv_cache_spec for group in scheduler.kv_cache_config.kv_cache_groups]
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    sizes = [manager.block_size for manager in managers]
    full = next(i for i, spec in enumerate(specs) if isinstance(spec, FullAttentionSpec))
    recurrent = [i for i, spec in enumerate(specs) if isinstance(spec, MambaSpec)]
    windows = [i for i in range(len(specs)) if i not in (full, *recurrent)]
    tree: RadixTree = scheduler.parts.radix.tree
    found: set[Block] = set()

    def add(node: Node, salt: str | None, tokens: tuple[int, ...]) -> None:
        lists = zip((full, *windows), (node.block_ids, *node.windows), strict=True)
        for group, ids in lists:
            ends = [
                (number + 1) * sizes[group]
                for number, _ in enumerate(ids, node.start // sizes[group])
            ]
            for end, block_id in zip(ends, ids, strict=True):
                if block_id != HOLE and end <= node.end:
                    found.add(Block(group, salt, tokens[:end]))
        for position in node.states:
            if position % sizes[full] == 0:
                found.update(Block(group, salt, tokens[:position]) for group in recurrent)
        for child in node.children.values():
            add(child, salt, (*tokens, *unpack(child.tokens)))

    for namespace, root in tree.roots.items():
        assert isinstance(namespace, CacheNamespace)
        for child in root.children.values():
            add(child, namespace.salt, tuple(unpack(child.tokens)))
    return found
