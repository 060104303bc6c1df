"""`sgl-vllm pin`: computes a prefix and keeps it in a server's cache."""

from __future__ import annotations

import argparse
import sys

from sgl_vllm.commands.arguments import add_server, server_at
from sgl_vllm.commands.terminal import plural

DESCRIPTION = """\
Computes TEXT as the start of prompts and keeps it in the cache until it is
unpinned or the server ends. Prints the id to unpin it by.

Use it for a long prefix that many requests share, such as a system prompt with
documents, so that other traffic cannot evict it. Pins take space: the option
radix_pin_share limits their total.

examples:
  sgl-vllm pin http://127.0.0.1:8000 --system "$(cat system_prompt.txt)"
  sgl-vllm pin http://127.0.0.1:8000 - < document.txt
"""


def declare(command: argparse.ArgumentParser) -> None:
    add_server(command)
    command.add_argument("text", metavar="TEXT", help="the prefix; - reads it from standard input")
    command.add_argument(
        "--system",
        action="store_true",
        help="TEXT is the system prompt of chats. Without this, chats do not share TEXT, because "
        "their template puts other tokens before it",
    )
    command.add_argument("--model", metavar="NAME", help="the LoRA adapter that will use it")
    command.add_argument(
        "--cache-salt", metavar="SALT", help="the cache_salt of the requests that will use it"
    )


def main(options: argparse.Namespace) -> int:
    text = sys.stdin.read() if options.text == "-" else options.text
    answer = server_at(options.url, options).pin(
        text,
        is_system_prompt=options.system,
        cache_salt=options.cache_salt,
        model=options.model,
    )
    for engine in answer["pins"]:
        print(
            f"pinned {engine['num_tokens']:,} of {answer['num_prompt_tokens']:,} tokens, "
            f"in {plural(engine['num_blocks'], 'block')}",
            file=sys.stderr,
        )
    print(answer["pin_id"])
    return 0
