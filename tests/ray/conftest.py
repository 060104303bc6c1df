"""A Ray cluster of this machine alone, and applications on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.models import resolve_model
from sgl_vllm.routing.ray import app as ray_app
from sgl_vllm.server_process import CPU_ENVIRONMENT, QUIET_ENVIRONMENT, free_port

os.environ.update(QUIET_ENVIRONMENT | {"RAY_USAGE_STATS_ENABLED": "0"})

MODEL = "shape:33m"
MAX_MODEL_LEN = 4096
BLOCK_SIZE = 32


class App:
    """One application on the cluster; `deploy` again changes it."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def deploy(
        self,
        router: str | None = None,
        *,
        engine_kwargs: dict[str, Any] | None = None,
        **deployment: Any,
    ) -> None:
        """Returns when its replicas are ready. `deployment` is of Ray's `deployment_config`."""
        routing: dict[str, Any] = {}
        if router is not None:
            routing["request_router_class"] = router
        model: dict[str, Any] = {
            "model_loading_config": {
                "model_id": "model",
                "model_source": str(resolve_model(MODEL)),
            },
            "accelerator_config": {"kind": "cpu"},
            "deployment_config": {
                "health_check_period_s": 2,
                "request_router_config": routing,
                **deployment,
            },
            "engine_kwargs": {
                "dtype": "float32",
                "enforce_eager": True,
                "max_model_len": MAX_MODEL_LEN,
                "block_size": BLOCK_SIZE,
                "enable_prompt_tokens_details": True,
                **(engine_kwargs or {}),
            },
            "runtime_env": {"env_vars": {**CPU_ENVIRONMENT, "OMP_NUM_THREADS": "1"}},
        }
        from ray import serve

        serve.run(
            ray_app.build_app({"llm_configs": [model]}), name=ray_app.APP_NAME, route_prefix="/"
        )

    def delete(self) -> None:
        from ray import serve

        serve.delete(ray_app.APP_NAME)

    def num_ready(self) -> int:
        """Replicas of the model that Ray sends requests to."""
        from ray import serve

        deployments = serve.status().applications[ray_app.APP_NAME].deployments
        return deployments["LLMServer:model"].replica_states.get("RUNNING", 0)

    def replicas(self) -> dict[str, Any]:
        """The actors of the model's replicas that are alive, by their names."""
        import ray

        return {
            one["name"]: ray.get_actor(one["name"], namespace=one["namespace"])
            for one in ray.util.list_named_actors(all_namespaces=True)
            if "LLMServer" in one["name"]
        }


@pytest.fixture(scope="session")
def cluster() -> Iterator[int]:
    """The port of its HTTP proxy. It counts more cores than there are: replicas share them."""
    import ray
    from ray import serve

    ray.init(
        address="local",
        num_cpus=16,
        include_dashboard=False,
        object_store_memory=200 << 20,
        _node_ip_address="127.0.0.2",
    )
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


@pytest.fixture
def app(cluster) -> Iterator[App]:
    app = App(cluster)
    yield app
    app.delete()
