"""The entry point of the `sgl-vllm` command: its subcommands, and how their errors are shown."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Protocol

import sgl_vllm
from sgl_vllm.commands import (
    bench,
    demo,
    doctor,
    examples,
    lint_prompts,
    migrate,
    pin,
    quickstart,
    ray_serve,
    run,
    top,
    tree,
    unpin,
    verify,
    why,
)
from sgl_vllm.commands.client import ServerError
from sgl_vllm.spelling import did_you_mean
from sgl_vllm.vllm_api import versions

DESCRIPTION = """\
A plugin for vLLM: prefixes cached at token granularity, cache-aware scheduling, and jump-forward
decoding of structured output; with SGLang's language as the client.

The server is vLLM's own, with two more options; `vllm serve --help=plugin-config` lists the
settings of the second:
    vllm serve MODEL --plugin sgl_vllm
    vllm serve MODEL --plugin sgl_vllm --plugin-config '{"jump_forward": false}'

Run `sgl-vllm COMMAND --help` for the arguments of a command.
"""


class Command(Protocol):
    """A subcommand's module."""

    DESCRIPTION: str

    def declare(self, command: argparse.ArgumentParser, /) -> None:
        """Adds its arguments."""
        ...

    def main(self, options: argparse.Namespace, /) -> int:
        """Runs it, and returns the exit status."""
        ...


COMMANDS: tuple[tuple[str, str, Command], ...] = (
    ("doctor", "check the installation, and say how to repair it", doctor),
    ("verify", "compare the plugin with stock vLLM on this device, and write a report", verify),
    ("quickstart", "serve the demo model, and open the page that shows the cache", quickstart),
    ("demo", "run one program on stock vLLM and with the plugin, and compare", demo),
    ("examples", "list, print or copy example programs and configuration files", examples),
    ("run", "run a program from a Python file", run),
    ("migrate", "rewrite programs written for SGLang's language", migrate),
    ("ray-serve", "serve replicas on Ray Serve, routed by what each has cached", ray_serve),
    ("tree", "show what a server's prefix cache holds", tree),
    ("why", "explain why prompt tokens of a request were not cached", why),
    ("lint-prompts", "find what keeps prompts from being shared, and what it costs", lint_prompts),
    ("top", "show load, throughput and cache hits of several servers", top),
    ("bench", "run a benchmark", bench),
    ("pin", "compute a prefix and keep it in a server's cache", pin),
    ("unpin", "allow a pinned prefix to be evicted again", unpin),
)
"""Each command's name, its line in `sgl-vllm --help`, and its module."""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Returns its exit status: 130 after Ctrl-C, 141 if its output is no longer read, 1 if a server
    fails.
    """
    words = sys.argv[1:] if arguments is None else arguments
    parser, names = _parser()
    if words and words[0] not in names and not words[0].startswith("-"):
        instead = did_you_mean(words[0], names, f"; the commands are {', '.join(names)}")
        parser.error(f"unknown command {words[0]}{instead}")
    options, unknown = parser.parse_known_args(words)
    if unknown:  # argparse would print the usage of `sgl-vllm`, not of its command
        instead = _instead_of(unknown, options.parser)
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}{instead}")
    try:
        return int(options.main(options))
    except ServerError as error:
        print(f"sgl-vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # of `sgl-vllm COMMAND | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser, and the names of the commands."""
    parser = argparse.ArgumentParser(
        prog="sgl-vllm", description=DESCRIPTION, formatter_class=argparse.RawTextHelpFormatter
    )
    version_help = "print the versions of sgl-vllm and vLLM"
    parser.add_argument("--version", action="version", version=_versions(), help=version_help)
    parser.set_defaults(main=_print_help, parser=parser)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, help_line, module in COMMANDS:
        command = commands.add_parser(
            name,
            help=help_line,
            description=module.DESCRIPTION,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.declare(command)
        command.set_defaults(main=module.main, parser=command)
    command = commands.add_parser("version", help=version_help, description=version_help)
    command.set_defaults(main=_print_versions, parser=command)
    return parser, list(commands.choices)


def _instead_of(unknown: list[str], parser: argparse.ArgumentParser) -> str:
    """The nearest to the first unknown flag."""
    flags = re.findall(r"--[a-z-]+", parser.format_help())
    return next((did_you_mean(word, flags) for word in unknown if word.startswith("--")), "")


def _print_help(options: argparse.Namespace) -> int:
    options.parser.print_help()
    return 0


def _print_versions(options: argparse.Namespace) -> int:
    print(_versions())
    return 0


def _versions() -> str:
    vllm = versions.installed_vllm()
    server = f"{vllm.distribution} {vllm.version} ({vllm.support})" if vllm else "no vLLM (client)"
    return f"sgl-vllm {sgl_vllm.__version__}, {server}"


if __name__ == "__main__":
    sys.exit(main())
