"""Options: what is taken, and how what is not is refused."""

import pytest

from sgl_vllm.config import OptionError, Options


def test_everything_is_on_by_default():
    options = Options()
    assert options.radix and options.schedule and options.jump_forward and options.select


def test_json_and_pairs_mix_and_the_last_word_wins():
    words = ['{"radix": false, "schedule_max_wait_s": 5}', "radix=true", "schedule_window=7"]
    assert Options.from_words(words) == Options(schedule_max_wait_s=5, schedule_window=7)


def test_a_pair_may_spell_its_value_as_python_does():
    assert Options.from_words(["jump_forward=False"]) == Options(jump_forward=False)


def test_options_survive_the_way_to_another_process():
    options = Options(select=False, schedule_max_passes=3)
    assert Options.from_mapping(options.to_mapping()) == options


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("jump=false", "the options are radix, schedule"),
        ("jumpforward=false", "did you mean 'jump_forward'"),
        ("radix=1", "radix takes true or false, not 1"),
        ("radix=off", "radix takes true or false, not 'off'"),
        ("schedule_window=1.5", "whole number"),
        ("schedule_window=true", "a number"),
        ("schedule_max_wait_s=-1", "cannot be -1"),
        ("schedule_max_wait_s=NaN", "cannot be nan"),
        ("schedule_window=0", "schedule=false"),
        ("radix_policy=fifo", "one of lru, lfu, slru, priority, not 'fifo'"),
        ("radix_policy=1", "one of lru"),
        ("jump_mode=fast", "one of canonical, exact, not 'fast'"),
        ("radix_pin_share=2", "at most 1"),
        ("radix_ttl_s=soon", "a number"),
        ("radix", "key=value"),
        ("{radix}", "not valid JSON"),
        ("[1]", "key=value"),
    ],
)
def test_what_is_no_option_is_refused_with_what_it_could_be(word, says):
    with pytest.raises(OptionError, match=says):
        Options.from_words([word])
