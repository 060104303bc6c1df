"""A small part of the fuzzer of formats (`format_fuzz.py`)."""

import pytest

pytest.importorskip("mistral_common")
pytest.importorskip("jsonschema")

from tests.effort import examples
from tests.unit.fsm import format_fuzz


def test_random_formats_get_the_masks_of_their_automata():
    outcome = format_fuzz.fuzz(examples(60), seed=0, num_tokens=8_192)
    assert outcome.errors == []
    assert outcome.formats > 1.5 * outcome.refused
    assert outcome.masks > 4 * outcome.formats and outcome.steps_back > 20
