"""`sgl-vllm quickstart`: the demo model served with the plugin, and what to do with it.

Owns what is printed and opened. The process is `server_process`'s.
"""

from __future__ import annotations

import os
import time
import webbrowser
from typing import Annotated

from rich.console import Console

from sgl_vllm.commands.arguments import flag, option
from sgl_vllm.commands.demo import serving
from sgl_vllm.commands.terminal import CommandError
from sgl_vllm.demo import TOOL_FLAGS
from sgl_vllm.server_process import ServerFailed, VllmServer, sigterm_as_interrupt
from sgl_vllm.vllm_api import versions

POLL_S = 0.5
OPTIONS = {"tree_text": True, "json_whitespace": "compact"}
"""The page shows texts. Without compact JSON, the demo model writes line breaks between JSON tokens
until it is cut off."""

STRICT_TOOLS = ("--tool-strict-level", "parameter")
"""From vLLM 0.32 on. Without it, the demo model calls tools with invalid arguments."""

DESCRIPTION = """\
Serves the demo model of the package with the plugin on this machine, on a CPU
or a GPU, and opens the page that shows the prefix cache. JSON is compact, and
OpenAI clients may send tools. Ctrl-C or SIGTERM stops it, with exit status
0. It needs vLLM and downloads nothing.
"""


def command(
    port: Annotated[int, option(None, "The port to listen on.")] = 8000,
    no_browser: Annotated[
        bool, flag("--no-browser", "Print the address of the page, open nothing.")
    ] = False,
) -> int:
    console = Console(highlight=False, soft_wrap=True)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    with sigterm_as_interrupt():
        try:
            with serving(
                errors, plugin=True, port=port, plugin_config=OPTIONS, extra_args=_tool_flags()
            ) as server:
                show(server, console)
                if not no_browser and has_browser():
                    webbrowser.open(tree_page(server))
                wait_for_end(server)
        except ServerFailed as failure:
            raise CommandError(str(failure)) from failure
        except KeyboardInterrupt:
            errors.print("stopped")
    return 0


def _tool_flags() -> tuple[str, ...]:
    vllm = versions.installed_vllm()
    is_new = vllm is not None and versions.release_of(vllm.version)[:2] >= (0, 32)
    return (*TOOL_FLAGS, *STRICT_TOOLS) if is_new else TOOL_FLAGS


def show(server: VllmServer, console: Console) -> None:
    """Prints the addresses and the next commands."""
    console.print(f"""
What the cache holds:  {tree_page(server)}
Hits, forced tokens:   {server.url}/v1/sgl/stats
OpenAI's API:          {server.url}/v1  (model: {server.served_model_name})

Run a program in another terminal, and look at the first page again:
  sgl-vllm examples guide.py --copy .
  python guide.py --url {server.url}

Ctrl-C ends the server. Its log: {server.log_path}""")


def tree_page(server: VllmServer) -> str:
    return f"{server.url}/sgl/tree"


def has_browser() -> bool:
    """Whether there is a desktop, or a browser that the user has named. `webbrowser` alone would
    also start one that takes over the terminal."""
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"))


def wait_for_end(server: VllmServer) -> None:
    """Never returns.

    Raises:
        ServerFailed: the server ended by itself.
    """
    while server.running:
        time.sleep(POLL_S)
    raise ServerFailed(f"the server has ended.\n{server.log_tail()}")
