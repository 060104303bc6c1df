"""What the language costs: programs of several calls against the same calls written by hand.

    python -m benchmarks.client [--programs 2000] [--calls 3] [--latency-ms 20] [--rounds 3]

A server in a separate process answers every completion after the given latency, and does nothing
else. Each way of asking runs in a separate process, all programs at once, in alternating rounds:

    by_hand   asyncio tasks that await `AsyncOpenAI().completions.create`, a call after the other
    sync      `run_batch` of a program that is a plain function
    async     `run_batch` of an `async def` program that awaits its variables
    compiled  `run_batch` of the plain program, compiled
    list      one request with the list of all prompts, as often as there are calls
    batch     `run_batch` of a program of one call, as often as there are calls

Wall times and peak resident memory are medians over rounds. The ratios that matter are `sync` and
`async` to `by_hand`, and `batch` to `list`. `list` has one round trip and no HTTP per prompt; on a
server with the plugin, which `--plugin` plays, calls made at the same moment share a request too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tqdm import tqdm

MAX_TOKENS = 4
QUESTIONS = ("Name:", "\nCity:", "\nJob:")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.client",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--programs", type=int, default=2000, metavar="N")
    parser.add_argument("--calls", type=int, default=3, metavar="N", help="per program")
    parser.add_argument("--latency-ms", type=float, default=20.0, metavar="MS")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--plugin", action="store_true", help="the server has the batch route")
    parser.add_argument("--only", nargs="+", choices=WAYS, help="leave the others out")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port is not None:
        serve(arguments.port, arguments.latency_ms / 1000, arguments.plugin)
    elif arguments.way is not None:
        print(json.dumps(measure(arguments)))
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Run the ways in alternation, each in a separate process, and print the table."""
    ways = arguments.only or list(WAYS)
    results: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with Endpoint(arguments) as url, tqdm(total=arguments.rounds * len(ways)) as bar:
        for _ in range(arguments.rounds):
            for way in ways:
                bar.set_description(way)
                command = [*_command(arguments), "--way", way, "--url", url]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    sys.exit(done.stderr)
                results[way].append(json.loads(done.stdout))
                bar.update()
    medians = {
        way: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        for way, rounds in results.items()
    }
    table = Table("way", "wall s", "to 'by hand'", "peak MB", "threads", "requests")
    by_hand = medians.get("by_hand")
    for way, of in medians.items():
        ratio = f"{of['wall_s'] / by_hand['wall_s']:.2f}" if by_hand else ""
        table.add_row(
            way,
            f"{of['wall_s']:.2f}",
            ratio,
            f"{of['peak_mb']:.0f}",
            f"{of['threads']:.0f}",
            f"{of['requests']:.0f}",
        )
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps({"medians": medians, "rounds": results}, indent=1))


def _command(arguments: argparse.Namespace) -> list[str]:
    command = [sys.executable, "-m", "benchmarks.client"]
    for option in ("programs", "calls", "latency_ms"):
        command += [f"--{option.replace('_', '-')}", str(getattr(arguments, option))]
    return [*command, "--plugin"] if arguments.plugin else command


class Endpoint:
    """The server in a process of its own, while the context lasts; its URL."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._command = _command(arguments)

    def __enter__(self) -> str:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._process = subprocess.Popen([*self._command, "--port", str(port)])
        for _ in range(200):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except OSError:
                time.sleep(0.05)
            else:
                break
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


# --- the server ----------------------------------------------------------------------------------


def serve(port: int, latency_s: float, plugin: bool) -> None:
    """A server as quick as can be: plain ASGI, no validation, a constant text after a while."""
    import uvicorn

    num_requests = 0

    def completion(body: dict[str, Any]) -> dict[str, Any]:
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        choice = {"text": " a b c", "finish_reason": "stop", "logprobs": None}
        choices = [{**choice, "index": index} for index in range(len(prompts))]
        usage = {"prompt_tokens": len(prompts), "completion_tokens": 3, "total_tokens": 4}
        return {
            "id": "x",
            "object": "text_completion",
            "created": 0,
            "model": "fake",
            "choices": choices,
            "usage": usage,
        }

    async def answer(path: str, data: bytes) -> tuple[int, bytes]:
        nonlocal num_requests
        if path == "/v1/models":
            return 200, b'{"data": [{"id": "fake", "max_model_len": 4096}]}'
        if path == "/requests":
            return 200, json.dumps({"requests": num_requests}).encode()
        if path == "/v1/sgl/stats" and plugin:
            return 200, b"{}"
        if path == "/v1/completions":
            num_requests += 1
            await asyncio.sleep(latency_s)
            return 200, json.dumps(completion(json.loads(data))).encode()
        if path == "/v1/sgl/batch" and plugin:
            num_requests += 1
            await asyncio.sleep(latency_s)
            lines = [
                json.dumps({"index": i, "status": 200, "body": completion(item["body"])})
                for i, item in enumerate(json.loads(data)["requests"])
            ]
            return 200, ("\n".join(lines) + "\n").encode()
        return 404, b'{"detail": "Not Found"}'

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        data = b""
        more = True
        while more:
            message = await receive()
            data += message.get("body", b"")
            more = message.get("more_body", False)
        status, body = await answer(scope["path"], data)
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    uvicorn.run(app, port=port, log_level="error", lifespan="off", access_log=False)


# --- the ways of asking --------------------------------------------------------------------------


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """One way in this process: wall time, peak memory, most threads, requests at the server."""
    import httpx

    def num_requests() -> int:
        count: int = httpx.get(f"{arguments.url}/requests").json()["requests"]
        return count

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 65_536), hard))
    start = WAYS[arguments.way](arguments)
    before = num_requests()
    began = time.perf_counter()
    start()
    wall_s = time.perf_counter() - began
    status = Path("/proc/self/status").read_text()
    threads = next(int(row.split()[1]) for row in status.splitlines() if row.startswith("Threads"))
    return {
        "wall_s": wall_s,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "threads": threads,
        "requests": num_requests() - before,
    }


def _question(number: int) -> str:
    return QUESTIONS[number % len(QUESTIONS)]


def _intro(index: int) -> str:
    return f"A card of person {index}.\n"


def by_hand(arguments: argparse.Namespace) -> Callable[[], object]:
    from openai import AsyncOpenAI

    async def program(client: AsyncOpenAI, index: int) -> str:
        prompt = _intro(index)
        for number in range(arguments.calls):
            prompt += _question(number)
            answer = await client.completions.create(
                model="fake", prompt=prompt, max_tokens=MAX_TOKENS, temperature=0.0
            )
            prompt += answer.choices[0].text
        return prompt

    async def run() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{arguments.url}/v1", api_key="EMPTY", timeout=600.0
        ) as client:
            return await asyncio.gather(*(program(client, i) for i in range(arguments.programs)))

    return lambda: asyncio.run(run())


def _programs(arguments: argparse.Namespace) -> tuple[Any, Any, list[dict[str, int]]]:
    import sgl_vllm as sgl

    sgl.set_default_backend(sgl.VLLM(arguments.url))

    @sgl.function
    def card(s, index, calls):
        s += f"A card of person {index}.\n"
        for number in range(calls):
            s += QUESTIONS[number % 3] + sgl.gen(f"answer{number}", max_tokens=MAX_TOKENS)

    @sgl.function
    async def card_async(s, index, calls):
        s += f"A card of person {index}.\n"
        for number in range(calls):
            s += QUESTIONS[number % 3] + sgl.gen(f"answer{number}", max_tokens=MAX_TOKENS)
            await s[f"answer{number}"]

    items = [{"index": index, "calls": arguments.calls} for index in range(arguments.programs)]
    return card, card_async, items


def sync(arguments: argparse.Namespace) -> Callable[[], object]:
    card, _, items = _programs(arguments)
    return lambda: card.run_batch(items, num_threads=len(items), temperature=0.0)


def asynchronous(arguments: argparse.Namespace) -> Callable[[], object]:
    _, card, items = _programs(arguments)
    return lambda: card.run_batch(items, num_threads=len(items), temperature=0.0)


def compiled(arguments: argparse.Namespace) -> Callable[[], object]:
    card, _, items = _programs(arguments)
    program = card.compile(calls=arguments.calls)
    indices = [{"index": item["index"]} for item in items]
    return lambda: program.run_batch(indices, num_threads=len(items), temperature=0.0)


def posted_list(arguments: argparse.Namespace) -> Callable[[], object]:
    from openai import OpenAI

    client = OpenAI(base_url=f"{arguments.url}/v1", api_key="EMPTY")
    prompts = [_intro(index) + _question(0) for index in range(arguments.programs)]

    def run() -> None:
        for _ in range(arguments.calls):
            client.completions.create(
                model="fake", prompt=prompts, max_tokens=MAX_TOKENS, temperature=0.0
            )

    return run


def batch(arguments: argparse.Namespace) -> Callable[[], object]:
    card, _, items = _programs(arguments)
    one_call = [{**item, "calls": 1} for item in items]

    def run() -> None:
        for _ in range(arguments.calls):
            card.run_batch(one_call, num_threads=len(items), temperature=0.0)

    return run


WAYS: dict[str, Callable[[argparse.Namespace], Callable[[], object]]] = {
    "by_hand": by_hand,
    "sync": sync,
    "async": asynchronous,
    "compiled": compiled,
    "list": posted_list,
    "batch": batch,
}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
