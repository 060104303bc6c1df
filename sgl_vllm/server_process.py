"""Starts, measures and stops one `vllm serve` process.

Owns the process, which never outlives this one however this one ends, and the reading of its
counters. Uses only vLLM's command line and HTTP routes, so stock vLLM and the plugin are run and
counted in the same way. Used by the demo, the server tests and the benchmarks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self  # Any: options as JSON

import httpx

from sgl_vllm.vllm_api import versions

GUARD = Path(__file__).with_name("_guard.py")


CPU_ARGUMENTS = ("--dtype", "float32", "--enforce-eager", "--distributed-executor-backend", "uni")
CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Without these, vLLM runs the model in a separate process, whatever the arguments say. The two
    # processes wait for each other in busy loops, which takes two cores. On a machine with no more
    # than two, the server's HTTP process and its client then wait, for seconds at worst.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
QUIET_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
POLL_S = 0.1
LOG_TAIL_LINES = 30


class ServerFailed(Exception):
    """The server did not start, or has ended. The message has the end of its log."""


@dataclass(frozen=True)
class Counters:
    """What a server has done since it started, from its `/metrics`. Can be subtracted.

    `forward_passes` counts the steps that produced at least one token, for which vLLM records an
    `iteration_tokens` sample. On any server, a step in which *every* request is in a chunk of its
    prompt before the last is not counted. Such steps need a prompt longer than
    `--max-num-batched-tokens`.
    """

    forward_passes: int
    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    forced_tokens: int
    preemptions: int

    @property
    def computed_prompt_tokens(self) -> int:
        return self.prompt_tokens - self.cached_prompt_tokens

    def __sub__(self, earlier: Counters) -> Counters:
        before = asdict(earlier)
        return Counters(**{name: count - before[name] for name, count in asdict(self).items()})


class VllmServer:
    """A `vllm serve` process: `with VllmServer(model, plugin=True) as server:` uses `server.url`.

    On a CPU build of vLLM it gets the options that the build needs: float32, eager, one GiB of KV
    cache. `extra_args` and `env` override all others. The log goes to `log_path`, or to a temporary
    file that is kept only if the server fails. Raises OSError if `port` is taken; by default, it is
    any free one.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        plugin: bool = False,
        plugin_config: Mapping[str, Any] | None = None,
        served_model_name: str | None = None,
        max_model_len: int | None = None,
        block_size: int | None = None,
        extra_args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        log_path: Path | None = None,
        start_timeout_s: float = 300,
        stop_timeout_s: float = 15,
        on_wait: Callable[[float], None] | None = None,
    ) -> None:
        if plugin_config and not plugin:
            raise ValueError("plugin_config requires plugin=True")
        self.model = str(model)
        self.served_model_name = served_model_name or self.model
        self.start_timeout_s = start_timeout_s
        self.stop_timeout_s = stop_timeout_s
        self.log_path = log_path or Path(os.devnull)
        self._log_is_ours = log_path is None
        self._on_wait = on_wait
        self._process: subprocess.Popen[bytes] | None = None
        reserved = reserved_port(port or 0)
        self.port = int(reserved.getsockname()[1])
        self._release_port = weakref.finalize(self, reserved.close)
        if sys.platform != "linux":
            self._release_port()
        self.url = f"http://127.0.0.1:{self.port}"

        on_cpu = (vllm := versions.installed_vllm()) is not None and vllm.build == "cpu"
        self.command = [sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", "serve"]
        self.command += [self.model, "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += CPU_ARGUMENTS if on_cpu else ()
        for flag, value in (
            ("--served-model-name", served_model_name),
            ("--max-model-len", max_model_len),
            ("--block-size", block_size),
            ("--plugin", "sgl_vllm" if plugin else None),
            ("--plugin-config", json.dumps(plugin_config) if plugin_config else None),
        ):
            self.command += [flag, str(value)] if value else []
        self.command += extra_args
        defaults = dict(QUIET_ENVIRONMENT)
        if on_cpu:
            # One core is left to the HTTP process, as vLLM does when it binds threads to cores.
            defaults |= CPU_ENVIRONMENT | {"OMP_NUM_THREADS": str(max(1, usable_cores() - 1))}
        self.environment = {**defaults, **os.environ, **(env or {})}

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # -- the process

    def start(self) -> None:
        """Returns when `/health` answers.

        Raises:
            ServerFailed: the process ended, or did not answer within `start_timeout_s`.
        """
        if self._log_is_ours:
            descriptor, name = tempfile.mkstemp(prefix="vllm-", suffix=".log")
            os.close(descriptor)
            self.log_path = Path(name)
        guard = [sys.executable, "-S", str(GUARD), str(self.stop_timeout_s)]
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                guard + self.command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self.environment,
                start_new_session=True,
            )
        try:
            self._wait_until_healthy()
        except BaseException as error:
            self._log_is_ours &= not isinstance(error, ServerFailed)
            self.stop()
            raise
        finally:
            self._release_port()

    def stop(self) -> None:
        """Ends the server and every process it started, and returns when all of them have ended."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()  # the guard notices this, as it would notice the end of this process
        try:
            process.wait(self.stop_timeout_s + 5)
        except BaseException:  # the guard hangs, or a second Ctrl-C arrived: end it at once
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise
        finally:
            if self._log_is_ours:
                self.log_path.unlink(missing_ok=True)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The process that starts and ends the server. `vllm serve` is its only child.

        Raises:
            ServerFailed: the server is not running.
        """
        if self._process is None:
            raise ServerFailed(f"`vllm serve {self.model}` is not running")
        return self._process.pid

    def log_tail(self, num_lines: int = LOG_TAIL_LINES) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-num_lines:])

    def _wait_until_healthy(self) -> None:
        begun = time.monotonic()
        while (waited_s := time.monotonic() - begun) < self.start_timeout_s:
            if not self.running:
                raise self._failed("ended before it was ready")
            try:
                if httpx.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if self._on_wait:
                self._on_wait(waited_s)
            time.sleep(POLL_S)
        raise self._failed(f"was not ready after {self.start_timeout_s:.0f} s")

    def _failed(self, what: str) -> ServerFailed:
        return ServerFailed(
            f"`vllm serve {self.model}` {what}.\n{self.log_tail()}\n(whole log: {self.log_path})"
        )

    # -- counters

    def metrics(self) -> dict[str, float]:
        """See `read_metrics`."""
        return read_metrics(self.url)

    def counters(self, timeout_s: float = 30) -> Counters:
        """See `read_counters`."""
        return read_counters(self.url, timeout_s)


_fresh_from: dict[str, float] = {}
"""When the metrics of a server will be newer than those that were read last, by its URL."""


def read_metrics(url: str) -> dict[str, float]:
    """`totals_of` the server at `url`.

    The plugin's numbers may be as old as the page's `Cache-Control` says. A second call waits for
    that long after the first, so that it sees what happened in between.
    """
    time.sleep(max(0.0, _fresh_from.get(url, 0.0) - time.monotonic()))
    page = httpx.get(f"{url}/metrics", timeout=30).raise_for_status()
    max_age = re.fullmatch(r"max-age=(\d+)", page.headers.get("Cache-Control", ""))
    if max_age:
        _fresh_from[url] = time.monotonic() + int(max_age[1])
    return totals_of(page.text)


def totals_of(exposition: str) -> dict[str, float]:
    """The samples of a page in Prometheus' text format: by name, summed over labels.

    Raises:
        ValueError: the page is not in this format.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return dict(totals)


def read_counters(url: str, timeout_s: float = 30) -> Counters:
    """The counters once the server is idle: a reply arrives before its last step is counted.

    Raises:
        TimeoutError: requests are still running after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    earlier = None
    while time.monotonic() < deadline:
        metrics = read_metrics(url)
        idle = not metrics["vllm:num_requests_running"] + metrics["vllm:num_requests_waiting"]
        counters = _counters_of(metrics)
        if idle and counters == earlier:
            return counters
        earlier = counters
        time.sleep(POLL_S)
    raise TimeoutError(f"{url} still has running requests after {timeout_s:.0f} s")


def _counters_of(metrics: Mapping[str, float]) -> Counters:
    return Counters(
        forward_passes=int(metrics["vllm:iteration_tokens_total_count"]),
        prompt_tokens=int(metrics["vllm:prompt_tokens_total"]),
        cached_prompt_tokens=int(metrics["vllm:prompt_tokens_cached_total"]),
        output_tokens=int(metrics["vllm:generation_tokens_total"]),
        forced_tokens=int(metrics.get("sgl_vllm:forced_tokens_total", 0)),
        preemptions=int(metrics["vllm:num_preemptions_total"]),
    )


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, as Ctrl-C does, so that a server is stopped."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def usable_cores() -> int:
    """The CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_port() -> int:
    """A free TCP port. Another process may take it before the caller does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def reserved_port(port: int = 0) -> socket.socket:
    """A socket bound to this TCP port, or for 0 to a free one, which on Linux no other process is
    given until it is closed. Raises OSError if another process listens there.

    In the meantime a server that sets SO_REUSEADDR, as vLLM does, can bind the port and listen on
    it, because this socket does not listen. Other systems refuse that.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", port))
    return reserved
