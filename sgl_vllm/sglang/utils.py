"""What surrounds the programs of SGLang's users: files of data and results, servers, images,
and the command line of SGLang's benchmarks."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Iterable, Sequence
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any  # Any: JSON, values of programs
from urllib.request import urlopen

import httpx

from sgl_vllm.lang.constraints import JsonSchema, schema_constraint
from sgl_vllm.sglang.backends import BaseBackend, RuntimeEndpoint
from sgl_vllm.sglang.services import OpenAI
from sgl_vllm.sglang.states import ProgramState

if TYPE_CHECKING:
    from PIL.Image import Image


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


print_highlight = print


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


# --- images and patterns (`sglang.srt`) ---------------------------------------------------------


def load_image(source: str | bytes) -> tuple[Image, tuple[int, int]]:
    """An image and its size (width, height) in pixels, given by a path, a URL or its bytes. Needs
    the package pillow."""
    from PIL import Image

    if isinstance(source, str):
        is_url = source.startswith(("http://", "https://", "data:"))
        source = urlopen(source, timeout=60).read() if is_url else Path(source).read_bytes()
    image = Image.open(BytesIO(source))
    return image, image.size


def build_regex_from_object(schema: JsonSchema, whitespace_pattern: str | None = None) -> str:
    """A pattern for the documents of a JSON schema, given as for `gen(json_schema=)`, which needs
    no pattern. Needs the package outlines-core."""
    from outlines_core.json_schema import build_regex_from_schema

    constraint, _ = schema_constraint(schema)
    return str(build_regex_from_schema(constraint.text, whitespace_pattern))


# --- benchmarks (`sglang.test`) ------------------------------------------------------------------

CustomTestCase = unittest.TestCase

DEFAULT_MODEL_NAME_FOR_TEST = "meta-llama/Llama-3.1-8B-Instruct"
DEFAULT_SMALL_MODEL_NAME_FOR_TEST = "meta-llama/Llama-3.2-1B-Instruct"


def add_common_sglang_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add the options that all of SGLang's benchmarks have, and parse the command line.

    ``--port`` is 30000 by default, SGLang's; vLLM's is 8000.
    """
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", default="http://127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--backend", default="srt")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--result-file", default="result.jsonl")
    parser.add_argument("--raw-result-file")
    return parser.parse_args()


def select_sglang_backend(args: argparse.Namespace) -> BaseBackend:
    """The backend that ``--backend`` names: a server ("srt...") or a model of OpenAI's ("gpt-...").

    Raises ValueError for another name.
    """
    if args.backend.startswith("srt"):
        return RuntimeEndpoint(f"{args.host}:{args.port}")
    if args.backend.startswith("gpt-"):
        return OpenAI(args.backend)
    raise ValueError(f"--backend must begin with srt or gpt-, not be {args.backend}")


def dump_bench_raw_result(
    path: str | None, states: Sequence[Any], preds: Sequence[object], labels: Sequence[object]
) -> None:
    """Write each state's prompt, its variable "answer", and whether that is right. Does nothing
    without a path."""
    if not path:
        return
    rows = [
        {
            "prompt_id": index,
            "prompt": state.text().removesuffix(state["answer"]),
            "output": state["answer"],
            "correct": bool(preds[index] == labels[index]),
        }
        for index, state in enumerate(states)
    ]
    Path(path).write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")


def is_in_ci() -> bool:
    """Whether SGLANG_IS_IN_CI is set to true."""
    return os.environ.get("SGLANG_IS_IN_CI", "").lower() in ("1", "true")
