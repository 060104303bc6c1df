"""The server of one arm: started for its turn, or already running elsewhere; its cache emptied.

Owns the options of both arms' servers, which differ in the plugin only. Both run with vLLM's
development routes, one of which resets the prefix cache. As many servers stay up as fit into
memory; the least recently used one is stopped to make room for another.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import httpx

from benchmarks.models import DEMO_MODEL
from sgl_vllm.server_process import Counters, VllmServer, read_counters
from sgl_vllm.vllm_api import versions

Arm = Literal["stock", "sgl"]
NAMES: Mapping[Arm, str] = {"stock": "stock vLLM", "sgl": "vLLM with the plugin"}

# vLLM's defaults, which no workload changes.
BLOCK_SIZE_TOKENS_ON_CPU = 128
BLOCK_SIZE_TOKENS_ON_GPU = 16

STOP_TIMEOUT_S = 5.0

# A CPU build of vLLM is served in float32, from weights that are mostly stored in two bytes.
BYTES_PER_STORED = 2
DEFAULT_CACHE_GIB = float(os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1"))
PROCESSES_GIB = 2.5

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    # By default a server closes a connection after 5 s without a request, just when the client may
    # send the next: then that one is sent again, and its time says nothing.
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
}


class ArmFailed(Exception):
    """A server, or a program on it, failed; the message says which and what to do."""


@dataclass(frozen=True)
class ServerSettings:
    """How both servers are started; `plugin_config` is for the one with the plugin."""

    model: Path
    served_model_name: str
    args: tuple[str, ...] = ()
    plugin_config: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Path, served_model_name: str, args: Sequence[str]) -> ServerSettings:
        """The shipped model is so small that a second thread only waits for the first."""
        env = {"OMP_NUM_THREADS": "1"} if model == DEMO_MODEL else {}
        return cls(model, served_model_name, tuple(args), env=env)

    def memory_bytes(self) -> int:
        """What one such server takes on a CPU, from above: weights in float32, cache, processes."""
        stored = sum(file.stat().st_size for file in self.model.glob("*.safetensors"))
        cache_gib = float(self.env.get("VLLM_CPU_KVCACHE_SPACE", DEFAULT_CACHE_GIB))
        return BYTES_PER_STORED * stored + int((cache_gib + PROCESSES_GIB) * 2**30)


@functools.cache  # all that is installed here is looked through
def on_cpu() -> bool:
    """Whether the vLLM installed here, if there is one, is a CPU build."""
    vllm = versions.installed_vllm()
    return vllm is not None and vllm.build == "cpu"


def default_block_size_tokens() -> int:
    return BLOCK_SIZE_TOKENS_ON_CPU if on_cpu() else BLOCK_SIZE_TOKENS_ON_GPU


@contextmanager
def started(arm: Arm, settings: ServerSettings, on_wait: Callable[[float], None]) -> Iterator[str]:
    """The URL of a new server, which ends with the block. Errors get the end of its log."""
    if versions.installed_vllm() is None:
        raise ArmFailed(versions.unsupported_message(None) or "no vLLM is installed")
    with_plugin = arm == "sgl"
    server = VllmServer(
        settings.model,
        plugin=with_plugin,
        plugin_config=settings.plugin_config if with_plugin else None,
        served_model_name=settings.served_model_name,
        extra_args=(*(() if on_cpu() else ("--cudagraph-metrics",)), *settings.args),
        env={**ENVIRONMENT, **settings.env},
        stop_timeout_s=STOP_TIMEOUT_S,
        on_wait=on_wait,
    )
    with server:
        try:
            yield server.url
        except Exception as error:
            ended = "" if server.running else " (the server ended)"
            raise ArmFailed(
                f"{NAMES[arm]} failed{ended}: {error}\nThe end of its log:\n{server.log_tail()}"
            ) from error


class Pool:
    """Servers that stay up for their next turn, `capacity` of them at most; `with` ends them all.

    Only one is asked at a time, so the others wait idle and cost nothing but memory.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._running: dict[tuple[Arm, str], tuple[str, ExitStack]] = {}

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as all_of_them:
            for _, server in self._running.values():
                all_of_them.push(server)
            self._running.clear()

    @contextmanager
    def serving(
        self, arm: Arm, settings: ServerSettings, on_wait: Callable[[float], None]
    ) -> Iterator[tuple[str, bool]]:
        """A server's URL and whether it is new. An error inside of the block ends it, and is
        raised as an ArmFailed with the end of its log."""
        key = (arm, repr(settings))
        is_new = key not in self._running
        if is_new:
            while len(self._running) >= self._capacity:
                oldest = next(iter(self._running))
                self._running.pop(oldest)[1].close()
            server = ExitStack()
            url = server.enter_context(started(arm, settings, on_wait))
        else:
            url, server = self._running.pop(key)
        with ExitStack() as in_turn:
            in_turn.push(server)  # it hears of what goes wrong
            yield url, is_new
            in_turn.pop_all()
        self._running[key] = (url, server)


@contextmanager
def serving(
    arm: Arm,
    settings: ServerSettings,
    urls: Mapping[Arm, str] | None,
    pool: Pool,
    on_wait: Callable[[float], None],
) -> Iterator[tuple[str, bool]]:
    """A server's URL, and whether it is new here: the one at `urls`, else one of the pool."""
    if urls is None:
        with pool.serving(arm, settings, on_wait) as served:
            yield served
    else:
        with attached(arm, urls[arm]) as url:
            yield url, True


def how_many_fit(settings: ServerSettings) -> int:
    """How many servers can be up at the same time: on a GPU one, as each takes all of it."""
    if not on_cpu():
        return 1
    import psutil

    return max(1, int(psutil.virtual_memory().available // settings.memory_bytes()))


@contextmanager
def attached(arm: Arm, url: str) -> Iterator[str]:
    """A server that this command did not start.

    Raises:
        ArmFailed: it has the plugin and should not, or the other way round.
    """
    try:
        has_plugin = _stats(url).is_success
    except httpx.TransportError as error:
        raise ArmFailed(f"no answer from {NAMES[arm]} at {url}: {error}") from error
    if has_plugin != (arm == "sgl"):
        raise ArmFailed(
            f"{url} is to be {NAMES[arm]}, but {'has' if has_plugin else 'lacks'} the plugin"
        )
    try:
        yield url
    except Exception as error:
        raise ArmFailed(f"{NAMES[arm]} at {url} failed: {error}") from error


def cpu_s(url: str) -> float | None:
    """Processor seconds so far of the server at `url`, all its processes included. None if it runs
    on another machine, or as another user."""
    import psutil

    address = urlsplit(url)
    if address.hostname not in ("127.0.0.1", "localhost", "::1", socket.gethostname()):
        return None
    listening = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and connection.laddr.port == address.port
        and connection.pid is not None
    }
    processes: set[psutil.Process] = set()
    for pid in listening:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(pid)
            processes |= {parent, *parent.children(recursive=True)}
    total_s = 0.0
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s if processes else None


STEPS = (
    *("schedule_s", "execute_s", "sample_s", "wait_s", "update_s"),
    *("full_graph_passes", "piecewise_graph_passes", "no_graph_passes"),
)
"""What the plugin tells of an engine's steps. A stock server tells nothing of the kind."""


def steps(url: str) -> dict[str, float]:
    """`STEPS` so far, as far as the server tells them."""
    answer = _stats(url)
    if answer.status_code == 404:
        return {}
    stats = answer.raise_for_status().json()
    return {name: stats[name] for name in STEPS if name in stats}


def empty_cache(url: str) -> None:
    """Empties the caches of an idle server of either arm: prefixes, and what it made of images."""
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        answer = httpx.post(f"{url}{path}", timeout=60, headers=_key())
        if answer.status_code != 404:  # not every supported vLLM has both
            answer.raise_for_status()
    answer = httpx.post(f"{url}/reset_prefix_cache", timeout=60, headers=_key())
    if answer.status_code == 404:
        raise ArmFailed("it cannot empty its prefix cache; start it with VLLM_SERVER_DEV_MODE=1")
    if not answer.raise_for_status().json()["success"]:
        raise ArmFailed("it did not empty its prefix cache: does anyone else use it?")


def begin_turn(url: str) -> Counters:
    """Waits until the server is idle and empties its cache; what it has counted until then."""
    read_counters(url)
    empty_cache(url)
    return read_counters(url)


def plugin_parts(url: str) -> dict[str, str]:
    """The plugin's parts, each "on" or why it is off."""
    return dict(_stats(url).raise_for_status().json()["parts"])


def _stats(url: str) -> httpx.Response:
    return httpx.get(f"{url}/v1/sgl/stats", timeout=30, headers=_key())


def _key() -> dict[str, str]:
    """The header for a server that has a key, which is in the environment as for the client."""
    key = os.environ.get("VLLM_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}
