"""`sgl-vllm lint-prompts`: what keeps a client's prompts from being shared, and what it costs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

from tqdm import tqdm  # type: ignore[import-untyped]

from sgl_vllm.commands.arguments import ApiKey, PrintsJson, argument, option, server_at
from sgl_vllm.commands.client import ServerError, SglServer
from sgl_vllm.commands.doctor_model import stay_offline_without_hub
from sgl_vllm.commands.terminal import Misused
from sgl_vllm.prompt_lint import report
from sgl_vllm.prompt_lint.lint import Tokenizer, Words, lint
from sgl_vllm.prompt_lint.prompts import LogError, Part, Prompt, read_log

MAX_NODES = 10_000
MAX_TEXT_TOKENS = 4_096

DESCRIPTION = """\
Reads requests and says which habits of the client keep their prompts from
being shared: timestamps and other values near the beginning, tools or
examples in changing order, static text behind text that changes, a cache_salt
for each request, conversations that drop their oldest messages. Each is
reported with the prompt tokens that it costs. The costs come from replaying
the prompts with and without the fault, against a prefix cache that keeps
everything.

SOURCE is a file of JSON lines, each the body of a request to
/v1/chat/completions or /v1/completions (or an object with such a body under
"body" or "request"), in the order in which they were sent; "-" reads standard
input. Or it is the URL of a server that runs with the option tree_text: then
the prompts in its cache are read, their answers included.

Without --tokenizer, words stand in for tokens.

    sgl-vllm lint-prompts requests.jsonl
    sgl-vllm lint-prompts requests.jsonl --tokenizer Qwen/Qwen3-8B
    sgl-vllm lint-prompts http://127.0.0.1:8000

Exit status: 1 if a fault was found.
"""


def command(
    source: Annotated[str, argument("SOURCE", "A file, -, or the URL of a server.")],
    tokenizer: Annotated[
        str | None, option("MODEL", "Count tokens as this model does: a name or a folder.")
    ] = None,
    max_requests: Annotated[int, option("N", "Read the last N requests.", min=1)] = 5_000,
    as_json: PrintsJson = False,
    api_key: ApiKey = None,
) -> int:
    try:
        prompts = read(source, api_key)[-max_requests:]
        counted = tokenizer_of(tokenizer) if tokenizer else Words()
    except ValueError as error:
        raise Misused(str(error)) from error
    unit = "tokens" if tokenizer else "words"
    with tqdm(total=len(prompts), unit="request", disable=None, leave=False) as bar:
        found = lint(prompts, counted, bar.update)
    print(json.dumps(report.as_json(found)) if as_json else report.as_text(found, unit))
    return 1 if found.findings else 0


def read(source: str, api_key: str | None) -> list[Prompt]:
    """The prompts of a file, of standard input, or in a server's cache.

    Raises:
        LogError: there are none, or the log is malformed.
        OSError: the file cannot be read.
        ServerError: the server does not answer, or does not show text.
    """
    if source == "-":
        prompts = read_log(sys.stdin)
    elif "://" in source:
        prompts = prompts_in(server_at(source, api_key))
    else:
        with open(source, encoding="utf-8") as file:
            prompts = read_log(file)
    if not prompts:
        raise LogError(f"{source} has no requests")
    return prompts


def prompts_in(server: SglServer) -> list[Prompt]:
    """The texts in a server's cache that nothing continues, the least recently used first."""
    answer = server.tree(MAX_NODES, MAX_TEXT_TOKENS)
    texts: list[tuple[float, Prompt]] = []
    for engine in answer["engines"]:
        nodes = engine.get("nodes", [])
        if nodes and "text" not in nodes[0]:
            raise ServerError(
                f"{server.base} shows no text of prompts: start it with --plugin-config "
                "tree_text=true, or give a file of requests"
            )
        paths: list[str] = []
        for node in nodes:
            beginning = "" if node["parent"] is None else paths[node["parent"]]
            paths.append(beginning + node["text"])
        parents = {node["parent"] for node in nodes}
        texts += [
            (node["age_s"], Prompt((Part("prompt", path),), model=str(node["namespace"])))
            for index, (node, path) in enumerate(zip(nodes, paths, strict=True))
            if index not in parents
        ]
    return [prompt for _, prompt in sorted(texts, key=lambda item: -item[0])]


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model, by name or folder.

    Raises:
        ValueError: there is none, or transformers is not installed.
    """
    stay_offline_without_hub(model)
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError("--tokenizer needs transformers: pip install transformers") from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer for {model}: {str(error).splitlines()[0]}") from None

    def tokenize(text: str) -> Sequence[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    return tokenize
