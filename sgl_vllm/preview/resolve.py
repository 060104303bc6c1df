"""vLLM's configuration from the flags of `vllm serve`, or one line that says why there is none."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path

from vllm.config import VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from sgl_vllm.flags import PLUGIN_NAME
from sgl_vllm.plugin import register
from sgl_vllm.preview.outlook import Refused


def resolve(model: str, flags: Sequence[str]) -> VllmConfig:
    """vLLM's configuration of an engine with the plugin, as the engine's process has it. Flags of
    the API server, such as `--port`, have no effect.

    Raises:
        Refused: vLLM or the plugin refuses the flags, or there is no such model.
    """
    register()
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            parser = make_arg_parser(FlexibleArgumentParser(add_help=False))
            parsed = parser.parse_args(["--plugin", PLUGIN_NAME, "--model", model, *flags])
            parsed.subparser = "serve"
    except SystemExit:
        _, _, message = printed.getvalue().rpartition("error: ")
        raise Refused(" ".join(message.split())) from None
    try:
        config = AsyncEngineArgs.from_cli_args(parsed).create_engine_config()
    except Exception as error:
        if not Path(model).exists() and _comes_from_the_hub(error):
            raise Refused(_not_found(model, error)) from error
        raise Refused(one_line(error)) from error
    if config.device_config.device_type == "cpu" and config.cache_config.kv_offloading_size:
        # vLLM's worker would fail only after it has loaded the model.
        raise Refused("vLLM offloads KV from GPUs only: leave out --kv-offloading-size on a CPU")
    if config.parallel_config.data_parallel_size > 1 and not config.model_config.is_moe:
        # As vLLM does in the process of such an engine: its ranks know nothing of each other.
        config.parallel_config.reconfigure_for_independent_dp_rank()
    return config


def one_line(error: BaseException) -> str:
    """What an error says, without the wrapping that pydantic gives it."""
    text = str(error)
    if details := getattr(error, "errors", None):
        text = "; ".join(str(detail["msg"]) for detail in details())
    return " ".join(text.removeprefix("Value error, ").split()) or type(error).__name__


def _comes_from_the_hub(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) or type(error).__module__.startswith("huggingface_hub"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _not_found(model: str, error: BaseException) -> str:
    if os.environ.get("HF_HUB_OFFLINE") == "1":
        return (
            f"{model} is neither a folder here nor in the cache of the Hugging Face hub, which "
            "cannot be reached from here or is switched off by HF_HUB_OFFLINE"
        )
    return (
        f"{model} is not a folder here, and its config.json cannot be read from the Hugging Face "
        f"hub: {one_line(error)}"
    )
