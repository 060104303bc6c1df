"""`sgl-vllm doctor MODEL`: which parts an engine would have with a model and flags.

Owns how the answer is shown. The answer is `sgl_vllm.preview`'s, which asks the functions that an
engine asks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sgl_vllm.commands.terminal import Misused, plural
from sgl_vllm.part import BY_OPTION
from sgl_vllm.preview.outlook import Outlook, Refused, State
from sgl_vllm.vllm_api import versions
from sgl_vllm.vllm_api.probe import missing_hooks

HUB_TIMEOUT_S = 10

COLORS = {State.ON: "green", State.CHECKED: "cyan", State.OFF: "yellow"}


def main(model: str, flags: Sequence[str], *, as_on_gpu: bool, as_json: bool) -> int:
    """The exit status: 0 if nothing is off but by its option, 1 if a part is, 2 without an
    answer."""
    try:
        outlook = ask(model, flags, as_on_gpu=as_on_gpu)
    except Misused as error:
        if as_json:
            print(json.dumps({"error": str(error)}))
            return 2
        raise
    if as_json:
        print(outlook.to_json(indent=2))
    else:
        show(outlook, Console())
    return 0 if outlook.is_complete else 1


def ask(model: str, flags: Sequence[str], *, as_on_gpu: bool) -> Outlook:
    """What is foreseen for an engine. Takes about ten seconds, most of them to import vLLM.

    Raises:
        Misused: vLLM would not start with these flags, cannot say, or is not installed.
    """
    if problem := versions.installation_problem():
        raise Misused(problem)
    if missing := missing_hooks("preview"):
        raise Misused(f"this vLLM lacks {', '.join(missing)}")
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        raise Misused(f"there is no folder {model}")
    stay_offline_without_hub(model)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with _silenced():
            if as_on_gpu:
                from sgl_vllm.preview import gpu

                gpu.pretend()
            from sgl_vllm.preview.engine import preview

            return preview(model, flags, is_prediction=as_on_gpu)
    except Refused as refusal:
        raise Misused(str(refusal)) from refusal
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise Misused(f"vLLM and the plugin cannot be loaded here: {reason}") from error


def stay_offline_without_hub(model: str) -> None:
    """Use only cached models if the hub is out of reach: libraries would retry for minutes."""
    if not Path(model).exists() and not _reaches_the_hub():
        os.environ["HF_HUB_OFFLINE"] = "1"


def _reaches_the_hub() -> bool:
    try:
        httpx.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=HUB_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


@contextmanager
def _silenced() -> Iterator[None]:
    """Discards what vLLM and PyTorch print, native code included."""
    streams = (sys.stdout, 1), (sys.stderr, 2)
    kept = [os.dup(number) for _, number in streams]
    nowhere = os.open(os.devnull, os.O_WRONLY)

    def lead_to(targets: Sequence[int]) -> None:
        for (stream, number), target in zip(streams, targets, strict=True):
            stream.flush()
            os.dup2(target, number)

    lead_to([nowhere, nowhere])
    try:
        yield
    finally:
        lead_to(kept)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


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
    if outlook.why_no_jump_graphs is None:
        count = plural(outlook.jump_graphs, "full CUDA graph")
        engine.add_row("jumps", f"run in {count} of their own")
    elif outlook.why_no_jump_graphs != BY_OPTION:
        engine.add_row("jumps", escape(f"leave full CUDA graphs: {outlook.why_no_jump_graphs}"))
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
