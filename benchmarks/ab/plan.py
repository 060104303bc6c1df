"""What a comparison depends on: the workload and its items, the model, the variants, how much.

Owns the meaning of the command's arguments. Nothing runs here.
"""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.ab import servers, variants
from benchmarks.ab.servers import Arm, ServerSettings
from benchmarks.ab.variants import STOCK, Variant
from benchmarks.ab.workloads import WORKLOADS, Workload
from benchmarks.ab.workloads.base import TEXT_MODEL, Item, Texts, Vocabulary
from benchmarks.models import resolve_model
from sgl_vllm.config import Options
from sgl_vllm.option import words_to_mapping

ALL = "all"
MAX_WARM_UP_PROGRAMS = 8
SEED = 0
WARM_UP_SEED = 1


@dataclass(frozen=True)
class Plan:
    """Everything that a comparison depends on.

    `variants` are stock vLLM, the plugin, and then the ablations; `settings` are what all of their
    servers have in common.
    """

    workload: Workload
    model: str
    settings: ServerSettings
    variants: tuple[Variant, ...]
    items: tuple[Item, ...]
    warm_up_items: tuple[Item, ...]
    rounds: int
    concurrency: int
    arguments: Mapping[str, Any]

    @property
    def max_num_seqs(self) -> int | None:
        """What `--max-num-seqs`, the last one if several, says."""
        parser = argparse.ArgumentParser(allow_abbrev=False)
        parser.add_argument("--max-num-seqs", type=int)
        known, _ = parser.parse_known_args(self.settings.args)
        number: int | None = known.max_num_seqs
        return number

    def settings_of(self, variant: Variant) -> ServerSettings:
        return replace(
            self.settings,
            args=(*self.settings.args, *variant.server_args),
            plugin_config=variant.plugin_config,
        )


def plans_of(arguments: argparse.Namespace) -> list[Plan]:
    """A plan for each workload asked for; those that can share servers follow each other.

    Raises ValueError for what does not fit together.
    """
    _check(arguments)
    vocabulary = functools.cache(Vocabulary.of)
    plans = []
    for workload in _workloads(arguments):
        model = resolve_model(arguments.model or workload.model)
        plans.append(_plan_of(workload, arguments, model, vocabulary(model)))
    seen = list(dict.fromkeys(repr(plan.settings) for plan in plans))
    return sorted(plans, key=lambda plan: seen.index(repr(plan.settings)))


def _workloads(arguments: argparse.Namespace) -> list[Workload]:
    """Those asked for. A model that is named for all of them is for those without images."""
    if ALL not in arguments.workloads:
        return [WORKLOADS[name] for name in arguments.workloads]
    return [one for one in WORKLOADS.values() if not arguments.model or one.model == TEXT_MODEL]


def urls_of(arguments: argparse.Namespace) -> dict[Arm, str] | None:
    """Of servers that run already; None if they are to be started."""
    stock, plugin = arguments.stock_url, arguments.sgl_url
    if stock is None and plugin is None:
        return None
    if stock is None or plugin is None:
        raise ValueError("--stock-url and --sgl-url go together")
    for_started = ("policy", "plugin_config", "server_args", "stock_args", "ablations")
    if any(getattr(arguments, name) for name in for_started):
        names = ", ".join("--" + name.replace("_", "-") for name in for_started)
        raise ValueError(f"{names} are for servers started here")
    if any(part != variants.FORK_HINT for part in arguments.off):
        raise ValueError(f"--off (but for {variants.FORK_HINT}) is for servers started here")
    return {"stock": stock.rstrip("/"), "sgl": plugin.rstrip("/")}


def _check(arguments: argparse.Namespace) -> None:
    urls_of(arguments)
    Options.from_mapping(words_to_mapping(arguments.plugin_config))
    several = len(arguments.workloads) > 1 or ALL in arguments.workloads
    if arguments.json and several and not arguments.json.is_dir():
        raise ValueError(f"--json: {arguments.json} is to be a folder, for a file per workload")
    if arguments.data and not arguments.data.is_dir():
        raise ValueError(f"--data: there is no folder {arguments.data}")


def _plan_of(
    workload: Workload, arguments: argparse.Namespace, model: Path, vocabulary: Vocabulary
) -> Plan:
    name = arguments.model or workload.model
    block_size_tokens = servers.default_block_size_tokens()
    server_args = (*workload.server_args(block_size_tokens), *shlex.split(arguments.server_args))
    settings = ServerSettings.of(model, name, server_args)
    stock = replace(STOCK, server_args=tuple(shlex.split(arguments.stock_args)))
    options = words_to_mapping(arguments.plugin_config)
    plugin = variants.plugin_variant(options, arguments.off, arguments.policy)
    others = (
        variants.ablations(plugin, structured=workload.structured) if arguments.ablations else ()
    )
    usual = workload.quick_requests if arguments.quick else workload.num_requests
    concurrency = arguments.concurrency or workload.concurrency
    num_items = arguments.requests or usual
    num_warm_up = max(1, min(concurrency, MAX_WARM_UP_PROGRAMS, num_items // 4))

    def texts(seed: int) -> Texts:
        return Texts(vocabulary, seed, arguments.data)

    return Plan(
        workload,
        name,
        settings,
        variants=(stock, plugin, *others),
        items=tuple(workload.items(texts(SEED), num_items)),
        warm_up_items=tuple(workload.items(texts(WARM_UP_SEED), num_warm_up)),
        rounds=1 if arguments.quick else arguments.rounds,
        concurrency=concurrency,
        arguments={**_plain(vars(arguments)), "workloads": [workload.name], "model": name},
    )


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON values, without the path of the result, which says nothing about the run."""
    return {
        name: str(value) if isinstance(value, Path) else value
        for name, value in arguments.items()
        if name != "json"
    }
