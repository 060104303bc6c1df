"""`sgl-vllm pin`: computes a prefix and keeps it in a server's cache."""

from __future__ import annotations

import sys
from typing import Annotated

from sgl_vllm.commands.arguments import URL_HELP, ApiKey, argument, flag, option, server_at, url_and
from sgl_vllm.commands.terminal import plural

DESCRIPTION = """\
Computes TEXT as the start of prompts and keeps it in the cache until it is
unpinned or the server ends. Prints the id to unpin it by.

Use it for a long prefix that many requests share, such as a system prompt
with documents, so that other traffic cannot evict it. Pins take space: the
option radix_pin_share limits their total.

examples:
  sgl-vllm pin http://127.0.0.1:8000 --system "$(cat system_prompt.txt)"
  sgl-vllm pin http://127.0.0.1:8000 - < document.txt
"""


def command(
    words: Annotated[
        list[str],
        argument(
            "[URL] TEXT", f"The server {URL_HELP}, and the prefix; - reads it from standard input."
        ),
    ],
    system: Annotated[
        bool,
        flag(
            "--system",
            "TEXT is the system prompt of chats. Without this, chats do not share TEXT, "
            "because their template puts other tokens before it.",
        ),
    ] = False,
    model: Annotated[str | None, option("NAME", "The LoRA adapter that will use it.")] = None,
    cache_salt: Annotated[
        str | None, option("SALT", "The cache_salt of the requests that will use it.")
    ] = None,
    api_key: ApiKey = None,
) -> None:
    url, text = url_and(words, "TEXT")
    server = server_at(url, api_key)
    answer = server.pin(
        sys.stdin.read() if text == "-" else text,
        is_system_prompt=system,
        cache_salt=cache_salt,
        model=model,
    )
    for engine in answer["pins"]:
        print(
            f"pinned {engine['num_tokens']:,} of {answer['num_prompt_tokens']:,} tokens, "
            f"in {plural(engine['num_blocks'], 'block')}",
            file=sys.stderr,
        )
    print(answer["pin_id"])
