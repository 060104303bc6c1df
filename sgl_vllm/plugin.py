"""vLLM's entry point: is the plugin active, with which options, and with which scheduler.

Owns what activation changes in vLLM. Does not own the patching mechanism
(`vllm_api/patching.py`), the flags (`flags.py`), the options (`config.py`), or which hooks a part
needs (`vllm_api/probe.py`).

vLLM calls `register` in every process it starts, whether or not the plugin was requested. The
plugin is active for an engine when `--plugin sgl_vllm`, `VLLM_PLUGINS=sgl_vllm`, or
`additional_config={"sgl_vllm": {}}` names it. Otherwise the wrappers below call vLLM and change
nothing:

    EngineArgs.add_cli_args          adds --plugin and --plugin-config
    FlexibleArgumentParser.parse_args
                                     refuses bad ones
    EngineArgs.from_cli_args         reads them
    EngineArgs.create_engine_config  sets our scheduler class in the resolved configuration
    SamplingParams._validate_structured_outputs, validate_xgrammar_grammar
                                     check counts in formats first; once the plugin is active
    core.generate_scheduler_kv_cache_config
                                     keeps the kinds of all layers, for our scheduler to see
    EngineCore._initialize_kv_caches, core.enable_envs_cache
                                     in EngineCore's __init__, the latter last of all. Before the
                                     former, workers are asked to capture graphs for jumps. After
                                     the latter, our scheduler chooses the block hasher, prepares
                                     workers, checks the parts on this device (`self_check/`), and
                                     times steps
    EngineCore.sgl_vllm_call         (added) what the HTTP routes call in the engine's process
    DPLBAsyncMPClient                chooses a data-parallel rank; only with `rank_routing`
"""

from __future__ import annotations

import argparse
import copy
import logging
import os
import weakref
from collections.abc import Awaitable, Callable

# Any: arguments of vLLM's, and options as JSON
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from sgl_vllm import flags
from sgl_vllm.config import CONFIG_KEY, ROUNDS_KEY, Options
from sgl_vllm.flags import PLUGIN_NAME, ActivationError
from sgl_vllm.vllm_api.patching import add_method, wrap
from sgl_vllm.vllm_api.probe import missing_hooks

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

_IS_PRIVATE = "_sgl_vllm_is_private"
"""Attribute of an `EngineArgs`: `flags.serves_this_machine_only`."""

_FRONTEND = "_sgl_vllm_frontend"
"""Attribute of an `EngineArgs`: `flags.other_frontend`."""

_RANK_ROUTER = "_sgl_vllm_rank_router"
"""Attribute of a client of data-parallel engines: its `RankRouter`, or None."""


def _no_engine() -> EngineCore | None:
    return None


_starting: Callable[[], EngineCore | None] = _no_engine
"""The engine core whose `__init__` runs in this process."""


@runtime_checkable
class ActiveScheduler(Protocol):
    """Our scheduler, as the engine core knows it."""

    sgl_vllm: EngineControl


def register() -> None:
    """Entry point of `vllm.general_plugins`. Idempotent; imports only what vLLM has imported."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine import core
    from vllm.v1.engine.core import EngineCore

    add_method(EngineCore, "sgl_vllm_call", _engine_call)
    wrap(EngineCore, "_initialize_kv_caches")(_initialize_kv_caches)
    wrap(core, "generate_scheduler_kv_cache_config")(_generate_scheduler_kv_cache_config)
    wrap(core, "enable_envs_cache")(_enable_envs_cache)
    wrap(EngineArgs, "add_cli_args")(_add_cli_args)
    wrap(FlexibleArgumentParser, "parse_args")(_parse_args)
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
    original: Callable[[EngineCore, VllmConfig], KVCacheConfig],
    engine: EngineCore,
    vllm_config: VllmConfig,
) -> KVCacheConfig:
    global _starting
    _starting = weakref.ref(engine)
    if CONFIG_KEY in (vllm_config.additional_config or {}):
        from sgl_vllm.jump import full_graphs

        full_graphs.prepare(vllm_config, engine.model_executor.collective_rpc)
    return original(engine, vllm_config)


def _generate_scheduler_kv_cache_config(
    original: Callable[[list[KVCacheConfig]], KVCacheConfig], kv_cache_configs: list[KVCacheConfig]
) -> KVCacheConfig:
    """vLLM's scheduler gets the spec of each group's first layer, whatever the others are."""
    from sgl_vllm.radix.part import keep_layer_specs

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
        control.round_hits()
        control.time_steps(engine)


# -- the command line -----------------------------------------------------------------------------


def _add_cli_args(
    original: Callable[[argparse.ArgumentParser], argparse.ArgumentParser],
    parser: argparse.ArgumentParser,
) -> argparse.ArgumentParser:
    parser = original(parser)
    flags.declare(parser)
    return parser


def _parse_args(
    original: Callable[..., argparse.Namespace],
    parser: argparse.ArgumentParser,
    args: list[str] | None = None,
    namespace: argparse.Namespace | None = None,
) -> argparse.Namespace:
    """Bad flags end the process here, before vLLM looks at the model."""
    parsed = original(parser, args, namespace)
    # vLLM parses [] for the defaults, and gives the Rust frontend only what differs from them.
    if hasattr(parsed, "plugin") and args != []:
        flags.refuse_early(parser, parsed)
    return parsed


def _from_cli_args(
    original: Callable[..., EngineArgs], cls: type[EngineArgs], args: argparse.Namespace
) -> EngineArgs:
    engine_args = original(cls, args)
    vars(engine_args)[_IS_PRIVATE] = flags.serves_this_machine_only(args)
    vars(engine_args)[_FRONTEND] = flags.other_frontend(args)
    given = flags.given_options(args)
    if given is not None:
        vars(engine_args)[_CLI_OPTIONS] = given
        allow_in_environment()
    return engine_args


# -- the resolved configuration -------------------------------------------------------------------


def _create_engine_config(
    original: Callable[..., VllmConfig], engine_args: EngineArgs, *args: Any, **kwargs: Any
) -> VllmConfig:
    options = flags.requested_options(
        vars(engine_args).get(_CLI_OPTIONS),
        engine_args.additional_config,
        is_private=vars(engine_args).get(_IS_PRIVATE, False),
    )
    if options is None:
        return original(engine_args, *args, **kwargs)
    _require_supported()
    flags.require_no_scheduler(engine_args.scheduler_cls)
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
    frontend = vars(engine_args).get(_FRONTEND)
    vllm_config.additional_config = {
        **(vllm_config.additional_config or {}),
        CONFIG_KEY: options.to_mapping(),
        **({} if frontend is None else {ROUNDS_KEY: True}),
    }
    if frontend is not None:
        logger.warning("sgl-vllm: %s, %s", frontend, flags.NOT_SERVED)
    if frontend == flags.RUST:  # it asks for this backend in every request, whatever the flags say
        held = copy.copy(vllm_config.structured_outputs_config)
        held.backend, vllm_config.structured_outputs_config = "guidance", held
    speculative = vllm_config.speculative_config
    if options.radix and speculative is not None and vllm_config.model_config.is_hybrid:
        # With a drafter that reads ahead, stock vLLM drops the last block of each hit and keeps the
        # recurrent state one block earlier. The tree needs the state after the last whole block.
        speculative.disable_eagle_block_drop = True
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


def allow_in_environment() -> None:
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
    flags.require_installation()
    try:
        import sgl_vllm.scheduler.scheduler  # noqa: F401
    except (ImportError, AttributeError) as error:
        raise flags.unusable(f"this vLLM lacks what every part needs ({error})") from error
