"""When the radix tree is off."""

from __future__ import annotations

from sgl_vllm.part import EngineView, Part
from sgl_vllm.radix.manager import unsupported_reason


def _unsupported(engine: EngineView) -> str | None:
    return unsupported_reason(engine.vllm_config, engine.kv_cache_config)


PART = Part("radix", _unsupported)
