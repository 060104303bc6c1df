"""vLLM's configuration from parsed flags, or one line that says why there is none.

Owns the words. Imports no vLLM at run time, so that it works with any version.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


class Refused(Exception):
    """vLLM would not start an engine with these flags. The message is one line that says why."""


def engine_config(kind: type[EngineArgs], flags: argparse.Namespace, model: str) -> VllmConfig:
    """vLLM's configuration for parsed flags, by way of this kind of its arguments.

    Raises:
        Refused: vLLM or the plugin refuses them, or there is no such model.
    """
    try:
        return kind.from_cli_args(flags).create_engine_config()
    except Exception as error:
        if not Path(model).exists() and _comes_from_the_hub(error):
            raise Refused(_not_found(model, error)) from error
        raise Refused(one_line(error)) from error


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
