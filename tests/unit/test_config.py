"""Options: which values are accepted, how others are refused, and what is made of a declaration."""

import dataclasses
import subprocess
import sys

import pytest

from sgl_vllm import config
from sgl_vllm.config import Options
from sgl_vllm.flags import default_text, help_text
from sgl_vllm.option import OptionError, OptionInfo, words_to_mapping
from sgl_vllm.radix.eviction_policies import POLICIES
from sgl_vllm.scheduler.policy import ORDERS


def from_words(words):
    return Options.from_mapping(words_to_mapping(words))


def test_json_and_pairs_mix_and_the_last_word_wins():
    words = ['{"radix": false, "schedule_max_wait_s": 5}', "radix=True", "schedule_window=7"]
    assert from_words(words) == Options(schedule_max_wait_s=5, schedule_window=7)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("colour=1", "^unknown option colour; vllm serve --help=plugin-config lists the options$"),
        ("jump_foward=false", "^unknown option jump_foward; did you mean jump_forward\\?$"),
        ('{"jump-forward": false}', "^unknown option jump-forward; did you mean jump_forward\\?$"),
        ("radix=1", "radix must be true or false, not 1"),
        ("schedule_window=1.5", "whole number"),
        ("schedule_max_wait_s=-1", "must be at least 0, not -1"),
        ("schedule_max_wait_s=NaN", "must be at least 0, not nan"),
        ("schedule_window=0", "must be at least 1, not 0; schedule=false turns reordering off"),
        ("radix_policy=fifo", "radix_policy must be one of lru, .*, not 'fifo'"),
        ('{"radix_policy": ["lru"]}', "one of lru"),
        ("jump_mode=exakt", "^jump_mode must be .* exact, not 'exakt'; did you mean exact\\?$"),
        (f"radix_ttl_s={'1' * 5000}", "a number"),  # more digits than Python reads
        ("radix_pin_share=2", "must be at most 1, not 2"),
        ("radix", "key=value"),
        ("{radix}", "not valid JSON"),
        ("=false", "key=value"),
        ("approximate_choice=first", "^approximate_choice was removed: .*Leave it out"),
        ("schedule_cheapest_victim=true", "^schedule_cheapest_victim was removed: .*Leave it out"),
        ("schedule_max_passes=3", "^schedule_max_passes was removed: it is called schedule_max_ov"),
        ("unverified=true", "^unverified was removed: .* Write self_check=off"),
    ],
)
def test_an_invalid_option_is_refused_with_the_accepted_values(word, says):
    with pytest.raises(OptionError, match=says):
        from_words([word])


def test_every_problem_is_named_at_once():
    with pytest.raises(OptionError) as refused:
        from_words(["jump_foward=false", "radix=true", "jump_mode=exakt", "radix_ttl=1"])
    assert [line.split(" must ")[0] for line in str(refused.value).splitlines()] == [
        "unknown option jump_foward; did you mean jump_forward?",
        "jump_mode",
        "unknown option radix_ttl; did you mean radix_ttl_s?",
    ]


def test_words_without_an_equals_sign_are_refused_together():
    with pytest.raises(OptionError, match=r"pairs, not 'jump_forward' '=' 'false'; write "):
        from_words(["radix=true", "jump_forward", "=", "false"])


def test_choices_are_what_the_registries_hold():
    assert config.choices_of("radix_policy") == tuple(POLICIES)
    assert config.choices_of("schedule_policy") == tuple(ORDERS)


@pytest.mark.parametrize("field", dataclasses.fields(Options), ids=lambda field: field.name)
def test_every_option_is_listed_in_the_help_with_its_default(field):
    line = f"- {field.name} (default: {default_text(field)}): "
    assert line in help_text()
    described = OptionInfo.of(field).choices
    assert described is None or all(described().values()), "a choice without a description"


def test_options_are_checked_without_vllm():
    code = (
        "import sys; from sgl_vllm.flags import Options, help_text; Options(); help_text(); "
        "assert not {'vllm', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
