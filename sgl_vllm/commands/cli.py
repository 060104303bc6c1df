"""The entry point of the `sgl-vllm` command: its subcommands, and how their errors are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any  # Any: typer's commands, whose base class is private

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from sgl_vllm.commands.terminal import CommandError, Misused, reason_of
from sgl_vllm.version import __version__

COMMANDS = {
    "Set up": {
        "doctor": "check the installation, and say how to repair it",
        "verify": "compare the plugin with stock vLLM on this device, and write a report",
        "quickstart": "serve the demo model, and open the page that shows the cache",
        "demo": "run one program on stock vLLM and with the plugin, and compare",
        "bench": "run a benchmark",
    },
    "Programs": {
        "examples": "list, print or copy example programs and configuration files",
        "run": "run a program from a Python file",
        "lint-prompts": "find what keeps prompts from being shared, and what it costs",
    },
    "Servers": {
        "top": "show load, throughput and cache hits of several servers",
        "tree": "show what a server's prefix cache holds",
        "why": "explain why prompt tokens of a request were not cached",
        "pin": "compute a prefix and keep it in a server's cache",
        "unpin": "allow a pinned prefix to be evicted again",
        "ray-serve": "serve replicas on Ray Serve, routed by what each has cached",
    },
}
"""Each command's line in `sgl-vllm --help`, by panel and name."""

DESCRIPTION = """\
A plugin for vLLM: prefixes cached at token granularity, cache-aware
scheduling, and jump-forward decoding of structured output; with SGLang's
language as the client.

The server is vLLM's own, with two more options. The settings of the second
are listed by `vllm serve --help=plugin-config`:

  vllm serve MODEL --plugin sgl_vllm
  vllm serve MODEL --plugin sgl_vllm --plugin-config jump_forward=false

Start with `sgl-vllm doctor MODEL`, which says what the plugin can do for a
model on this machine, or with `sgl-vllm quickstart`, which serves a small
one. `sgl-vllm COMMAND --help` explains a command.
"""

VERSION_HELP = "print the versions of sgl-vllm and vLLM"


class _Command(TyperCommand):
    """Shows arguments as their metavars are: typer would put brackets around some of them."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = (one for one in self.params if one.param_type_name == "argument")
        return ["[OPTIONS]", *(one.metavar or "" for one in arguments)]


class _Commands(TyperGroup):
    """Imports the module of a subcommand when that is invoked, so that the list of all is fast."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, _loaded(name) if name and name != "version" else command, rest

    def invoke(self, ctx: Any) -> Any:
        """Runs one command. Of an error, it prints one line."""
        try:
            status = super().invoke(ctx)
        except (CommandError, OSError) as error:
            if isinstance(error, BrokenPipeError):  # of `sgl-vllm COMMAND | head`
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(141) from None
            if isinstance(error, OSError):
                if error.filename is None:
                    raise
                error = Misused(f"{error.filename} cannot be opened: {reason_of(error)}")
            print(f"sgl-vllm {ctx.invoked_subcommand}: {error}", file=sys.stderr)
            status = error.status
        raise typer.Exit(status or 0)


def _loaded(name: str) -> Any:
    module = import_module(f"{__package__}.{name.replace('-', '_')}")
    settings = getattr(module, "PARSING", {})
    alone = typer.Typer(add_completion=False)
    register = alone.command(name, cls=_Command, help=module.DESCRIPTION, context_settings=settings)
    register(module.command)
    return get_command(alone)


app = typer.Typer(cls=_Commands, help=DESCRIPTION, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help=VERSION_HELP)] = False,
) -> None:
    if version:
        print(_versions())
        raise typer.Exit()
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _panel, _lines in COMMANDS.items():
    for _name, _line in _lines.items():
        app.command(_name, help=_line, rich_help_panel=_panel)(lambda: None)


@app.command("version", help=VERSION_HELP, rich_help_panel="Set up")
def _print_versions() -> None:
    print(_versions())


def _versions() -> str:
    from sgl_vllm.vllm_api import versions  # importlib.metadata would slow down `--help`

    vllm = versions.installed_vllm()
    server = f"{vllm.distribution} {vllm.version} ({vllm.support})" if vllm else "no vLLM (client)"
    return f"sgl-vllm {__version__}, {server}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Returns its exit status: 2 if it is misused, 130 after Ctrl-C, 141 if its output is no longer
    read, 1 if a server fails.
    """
    try:
        app(arguments, prog_name="sgl-vllm")
    except SystemExit as ended:
        if not isinstance(ended.code, int):  # a benchmark's message
            raise
        return ended.code
    return 0


if __name__ == "__main__":
    sys.exit(main())
