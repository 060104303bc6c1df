"""Same answers and hits on models with recurrent layers: three of linear attention (Qwen3-Next) or
of Mamba-2 (Granite 4) for each of full attention. The models are small and random. One computes in
bfloat16, so its log-probabilities move by a rounding step with how a request is cut into passes, in
stock vLLM too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import vllm
from vllm.v1.kv_cache_interface import MambaSpec

from sgl_vllm.radix.checkpoints import MIN_GAIN
from sgl_vllm.vllm_api.versions import release_of
from tests.effort import requests, some_nightly
from tests.engine import sessions
from tests.engine.engine import Ask, Engine, greedy, tokens_of, words
from tests.engine.recurrent_models import MODELS, RecurrentModel, let_mamba2_keep_states
from tests.engine.sessions import Reply, again, in_order, num_shared, run, session


@pytest.fixture(scope="module", params=some_nightly(MODELS, ["qwen3_next"]))
def model(request) -> RecurrentModel:
    if request.param == "granite4" and release_of(vllm.__version__) < (0, 32):
        pytest.skip("vLLM 0.31 has no CPU kernel for Mamba-2 in float32")
    return MODELS[request.param]


@pytest.fixture(scope="module")
def start_recurrent(model, start, tmp_path_factory) -> Iterator[Callable[..., Engine]]:
    """`start`, with the model, whose prefixes are cached unless asked not to."""
    folder = tmp_path_factory.mktemp("models") / "recurrent"
    arguments = model.engine_args(model.write(folder))
    with pytest.MonkeyPatch.context() as patch:
        if model.keeps_state_inside_pass:
            let_mamba2_keep_states(patch)
        yield lambda plugin=None, **more: start(plugin, **{**arguments, **more})


def wrong(model: RecurrentModel, want: Sequence[Reply], got: Sequence[Reply]) -> list[str]:
    """What differs by more than the model's rounding."""
    return sessions.wrong(want, got, tolerance=model.tolerance, near_tie=model.rounding)


@pytest.fixture(scope="module")
def cold(start_recurrent) -> list[list[Reply]]:
    """The session on stock vLLM without a cache."""
    return session(start_recurrent(enable_prefix_caching=False), max(11, requests(22)))


@pytest.fixture(scope="module")
def engine(cold, start_recurrent) -> Engine:
    return start_recurrent({}, num_gpu_blocks_override=2000)


def block_ends(model: RecurrentModel, start: int, branch: int, end: int) -> set[int]:
    """The ends of blocks at which the passes over tokens `[start, end)` of a prompt leave a state.

    A pass ends at the end of a block or of the prompt, and one at the branch, if there is one. From
    inside a block it goes to the block's end, and from there to the last end of a block. Where
    vLLM can take that state from inside a pass, there is one pass less.
    """
    size, position, ends = model.block_size, start, set()
    while position < end:
        last = (end - 1) // size * size
        to = min((position // size + 1) * size, end) if position % size else max(position, last)
        if to == position or (model.keeps_state_inside_pass and not position % size):
            to = end
        is_cut = position < branch < to
        if to == end and not is_cut and position < last:
            ends.add(last)
        position = branch if is_cut else to
        ends |= {position} if position % size == 0 else set()
    return ends


def hits_by_states(model: RecurrentModel, replies: Sequence[Reply]) -> list[int]:
    """For each of these requests, which ran one after another, the longest of its prefixes after
    which one before it has left its state: at its own end, at the end of its prompt, at the ends of
    blocks, and where what was cached of its prompt ended."""
    found: list[int] = []
    computed: list[list[int]] = []
    states: set[tuple[int, ...]] = set()
    for reply in replies:
        prompt, most = reply.prompt, len(reply.prompt) - 1
        hit = max((n for n in range(1, most + 1) if tuple(prompt[:n]) in states), default=0)
        found.append(hit)
        shared = max((num_shared(prompt, tokens) for tokens in computed), default=0)
        branch = min(shared, most) if min(shared, most) - hit >= MIN_GAIN else 0
        ends = {len(prompt), len(reply.computed), *block_ends(model, hit, branch, len(prompt))}
        after_prompt = range(len(prompt), len(reply.computed))
        ends |= {end for end in after_prompt if end % model.block_size == 0}
        ends |= {branch} if branch else set()
        states |= {tuple(reply.computed[:end]) for end in ends}
        computed.append(reply.computed)
    return found


def test_every_part_is_on(model, engine):
    assert set(engine.scheduler.parts.states().values()) == {"on"}
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    assert sum(isinstance(group.kv_cache_spec, MambaSpec) for group in groups) == 3
    assert engine.scheduler.block_size == model.block_size


def test_a_hit_ends_at_the_last_state_that_a_request_has_left(model, cold, engine):
    assert engine.llm.reset_prefix_cache()
    one_by_one = [[reply] for reply in in_order(cold)]
    warm = in_order(again(engine, one_by_one))
    want = hits_by_states(model, warm)
    assert [reply.num_cached for reply in warm] == want
    assert sum(want) > 0.6 * sum(len(reply.prompt) for reply in warm)
    assert not wrong(model, in_order(cold), warm)
    engine.check_nothing_is_left()


def test_a_hit_that_ends_at_the_end_of_a_block_reads_all_of_it(model, engine):
    """vLLM's own copy of a block leaves out its end (`copy_whole_blocks`)."""
    size = model.block_size
    prompt, more = words(size - 1, seed=7), words(40, seed=8)
    assert engine.llm.reset_prefix_cache()
    cold = run(engine, [prompt + more])
    assert engine.llm.reset_prefix_cache()
    engine.run([Ask(prompt, greedy(1))])
    warm = run(engine, [prompt + more])
    assert warm[0].num_cached == size - 1
    assert not wrong(model, cold, warm)
    engine.check_nothing_is_left()


@pytest.mark.slow
def test_more_is_found_than_by_vllms_own_cache_and_less_is_computed(
    model, cold, engine, start_recurrent
):
    def hits_and_computed(engine: Engine) -> tuple[int, int]:
        engine.reset_counts()
        warm = in_order(again(engine, cold))
        assert not wrong(model, in_order(cold), warm)
        return sum(reply.num_cached for reply in warm), engine.computed_tokens

    assert engine.llm.reset_prefix_cache()
    hits, computed = hits_and_computed(engine)
    engine.check_nothing_is_left()
    stock = start_recurrent(num_gpu_blocks_override=2000, block_size=16, prefix_match_unit=16)
    stock_hits, stock_computed = hits_and_computed(stock)
    assert hits > stock_hits and computed < stock_computed


@pytest.mark.parametrize(
    ("num_shared", "num_own", "num_requests"),
    [
        (750, 100, 12),
        # Of vLLM issue 45238, where 40 of 64 requests hit.
        pytest.param(1500, 700, 64, marks=pytest.mark.slow),
    ],
)
def test_only_the_first_of_many_siblings_computes_what_they_share(
    start_recurrent, num_shared, num_own, num_requests
):
    engine = start_recurrent(
        {},
        max_model_len=num_shared + num_own + 8,
        num_gpu_blocks_override=2000,
        max_num_batched_tokens=2048,
    )
    shared, seeds = words(num_shared), range(1, num_requests + 1)
    asks = [Ask(shared + words(num_own, seed=seed), greedy(4)) for seed in seeds]
    alone = [engine.run([ask])[0] for ask in asks[:1]]
    assert engine.llm.reset_prefix_cache()
    engine.reset_counts()
    results = engine.run(asks)
    hits = sorted(result.num_cached_tokens for result in results)
    assert hits == [0] + [num_shared] * (num_requests - 1)
    assert engine.computed_tokens == num_shared + num_requests * (num_own + 3)
    assert tokens_of(results[0]) == tokens_of(alone[0])
    engine.check_nothing_is_left()


def test_examples_before_questions_before_choices_are_each_computed_once(model, start_recurrent):
    """All sent at once, as a program does that selects an answer to each question."""
    engine = start_recurrent({}, num_gpu_blocks_override=2000, max_num_batched_tokens=2048)
    examples = words(200)
    questions = [words(60, seed=seed) for seed in (1, 2, 3)]
    choices = [words(10, seed=seed) for seed in (4, 5, 6, 7)]
    prompts = [examples + question + choice for question in questions for choice in choices]
    cold = [run(engine, [prompt])[0] for prompt in prompts[::5]]
    assert engine.llm.reset_prefix_cache()
    engine.reset_counts()
    warm = run(engine, prompts)
    num_decoded = sum(len(reply.computed) - len(reply.prompt) for reply in warm)
    assert engine.computed_tokens - num_decoded == 200 + 3 * 60 + 12 * 10
    assert not wrong(model, cold, warm[::5])
    engine.check_nothing_is_left()


def test_siblings_wait_for_room_rather_than_compute_their_prefix_again(model, start_recurrent):
    """A hit inside a block takes more blocks for a while than none: those that it copies."""
    shared = words(model.block_size + 356)
    asks = [Ask(shared + words(20, seed=seed), greedy(8)) for seed in (1, 2, 3)]
    engine = start_recurrent(
        {}, max_model_len=model.block_size + 544, num_gpu_blocks_override=model.fewest_blocks
    )
    results = engine.run(asks)
    assert [result.num_cached_tokens for result in results] == [0, len(shared), len(shared)]
    engine.check_nothing_is_left()


def test_the_self_check_finds_the_states_right(start_recurrent):
    engine = start_recurrent({"self_check": "on"}, num_gpu_blocks_override=400)
    assert set(engine.scheduler.parts.states().values()) == {"on"}
    assert engine.scheduler.kv_cache_manager.sections()["cache"].tree_states == 0, (
        "nothing is left of it"
    )
