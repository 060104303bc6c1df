"""What several subcommands have: which server to ask, printing JSON, and how they fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any  # Any: typer declares it

import httpx
import typer

from sgl_vllm.commands.client import SglServer
from sgl_vllm.commands.terminal import Misused
from sgl_vllm.spelling import did_you_mean

URL_VARIABLE = "SGL_VLLM_URL"
DEFAULT_URL = "http://127.0.0.1:8000"
URL_HELP = f"(default: ${URL_VARIABLE}, or {DEFAULT_URL})"


def argument(metavar: str, help: str) -> Any:
    return typer.Argument(metavar=metavar, help=help)


def option(metavar: str | None, help: str, *, panel: str | None = None, **limits: Any) -> Any:
    """`--name METAVAR`. Without a metavar, the help shows the type."""
    return typer.Option(metavar=metavar, help=help, rich_help_panel=panel, **limits)


def flag(name: str, help: str, *, panel: str | None = None) -> Any:
    """Named, because typer would add `--no-NAME`."""
    return typer.Option(name, help=help, rich_help_panel=panel)


Url = Annotated[str | None, argument("[URL]", f"The server's address {URL_HELP}.")]
ApiKey = Annotated[
    str | None, option("KEY", "The server's API key, if it has one.", envvar="VLLM_API_KEY")
]
PrintsJson = Annotated[bool, flag("--json", "Print the answer as JSON.")]


def server_at(url: str | None, api_key: str | None) -> SglServer:
    """The server at `url`, or at the default address.

    Raises:
        typer.BadParameter: `url` is not an HTTP address.
    """
    server = SglServer(url or os.environ.get(URL_VARIABLE) or DEFAULT_URL, api_key)
    try:
        address = httpx.URL(server.base)
    except httpx.InvalidURL:
        address = httpx.URL("")
    if address.scheme not in ("http", "https") or not address.host:
        raise typer.BadParameter(f"{server.url} is not a server's URL, such as {DEFAULT_URL}")
    return server


SERVE_FLAGS = {"ignore_unknown_options": True}
"""Parsing of commands that pass on flags of `vllm serve`: their own flags may stand anywhere."""


def check_model_first(word: str, own_flags: Sequence[str]) -> None:
    """Raises Misused if flags come where MODEL should be."""
    if word.startswith("-"):
        near = did_you_mean(word, own_flags, cutoff=0.8)
        raise Misused(f"write MODEL before {word}{near}")


def url_and(words: Sequence[str], needed: str) -> tuple[str | None, str]:
    """The arguments `[URL] NEEDED`: the first may be left out.

    Raises:
        typer.BadParameter: there are more, or only a URL.
    """
    *urls, word = words
    if len(urls) > 1 or (not urls and word.startswith(("http://", "https://"))):
        raise typer.BadParameter(f"the arguments are [URL] {needed}, not {' '.join(words)}")
    return (urls[0] if urls else None), word
