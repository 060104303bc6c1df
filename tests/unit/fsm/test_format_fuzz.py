"""A small part of the fuzzer of formats (`format_fuzz.py`)."""

import pytest

pytest.importorskip("mistral_common")
pytest.importorskip("jsonschema")

from tests.effort import examples, some_nightly
from tests.unit.fsm import format_fuzz


@pytest.mark.parametrize("num_tokens", some_nightly([8_192, 32_768, 131_072], [8_192]))
def test_random_formats_get_the_masks_of_their_automata(num_tokens):
    outcome = format_fuzz.fuzz(examples(25), seed=0, num_tokens=num_tokens)
    assert outcome.errors == []
    assert outcome.formats > 1.5 * outcome.refused
    assert outcome.masks > 4 * outcome.formats and outcome.steps_back > 8
