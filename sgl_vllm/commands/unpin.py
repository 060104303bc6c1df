"""`sgl-vllm unpin`: allows a pinned prefix to be evicted again."""

from __future__ import annotations

from typing import Annotated

from sgl_vllm.commands.arguments import URL_HELP, ApiKey, argument, server_at, url_and

DESCRIPTION = """\
Allows a pinned prefix to be evicted again. It stays in the cache until its
space is needed. `sgl-vllm tree URL` lists the ids of all pins.
"""


def command(
    words: Annotated[
        list[str], argument("[URL] ID", f"The server {URL_HELP}, and the id that pin printed.")
    ],
    api_key: ApiKey = None,
) -> None:
    url, pin_id = url_and(words, "ID")
    server_at(url, api_key).unpin(pin_id)
