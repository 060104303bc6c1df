"""One run of `vllm bench serve` against one server.

Owns its command line and its process. What it measures and how is vLLM's own affair.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.child import ChildFailed, Steps, run_for_json, tail
from benchmarks.serve.datasets import Asked
from sgl_vllm.server_process import QUIET_ENVIRONMENT

RESULT_FILE = "result.json"
# It lists the first ten, some way above the end of its output.
_ERROR = re.compile(r"^Error \d+: .*$", re.MULTILINE)


class LoadFailed(Exception):
    """The load generator failed, or some of its requests did; the message says how."""


@dataclass(frozen=True)
class LoadSettings:
    """How the load is put on a server, whichever it is.

    Attributes:
        model: as the server calls it.
        tokenizer: the folder or hub name that has the tokenizer.
        request_rate: requests per second, "inf" for all at once.
        max_concurrency: at most so many under way; None for no bound.
        extra_args: options of `vllm bench serve`; they win over others.
    """

    model: str
    tokenizer: Path
    request_rate: str = "inf"
    max_concurrency: int | None = None
    extra_args: tuple[str, ...] = ()


def bench_arguments(asked: Asked, settings: LoadSettings) -> tuple[str, ...]:
    """The words after `vllm bench serve`, without those that say where.

    Greedy and without an end of its own, so that both arms write as many tokens.
    """
    concurrency = settings.max_concurrency
    return (
        *asked.options,
        "--num-prompts",
        str(asked.num_prompts),
        "--model",
        settings.model,
        "--tokenizer",
        str(settings.tokenizer),
        "--request-rate",
        settings.request_rate,
        *(() if concurrency is None else ("--max-concurrency", str(concurrency))),
        "--temperature",
        "0",
        "--ignore-eos",
        "--percentile-metrics",
        "ttft,tpot,itl,e2el",
        "--metric-percentiles",
        "50,99",
        *settings.extra_args,
    )


def put_load(
    asked: Asked,
    settings: LoadSettings,
    url: str,
    folder: Path,
    on_wait: Callable[[Steps | None], object],
) -> dict[str, Any]:
    """Everything once; what `vllm bench serve` wrote about it. `folder` is empty, for its file.

    Raises LoadFailed, also if it says that a request failed.
    """
    command = (
        *("-P", "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
        *bench_arguments(asked, settings),
        *("--base-url", url),
        *("--save-result", "--result-dir", str(folder), "--result-filename", RESULT_FILE),
    )
    env = dict(QUIET_ENVIRONMENT)
    if key := os.environ.get("VLLM_API_KEY"):
        env["OPENAI_API_KEY"] = key
    try:
        written = run_for_json(command, folder / RESULT_FILE, on_wait, env)
    except ChildFailed as failure:
        raise LoadFailed(f"`vllm bench serve` failed. The end of its output:\n{failure}") from None
    said: dict[str, Any] = written.content
    if said["failed"]:
        raise LoadFailed(
            f"{said['failed']} of {asked.num_prompts} requests failed, says `vllm bench serve`:\n"
            + (tail("\n".join(_ERROR.findall(written.output))) or tail(written.output))
        )
    return said
