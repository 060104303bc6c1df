"""`sgl-vllm doctor MODEL`: which parts an engine would have with a model and flags.

Owns how the answer is asked for, in a separate process, and how it is shown. The answer is
`sgl_vllm.preview`'s, which asks the functions that an engine asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any  # Any: JSON

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_vllm.commands.terminal import Misused
from sgl_vllm.preview.outlook import AS_ON_GPU, MARK, Outlook, State
from sgl_vllm.vllm_api import versions

TIMEOUT_S = 300
"""vLLM inspects a model's class in a process of its own, and may ask the Hugging Face hub."""

COLORS = {State.ON: "green", State.CHECKED: "cyan", State.OFF: "yellow"}


class NoAnswer(Exception):
    """Another process has not answered. The message says why in one line."""


def main(model: str, flags: Sequence[str], *, as_on_gpu: bool, as_json: bool) -> int:
    """The exit status: 0 if nothing is off but by its option, 1 if a part is, 2 without an answer.

    Raises:
        subprocess.SubprocessError: the other process cannot be started.
    """
    try:
        outlook = ask(model, flags, as_on_gpu=as_on_gpu)
    except NoAnswer as error:
        if as_json:
            print(json.dumps({"error": str(error)}))
            return 2
        raise Misused(str(error)) from error
    if as_json:
        print(outlook.to_json(indent=2))
    else:
        show(outlook, Console())
    return 0 if outlook.is_complete else 1


def ask(model: str, flags: Sequence[str], *, as_on_gpu: bool = False) -> Outlook:
    """What is foreseen for an engine. Takes about ten seconds, most of them to import vLLM.

    Raises:
        NoAnswer: vLLM would not start with these flags, cannot say, or is not installed.
    """
    if problem := versions.installation_problem():
        raise NoAnswer(problem)
    values = answer_of("-m", "sgl_vllm.preview", *[AS_ON_GPU] * as_on_gpu, model, *flags)
    if refusal := values.get("refused"):
        raise NoAnswer(refusal)
    return Outlook.from_json(values)


def answer_of(*words: str) -> Any:
    """What Python prints as JSON after `MARK`, among what vLLM logs, when it is run like this.

    Raises:
        NoAnswer: nothing, or not in time.
    """
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    try:
        answer = subprocess.run(
            [sys.executable, *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"vLLM and the plugin did not answer within {TIMEOUT_S} s") from None
    for line in answer.stdout.splitlines():
        if line.startswith(MARK):
            return json.loads(line.removeprefix(MARK))
    errors = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
    raise NoAnswer(f"vLLM and the plugin cannot be loaded here: {errors[-1]}")


def show(outlook: Outlook, console: Console) -> None:
    """The outlook as a table."""
    scheduling = "asynchronous" if outlook.is_async else "synchronous"
    groups = "\n".join(
        f"{_counted(same.num_groups, 'group')} of {same.kind}, {_counted(same.num_layers, 'layer')}"
        f", blocks of {same.block_size} tokens"
        for same in outlook.kv_cache
    )
    engine = Table(box=None, pad_edge=False, show_header=False)
    engine.add_row("model", escape(outlook.model))
    engine.add_row("device", escape(outlook.device))
    engine.add_row("runs with", f"the {outlook.model_runner} runner, {scheduling} scheduling")
    engine.add_row("KV cache", groups or "none")
    console.print(engine, highlight=False)

    parts = Table(box=None, pad_edge=False, show_header=False)
    for part in outlook.parts:
        color = COLORS[part.state]
        parts.add_row(part.name, f"[{color}]{part.state}[/{color}]", escape(part.reason))
    console.print()
    console.print(parts, highlight=False)

    if any(part.state is State.CHECKED for part in outlook.parts):
        console.print(
            "\nChecked at start: on if the part agrees with stock vLLM on the device before the "
            "first request, off otherwise.",
            highlight=False,
            soft_wrap=True,
        )
    if outlook.is_prediction:
        console.print(
            f"\nThis is a prediction of vLLM's defaults on an {outlook.device}, made without one. "
            "The engine's own log line counts.",
            highlight=False,
            soft_wrap=True,
        )


def _counted(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number != 1)}"
