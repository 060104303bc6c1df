"""From the flags of `vllm serve` to which parts the engine would have.

Owns the facts about the scheduler that would be made from them. Does not own which parts are on:
`scheduler/assembly.py` decides, for this engine as for one that runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.core.sched.request_queue import SchedulingPolicy

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.jump.full_graphs import GraphsOutlook, sizes_of, why_not, why_not_with
from sgl_vllm.part import SchedulerFacts
from sgl_vllm.preview.layers import attention_groups, kv_cache_config
from sgl_vllm.preview.outlook import KVCacheGroups, Outlook, PartOutlook, Refused, State
from sgl_vllm.preview.resolve import one_line, resolve
from sgl_vllm.scheduler.assembly import PARTS, decide
from sgl_vllm.self_check.plan import CHECKED
from sgl_vllm.vllm_api.runners import kind_of

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def preview(model: str, flags: Sequence[str], *, is_prediction: bool = False) -> Outlook:
    """What `vllm serve MODEL FLAGS --plugin sgl_vllm` would have on.

    Reads the model's `config.json`, never its weights. Cost: 0.2 to 2 s, after several seconds for
    the imports and, once per architecture, for vLLM to inspect the model's class.

    Args:
        is_prediction: whether this process only pretends to have the device (`gpu.py`).

    Raises:
        Refused: a flag is unknown or has a wrong value, there is no such model, or the plugin would
            refuse to start.
    """
    config = resolve(model, flags)
    try:
        kv_cache = kv_cache_config(config)
    except Exception as error:
        raise Refused(f"the layers of {model} cannot be built here: {one_line(error)}") from error
    scheduler = facts(config, kv_cache)
    options = Options.from_mapping((config.additional_config or {}).get(CONFIG_KEY, {}))
    _, off, plan = decide(scheduler, kv_cache, options)

    def outlook(name: str) -> PartOutlook:
        if reason := off.get(name):
            return PartOutlook(name, State.OFF, reason)
        is_checked = plan.runs and name in CHECKED
        return PartOutlook(name, State.CHECKED if is_checked else State.ON)

    graphs = _jump_graphs(config, options)
    return Outlook(
        model=model,
        device=current_platform.get_device_name(),
        is_prediction=is_prediction,
        model_runner=kind_of(config).name,
        is_async=bool(config.scheduler_config.async_scheduling),
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        kv_cache=_described(kv_cache),
        parts=[outlook(part.name) for part in PARTS],
        jump_graphs=graphs.num_graphs,
        why_no_jump_graphs=graphs.reason,
    )


def _jump_graphs(config: VllmConfig, options: Options) -> GraphsOutlook:
    if reason := why_not(config, options):
        return GraphsOutlook(reason=reason)
    mode = config.compilation_config.cudagraph_mode
    reason = why_not_with(attention_groups(config), config, options, mode)
    return GraphsOutlook(0 if reason else len(sizes_of(config, options)), reason)


def _described(kv_cache: KVCacheConfig) -> list[KVCacheGroups]:
    num_layers: dict[tuple[str, int], list[int]] = {}
    for group in kv_cache.kv_cache_groups:
        kind = type(group.kv_cache_spec).__name__, group.kv_cache_spec.block_size
        num_layers.setdefault(kind, []).append(len(group.layer_names))
    return [KVCacheGroups(*kind, len(each), sum(each)) for kind, each in num_layers.items()]


def facts(config: VllmConfig, kv_cache: KVCacheConfig) -> SchedulerFacts:
    """Those of the scheduler that vLLM would make of `config`."""
    return SchedulerFacts(
        vllm_config=config,
        has_connector=config.kv_transfer_config is not None,
        policy=SchedulingPolicy(config.scheduler_config.policy),
        block_size=resolve_kv_cache_block_sizes(kv_cache, config)[0],
    )
