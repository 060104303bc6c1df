"""vLLM's entry point: is the plugin active, with which options, and with which scheduler.

Owns the activation rules. Does not own the patching mechanism (`vllm_api/patching.py`), the options
(`config.py`), or which hooks a part needs (`vllm_api/probe.py`).

vLLM calls `register` in every process it starts, whether or not the plugin was requested. The
plugin is active for an engine when `--plugin sgl_vllm`, `VLLM_PLUGINS=sgl_vllm`, or
`additional_config={"sgl_vllm": {}}` names it. Otherwise the wrappers below call vLLM and change
nothing:

    EngineArgs.add_cli_args          adds --plugin and --plugin-config
    EngineArgs.from_cli_args         reads them
    EngineArgs.create_engine_config  sets our scheduler class in the resolved configuration
    SamplingParams._validate_structured_outputs, validate_xgrammar_grammar
                                     check counts in formats first; once the plugin is active
    core.generate_scheduler_kv_cache_config
                                     keeps the kinds of all layers, for our scheduler to see
    EngineCore._initialize_kv_caches, core.enable_envs_cache
                                     in EngineCore's __init__, the latter last of all. Then our
                                     scheduler chooses the block hasher, prepares workers, and
                                     checks the parts on this device (`self_check/`)
    EngineCore.sgl_vllm_call         (added) what the HTTP routes call in the engine's process
    DPLBAsyncMPClient                chooses a data-parallel rank; only with `rank_routing`
"""

from __future__ import annotations

import argparse
import logging
import os
import weakref
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

# Any: arguments of vLLM's, and options as JSON
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sgl_vllm.config import (
    CONFIG_ENV,
    CONFIG_KEY,
    OptionError,
    Options,
    help_text,
    words_to_mapping,
)
from sgl_vllm.vllm_api.patching import add_method, wrap
from sgl_vllm.vllm_api.probe import PARTS, missing_hooks
from sgl_vllm.vllm_api.versions import (
    Support,
    installed_vllm,
    server_requirements,
    unsupported_message,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequest
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.engine.core_client import DPLBAsyncMPClient
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from sgl_vllm.routing.ranks import RankRouter
    from sgl_vllm.scheduler.control import EngineControl

logger = logging.getLogger("vllm.sgl_vllm")

PLUGIN_NAME = "sgl_vllm"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
_ACTIVE_ONLY_IF_NAMED = {"lora_hf_hub_resolver"}
"""vLLM plugins that are installed by default and do nothing until VLLM_PLUGINS names them."""

_PREFIX_ATTENTION_ENV = "SGL_VLLM_PREFIX_ATTENTION"
"""Tells child processes to register the attention backend."""

_CLI_OPTIONS = "_sgl_vllm_cli_options"
"""Attribute of an `EngineArgs`: the options from the command line."""

_RANK_ROUTER = "_sgl_vllm_rank_router"
"""Attribute of a client of data-parallel engines: its `RankRouter`, or None."""


def _no_engine() -> EngineCore | None:
    return None


_starting: Callable[[], EngineCore | None] = _no_engine
"""The engine core whose `__init__` runs in this process."""


class ActivationError(RuntimeError):
    """The plugin was requested but cannot work here. The message says what to do."""


@dataclass(frozen=True, slots=True)
class PartStatus:
    """Whether a part works with the installed vLLM; `reason` says why it does not."""

    name: str
    on: bool
    reason: str


@runtime_checkable
class ActiveScheduler(Protocol):
    """Our scheduler, as the engine core knows it."""

    sgl_vllm: EngineControl


def register() -> None:
    """Entry point of `vllm.general_plugins`. Idempotent; imports only what vLLM has imported."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine import core
    from vllm.v1.engine.core import EngineCore

    add_method(EngineCore, "sgl_vllm_call", _engine_call)
    wrap(EngineCore, "_initialize_kv_caches")(_initialize_kv_caches)
    wrap(core, "generate_scheduler_kv_cache_config")(_generate_scheduler_kv_cache_config)
    wrap(core, "enable_envs_cache")(_enable_envs_cache)
    wrap(EngineArgs, "add_cli_args")(_add_cli_args)
    wrap(EngineArgs, "from_cli_args")(_from_cli_args)
    wrap(EngineArgs, "create_engine_config")(_create_engine_config)
    if os.environ.get(_PREFIX_ATTENTION_ENV):
        _register_prefix_attention()


# -- the engine's process -------------------------------------------------------------------------


def _engine_call(engine: EngineCore, what: str, arguments: dict[str, Any] | None = None) -> Any:
    """The answer of our scheduler's `EngineControl.<what>(**arguments)` in built-in types; None
    without our scheduler."""
    import msgspec

    if not isinstance(engine.scheduler, ActiveScheduler):
        return None
    method = getattr(engine.scheduler.sgl_vllm, what)
    return msgspec.to_builtins(method(**(arguments or {})))


# In the process that `vllm serve` spawns for it, an engine core loads plugins in its `__init__`,
# which cannot be wrapped any more by then. What it calls afterwards can.


def _initialize_kv_caches(
    original: Callable[..., KVCacheConfig], engine: EngineCore, *args: Any, **kwargs: Any
) -> KVCacheConfig:
    global _starting
    _starting = weakref.ref(engine)
    return original(engine, *args, **kwargs)


def _generate_scheduler_kv_cache_config(
    original: Callable[[list[KVCacheConfig]], KVCacheConfig], kv_cache_configs: list[KVCacheConfig]
) -> KVCacheConfig:
    """vLLM's scheduler gets the spec of each group's first layer, whatever the others are."""
    from sgl_vllm.radix.layouts import keep_layer_specs

    config = original(kv_cache_configs)
    keep_layer_specs(config, kv_cache_configs)
    return config


def _enable_envs_cache(original: Callable[[], None]) -> None:
    """The last call of an engine core's `__init__`."""
    global _starting
    original()
    engine, _starting = _starting(), _no_engine
    if engine is None:
        return
    scheduler = engine.scheduler
    if isinstance(scheduler, ActiveScheduler):
        control = scheduler.sgl_vllm
        engine.request_block_hasher = control.block_hasher(engine.request_block_hasher)
        control.prepare_workers(engine.model_executor.collective_rpc)
        control.check_before_serving(engine)


# -- the command line -----------------------------------------------------------------------------


def _add_cli_args(
    original: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
    parser: argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    parser = original(parser)
    group = parser.add_argument_group(
        "sgl-vllm", "RadixAttention, cache-aware scheduling and jump-forward decoding"
    )
    group.add_argument(
        "--plugin",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"Activate an installed plugin by name: {PLUGIN_NAME}.",
    )
    group.add_argument(
        "--plugin-config",
        nargs="+",
        action="extend",
        metavar="JSON|KEY=VALUE",
        help="Options of the plugin, as a JSON object or key=value pairs: "
        "'{\"jump_forward\": false}' or jump_forward=false.\n" + help_text().replace("%", "%%"),
    )
    return parser


def _from_cli_args(
    original: Callable[..., EngineArgs], cls: type[EngineArgs], args: argparse.Namespace
) -> EngineArgs:
    engine_args = original(cls, args)
    plugins = getattr(args, "plugin", None) or []
    words = [str(word) for word in getattr(args, "plugin_config", None) or []]
    for name in plugins:
        if name != PLUGIN_NAME:
            raise ActivationError(
                f"--plugin {name}: --plugin accepts only {PLUGIN_NAME}. "
                "Set VLLM_PLUGINS to load other vLLM plugins"
            )
    if plugins or (words and _named_in_environment()):
        vars(engine_args)[_CLI_OPTIONS] = words_to_mapping(words)
        _allow_in_environment()
    elif words:
        raise ActivationError(f"--plugin-config has no effect without --plugin {PLUGIN_NAME}")
    _report_cached_tokens(engine_args, args)
    return engine_args


def _report_cached_tokens(engine_args: EngineArgs, args: argparse.Namespace) -> None:
    """Switch on `--enable-prompt-tokens-details`, where the command has it, with the plugin. The
    API server reads the arguments after the engine's are made of them."""
    if not hasattr(args, "enable_prompt_tokens_details"):
        return
    options = _requested_options(engine_args)
    if options is not None and options.cached_tokens_in_usage:
        args.enable_prompt_tokens_details = True


# -- the resolved configuration -------------------------------------------------------------------


def _create_engine_config(
    original: Callable[..., VllmConfig], engine_args: EngineArgs, *args: Any, **kwargs: Any
) -> VllmConfig:
    options = _requested_options(engine_args)
    if options is None:
        return original(engine_args, *args, **kwargs)
    _require_supported()
    if engine_args.scheduler_cls is not None:
        raise ActivationError(
            f"{PLUGIN_NAME} sets its own scheduler class, so it cannot run with "
            f"--scheduler-cls {engine_args.scheduler_cls}: choose one of the two"
        )
    if options.prefix_attention:
        _use_prefix_attention(engine_args)
    _check_formats_first()
    vllm_config = original(engine_args, *args, **kwargs)
    scheduler_config = vllm_config.scheduler_config
    if scheduler_config.scheduler_cls is not None:
        raise ActivationError(
            f"vLLM uses the scheduler {scheduler_config.scheduler_cls} for this model, which "
            f"{PLUGIN_NAME} cannot extend: serve the model without --plugin {PLUGIN_NAME}"
        )
    scheduler_config.scheduler_cls = "sgl_vllm.scheduler.scheduler." + (
        "SglAsyncScheduler" if scheduler_config.async_scheduling else "SglScheduler"
    )
    vllm_config.additional_config = {
        **(vllm_config.additional_config or {}),
        CONFIG_KEY: options.to_mapping(),
    }
    if options.rank_routing and vllm_config.parallel_config.data_parallel_size > 1:
        _route_ranks_by_prefix()
    return vllm_config


def _check_formats_first() -> None:
    if missing := missing_hooks("format_checks"):
        logger.warning(
            "sgl-vllm: counts in formats are not checked before vLLM compiles them: "
            "this vLLM lacks %s",
            ", ".join(missing),
        )
        return
    from sgl_vllm.fsm.vllm.frontend import install_checks

    install_checks()


def _requested_options(engine_args: EngineArgs) -> Options | None:
    """The options, or None if the plugin was not requested.

    The command line wins over `additional_config`, which wins over the environment.
    """
    from_config: Mapping[str, Any] | None
    from_config = (engine_args.additional_config or {}).get(CONFIG_KEY)
    if from_config is not None and not isinstance(from_config, Mapping):
        raise OptionError(
            f"additional_config: {CONFIG_KEY!r} must be an object with options, not {from_config!r}"
        )
    from_cli: Mapping[str, Any] | None = vars(engine_args).get(_CLI_OPTIONS)
    if from_config is None and from_cli is None and not _named_in_environment():
        return None
    values: Mapping[str, Any] = {}
    if text := os.environ.get(CONFIG_ENV):
        if "{" not in text and sum("=" in word for word in text.split()) > 1:
            raise OptionError(
                f"environment variable {CONFIG_ENV} takes one key=value pair, not {text!r}; write "
                "several as a JSON object"
            )
        values = words_to_mapping([text], f"environment variable {CONFIG_ENV}")
    return Options.from_mapping(values, from_config or {}, from_cli or {})


def _use_prefix_attention(engine_args: EngineArgs) -> None:
    """Select the attention backend and have every worker register it, or log why not."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = engine_args.attention_backend
    if not current_platform.is_cuda():
        logger.warning("sgl-vllm: prefix_attention has no effect: it needs a CUDA GPU")
    elif chosen not in (None, AttentionBackendEnum.FLASH_ATTN):
        logger.warning(
            "sgl-vllm: prefix_attention has no effect: it extends FlashAttention, but "
            "--attention-backend selects %s",
            chosen.name,
        )
    else:
        os.environ[_PREFIX_ATTENTION_ENV] = "1"
        _register_prefix_attention()
        engine_args.attention_backend = AttentionBackendEnum.CUSTOM


def _register_prefix_attention() -> None:
    from sgl_vllm.kernels import attention_backend

    attention_backend.register()


# -- data-parallel ranks --------------------------------------------------------------------------


def _route_ranks_by_prefix() -> None:
    if missing := missing_hooks("rank_routing"):
        logger.warning("sgl-vllm: rank_routing is off: this vLLM lacks %s", ", ".join(missing))
        return
    from vllm.v1.engine.core_client import DPLBAsyncMPClient

    wrap(DPLBAsyncMPClient, "get_core_engine_for_request")(_choose_rank)
    wrap(DPLBAsyncMPClient, "process_engine_outputs")(_observe_outputs)


def _choose_rank(
    original: Callable[[DPLBAsyncMPClient, EngineCoreRequest], bytes],
    client: DPLBAsyncMPClient,
    request: EngineCoreRequest,
) -> bytes:
    if _RANK_ROUTER not in vars(client):
        vars(client)[_RANK_ROUTER] = _rank_router(client)
    router: RankRouter | None = vars(client)[_RANK_ROUTER]
    rank = router.choose(request) if router is not None else None
    if rank is None:
        return original(client, request)
    request.data_parallel_rank = rank
    try:
        return original(client, request)
    finally:
        request.data_parallel_rank = None


async def _observe_outputs(
    original: Callable[[DPLBAsyncMPClient, EngineCoreOutputs], Awaitable[None]],
    client: DPLBAsyncMPClient,
    outputs: EngineCoreOutputs,
) -> None:
    await original(client, outputs)
    router: RankRouter | None = vars(client).get(_RANK_ROUTER)
    if router is not None:
        router.observe(outputs)


def _rank_router(client: DPLBAsyncMPClient) -> RankRouter | None:
    """None if the plugin is not active in the client's engines, or `rank_routing` is off."""
    config = client.vllm_config
    values = (config.additional_config or {}).get(CONFIG_KEY)
    if values is None or not Options.from_mapping(values).rank_routing:
        return None
    if not config.cache_config.enable_prefix_caching:
        return None
    from sgl_vllm.routing.ranks import RankRouter

    return RankRouter(client)


# -- VLLM_PLUGINS ---------------------------------------------------------------------------------


def _named_in_environment() -> bool:
    return PLUGIN_NAME in (os.environ.get("VLLM_PLUGINS") or "").split(",")


def _allow_in_environment() -> None:
    """Add the plugin to `VLLM_PLUGINS`, which endpoint plugins and child processes need.

    Unset, the variable loads every installed plugin, so the new value lists them all. Being listed
    also activates a plugin's HTTP routes, which the user has not requested for other plugins.

    Raises:
        ActivationError: listing another plugin would activate its HTTP routes.
    """
    from importlib.metadata import entry_points

    if os.environ.get("VLLM_PLUGINS") is not None:  # it lists us: vLLM has loaded this module
        return
    names = {point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)}
    names -= _ACTIVE_ONLY_IF_NAMED
    with_routes = names & {point.name for point in entry_points(group="vllm.endpoint_plugins")}
    for name in with_routes - {PLUGIN_NAME}:
        raise ActivationError(
            f"--plugin {PLUGIN_NAME} lists every installed plugin in VLLM_PLUGINS, which would "
            f"activate the HTTP routes of {name}. List the plugins you want yourself, e.g. "
            f"VLLM_PLUGINS={','.join(sorted(names | {PLUGIN_NAME}))}"
        )
    os.environ["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN_NAME}))


# -- the installed vLLM ---------------------------------------------------------------------------


def _require_supported() -> None:
    """Refuse an installation where no part can work. Single parts are switched off later.

    Raises:
        ActivationError: what is missing or out of range, and the command that fixes it.
    """
    problem = _installation_problem()
    if problem is None:
        try:
            import sgl_vllm.scheduler.scheduler  # noqa: F401
        except (ImportError, AttributeError) as error:
            problem = f"this vLLM lacks what every part needs ({error})"
    if problem is not None:
        raise ActivationError(
            f"{PLUGIN_NAME} cannot work with this installation: {problem}. "
            "Run 'sgl-vllm doctor' for details"
        )


def _installation_problem() -> str | None:
    found = installed_vllm()
    if found is None or found.support is Support.UNSUPPORTED:
        return unsupported_message(found)
    problems = [requirement.problem for requirement in server_requirements()]
    return next((problem for problem in problems if problem), None)


def probe_parts() -> list[PartStatus]:
    """Whether each part finds its hooks in the installed vLLM. Cost: see `probe.missing_hooks`.

    A model or configuration can rule out more; the scheduler logs that when it starts.
    """
    problem = _installation_problem()
    if problem is not None:
        return [PartStatus("server", False, problem)]
    return [
        PartStatus(part, not missing, f"this vLLM lacks {', '.join(missing)}" if missing else "")
        for part, missing in ((part, missing_hooks(part)) for part in PARTS)
    ]
