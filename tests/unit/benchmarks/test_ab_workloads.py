"""The workloads of `benchmarks.ab`: what is asked, and of what size."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter
from pathlib import Path
from re import _parser

import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer
from tokenizers.models import BPE

from benchmarks.ab.workloads import (
    WORKLOADS,
    json_fields,
    json_regex,
    json_schema,
    no_sharing,
    tight_cache,
    tool_calls,
)
from benchmarks.ab.workloads.base import MAX_MODEL_LEN, Texts, Vocabulary
from benchmarks.models import DEMO_MODEL
from benchmarks.schemas import FILE, is_plain


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


def test_a_text_of_n_words_has_n_tokens_alone_and_joined(
    vocabulary: Vocabulary, tokenizer: Tokenizer
) -> None:
    texts = Texts(vocabulary, seed=0)
    for num_tokens in (1, 7, 300):
        text, more = texts.text(num_tokens), texts.text(5)
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == num_tokens
        assert len(tokenizer.encode(text + more, add_special_tokens=False).ids) == num_tokens + 5


def test_there_are_words_enough_for_texts_to_differ(vocabulary: Vocabulary) -> None:
    assert len(vocabulary.words) > 500
    assert len({*vocabulary.words}) == len(vocabulary.words)


def test_a_tokenizer_without_words_is_refused() -> None:
    with pytest.raises(ValueError, match="name another model"):
        Vocabulary(Tokenizer(BPE(vocab={"a": 0}, merges=[])))


def test_the_beginning_of_a_text_has_the_tokens_asked_for(vocabulary: Vocabulary) -> None:
    text = "The hare, who lived at the edge of the forest, said: You are late!"
    num_tokens = vocabulary.num_tokens(text)
    assert vocabulary.beginning(text, num_tokens) == text
    for num in range(num_tokens):
        beginning = vocabulary.beginning(text, num)
        assert text.startswith(beginning) and vocabulary.num_tokens(beginning) <= num
    assert vocabulary.beginning(text, num_tokens // 2)


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no tokenizer"):
        Vocabulary.of(tmp_path / "nothing")


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_same_seed_gives_the_same_items_and_another_seed_others(
    name: str, vocabulary: Vocabulary
) -> None:
    items = WORKLOADS[name].items
    assert items(Texts(vocabulary, 0), 20) == items(Texts(vocabulary, 0), 20)
    assert items(Texts(vocabulary, 0), 20) != items(Texts(vocabulary, 1), 20)
    assert len(items(Texts(vocabulary, 0), 20)) == 20


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_listed_by_its_name_and_quick_is_less(
    name: str, vocabulary: Vocabulary
) -> None:
    workload = WORKLOADS[name]
    assert workload.name == name
    assert workload.quick_requests < workload.num_requests
    assert {*workload.program.arg_names} == {*workload.items(Texts(vocabulary, 0), 1)[0]}


def test_tight_cache_comes_back_to_a_group_after_all_others(vocabulary: Vocabulary) -> None:
    num_groups = tight_cache.NUM_GROUPS
    made = tight_cache.items(Texts(vocabulary, 0), 3 * num_groups)
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


def test_no_sharing_shares_nothing_and_fits(vocabulary: Vocabulary) -> None:
    made = no_sharing.items(Texts(vocabulary, 0), 200)
    begins = Counter(tuple(one["prompt"].split()[:4]) for one in made)
    assert begins.most_common(1)[0][1] == 1
    longest = max(len(one["prompt"].split()) + one["num_tokens"] for one in made)
    assert longest < MAX_MODEL_LEN


def longest(pattern: str) -> int:
    """In characters; a token has at least one."""
    return _parser.parse(pattern).getwidth()[1]


CHARACTER = """\
{"name": "Albus", "house": "Gryffindor", "blood status": "Half-blood", "occupation": "teacher", \
"wand": {"wood": "elm", "core": "phoenix feather", "length": 13.5}, "alive": false, \
"patronus": "otter", "age": 99, "pet": "bird"}"""


def test_json_regex_is_json_of_nine_keys_and_one_nested_object() -> None:
    assert re.fullmatch(json_regex.CHARACTER, CHARACTER)
    value = json.loads(CHARACTER)
    assert len(value) == 9
    assert [key for key in value if isinstance(value[key], dict)] == ["wand"]


def test_json_regex_ends_within_its_tokens_whatever_is_decided() -> None:
    end_of_sequence = 1
    assert longest(json_regex.CHARACTER) + end_of_sequence <= json_regex.MAX_TOKENS == 256
    prompt = "A character of a book about, as JSON:\n"
    most = len(prompt) + json_regex.PROMPT_TOKENS[1] + json_regex.MAX_TOKENS
    assert most < MAX_MODEL_LEN


def test_three_quarters_of_json_regex_are_forced() -> None:
    """In characters: an enumeration decides one, a character class each of its own."""
    pattern = json_regex.CHARACTER
    repeated = [int(most) for most in re.findall(r"\{[0-9]+,([0-9]+)\}", pattern)]
    num_classes = len(re.findall(r"\[[^]]+\]", pattern))
    num_decided = pattern.count("(") + sum(repeated) + num_classes - len(repeated)
    assert num_decided <= 0.25 * len(CHARACTER)


def test_json_fields_asks_for_five_values_that_end_within_their_tokens() -> None:
    end_of_sequence = 1
    assert [max_tokens for _, _, max_tokens, _ in json_fields.FIELDS] == [8, 8, 8, 8, 24]
    for _, _, max_tokens, form in json_fields.FIELDS:
        assert longest(form) + end_of_sequence <= max_tokens


def test_json_fields_writes_json() -> None:
    values = ("Bern", "Suisse", "46.95", "134000", 'German", "Italian')
    text = ""
    for (before, _, _, form), value in zip(json_fields.FIELDS, values, strict=True):
        assert re.fullmatch(form, value)
        text += before + value
    assert json.loads(text + json_fields.END) == {
        "name": "Bern",
        "country": "Suisse",
        "latitude": 46.95,
        "population": 134000,
        "languages": ["German", "Italian"],
    }


def test_json_schema_asks_each_schema_before_any_again(vocabulary: Vocabulary) -> None:
    made = [one["schema"] for one in json_schema.items(Texts(vocabulary, 0), 80)]
    assert len(set(made[:40])) == 40
    assert set(made[:40]) == set(made[40:])
    # A token of a byte-level vocabulary has at least one byte.
    template_characters = 200
    longest_prompt = max(map(len, made)) + template_characters
    assert longest_prompt + json_schema.MAX_TOKENS < json_schema.MAX_MODEL_LEN


def test_json_schema_takes_what_any_backend_takes_from_the_data(
    vocabulary: Vocabulary, tmp_path: Path
) -> None:
    usable = {"type": "object", "properties": {"a": {"type": "integer"}}}
    contents = (usable, {"not": {"type": "string"}}, {"description": "long " * 400})
    lines = [json.dumps({"name": "one", "schema": one, "tests": []}) for one in contents]
    with gzip.open(tmp_path / FILE, "wt") as file:
        file.write("\n".join(lines))
    made = json_schema.items(Texts(vocabulary, 0, tmp_path), 3)
    assert made == [{"schema": json.dumps(usable)}] * 3
    with pytest.raises(ValueError, match="--data"):
        json_schema.items(Texts(vocabulary, 0, tmp_path / "nowhere"), 3)


def test_tool_calls_are_by_name_and_by_choice_one_and_several(vocabulary: Vocabulary) -> None:
    made = tool_calls.items(Texts(vocabulary, 0), 30)
    fields = [tool_calls.request_fields(item) for item in made]
    kinds = Counter(
        (one["tool_choice"] == "required", one["parallel_tool_calls"]) for one in fields
    )
    assert kinds == {(True, True): 10, (True, False): 10, (False, False): 10}
    for one in fields:
        names = [tool["function"]["name"] for tool in one["tools"]]
        assert len({*names}) == tool_calls.NUM_TOOLS
        if one["tool_choice"] != "required":
            assert one["tool_choice"]["function"]["name"] in names


def test_functions_are_as_openai_wants_strict_ones(vocabulary: Vocabulary) -> None:
    for tool in tool_calls.TOOLS:
        schema = tool["function"]["parameters"]
        assert tool["function"]["strict"] and schema["additionalProperties"] is False
        assert schema["required"] == [*schema["properties"]]
        assert is_plain(schema)


@pytest.mark.parametrize(
    "name", [name for name in WORKLOADS if name.startswith("json_") or name == "tool_calls"]
)
def test_structured_workloads_run_one_program_at_a_time(name: str) -> None:
    assert WORKLOADS[name].concurrency == 1
    assert WORKLOADS[name].structured
