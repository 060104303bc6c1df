"""`sgl-vllm unpin`: allows a pinned prefix to be evicted again."""

from __future__ import annotations

import argparse

from sgl_vllm.commands.arguments import add_server, server_at

DESCRIPTION = """\
Allows a pinned prefix to be evicted again. It stays in the cache until its
space is needed. `sgl-vllm tree URL` lists the ids of all pins.
"""


def declare(command: argparse.ArgumentParser) -> None:
    add_server(command)
    command.add_argument("pin_id", metavar="ID", help="the id that pin printed")


def main(options: argparse.Namespace) -> int:
    server_at(options.url, options).unpin(options.pin_id)
    return 0
