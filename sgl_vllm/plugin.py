"""vLLM's entry point: the `--plugin` switch. The only file that patches anything.

vLLM calls `register` in every process it starts, whether or not anyone asked for us, so it must do
no more than teach the command line its two options. The plugin is *active* for an engine when it
is named: `--plugin sgl_vllm`, `VLLM_PLUGINS=sgl_vllm`, or `additional_config={"sgl_vllm": {}}`.
Only then is the engine's resolved configuration given our scheduler.

Patched, each by wrapping and calling the original: `EngineArgs.add_cli_args`, `.from_cli_args`,
`.create_engine_config`, and `EngineCore.__init__`, after which our scheduler may say that nobody
needs block hashes, and may change how its workers copy. Added: `EngineCore.sgl_vllm_call`, the way
of the server's routes to the scheduler. Without being named, the wrappers change nothing. Being
named for several data-parallel engines, we also wrap the choice of one for a request.
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
from dataclasses import dataclass
from typing import Any

from sgl_vllm.config import (
    CONFIG_ENV,
    CONFIG_KEY,
    OptionError,
    Options,
    help_text,
    words_to_mapping,
)
from sgl_vllm.vllm_api.probe import PARTS, missing_hooks
from sgl_vllm.vllm_api.versions import (
    Support,
    installed_vllm,
    server_requirements,
    unsupported_message,
)

logger = logging.getLogger("vllm.sgl_vllm")

PLUGIN_NAME = "sgl_vllm"
_PLUGIN_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
_ACTIVE_ONLY_IF_NAMED = {"lora_hf_hub_resolver"}
"""vLLM's plugins that are installed and do nothing until VLLM_PLUGINS names them."""

_PREFIX_ATTENTION_ENV = "SGL_VLLM_PREFIX_ATTENTION"
"""Set for the processes that this one starts: each registers the attention backend by itself."""

_CLI_OPTIONS = "_sgl_vllm_cli_options"


class ActivationError(RuntimeError):
    """The plugin was asked for and cannot work here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class PartStatus:
    """Whether a part can work with the installed vLLM, and if not, why."""

    name: str
    on: bool
    reason: str


def register() -> None:
    """Entry point of `vllm.general_plugins`. Idempotent; imports no more than vLLM has already."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.core import EngineCore

    if "sgl_vllm_call" in vars(EngineCore):
        return
    EngineCore.sgl_vllm_call = _engine_call
    _wrap_engine_core(EngineCore)
    _wrap_add_cli_args(EngineArgs)
    _wrap_from_cli_args(EngineArgs)
    _wrap_create_engine_config(EngineArgs)
    if os.environ.get(_PREFIX_ATTENTION_ENV):
        _register_prefix_attention()


def _engine_call(engine: Any, what: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    """In the engine's process: what our scheduler's `sgl_vllm_<what>(**arguments)` returns."""
    answer = getattr(engine.scheduler, f"sgl_vllm_{what}", None)
    return {} if answer is None else answer(**(arguments or {}))


# -- the wrappers ---------------------------------------------------------------------------------


def _wrap_add_cli_args(engine_args: Any) -> None:
    original = engine_args.add_cli_args

    @functools.wraps(original)
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
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

    engine_args.add_cli_args = staticmethod(add_cli_args)


def _wrap_from_cli_args(engine_args: Any) -> None:
    original = engine_args.from_cli_args.__func__

    @functools.wraps(original)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        made = original(cls, args)
        plugins = getattr(args, "plugin", None) or []
        words = [str(word) for word in getattr(args, "plugin_config", None) or []]
        for name in plugins:
            if name != PLUGIN_NAME:
                raise ActivationError(
                    f"--plugin {name}: the only plugin of that switch is {PLUGIN_NAME}; "
                    "other vLLM plugins are named in the environment variable VLLM_PLUGINS"
                )
        if plugins or (words and _named_in_environment()):
            setattr(made, _CLI_OPTIONS, words_to_mapping(words))
            _allow_in_environment()
        elif words:
            raise ActivationError(f"--plugin-config has no effect without --plugin {PLUGIN_NAME}")
        return made

    engine_args.from_cli_args = classmethod(from_cli_args)


def _wrap_engine_core(engine_core: Any) -> None:
    original = engine_core.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        choose = getattr(self.scheduler, "sgl_vllm_block_hasher", None)
        if choose is not None and hasattr(self, "request_block_hasher"):
            self.request_block_hasher = choose(self.request_block_hasher)
        prepare = getattr(self.scheduler, "sgl_vllm_prepare_workers", None)
        if prepare is not None:
            prepare(self.model_executor.collective_rpc)

    engine_core.__init__ = __init__


def _wrap_create_engine_config(engine_args: Any) -> None:
    original = engine_args.create_engine_config

    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = _requested_options(self)
        if options is None:
            return original(self, *args, **kwargs)
        _require_supported()
        if self.scheduler_cls is not None:
            raise ActivationError(
                f"{PLUGIN_NAME} brings its own scheduler and cannot share the engine with "
                f"--scheduler-cls {self.scheduler_cls}: name one of the two"
            )
        if options.prefix_attention:
            _use_prefix_attention(self)
        vllm_config = original(self, *args, **kwargs)
        scheduler_config = vllm_config.scheduler_config
        if scheduler_config.scheduler_cls is not None:
            raise ActivationError(
                f"vLLM chose the scheduler {scheduler_config.scheduler_cls} for this model, which "
                f"{PLUGIN_NAME} cannot extend: serve it without --plugin {PLUGIN_NAME}"
            )
        scheduler_config.scheduler_cls = "sgl_vllm.scheduler.scheduler." + (
            "SglAsyncScheduler" if scheduler_config.async_scheduling else "SglScheduler"
        )
        vllm_config.additional_config = {
            **(vllm_config.additional_config or {}),
            CONFIG_KEY: options.to_mapping(),
        }
        if options.rank_routing and vllm_config.parallel_config.data_parallel_size > 1:
            _wrap_choice_of_ranks()
        return vllm_config

    engine_args.create_engine_config = create_engine_config


def _use_prefix_attention(engine_args: Any) -> None:
    """Have the engine's workers register the backend, and choose it; or say why not."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    chosen = engine_args.attention_backend
    if not current_platform.is_cuda():
        logger.warning("sgl-vllm: prefix_attention has no effect: it needs a CUDA GPU")
    elif chosen not in (None, AttentionBackendEnum.FLASH_ATTN):
        logger.warning(
            "sgl-vllm: prefix_attention has no effect: it is FlashAttention with groups, and "
            "--attention-backend names %s",
            chosen.name,
        )
    else:
        os.environ[_PREFIX_ATTENTION_ENV] = "1"
        _register_prefix_attention()
        engine_args.attention_backend = AttentionBackendEnum.CUSTOM


def _register_prefix_attention() -> None:
    from sgl_vllm.kernels import attention_backend

    attention_backend.register()


def _wrap_choice_of_ranks() -> None:
    """Data-parallel engines: a client has a `RankRouter` from its first request on, or None."""
    if missing := missing_hooks("rank_routing"):
        logger.warning("sgl-vllm: rank_routing off: this vLLM lacks %s", ", ".join(missing))
        return
    from vllm.v1.engine.core_client import DPLBAsyncMPClient as Client

    attribute = "_sgl_vllm_rank_router"
    if hasattr(Client, attribute):
        return
    choose_by_load = Client.get_core_engine_for_request
    process_outputs = Client.process_engine_outputs

    @functools.wraps(choose_by_load)
    def get_core_engine_for_request(self: Any, request: Any) -> Any:
        if attribute not in vars(self):
            setattr(self, attribute, _rank_router(self))
        router = vars(self)[attribute]
        rank = router.choose(request) if router is not None else None
        if rank is None:
            return choose_by_load(self, request)
        request.data_parallel_rank = rank
        try:
            return choose_by_load(self, request)
        finally:
            request.data_parallel_rank = None

    @functools.wraps(process_outputs)
    async def process_engine_outputs(self: Any, outputs: Any) -> None:
        await process_outputs(self, outputs)
        router = getattr(self, attribute)
        if router is not None:
            router.hear(outputs)

    setattr(Client, attribute, None)
    Client.get_core_engine_for_request = get_core_engine_for_request
    Client.process_engine_outputs = staticmethod(process_engine_outputs)


def _rank_router(client: Any) -> Any:
    """None for a client of engines that the plugin is not active in, or is not to choose for."""
    config = client.vllm_config
    values = (config.additional_config or {}).get(CONFIG_KEY)
    if values is None or not Options.from_mapping(values).rank_routing:
        return None
    if not config.cache_config.enable_prefix_caching:
        return None
    from sgl_vllm.routing.ranks import RankRouter

    return RankRouter(client)


# -- being named ----------------------------------------------------------------------------------


def _named_in_environment() -> bool:
    return PLUGIN_NAME in (os.environ.get("VLLM_PLUGINS") or "").split(",")


def _allow_in_environment() -> None:
    """Add us to `VLLM_PLUGINS`, which vLLM's endpoint plugins and child processes look at.

    Unset means "every plugin", and has to go on meaning that for the others. But what is named may
    do more than what is not, and nobody named the others.

    Raises:
        ActivationError: another plugin would get its HTTP routes switched on by this.
    """
    from importlib.metadata import entry_points

    if os.environ.get("VLLM_PLUGINS") is not None:  # we are in it, or would not be running
        return
    names = {point.name for group in _PLUGIN_GROUPS for point in entry_points(group=group)}
    names -= _ACTIVE_ONLY_IF_NAMED
    with_routes = names & {point.name for point in entry_points(group="vllm.endpoint_plugins")}
    for name in with_routes - {PLUGIN_NAME}:
        raise ActivationError(
            f"--plugin {PLUGIN_NAME} has to name every installed plugin in VLLM_PLUGINS, and that "
            f"would switch on the HTTP routes of {name}: say which ones you want, e.g. "
            f"VLLM_PLUGINS={','.join(sorted(names | {PLUGIN_NAME}))}"
        )
    os.environ["VLLM_PLUGINS"] = ",".join(sorted(names | {PLUGIN_NAME}))


def _requested_options(engine_args: Any) -> Options | None:
    """The options, from the environment, `additional_config` and the command line, the last
    winning; None if nobody named the plugin."""
    from_config = (engine_args.additional_config or {}).get(CONFIG_KEY)
    from_cli = getattr(engine_args, _CLI_OPTIONS, None)
    if from_config is None and from_cli is None and not _named_in_environment():
        return None
    values: dict[str, Any] = {}
    if text := os.environ.get(CONFIG_ENV):
        try:
            values = words_to_mapping([text])
        except OptionError as error:
            raise OptionError(f"environment variable {CONFIG_ENV}: {error}") from None
    return Options.from_mapping(values, from_config or {}, from_cli or {})


# -- what the installed vLLM must offer -----------------------------------------------------------


def _require_supported() -> None:
    """Refuse what cannot work at all; single parts that cannot are switched off by the scheduler.

    Raises:
        ActivationError: says what is missing or out of range, and the command that mends it.
    """
    problem = _installation_problem()
    if problem is None:
        try:
            import sgl_vllm.scheduler.scheduler  # noqa: F401
        except (ImportError, AttributeError) as error:
            problem = f"this vLLM has not what every part needs ({error})"
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
    """Whether each part finds what it needs in the installed vLLM.

    Imports vLLM. What a model or a configuration rules out beyond that is said when it is served.
    """
    problem = _installation_problem()
    if problem is not None:
        return [PartStatus("server", False, problem)]
    return [
        PartStatus(part, not missing, f"this vLLM lacks {', '.join(missing)}" if missing else "")
        for part, missing in ((part, missing_hooks(part)) for part in PARTS)
    ]


__all__ = ["ActivationError", "PartStatus", "probe_parts", "register"]
