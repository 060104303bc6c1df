"""The router against Ray's interface, without a cluster: replicas are stand-ins."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: make ray")

from ray.serve._private.common import (
    DeploymentHandleSource,
    DeploymentID,
    ReplicaID,
    RequestMetadata,
)
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest

from sgl_vllm.routing.ray.app import ROUTER, RayServeError, build_app
from sgl_vllm.routing.ray.router import PrefixCostRouter

DEPLOYMENT = DeploymentID(name="model")
LONG = "a long beginning that two requests have in common, " * 40


class Replica:
    """What routers ask of Ray's `RunningReplica`."""

    node_id = availability_zone = None

    def __init__(self, name: str, models: Iterable[str] = ()) -> None:
        self.replica_id = ReplicaID(name, DEPLOYMENT)
        self.multiplexed_model_ids = set(models)
        self.max_ongoing_requests = 100
        self.num_running = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_running


def router_of(*replicas: Replica, **kwargs: Any) -> PrefixCostRouter:
    router = PrefixCostRouter(
        deployment_id=DEPLOYMENT,
        handle_source=DeploymentHandleSource.REPLICA,
        use_replica_queue_len_cache=True,
    )
    router.initialize_state(**kwargs)
    router.update_replicas(list(replicas))
    return router


async def replica_for(router: PrefixCostRouter, request_id: str, *args: Any, model: str = ""):
    """As Ray's own `AsyncioRouter` asks for it."""
    metadata = RequestMetadata(
        request_id=request_id, internal_request_id=request_id, multiplexed_model_id=model
    )
    pending = PendingRequest(args=list(args), kwargs={}, metadata=metadata)
    async with asyncio.timeout(10):
        replica = await router._choose_replica_for_request(pending)
    router.on_send_request(replica.replica_id)
    return replica


def finish(router: PrefixCostRouter, replica: Replica, request_id: str) -> None:
    router.on_request_completed(replica.replica_id, request_id)
    router.decrement_queue_len_cache(replica.replica_id)


def in_loop(test):
    """Ray's routers live on an event loop."""
    return lambda: asyncio.run(test())


def test_ray_finds_the_class_by_its_name():
    config = RequestRouterConfig(request_router_class=ROUTER)
    assert config.get_request_router_class().__name__ == PrefixCostRouter.__name__


@in_loop
async def test_a_request_goes_where_its_beginning_is():
    a, b = Replica("a"), Replica("b")
    router = router_of(a, b)
    first = await replica_for(router, "1", {"prompt": LONG})
    finish(router, first, "1")
    for number in range(5):
        name = f"more {number}"
        assert await replica_for(router, name, {"prompt": LONG + name}) is first
        finish(router, first, name)


@in_loop
async def test_requests_at_the_same_time_each_get_the_replica_chosen_for_them():
    router = router_of(*(Replica(name) for name in "abcd"))
    prompts = {f"{n}": {"prompt": f"{n} " * 400} for n in range(4)}
    firsts = dict(
        zip(
            prompts,
            await asyncio.gather(*(replica_for(router, n, p) for n, p in prompts.items())),
            strict=True,
        )
    )
    for n, replica in firsts.items():
        finish(router, replica, n)
    again = await asyncio.gather(*(replica_for(router, f"{n}'", p) for n, p in prompts.items()))
    assert again == list(firsts.values())


@in_loop
async def test_a_full_replica_is_passed_over():
    a, b = Replica("a"), Replica("b")
    a.max_ongoing_requests = b.max_ongoing_requests = 1
    router = router_of(a, b)
    first = await replica_for(router, "1", {"prompt": LONG})
    first.num_running = 1
    assert await replica_for(router, "2", {"prompt": LONG}) is ({a, b} - {first}).pop()


@in_loop
async def test_a_replica_that_died_is_not_chosen():
    a, b = Replica("a"), Replica("b")
    router = router_of(a, b)
    first = await replica_for(router, "1", {"prompt": LONG})
    router.on_replica_actor_died(first.replica_id)
    assert await replica_for(router, "2", {"prompt": LONG}) is not first


@in_loop
async def test_a_request_without_a_prompt_goes_to_the_shorter_queue():
    a, b = Replica("a"), Replica("b")
    router = router_of(a, b)
    router.on_new_queue_len_info(a.replica_id, 5)
    router.on_new_queue_len_info(b.replica_id, 0)
    assert await replica_for(router, "1", {"input": "to embed"}) is b


@in_loop
async def test_an_adapter_goes_where_it_is_loaded():
    a, b = Replica("a"), Replica("b", models=["sql"])
    router = router_of(a, b)
    for number in range(4):
        assert await replica_for(router, f"{number}", {"prompt": LONG}, model="sql") is b


@in_loop
async def test_a_request_that_is_given_up_before_it_is_sent_is_no_load():
    a = Replica("a")
    router = router_of(a)
    metadata = RequestMetadata(request_id="1", internal_request_id="1")
    pending = PendingRequest(args=[{"prompt": LONG}], kwargs={}, metadata=metadata)
    await router.choose_replicas([a], pending)
    assert router._placer.router.load(a.replica_id).num_running == 1
    pending.future.cancel()
    await asyncio.sleep(0)
    assert router._placer.router.load(a.replica_id).num_running == 0


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            {"request_router_class": "sgl_vllm.routing.ray.router:PrefixCostRuter"},
            "PrefixCostRuter",
        ),
        ({"request_router_kwargs": {"capacity_toknes": 1}}, "capacity_toknes"),
        ({"request_router_kwargs": {"cost": {"output_toknes": 1}}}, "output_toknes"),
    ],
)
def test_what_a_router_does_not_take_is_said_before_ray_starts(config, said):
    model = {"model_loading_config": {"model_id": "m"}}
    model["deployment_config"] = {"request_router_config": config}
    with pytest.raises(RayServeError, match=said):
        build_app({"llm_configs": [model]})
