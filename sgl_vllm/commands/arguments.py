"""Arguments that several subcommands have: which server to ask, and positive numbers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable

from sgl_vllm.commands.client import SglServer

API_KEY_VARIABLE = "VLLM_API_KEY"


def add_api_key(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--api-key",
        metavar="KEY",
        help=f"the server's API key, if it has one (default: ${API_KEY_VARIABLE})",
    )


def add_server(command: argparse.ArgumentParser) -> None:
    command.add_argument("url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    add_api_key(command)


def server_at(url: str, options: argparse.Namespace) -> SglServer:
    """The server at `url`, with the API key of the options or the environment."""
    return SglServer(url, options.api_key or os.environ.get(API_KEY_VARIABLE))


def positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    """An argparse type: a number above 0 and below 1e9."""

    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e9:
            raise ValueError
        return value

    parse.__name__ = "positive number"  # argparse prints: invalid positive number value
    return parse
