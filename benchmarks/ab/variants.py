"""What is compared: stock vLLM, the plugin, and the plugin without one thing at a time.

The ablations are those of SGLang's paper (arXiv 2312.07104, figure 8), in the plugin's terms.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks.ab.client import ClientOptions
from benchmarks.ab.servers import NAMES, Arm
from sgl_vllm.vllm_api.probe import PARTS

FORK_HINT = "fork_hint"
CAN_BE_OFF = (*PARTS, FORK_HINT)


@dataclass(frozen=True)
class Variant:
    """One way to serve and ask the same programs.

    `server_args` come after all others.
    """

    name: str
    title: str
    arm: Arm = "sgl"
    server_args: tuple[str, ...] = ()
    plugin_config: Mapping[str, Any] = field(default_factory=dict)
    client: ClientOptions = field(default_factory=ClientOptions)


STOCK = Variant("stock", NAMES["stock"], "stock")


def plugin_variant(options: Mapping[str, Any], off: Iterable[str], policy: str | None) -> Variant:
    """The plugin with these options, without the parts named in `off`, and with another order of
    those that wait."""
    parts = [part for part in off if part != FORK_HINT]
    plugin_config = {**options, **dict.fromkeys(parts, False)}
    if policy:
        plugin_config["schedule_policy"] = policy
    client = ClientOptions(hints=FORK_HINT not in off)
    return Variant("sgl", NAMES["sgl"], plugin_config=plugin_config, client=client)


def ablations(plugin: Variant, *, structured: bool) -> tuple[Variant, ...]:
    """The plugin, as it was asked for, without one thing each. Of programs whose output is free,
    jump-forward is no part."""

    def without(name: str, title: str, **plugin_config: Any) -> Variant:
        config = {**plugin.plugin_config, **plugin_config}
        return replace(plugin, name=name, title=title, plugin_config=config)

    one_by_one = replace(plugin.client, parallel=False)
    unhinted = replace(plugin.client, hints=False)
    made = [
        replace(
            without("no_cache", "no prefix cache"), server_args=("--no-enable-prefix-caching",)
        ),
        without("no_tree", "stock's block cache", radix=False),
        without("fcfs", "order of arrival", schedule_policy="fcfs"),
        without("random", "random order", schedule_policy="random"),
        replace(without("no_parallelism", "no parallelism"), client=one_by_one),
        replace(without("no_hint", "no hint"), client=unhinted),
    ]
    if structured:
        made.append(without("no_jump", "no jump-forward", jump_forward=False))
    return tuple(made)
