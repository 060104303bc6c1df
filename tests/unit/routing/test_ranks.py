"""Which data-parallel rank a request goes to, with a client of vLLM's that is only its figures."""

from types import SimpleNamespace

import pytest

from sgl_vllm.routing import ranks
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
    """The rank for a request that is answered before the next comes."""
    rank = router.choose(request(request_id, token_ids, **fields))
    router.hear(outputs(request_id, finished=[request_id]))
    return rank


def test_a_conversation_stays_where_it_began():
    router = RankRouter(client())
    first = serve(router, "a", [*range(300)])
    other = serve(router, "b", [*range(5000, 5300)])
    assert {first, other} == {0, 1}
    assert serve(router, "a2", [*range(320)]) == first
    assert serve(router, "b2", [*range(5000, 5400)]) == other


def test_what_is_not_finished_is_load_and_a_shared_beginning_spreads_when_it_pays():
    router = RankRouter(client())
    home = serve(router, "first", SYSTEM)
    chosen = [router.choose(request(str(i), [*SYSTEM, i])) for i in range(8)]
    assert chosen[0] == home and {*chosen} == {0, 1}


def test_others_load_counts_with_several_api_servers():
    plain = client(count=2)
    router = RankRouter(plain)
    home = serve(router, "first", SYSTEM)
    plain.lb_engines = [[0, 40, 0.1] if rank == home else [0, 0, 0.0] for rank in range(2)]
    assert serve(router, "second", [*SYSTEM, 1]) == 1 - home


def test_own_requests_that_have_ended_since_are_not_taken_for_others():
    plain = client(count=2)
    router = RankRouter(plain)
    home = serve(router, "first", SYSTEM)
    plain.lb_engines = [[0, 1, 0.1] if rank == home else [0, 0, 0.0] for rank in range(2)]
    assert serve(router, "second", [*SYSTEM, 1]) == home


@pytest.mark.parametrize(
    "fields",
    [{"data_parallel_rank": 1}, {"pooling_params": object()}, {"prompt_token_ids": None}],
    ids=["rank asked for", "pooling", "embeddings"],
)
def test_vllm_chooses_where_someone_has_or_there_is_nothing_to_go_by(fields):
    asked = request("a", SYSTEM)
    for name, value in fields.items():
        setattr(asked, name, value)
    assert RankRouter(client()).choose(asked) is None


def test_a_session_that_goes_on_is_left_to_vllm():
    plain = client()
    plain.reqs_in_flight["a"] = 0
    assert RankRouter(plain).choose(request("a", SYSTEM)) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "another tenant"},
        {"lora_request": SimpleNamespace(lora_name="adapter")},
        {"mm_features": [SimpleNamespace(identifier="image")]},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_only_those_meet_who_share_a_cache(fields):
    router = RankRouter(client())
    assert serve(router, "a", SYSTEM) != serve(router, "b", SYSTEM, **fields)
    assert serve(router, "a2", SYSTEM) != serve(router, "b2", SYSTEM, **fields)


def test_ranks_may_come_and_go():
    plain = client(3)
    router = RankRouter(plain)
    prompts = [[*range(1000 * i, 1000 * i + 300)] for i in range(3)]
    assert {serve(router, str(i), prompt) for i, prompt in enumerate(prompts)} == {0, 1, 2}
    plain.core_engines = [0]
    assert {serve(router, str(i), prompt) for i, prompt in enumerate(prompts)} == {0}


def test_an_error_leaves_the_choice_to_vllm_and_is_said_once(monkeypatch, caplog):
    router = RankRouter(client())
    router.choose(request("before", SYSTEM))
    monkeypatch.setattr(router._router, "choose", lambda *_, **__: 1 / 0)
    assert router.choose(request("a", SYSTEM)) is None
    assert router.choose(request("b", SYSTEM)) is None
    assert len(caplog.records) == 1 and "chooses by load" in caplog.text
    router.hear(outputs("before", finished=["before"]))


def test_nothing_is_kept_of_what_has_ended():
    router = RankRouter(client())
    for i in range(100):
        serve(router, str(i), [*range(i, i + 300)])
    aborted = router.choose(request("aborted", SYSTEM))
    router.hear(outputs(finished=["aborted"]))
    assert not router._routes and not router._waiting
    assert router._router.load(aborted) == ranks.Load(0, 0)


def config_with_events(endpoint, replay="ipc:///run/inproc-replay", num_local=2):
    plain = client().vllm_config
    plain.parallel_config.data_parallel_size_local = num_local
    plain.kv_events_config = SimpleNamespace(
        enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, replay_endpoint=replay
    )
    return plain


def test_each_engines_events_are_looked_for_where_vllm_publishes_them():
    found = ranks._event_sources(config_with_events("tcp://*:5557"))
    assert [found[rank].endpoint for rank in range(2)] == [
        "tcp://127.0.0.1:5557",
        "tcp://127.0.0.1:5558",
    ]
    assert found[1].replay_endpoint == "ipc:///run/inproc-replay_dp1"


@pytest.mark.parametrize(
    "config",
    [
        config_with_events("tcp://127.0.0.1:5557"),  # where the engines connect to someone
        config_with_events("tcp://*:5557", replay=None),
        config_with_events("tcp://*:5557", num_local=1),
    ],
    ids=["not bound", "no replay", "several machines"],
)
def test_events_that_cannot_be_followed_are_said_to_be(config, caplog):
    assert ranks._event_sources(config) == {}
    assert "not used to choose ranks" in caplog.text
