"""`sgl-vllm doctor MODEL`: which parts an engine would have with a model and flags.

Owns how the answer is asked for, in a separate process, and how it is shown. The answer is
`sgl_vllm.preview`'s, which asks the functions that an engine asks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_vllm.commands.terminal import Misused, plural
from sgl_vllm.preview.outlook import AS_ON_GPU, MARK, Outlook, State
from sgl_vllm.vllm_api import versions

TIMEOUT_S = 300
"""vLLM inspects a model's class in a process of its own, and may ask the Hugging Face hub."""

COLORS = {State.ON: "green", State.CHECKED: "cyan", State.OFF: "yellow"}


class NoAnswer(Exception):
    """Another process has not answered. The message says why in one line."""


def main(model: str, flags: Sequence[str], *, as_on_gpu: bool, as_json: bool) -> int:
    """The exit status: 0 if nothing is off but by its option, 1 if a part is, 2 without an
    answer."""
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
    command = [sys.executable, "-m", "sgl_vllm.preview", *[AS_ON_GPU] * as_on_gpu, model, *flags]
    environment = {"VLLM_LOGGING_LEVEL": "ERROR"} | os.environ
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
        )
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"vLLM and the plugin did not answer within {TIMEOUT_S} s") from None
    found = [line for line in answer.stdout.splitlines() if line.startswith(MARK)]
    if not found:
        errors = answer.stderr.strip().splitlines() or [f"exit status {answer.returncode}"]
        raise NoAnswer(f"vLLM and the plugin cannot be loaded here: {errors[-1]}")
    values = json.loads(found[0].removeprefix(MARK))
    if refusal := values.get("refused"):
        raise NoAnswer(refusal)
    return Outlook.from_json(values)


def parts_table(parts: Iterable[tuple[str, str, str, str]]) -> Table:
    """A line for each part: its name, its state and a color for that, and the reason."""
    table = Table(box=None, pad_edge=False, show_header=False)
    for name, state, color, reason in parts:
        table.add_row(name, f"[{color}]{state}[/{color}]", escape(reason))
    return table


def show(outlook: Outlook, console: Console) -> None:
    """The outlook as a table."""
    scheduling = "asynchronous" if outlook.is_async else "synchronous"
    groups = "\n".join(
        f"{plural(same.num_groups, 'group')} of {same.kind}, {plural(same.num_layers, 'layer')}"
        f", blocks of {same.block_size} tokens"
        for same in outlook.kv_cache
    )
    engine = Table(box=None, pad_edge=False, show_header=False)
    engine.add_row("model", escape(outlook.model))
    engine.add_row("device", escape(outlook.device))
    engine.add_row("runs with", f"the {outlook.model_runner} runner, {scheduling} scheduling")
    engine.add_row("KV cache", groups or "none")
    console.print(engine, highlight=False)

    console.print()
    parts = [(one.name, one.state, COLORS[one.state], one.reason) for one in outlook.parts]
    console.print(parts_table(parts), highlight=False)

    notes = []
    if any(part.state is State.CHECKED for part in outlook.parts):
        notes.append(
            "Checked at start: on if the part agrees with stock vLLM on the device before the "
            "first request, off otherwise."
        )
    if outlook.is_prediction:
        notes.append(
            f"This is a prediction of vLLM's defaults on an {outlook.device}, made without one. "
            "The engine's own log line counts."
        )
    for note in notes:
        console.print(f"\n{note}", highlight=False, soft_wrap=True)
