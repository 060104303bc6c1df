"""When an answer on a GPU counts as stock's: how near a tie must be, and how often one may part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from tests.engine import play
from tests.gpu.configuration import on_cpu
from tests.gpu.conftest import CONFIGURATION

Token = TypeVar("Token")

IS_PLAIN = CONFIGURATION.numerics == "plain" and not on_cpu()
TIE_OF_BATCHES = 0.5
"""Where sums depend on the batch: between logits of about 20, of which bfloat16 keeps eighths."""
NEAR_TIE = TIE_OF_BATCHES if IS_PLAIN else play.NEAR_TIE
LOGPROB_TOLERANCE = 0.25 if IS_PLAIN else play.LOGPROB_TOLERANCE


def near_tie(num_of_stock: int) -> float:
    """Between logits, given how many of stock's answers part from its own in other batches."""
    return TIE_OF_BATCHES if num_of_stock else NEAR_TIE


def most_parted(num_of_stock: int, num_compared: int) -> float:
    """How many answers may part from stock's."""
    return 1.5 * num_of_stock + (0.02 if num_of_stock else 0.002) * num_compared


def first_difference(one: Sequence[Token], other: Sequence[Token]) -> int | None:
    """The index; None if answers of the same length are equal."""
    pairs = zip(one, other, strict=True)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), None)
