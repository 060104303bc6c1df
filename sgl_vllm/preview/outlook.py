"""What is foreseen for an engine.

Owns the form of the answer. Does not own how it is found (`engine.py`). Pure.
"""

from __future__ import annotations

import enum
import json
from dataclasses import asdict, dataclass, field

from sgl_vllm.part import BY_OPTION


class Refused(Exception):
    """vLLM would not start an engine with these flags. The message is one line that says why."""


class State(enum.StrEnum):
    """What a part will be when the engine serves."""

    ON = "on"
    CHECKED = "checked at start"
    """On if it agrees with stock vLLM in the self-check, off if not."""
    OFF = "off"


@dataclass(frozen=True)
class PartOutlook:
    """One part; `reason` says why it is off."""

    name: str
    state: State
    reason: str = ""

    @property
    def is_missed(self) -> bool:
        """Whether it is off although its option is not."""
        return self.state is State.OFF and self.reason != BY_OPTION


@dataclass(frozen=True)
class KVCacheGroups:
    """Groups of layers with the same kind of KV cache; each group has a block table.

    Attributes:
        kind: vLLM's name for it, such as "FullAttentionSpec".
        block_size: tokens per block.
        num_layers: of all these groups together.
    """

    kind: str
    block_size: int
    num_groups: int
    num_layers: int


@dataclass(frozen=True)
class Outlook:
    """An engine that was not started.

    Attributes:
        device: its name; of a GPU that is not there if `is_prediction`.
        model_runner: vLLM's name of it, such as "V2".
        kv_cache: the groups that vLLM forms of the whole model's layers.
        jump_graphs: how many full CUDA graphs are captured for passes with jumps.
        why_no_jump_graphs: why none are; None if some are.
    """

    model: str
    device: str
    is_prediction: bool
    model_runner: str
    is_async: bool
    prefix_caching: bool
    kv_cache: list[KVCacheGroups] = field(default_factory=list)
    parts: list[PartOutlook] = field(default_factory=list)
    jump_graphs: int = 0
    why_no_jump_graphs: str | None = BY_OPTION

    @property
    def is_complete(self) -> bool:
        """Whether each part will be on, be checked at the start, or is off by its option."""
        return not any(part.is_missed for part in self.parts)

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps(asdict(self), indent=indent)
