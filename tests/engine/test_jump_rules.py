"""Which requests may jump, and on which engines. None of these tests needs an engine."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.output import GrammarOutput
from vllm.v1.request import Request
from vllm.v1.sample.logits_processor import MinPLogitsProcessor

from sgl_vllm.config import Options
from sgl_vllm.jump import part
from sgl_vllm.jump.part import Limits, may_jump, may_open, why_unsupported
from sgl_vllm.jump.short_runs import ShortRuns
from tests.engine.engine import MODEL


def request(name: str = "one", features: Any = None, **options: Any) -> Request:
    grammar = StructuredOutputsParams(regex="a+")
    params = SamplingParams(structured_outputs=grammar)
    for option, value in options.items():
        setattr(params, option, value)
    return Request(name, list(range(40)), params, None, mm_features=features)


def feature(modality: str) -> list[MultiModalFeatureSpec]:
    place = PlaceholderRange(offset=4, length=8)
    return [MultiModalFeatureSpec(None, modality=modality, identifier="one", mm_position=place)]


@pytest.mark.parametrize(
    ("options", "limits", "jumps", "opens"),
    [
        ({}, {}, True, True),
        ({"prompt_logprobs": 0}, {}, True, False),
        ({"repetition_detection": "on"}, {}, True, False),
        ({"stop": ["x"]}, {}, True, True),
        # Where the frontend keeps what comes after a stop string.
        ({"stop": ["x"]}, {"drops_after_stop": False}, False, False),
        ({"logprobs": 1}, {"has_logprobs": False}, False, False),
        ({"presence_penalty": 0.5}, {"draws_by_position": False}, True, True),
        ({"seed": 3, "temperature": 0.0}, {"draws_by_position": False}, True, True),
        ({"seed": 3, "temperature": 1.0}, {"draws_by_position": False}, False, False),
        ({"seed": 3, "temperature": 1.0}, {}, True, True),
        ({"features": feature("image")}, {}, True, True),
        ({"features": feature("prompt_embeds")}, {}, False, False),
    ],
    ids=str,
)
def test_what_a_request_asks_for_decides_whether_it_jumps(options, limits, jumps, opens):
    one = request(**options)
    assert may_jump(one, Limits(**limits)) is jumps
    assert (jumps and may_open(one, Limits(**limits))) is opens


# -- runs too short for a jump beside a step in flight: decoded, in canonical tokens ---------------


def legal(masks: GrammarOutput) -> list[list[int]]:
    """The tokens of each row's bits."""
    rows = np.unpackbits(masks.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")
    return [np.flatnonzero(row).tolist() for row in rows]


def test_only_the_next_token_of_a_run_is_legal_if_it_was() -> None:
    runs, one, other = ShortRuns(), request(), request("other")
    anything = list(range(128))
    for token in (31, 32, 64):  # the last bit of a word, and first ones
        runs.begin(one, [token, 5])
        masks = GrammarOutput(["other", "one", "gone"], np.full((3, 4), -1, np.int32))
        runs.narrow(masks, {"one": one, "other": other})
        assert legal(masks) == [anything, [token], anything]
    runs.begin(one, [31])
    masks = GrammarOutput(["one"], np.array([[0b1010, 0, 0, 0]], np.int32))
    runs.narrow(masks, {"one": one})
    assert legal(masks) == [[1, 3]]
    assert one not in runs


# -- logits processors -----------------------------------------------------------------------------


def test_nothing_jumps_beside_custom_logits_processors(monkeypatch):
    config = AsyncEngineArgs(model=MODEL, max_model_len=256).create_engine_config()
    assert why_unsupported(config, Options()) is None
    for given in ("a.module:Processor", MinPLogitsProcessor):
        monkeypatch.setattr(config.model_config, "logits_processors", [given])
        assert "Processor may change" in str(why_unsupported(config, Options()))
    monkeypatch.undo()
    of_a_package = EntryPoint("mine", "a.package:Processor", "vllm.logits_processors")
    monkeypatch.setattr(part, "entry_points", lambda *, group: [of_a_package])
    assert "a.package:Processor" in str(why_unsupported(config, Options()))
