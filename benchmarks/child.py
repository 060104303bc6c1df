"""A child process that writes a JSON file: started, watched and ended.

Owns the process: nothing of it outlives ours, however we end, and its own children end with it.
Knows nothing of what it measures, but for the bar that tqdm draws while it does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sgl_vllm.server_process import GUARD

POLL_S = 0.2
STOP_TIMEOUT_S = 2.0
TAIL_LINES = 15
TAIL_BYTES = 20_000
_BAR = re.compile(r"(\d+)/(\d+) \[")


class ChildFailed(Exception):
    """It ended without its result; the message holds the end of what it wrote."""


@dataclass(frozen=True)
class Steps:
    """How far it is, as its bar says."""

    done: int
    total: int


@dataclass(frozen=True)
class Written:
    """What a child left: the content of its file, and the end of what else it wrote."""

    content: Any
    output: str


def run_for_json(
    command: Sequence[str],
    file: Path,
    on_wait: Callable[[Steps | None], object] = lambda steps: None,
    env: Mapping[str, str] | None = None,
) -> Written:
    """Runs a command that writes a JSON file before it ends.

    Args:
        command: for the interpreter that runs this, without it: `("-m", "package", ...)`.
        file: must not exist yet.
        on_wait: called some times a second; None as long as there is no bar.
        env: added to our environment.

    Raises ChildFailed if there is no such file then.
    """
    # The guard's exit status says nothing of the command's: the file is what tells.
    guard = [sys.executable, "-S", str(GUARD), str(STOP_TIMEOUT_S), sys.executable]
    with tempfile.NamedTemporaryFile(prefix="child-", suffix=".log") as log:
        process = subprocess.Popen(
            [*guard, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            start_new_session=True,
        )
        assert process.stdin is not None
        try:
            while process.poll() is None:
                on_wait(steps_of(end_of(Path(log.name))))
                time.sleep(POLL_S)
        finally:
            process.stdin.close()  # the guard sees this, as it would see our death
            process.wait()
        output = end_of(Path(log.name))
    try:
        return Written(json.loads(file.read_text()), output)
    except FileNotFoundError:
        raise ChildFailed(tail(output) or "it ended without a word") from None


def end_of(log: Path) -> str:
    """The last part of what it wrote."""
    with log.open("rb") as content:
        content.seek(max(0, log.stat().st_size - TAIL_BYTES))
        return content.read().decode(errors="replace")


def steps_of(output: str) -> Steps | None:
    """What the bar that was drawn last says; None if there is none."""
    bars = _BAR.findall(output)
    return Steps(*map(int, bars[-1])) if bars else None


def tail(output: str, num_lines: int = TAIL_LINES) -> str:
    """The last lines as a terminal would show them: of what overwrites itself, the last."""
    lines = [line.rstrip().rsplit("\r", 1)[-1] for line in output.split("\n")]
    return "\n".join([line for line in lines if line.strip()][-num_lines:])
