"""What of an engine's configuration matters to a scheduler without a model. Pure: no vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STOCK, SGL = "stock", "sgl"
"""The two arms of a comparison: vLLM's scheduler, and the plugin's."""

HEADS, MLA = "heads", "MLA"
"""Two kinds of full attention: keys and values of each head, or one latent vector for all."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What of an engine's configuration matters here; named as vLLM's options.

    `num_blocks` counts usable blocks, `plugin` is what `--plugin-config` would give. Each of
    `sliding_windows` and `attention_chunks` is a KV-cache group of layers that read so many tokens,
    beside one of full attention, by heads or by a latent vector (`MLA`); None for none. There are
    `num_recurrent_groups` more, of recurrent layers. The blocks of full attention are
    `full_block_scale` times as long as `block_size`, those of others. `kv_events` has blocks
    announced, to a publisher that drops the events. `speculation` is vLLM's name of a method, which
    drafts `num_drafts` tokens. `prefix_match_unit` is vLLM's option; None for its default.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    async_scheduling: bool = True
    sliding_windows: tuple[int, ...] = ()
    attention_chunks: tuple[int, ...] = ()
    num_recurrent_groups: int = 0
    full_block_scale: int = 1
    full_attention: str | None = HEADS
    kv_events: bool = False
    speculation: str | None = None
    num_drafts: int = 0
    prefix_match_unit: int | None = None
    plugin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cache_tokens(self) -> int:
        return self.num_blocks * self.block_size
