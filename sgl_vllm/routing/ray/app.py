"""`sgl-vllm ray-serve`: Ray Serve LLM, with our router and plugin unless its file says otherwise.

Owns the defaults that a file of Ray's `LLMServingArgs` gets, and starting it. The replicas, the
OpenAI routes and everything else are Ray's: `serve run` and `serve deploy` take `build_app` as
their `import_path`.
"""

from __future__ import annotations

import copy
import inspect
import pkgutil
import signal
import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any  # Any: YAML; an application of Ray's has no types

from sgl_vllm.config import CONFIG_KEY, Options
from sgl_vllm.option import OptionError

ROUTER = "sgl_vllm.routing.ray.router:PrefixCostRouter"
APP_NAME = "sgl-vllm"


class RayServeError(Exception):
    """Ray Serve cannot be started; the message says what to do."""


def with_defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Ray's `LLMServingArgs`, with our router and our plugin for each model.

    What the file sets stays: another router, or `additional_config` with other options
    for the plugin. One ingress replica is the default, because each has its own router, which
    knows only the requests that it has sent itself.
    """
    filled = copy.deepcopy(dict(arguments))
    if not isinstance(filled.get("llm_configs"), list) or not filled["llm_configs"]:
        raise RayServeError(
            "the file has no `llm_configs`, a list with a model each, as ray.serve.llm's "
            "build_openai_app takes them; `sgl-vllm ray-serve --help` shows one"
        )
    for number, model in enumerate(filled["llm_configs"]):
        if isinstance(model, str):  # the path of a file with one
            model = filled["llm_configs"][number] = read_yaml(Path(model))
        deployment = model.setdefault("deployment_config", {})
        router = deployment.setdefault("request_router_config", {})
        router.setdefault("request_router_class", ROUTER)
        engine = model.setdefault("engine_kwargs", {})
        engine.setdefault("additional_config", {}).setdefault(CONFIG_KEY, {})
    ingress = filled.setdefault("ingress_deployment_config", {})
    if not {"num_replicas", "autoscaling_config"} & ingress.keys():
        ingress["num_replicas"] = 1
    return filled


def build_app(arguments: Mapping[str, Any]) -> Any:
    """A Ray Serve application, from the `args` of its file."""
    filled = with_defaults(arguments)
    for model in filled["llm_configs"]:
        try:
            Options.from_mapping(model["engine_kwargs"]["additional_config"][CONFIG_KEY])
        except OptionError as error:
            raise RayServeError(f"additional_config.{CONFIG_KEY}: {error}") from error
    try:
        from ray.serve.llm import build_openai_app
    except ImportError as error:
        raise RayServeError(
            f"Ray Serve LLM cannot be imported here: {error}. Beside your vLLM, install what it "
            "needs: pip install '.[ray]' in the repository"
        ) from error
    for model in filled["llm_configs"]:
        _check_router(model["deployment_config"]["request_router_config"])
    return build_openai_app(filled)


def _check_router(config: Mapping[str, Any]) -> None:
    """Ray notices only in a callback, after which requests wait forever."""
    path = config["request_router_class"]
    kwargs = config.get("request_router_kwargs") or {}
    try:
        router = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise RayServeError(f"request_router_class {path!r} cannot be imported: {error}") from error
    try:
        inspect.signature(router.initialize_state).bind(None, **kwargs)
        if path == ROUTER:
            from sgl_vllm.routing.costs import CostModel  # imports numpy

            CostModel(**kwargs.get("cost") or {})
    except TypeError as error:
        raise RayServeError(
            f"request_router_kwargs: {error}; docs/routing.md in the repository has them all"
        ) from error


def run(path: Path, *, host: str, port: int) -> None:
    """Serves until Ctrl-C or SIGTERM, on the Ray cluster of `RAY_ADDRESS` or one of its own.

    Raises RayServeError.
    """
    arguments = read_yaml(path)
    try:
        socket.create_server((host, port)).close()  # Ray reports it only after many lines
    except OSError as error:
        reason = f"{host}:{port} cannot be listened at: {error.strerror}"
        raise RayServeError(f"{reason}. See --port") from error
    try:
        app = build_app(arguments)  # Ray's builder connects to the cluster
    except ConnectionError as error:
        raise RayServeError(
            f"{error}. RAY_ADDRESS names the cluster; without it, Ray starts one"
        ) from error
    except ValueError as error:  # what Ray does not take
        raise RayServeError(f"{path}: {error}") from error
    import ray
    from ray import serve

    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        serve.start(http_options={"host": host, "port": port})
        serve.run(app, name=APP_NAME, route_prefix="/")
        print(f"sgl-vllm: serving at http://{host}:{port}/v1 until Ctrl-C", flush=True)
        while not ended.wait(1):  # without a timeout, Ctrl-C would have no effect
            pass
    finally:
        if ray.is_initialized():
            serve.delete(APP_NAME)
            ray.shutdown()


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises RayServeError for what is no file of YAML with names at its top."""
    try:
        import yaml
    except ImportError as error:
        raise RayServeError(
            "PyYAML is not installed: pip install '.[ray]' in the repository"
        ) from error
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise RayServeError(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise RayServeError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise RayServeError(f"{path} is not a mapping of names to values")
    return content
