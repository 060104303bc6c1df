"""The command line of SGLang's benchmarks, and the names that its tests of the language use."""

from __future__ import annotations

import argparse
import json
import os
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any  # Any: values of programs

from sgl_vllm.sglang.lang.backend.base_backend import BaseBackend
from sgl_vllm.sglang.lang.backend.openai import OpenAI
from sgl_vllm.sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

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
