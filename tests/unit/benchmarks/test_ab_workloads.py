"""The workloads of `benchmarks.ab`: what is asked, and of what size."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer

from benchmarks.ab.workloads import WORKLOADS, no_sharing, tight_cache
from benchmarks.ab.workloads.base import Texts, one_token_words
from benchmarks.models import DEMO_MODEL


@pytest.fixture(scope="module")
def words() -> list[str]:
    return one_token_words(DEMO_MODEL)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def test_a_text_of_n_words_has_n_tokens_alone_and_joined(
    words: list[str], tokenizer: Tokenizer
) -> None:
    texts = Texts(words, seed=0)
    for num_tokens in (1, 7, 300):
        text, more = texts.text(num_tokens), texts.text(5)
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == num_tokens
        assert len(tokenizer.encode(text + more, add_special_tokens=False).ids) == num_tokens + 5


def test_there_are_words_enough_for_texts_to_differ(words: list[str]) -> None:
    assert len(words) > 500
    assert len(set(words)) == len(words)


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="name another model"):
        Texts([], seed=0)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        one_token_words(tmp_path / "nothing")


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_items_and_another_seed_others(
    name: str, words: list[str]
) -> None:
    items = WORKLOADS[name].items
    assert items(Texts(words, 0), 20) == items(Texts(words, 0), 20)
    assert items(Texts(words, 0), 20) != items(Texts(words, 1), 20)
    assert len(items(Texts(words, 0), 20)) == 20


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_listed_by_its_name_and_quick_is_less(name: str) -> None:
    workload = WORKLOADS[name]
    assert workload.name == name
    assert workload.quick_requests < workload.num_requests
    assert {*workload.program.arg_names} == {*workload.items(Texts([" a", " b"], 0), 1)[0]}


def test_tight_cache_comes_back_to_a_group_after_all_others(words: list[str]) -> None:
    num_groups = tight_cache.NUM_GROUPS
    made = tight_cache.items(Texts(words, 0), 3 * num_groups)
    for turn in range(3):
        prefixes = [one["prefix"] for one in made[turn * num_groups : (turn + 1) * num_groups]]
        assert len(set(prefixes)) == num_groups
    assert set(Counter(one["prefix"] for one in made).values()) == {3}


@pytest.mark.parametrize("block_size_tokens", [16, 128])
def test_the_tight_cache_holds_a_fifth_of_the_prefixes_and_any_one_request(
    block_size_tokens: int,
) -> None:
    arguments = tight_cache.server_args(block_size_tokens)
    cache_tokens = int(arguments[arguments.index("--num-gpu-blocks-override") + 1])
    cache_tokens *= block_size_tokens
    prefixes_tokens = tight_cache.NUM_GROUPS * tight_cache.PREFIX_TOKENS
    assert 0.19 < cache_tokens / prefixes_tokens < 0.21
    longest = tight_cache.PREFIX_TOKENS
    longest += tight_cache.QUESTION_TOKENS[1] + tight_cache.OUTPUT_TOKENS[1]
    assert longest < tight_cache.MAX_MODEL_LEN < cache_tokens


def test_more_wait_than_run_and_several_of_each_group() -> None:
    most_running = tight_cache.CACHE_SHARE * tight_cache.NUM_GROUPS  # if all are of other groups
    assert tight_cache.WORKLOAD.concurrency - most_running > 2 * tight_cache.NUM_GROUPS


def test_no_sharing_shares_nothing_and_fits(words: list[str]) -> None:
    made = no_sharing.items(Texts(words, 0), 200)
    begins = Counter(tuple(one["prompt"].split()[:4]) for one in made)
    assert begins.most_common(1)[0][1] == 1
    longest = max(len(one["prompt"].split()) + one["num_tokens"] for one in made)
    assert longest < no_sharing.MAX_MODEL_LEN
