"""Which data-parallel rank a request goes to, with a stand-in for vLLM's client."""

from types import SimpleNamespace

import pytest

from sgl_vllm.routing import ranks
from sgl_vllm.routing.costs import Load
from sgl_vllm.routing.ranks import RankRouter

SYSTEM = list(range(1000, 1400))


def client(num_ranks=2, count=1):
    return SimpleNamespace(
        core_engines=list(range(num_ranks)),
        lb_engines=[[0, 0, 0.0] for _ in range(num_ranks)],
        reqs_in_flight={},
        client_count=count,
        vllm_config=SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=8 * num_ranks, block_size=128),
            kv_events_config=None,
            parallel_config=SimpleNamespace(data_parallel_size_local=2, data_parallel_size=2),
        ),
    )


def request(request_id, token_ids, **fields):
    plain = {
        "data_parallel_rank": None,
        "pooling_params": None,
        "sampling_params": None,
        "lora_request": None,
        "mm_features": None,
        "cache_salt": None,
    }
    return SimpleNamespace(request_id=request_id, prompt_token_ids=token_ids, **(plain | fields))


def outputs(*request_ids, finished=()):
    listed = [SimpleNamespace(request_id=request_id) for request_id in request_ids]
    return SimpleNamespace(outputs=listed, finished_requests=set(finished))


def serve(router, request_id, token_ids, **fields):
    """The rank for a request that is answered before the next one arrives."""
    rank = router.choose(request(request_id, token_ids, **fields))
    router.observe(outputs(request_id, finished=[request_id]))
    return rank


def test_unfinished_requests_are_load_and_a_shared_prefix_spreads_when_it_pays():
    router = RankRouter(client())
    home = serve(router, "first", SYSTEM)
    chosen = [router.choose(request(str(i), [*SYSTEM, i])) for i in range(8)]
    assert chosen[0] == home and {*chosen} == {0, 1}


@pytest.mark.parametrize("num_running", [40, 1], ids=["of other API servers", "its own, ended"])
def test_only_requests_of_other_api_servers_are_load(num_running):
    plain = client(count=2)
    router = RankRouter(plain)
    home = serve(router, "first", SYSTEM)
    plain.lb_engines = [[0, num_running, 0.1] if rank == home else [0, 0, 0.0] for rank in range(2)]
    assert serve(router, "second", [*SYSTEM, 1]) == (1 - home if num_running > 1 else home)


@pytest.mark.parametrize(
    "fields",
    [{"data_parallel_rank": 1}, {"pooling_params": object()}, {"prompt_token_ids": None}],
    ids=["rank requested", "pooling", "embeddings"],
)
def test_vllm_places_requests_with_a_rank_or_without_tokens(fields):
    asked = request("a", SYSTEM)
    for name, value in fields.items():
        setattr(asked, name, value)
    assert RankRouter(client()).choose(asked) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "another tenant"},
        {"lora_request": SimpleNamespace(lora_name="adapter")},
        {"mm_features": [SimpleNamespace(identifier="image")]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_requests_in_other_namespaces_share_nothing(fields):
    router = RankRouter(client())
    assert serve(router, "a", SYSTEM) != serve(router, "b", SYSTEM, **fields)
    assert serve(router, "a2", SYSTEM) != serve(router, "b2", SYSTEM, **fields)


def test_vllm_chooses_for_a_request_whose_choice_fails_and_for_no_other(monkeypatch, caplog):
    router = RankRouter(client())
    router.choose(request("before", SYSTEM))
    with monkeypatch.context() as patch:
        patch.setattr(router._router, "choose", lambda *_, **__: 1 / 0)
        assert [router.choose(request(str(i), SYSTEM)) for i in range(3)] == [None] * 3
    errors = [record for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == 2 and "vLLM chooses it by load" in errors[0].getMessage()
    assert router.choose(request("next", SYSTEM)) is not None
    router.observe(outputs("before", finished=["before"]))


def test_nothing_is_kept_of_finished_requests():
    router = RankRouter(client())
    for i in range(100):
        serve(router, str(i), [*range(i, i + 300)])
    aborted = router.choose(request("aborted", SYSTEM))
    router.observe(outputs(finished=["aborted"]))
    assert not router._routes and not router._in_prefill
    assert router._router.load(aborted) == Load(0, 0)


def config_with_events(endpoint, replay="ipc:///run/inproc-replay", num_local=2):
    plain = client().vllm_config
    plain.parallel_config.data_parallel_size_local = num_local
    plain.kv_events_config = SimpleNamespace(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay
    )
    return plain


def test_each_ranks_events_are_followed_at_the_endpoint_where_vllm_publishes_them():
    found = ranks._event_sources(config_with_events("tcp://*:5557"))
    assert [found[rank].endpoint for rank in range(2)] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
    ]
    assert found[1].replay_endpoint == "ipc:///run/inproc-replay_dp1"


@pytest.mark.parametrize(
    "config",
    [
        config_with_events("tcp://127.0.0.1:5557"),  # where the engines connect and do not bind
        config_with_events("tcp://*:5557", replay=None),
        config_with_events("tcp://*:5557", num_local=1),
    ],
    ids=["not bound", "no replay", "several machines"],
)
def test_unusable_event_endpoints_are_logged(config, caplog):
    assert ranks._event_sources(config) == {}
    assert "not used to choose ranks" in caplog.text
