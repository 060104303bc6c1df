"""`--plugin` and `--plugin-config` on vLLM's command line, and where else options come from.

Owns the flags, and how bad ones are refused. Does not own the options (`config.py`) or what they
change in vLLM (`plugin.py`). Imports no vLLM.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any  # Any: options before they are checked

from sgl_vllm.config import CONFIG_ENV, CONFIG_KEY, Options, by_heading, choices_of
from sgl_vllm.option import OptionError, OptionInfo, words_to_mapping
from sgl_vllm.spelling import did_you_mean
from sgl_vllm.vllm_api.versions import installation_problem

PLUGIN_NAME = "sgl_vllm"

RUST = "with vLLM's Rust frontend"
HEADLESS = "headless: unless a `vllm serve` with the plugin answers HTTP"
NOT_SERVED = (
    "there are no routes under /v1/sgl, no metrics of the plugin, no forced tokens in `usage`, no "
    "hints from headers and standard fields, and no checks of requests. The engine's parts work, "
    "and so do the plugin's keys in `vllm_xargs`"
)


class ActivationError(RuntimeError):
    """The plugin was requested but cannot work here. The message says what to do."""


def declare(parser: argparse.ArgumentParser) -> None:
    """Add the two flags."""
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


def default_text(field: dataclasses.Field[Any]) -> str:
    """An option's default as a user would write it."""
    if isinstance(field.default, str):
        return field.default
    return f"{field.default:g}" if isinstance(field.default, float) else json.dumps(field.default)


def help_text() -> str:
    """The options as a list, one line each, as `vllm serve --help=plugin-config` shows them."""
    lines: list[str] = []
    for heading, fields in by_heading().items():
        lines.append(f"\n{heading}:")
        for field in fields:
            info = OptionInfo.of(field)
            choices = f" One of {', '.join(choices_of(field.name))}." if info.choices else ""
            lines.append(f"- {field.name} (default: {default_text(field)}): {info.help}{choices}")
    return "\n".join(lines)


def refuse_early(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End the process with status 2, and a line for each problem, if `check` fails."""
    try:
        check(args)
    except (ActivationError, OptionError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def check(args: argparse.Namespace) -> None:
    """Check what the plugin can check of parsed flags without a model, and switch on what its
    options imply of vLLM's flags.

    Raises:
        ActivationError, OptionError: the message is one line for each problem.
    """
    options = requested_options(given_options(args), getattr(args, "additional_config", None))
    if options is None:
        return
    require_installation()
    require_no_scheduler(getattr(args, "scheduler_cls", None))
    if options.tenant_from != "none" and other_frontend(args) == RUST:
        raise ActivationError(
            f"tenant_from={options.tenant_from} has no effect with VLLM_USE_RUST_FRONTEND: tenants "
            "would share cached prompts. Leave it out, and set `cache_salt` in every request"
        )
    if options.cached_tokens_in_usage and hasattr(args, "enable_prompt_tokens_details"):
        args.enable_prompt_tokens_details = True


def given_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """The options of `--plugin-config`, or None if the command line does not request the plugin.

    Raises:
        ActivationError: another plugin is named, or none although there are options.
        OptionError: a word of `--plugin-config` is neither JSON nor `key=value`.
    """
    plugins = [str(name) for name in getattr(args, "plugin", None) or []]
    words = [str(word) for word in getattr(args, "plugin_config", None) or []]
    for name in plugins:
        if name != PLUGIN_NAME:
            raise ActivationError(_not_ours(name, plugins, args))
    if words and not (plugins or named_in_environment()):
        raise ActivationError(f"--plugin-config has no effect without --plugin {PLUGIN_NAME}")
    if _has_no_model(args):
        for word in words:
            if not _is_option(word):
                raise ActivationError(_model_first(word))
    return words_to_mapping(words) if plugins or words else None


def _not_ours(name: str, plugins: list[str], args: argparse.Namespace) -> str:
    if PLUGIN_NAME in plugins and _has_no_model(args):
        return _model_first(name)
    if "=" in name:
        return f"write --plugin-config before {name}: --plugin accepts only {PLUGIN_NAME}"
    others = ". Set VLLM_PLUGINS to load other vLLM plugins"
    instead = did_you_mean(name, [PLUGIN_NAME], others)
    return f"--plugin {name}: --plugin accepts only {PLUGIN_NAME}{instead}"


def _has_no_model(args: argparse.Namespace) -> bool:
    """Whether `vllm serve [MODEL]` got no MODEL: a flag that takes several words may have it."""
    return getattr(args, "model_tag", "") is None


def _is_option(word: str) -> bool:
    """Whether a word of `--plugin-config` is no MODEL: a path may have an equals sign, too."""
    if word.startswith("{"):
        return True
    name, equals, _ = word.partition("=")
    if equals:
        return "/" not in name
    return bool(did_you_mean(word, Options.__dataclass_fields__))


def _model_first(model: str) -> str:
    return f"write {model} before --plugin: vllm serve {model} --plugin {PLUGIN_NAME}"


def serves_this_machine_only(args: argparse.Namespace) -> bool:
    """Whether a server with these flags listens at a loopback address and asks for no API key."""
    host = getattr(args, "host", None) or ""
    api_key = getattr(args, "api_key", None) or os.environ.get("VLLM_API_KEY")
    if api_key or getattr(args, "uds", None):
        return False
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def other_frontend(args: argparse.Namespace) -> str | None:
    """`RUST` or `HEADLESS` if the process that these flags start has none of the plugin's routes;
    None if it has."""
    if getattr(args, "subparser", None) != "serve" or getattr(args, "grpc", False):
        return None
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        return RUST
    return HEADLESS if getattr(args, "headless", False) else None


def requested_options(
    from_cli: Mapping[str, Any] | None, additional_config: object, *, is_private: bool = False
) -> Options | None:
    """The options, or None if the plugin was not requested.

    The command line wins over vLLM's `additional_config`, which wins over the environment. If only
    programs on this machine can reach the server (`is_private`), they get exact numbers, unless an
    option says otherwise or there are several tenants.

    Raises:
        OptionError: the message is one line for each problem.
    """
    from_config = None
    if isinstance(additional_config, Mapping):  # vLLM refuses anything else
        from_config = additional_config.get(CONFIG_KEY)
    if from_config is not None and not isinstance(from_config, Mapping):
        raise OptionError(
            f"additional_config: {CONFIG_KEY!r} must be an object with options, not {from_config!r}"
        )
    if from_config is None and from_cli is None and not named_in_environment():
        return None
    sources = (_environment_options(), from_config or {}, from_cli or {})
    options = Options.from_mapping(*sources)
    if is_private and options.tenant_from == "none" and not any("why_exact" in s for s in sources):
        options = dataclasses.replace(options, why_exact=True)
    return options


def _environment_options() -> Mapping[str, Any]:
    text = os.environ.get(CONFIG_ENV)
    if not text:
        return {}
    if "{" not in text and sum("=" in word for word in text.split()) > 1:
        raise OptionError(
            f"environment variable {CONFIG_ENV} takes one key=value pair, not {text!r}; write "
            "several as a JSON object"
        )
    return words_to_mapping([text], f"environment variable {CONFIG_ENV}")


def named_in_environment() -> bool:
    """Whether `VLLM_PLUGINS` activates the plugin."""
    return PLUGIN_NAME in (os.environ.get("VLLM_PLUGINS") or "").split(",")


def require_installation() -> None:
    """Raises ActivationError with the command that repairs the installation."""
    if problem := installation_problem():
        raise unusable(problem)


def unusable(problem: str) -> ActivationError:
    return ActivationError(
        f"{PLUGIN_NAME} cannot work with this installation: {problem}. "
        "Run 'sgl-vllm doctor' for details"
    )


def require_no_scheduler(scheduler_cls: object) -> None:
    """Raises ActivationError if `--scheduler-cls` names another scheduler."""
    if scheduler_cls is not None:
        raise ActivationError(
            f"{PLUGIN_NAME} sets its own scheduler class, so it cannot run with "
            f"--scheduler-cls {scheduler_cls}: choose one of the two"
        )
