"""What SGLang's programs use of `sglang.utils`: files of data and results, and servers."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any  # Any: JSON

import httpx

from sgl_vllm.sglang.lang.interpreter import ProgramState


def read_jsonl(filename: str) -> list[Any]:
    """The documents of a file with one in each line. Lines that begin with # are skipped."""
    with open(filename, encoding="utf-8") as file:
        return [json.loads(line) for line in file if not line.startswith("#")]


def dump_state_text(filename: str, states: Iterable[object], mode: str = "w") -> None:
    """Write the text of each state, or each text, to a file, with a header that numbers it."""
    with open(filename, mode, encoding="utf-8") as file:
        for index, state in enumerate(states):
            text = state.text() if isinstance(state, ProgramState) else str(state)
            file.write(f"{'=' * 40} {index} {'=' * 40}\n{text}\n{'=' * 80}\n\n")


def download_and_cache_file(url: str, filename: str | None = None) -> str:
    """Download a file unless it is there already. Returns its path, which by default is in the
    directory for temporary files."""
    path = filename or os.path.join(tempfile.gettempdir(), url.rpartition("/")[2])
    if not os.path.exists(path):
        answer = httpx.get(url, follow_redirects=True, timeout=600).raise_for_status()
        Path(path).write_bytes(answer.content)
    return path


def http_request(
    url: str,
    json: Any = None,
    api_key: str | None = None,
    verify: str | None = None,
    method: str | None = None,
) -> httpx.Response:
    """Send a request, which is a POST if it has a body."""
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    how = method or ("GET" if json is None else "POST")
    return httpx.request(url=url, method=how, json=json, headers=headers, timeout=600)


def encode_image_base64(image: str | bytes) -> str:
    """The content of an image file, given by its path or as it is, in base64."""
    data = image if isinstance(image, bytes) else Path(image).read_bytes()
    return base64.b64encode(data).decode()


def normalize_base_url(host: str, port: int) -> str:
    """The URL of a server, whose host may begin with a scheme."""
    return f"{host if '://' in host else f'http://{host}'}:{port}"


def print_highlight(content: object) -> None:
    """Print."""
    print(content)


def launch_server_cmd(
    command: str, host: str = "127.0.0.1", port: int | None = None
) -> tuple[subprocess.Popen[str], int]:
    """Run a command that starts a server, with ``--port`` added. Returns the process and the port,
    which by default is a free one.

    A command that starts SGLang's server starts vLLM's with the plugin (`launch_server.py`).
    """
    from sgl_vllm.server_process import free_port

    chosen = port or free_port()
    words = [
        "sgl_vllm.sglang.launch_server" if word == "sglang.launch_server" else word
        for word in shlex.split(command.replace("\\\n", " "))
    ]
    if words[0] in ("python", "python3"):
        words[0] = sys.executable
    return subprocess.Popen([*words, "--port", str(chosen)], text=True), chosen


def wait_for_server(base_url: str, timeout: float | None = None) -> None:
    """Return when a server answers. Raises TimeoutError after `timeout` seconds."""
    begun = time.monotonic()
    while True:
        try:
            if httpx.get(f"{base_url}/v1/models", timeout=5).status_code in (200, 401):
                return
        except httpx.TransportError:
            pass
        if timeout is not None and time.monotonic() - begun > timeout:
            raise TimeoutError(f"no server answered at {base_url} within {timeout:g} s")
        time.sleep(0.5)


def terminate_process(process: subprocess.Popen[str]) -> None:
    """End a process of `launch_server_cmd`, and wait until it has ended."""
    process.terminate()
    process.wait()
