"""vLLM's native offloading below the tree: host memory, and files below that."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from sgl_vllm.radix.stats import RadixCounters
from sgl_vllm.tiers.load_rule import KEPT
from tests.engine import host_tiers
from tests.engine.engine import Ask, Engine, greedy, tokens_of, words

ALWAYS = {"tier_rule": "always"}
BLOCK = 32
NUM_GPU_BLOCKS = 24
HOST_CHUNKS = 16
"""A quarter of what the longest test needs: what it has computed is in files, too."""


def ask(engine: Engine, prompt: list[int], max_tokens: int = 4):
    (result,) = engine.run([Ask(prompt, greedy(max_tokens))])
    engine.settle()
    return result


def push_out(engine: Engine, seed: int = 1000, count: int = 6) -> None:
    """Compute so much else that nothing earlier is left on the device, nor in host memory."""
    for number in range(count):
        ask(engine, words(300, seed + number), 1)


def counters(engine: Engine) -> RadixCounters:
    return engine.scheduler.sgl_vllm.stats().radix


TELLS_TIERS = hasattr(OffloadingConnector, "get_external_cache_hit_sources")
"""vLLM 0.31 does not say in which tier it has found something."""


def by_tier(disk: int, host: int) -> list[int]:
    """Tokens in the order of `loaded`."""
    return [disk, host] if TELLS_TIERS else [disk + host]


def loaded(after: RadixCounters, before: RadixCounters | None = None) -> list[int]:
    """Tokens from files and from host memory; their sum if vLLM does not tell them apart."""
    names = ("disk_hit_tokens", "host_hit_tokens") if TELLS_TIERS else ("other_tier_hit_tokens",)
    before = before or RadixCounters()
    return [getattr(after, name) - getattr(before, name) for name in names]


@pytest.fixture(scope="module")
def chunk_bytes(start) -> int:
    """Of a block in host memory: whole pages."""
    engine = start(None)
    spec = engine.scheduler.kv_cache_config.kv_cache_groups[0]
    num_bytes = spec.kv_cache_spec.page_size_bytes * len(spec.layer_names)
    return -(-num_bytes // 4096) * 4096


@pytest.fixture
def tiered(start, chunk_bytes, tmp_path) -> Iterator[Callable[..., Engine]]:
    """Start an engine with both tiers: `tiered(plugin)`."""
    engines: list[Engine] = []

    def start_tiered(plugin: dict[str, Any]) -> Engine:
        tier = host_tiers.checked_files(tmp_path)
        config = host_tiers.config(HOST_CHUNKS * chunk_bytes, tier)
        engines.append(
            start(
                plugin,
                kv_transfer_config=KVTransferConfig(**config),
                num_gpu_blocks_override=NUM_GPU_BLOCKS,
                max_model_len=512,
            )
        )
        return engines[-1]

    yield start_tiered
    engines[-1].settle()
    engines[-1].check_nothing_is_left()


def test_what_is_evicted_is_found_in_files_then_in_host_memory_then_in_the_tree(tiered):
    engine = tiered(ALWAYS)
    prompt = words(300)
    first = ask(engine, prompt)
    push_out(engine)
    before = counters(engine)
    from_files = ask(engine, prompt)
    from_tree = ask(engine, prompt)
    assert engine.llm.reset_prefix_cache()
    from_host = ask(engine, prompt)
    after = counters(engine)
    found = [result.num_cached_tokens for result in (from_files, from_tree, from_host)]
    assert found == [288, 299, 288]
    assert after.hit_tokens - before.hit_tokens == 299
    assert loaded(after, before) == by_tier(disk=288, host=288)
    answers = [tokens_of(result) for result in (first, from_files, from_tree, from_host)]
    assert answers == [answers[0]] * 4


def test_a_request_ahead_of_time_brings_a_prompt_back_to_the_device(tiered):
    """What the language sends again shortly before a long tool returns."""
    engine = tiered(ALWAYS)
    prompt = words(300)
    first = ask(engine, prompt)
    push_out(engine)
    before = counters(engine)
    engine.run([Ask(prompt, greedy(1, extra_args={"sgl_ahead": 1}))])
    engine.settle()
    brought = counters(engine)
    assert loaded(brought, before) == by_tier(disk=288, host=0)
    answer = ask(engine, prompt)
    assert loaded(counters(engine), brought) == by_tier(disk=0, host=0)
    assert answer.num_cached_tokens == 299
    assert tokens_of(answer) == tokens_of(first)


def block_hashes(engine: Engine, prompt: list[int]) -> list[bytes]:
    """Of the prompt's whole blocks, as vLLM gives them to connectors."""
    seen: list[list[bytes]] = []
    connector = engine.scheduler.connector
    ask_connector = connector.get_num_new_matched_tokens

    def spy(request, num_local):
        seen.append(list(request.block_hashes))
        return ask_connector(request, num_local)

    connector.get_num_new_matched_tokens = spy
    ask(engine, prompt, 1)
    connector.get_num_new_matched_tokens = ask_connector
    return seen[0]


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(1000)
        byte = file.read(1)[0]
        file.seek(1000)
        file.write(bytes([byte ^ 0x40]))


def zero(path: Path) -> None:
    """As after a power failure that lost what was not yet on the disk."""
    path.write_bytes(bytes(path.stat().st_size))


def swap(path: Path) -> None:
    """Another block's file in its place."""
    other = next(each for each in path.parents[2].rglob("*.bin") if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [Path.unlink, cut, flip, zero, swap])
def test_a_damaged_file_is_a_miss(tiered, tmp_path, damage):
    engine = tiered(ALWAYS)
    prompt = words(300)
    first = ask(engine, prompt)
    (path,) = tmp_path.rglob(f"{block_hashes(engine, prompt)[4].hex()}.bin")
    push_out(engine)
    damage(path)
    second = ask(engine, prompt)
    assert tokens_of(second) == tokens_of(first)
    assert second.num_cached_tokens == 4 * BLOCK
    # It is written again with what was computed instead.
    push_out(engine, seed=2000)
    assert ask(engine, prompt).num_cached_tokens == 288


def test_files_of_an_earlier_engine_are_found_and_checked(tiered, tmp_path):
    prompt = words(300)
    first = ask(tiered(ALWAYS), prompt)
    engine = tiered(ALWAYS)
    second = ask(engine, prompt)
    assert (tokens_of(second), second.num_cached_tokens) == (tokens_of(first), 288)
    assert loaded(counters(engine)) == by_tier(disk=288, host=0)


def test_the_rule_is_measured_and_decides(tiered):
    engine = tiered({})
    for seed, num_tokens in enumerate((40, 100, 300)):
        ask(engine, words(num_tokens, seed))
        assert engine.llm.reset_prefix_cache()
        result = ask(engine, words(num_tokens, seed))
        assert result.num_cached_tokens > 0
    measured = engine.scheduler.sgl_vllm.stats().tiers
    assert measured.connector == "OffloadingConnector"
    assert measured.compute_token_s > 0 and measured.load_fixed_s is not None
    rule = engine.scheduler.parts.tiers._rule
    prompts = words(90, seed=7), words(300, seed=8)
    expected = [tokens_of(ask(engine, prompt)) for prompt in prompts]
    assert engine.llm.reset_prefix_cache()
    results = []
    for prompt in prompts:
        # As if a load took 0.1 s, as much as computing 100 tokens. What ran before is forgotten,
        # because there are enough measurements of every size.
        for num_tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256):
            for _ in range(KEPT):
                rule.loaded(num_tokens, 0.1)
                rule.passes.add(num_tokens, 1e-3 * num_tokens)
        results.append(ask(engine, prompt))
    assert [tokens_of(result) for result in results] == expected
    assert [result.num_cached_tokens for result in results] == [0, 288]
