"""The models that the soak can play on, and the settings that fit each: one for every layout of KV
caches that vLLM runs on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.engine import mla_model, mtp_models, recurrent_models, window_models
from tests.engine.engine import Engine
from tests.engine.play import LOGPROB_TOLERANCE, NEAR_TIE
from tests.engine.programs import MAX_MODEL_LEN

BFLOAT16_TOLERANCE = 0.024
"""Of log-probabilities, in many requests: stock is as far from itself where it computes a prompt of
186 tokens in chunks of 122, and in one pass."""


@dataclass(frozen=True)
class SoakModel:
    """A model with its weights, and what its engines may be given.

    Attributes:
        engine_args: of every engine of the model.
        block_sizes: to choose from.
        fewest_blocks: of the smallest cache, with blocks of 32 tokens and the smallest chunks, one
            of vLLM's own included; None: what the longest request holds in one group.
        chunk_sizes: of prefill, to choose from.
        is_always_chunked: whether prompts are never computed whole.
        tolerance: of log-probabilities.
        near_tie: answers may part where two logits are as near.
    """

    engine_args: Mapping[str, Any] = field(default_factory=dict)
    block_sizes: tuple[int, ...] = (32, 32, 64, 128)
    fewest_blocks: int | None = None
    chunk_sizes: tuple[int, ...] = (48, 64, 128, 256, 1024)
    is_always_chunked: bool = False
    tolerance: float = LOGPROB_TOLERANCE
    near_tie: float = NEAR_TIE

    def num_fewest_blocks(self, block_size: int) -> int:
        if self.fewest_blocks is not None:
            return self.fewest_blocks
        return MAX_MODEL_LEN // block_size + 1


def _windows(name: str) -> Callable[[Path, pytest.MonkeyPatch], SoakModel]:
    def written(folder: Path, patch: pytest.MonkeyPatch) -> SoakModel:
        return SoakModel(
            engine_args={
                "model": window_models.write_model(name, folder),
                **window_models.ENGINE_ARGS.get(name, {}),
            },
            block_sizes=(32,),
            fewest_blocks=window_models.TINY[name],
            chunk_sizes=(48, 96),
            is_always_chunked=True,  # a longer chunk takes more blocks of a window group
        )

    return written


def _recurrent(name: str) -> Callable[[Path, pytest.MonkeyPatch], SoakModel]:
    model = recurrent_models.MODELS[name]

    def written(folder: Path, patch: pytest.MonkeyPatch) -> SoakModel:
        if model.keeps_state_inside_pass:
            recurrent_models.let_mamba2_keep_states(patch)
        return SoakModel(
            engine_args=model.engine_args(model.write(folder)),
            block_sizes=(32,),  # vLLM makes them longer
            fewest_blocks=model.fewest_blocks,
            chunk_sizes=(model.block_size + 16, 1024),
            is_always_chunked=True,  # vLLM demands it
            tolerance=model.tolerance if model.dtype == "float32" else BFLOAT16_TOLERANCE,
            near_tie=model.rounding,
        )

    return written


def _deepseek_v2(folder: Path, patch: pytest.MonkeyPatch) -> SoakModel:
    mla_model.allow_prefix_caching(patch)
    return SoakModel(
        engine_args=mla_model.engine_args(mla_model.write_model(folder)),
        block_sizes=(mla_model.BLOCK_SIZE,),
    )


def _mtp(kind: str) -> Callable[[Path, pytest.MonkeyPatch], SoakModel]:
    def written(folder: Path, patch: pytest.MonkeyPatch) -> SoakModel:
        mla_model.allow_prefix_caching(patch)
        is_mla = kind == "deepseek_v3"
        return SoakModel(
            engine_args=mtp_models.engine_args(kind, mtp_models.write_model(kind, folder)),
            block_sizes=(mla_model.BLOCK_SIZE if is_mla else 32,),
            fewest_blocks=mtp_models.TINY[kind],
            chunk_sizes=(48, 96),
            is_always_chunked=True,
        )

    return written


MODELS: dict[str, Callable[[Path, pytest.MonkeyPatch], SoakModel]] = {
    "demo": lambda folder, patch: SoakModel(),
    **{name: _windows(name) for name in window_models.CONFIGS},
    **{name: _recurrent(name) for name in recurrent_models.MODELS},
    "deepseek_v2": _deepseek_v2,
    **{kind: _mtp(kind) for kind in mtp_models.CONFIGS},
}
"""By name: writes the model into a new folder, and patches what vLLM lacks to run it here."""

SINCE_0_32 = ("granite4", "exaone_moe")
"""vLLM 0.31 has no CPU kernel for Mamba-2 in float32, and cannot read K-EXAONE's windows."""


@contextmanager
def starting(
    name: str, start: Callable[..., Engine], folder: Path
) -> Iterator[Callable[..., Engine]]:
    """`start`, the fixture, for a model that is written into `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        model = MODELS[name](folder / name, patch)
        yield lambda plugin=None, **more: start(plugin, **{**model.engine_args, **more})
