"""A fixed part of the fuzzer of conjunctions (`schema_fuzz.py`)."""

import pytest

pytest.importorskip("jsonschema")

from tests.effort import examples
from tests.unit.fsm import schema_fuzz

NUM_SCHEMAS = 80


def test_no_conjunction_accepts_an_invalid_text():
    outcome = schema_fuzz.fuzz(examples(NUM_SCHEMAS), seed=0)
    assert outcome.wrong == []
    assert outcome.accepted > outcome.schemas  # not too many are refused
