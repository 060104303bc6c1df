"""Pinned prefixes: cached tokens that are not evicted until they are unpinned.

Owns the pins, their limit, and that each follows its prefix to other blocks. Does not own the
blocks: a pin holds a reference to each of its blocks, as a running request does.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sgl_vllm.protocol.cache_namespace import CacheNamespace
from sgl_vllm.radix.node import without_holes
from sgl_vllm.radix.tokens import TOKEN_BYTES, Tokens, pack

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    from sgl_vllm.radix.marked_pool import MarkedBlockPool
    from sgl_vllm.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class Pin:
    """A pinned prefix.

    Attributes:
        tokens: what was pinned, packed.
        blocks: what holds it. The pin has one reference to each.
        num_tokens: how many of `tokens` these blocks hold.
        since: seconds on the monotonic clock.
    """

    namespace: CacheNamespace
    tokens: Tokens
    blocks: tuple[KVCacheBlock, ...]
    num_tokens: int
    since: float


@dataclass(eq=False)
class Pins:
    """The pins of one cache.

    Attributes:
        max_blocks: at most this many blocks can be pinned, each counted once however many pins
            hold it.
        max_pins: at most this many pins at a time.
    """

    _pool: MarkedBlockPool
    max_blocks: int = 0
    max_pins: int = 0
    _pins: dict[str, Pin] = field(default_factory=dict)
    _holders: dict[int, set[str]] = field(default_factory=dict)
    """The pins that hold each pinned block."""

    def all(self) -> dict[str, Pin]:
        """Every pin, by its id."""
        return dict(self._pins)

    @property
    def block_ids(self) -> Set[int]:
        """The pinned blocks: a view. Many pins may share a prefix, and each block counts once."""
        return self._holders.keys()

    def pin(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        adapter: tuple[str, str] | None = None,
    ) -> tuple[str, Pin]:
        """Keep the longest cached prefix of `token_ids` until `unpin` or a reset.

        Args:
            adapter: name and path of the LoRA adapter.

        Returns:
            The pin's id, and the pin.

        Raises:
            ValueError: nothing of the prefix is cached, too much would be pinned, or the tree is
                off.
        """
        tree = self._pool.tree
        if self._pool.is_off:
            raise ValueError(f"the radix tree is {self._pool.off_reason}")
        if len(self._pins) >= self.max_pins:
            raise ValueError(
                f"there are {len(self._pins)} pins and at most {self.max_pins} may be: unpin "
                "something, or start the server with a larger radix_max_pins"
            )
        namespace = CacheNamespace(adapter, cache_salt or None)
        tokens = pack(token_ids)
        blocks, num_tokens = self._cached(tree, namespace, tokens)
        if not blocks:
            raise ValueError("nothing of this prefix is cached: run it once, then pin it")
        num_new = sum(block.block_id not in self._holders for block in blocks)
        num_pinned = len(self._holders) + num_new
        if num_pinned > self.max_blocks:
            raise ValueError(
                f"{num_pinned} blocks would be pinned and at most {self.max_blocks} may be: "
                "unpin something, or start the server with a larger radix_pin_share or cache"
            )
        pin_id = secrets.token_hex(8)
        tokens = tokens[: TOKEN_BYTES * num_tokens]
        pin = self._pins[pin_id] = Pin(namespace, tokens, blocks, num_tokens, time.monotonic())
        self._hold(pin_id, pin)
        return pin_id, pin

    def unpin(self, pin_id: str) -> bool:
        """Let a pinned prefix be evicted again; False if there is no such pin."""
        pin = self._pins.pop(pin_id, None)
        if pin is None:
            return False
        self._release(pin_id, pin)
        return True

    def unpin_all(self) -> Mapping[str, Pin]:
        """Remove every pin. Returns them: pass them to `restore` before anything else changes the
        cache."""
        pins, self._pins = self._pins, {}
        for pin_id, pin in pins.items():
            self._release(pin_id, pin)
        return pins

    def restore(self, pins: Mapping[str, Pin]) -> None:
        """Undo `unpin_all`."""
        for pin_id, pin in pins.items():
            self._hold(pin_id, pin)
        self._pins.update(pins)

    def follow(self, evicted: Sequence[int]) -> None:
        """Move the pins of blocks that have left the tree to the blocks that hold their prefixes
        now. Most often a longer copy of a partial last block has replaced it.

        Cost: a lookup per block of `evicted`, and the blocks of each pin that holds one.
        """
        tree = self._pool.tree
        if not self._pins or self._pool.is_off:
            return
        for pin_id in {pin_id for block in evicted for pin_id in self._holders.get(block, ())}:
            pin = self._pins[pin_id]
            blocks, num_tokens = self._cached(tree, pin.namespace, pin.tokens)
            moved = self._pins[pin_id] = replace(pin, blocks=blocks, num_tokens=num_tokens)
            self._pool.touch(blocks)
            self._release(pin_id, pin)
            self._note(pin_id, moved)

    def _hold(self, pin_id: str, pin: Pin) -> None:
        self._pool.touch(pin.blocks)
        self._note(pin_id, pin)

    def _note(self, pin_id: str, pin: Pin) -> None:
        for block in pin.blocks:
            self._holders.setdefault(block.block_id, set()).add(pin_id)

    def _release(self, pin_id: str, pin: Pin) -> None:
        for block in pin.blocks:
            holders = self._holders[block.block_id]
            holders.discard(pin_id)
            if not holders:
                del self._holders[block.block_id]
        self._pool.free_blocks(reversed(pin.blocks))

    def _cached(
        self, tree: RadixTree, namespace: CacheNamespace, tokens: Tokens
    ) -> tuple[tuple[KVCacheBlock, ...], int]:
        """The blocks of the longest cached prefix, and how many tokens of it they hold."""
        match = tree.match_prefix(namespace, tokens)
        num_tokens = tree.longest_hit(match, match.num_tokens)
        lists = [tree.block_ids(match, num_tokens), *tree.window_ids(match, num_tokens)]
        lists.append(tree.state_ids(match, num_tokens))
        block_ids = without_holes([*itertools.chain.from_iterable(lists)])
        return tuple(self._pool.blocks[block_id] for block_id in block_ids), num_tokens
