"""What a forward pass costs: the simulator's linear model, and its fit to measured passes.

Owns `CostModel`, what of a pass it looks at (`Batch`), the fit, and the JSON that
`benchmarks.calibrate` writes and `benchmarks.simulate --cost-model` reads. Pure: no vLLM; measuring
is `benchmarks.calibrate`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True, slots=True)
class CostModel:
    """What a forward pass costs, in seconds: a sum of four terms, each linear.

    The defaults are round numbers for a dense model of 8 billion bfloat16 weights on one H100.

    Attributes:
        step_s: once a pass. Reading 16 GB of weights at 3.35 TB/s takes 4.8 ms; launches the rest.
        prefill_token_s: each token of a request that computes several: 16 GFLOP at half of the
            machine's 990 TFLOP/s.
        decode_token_s: each request that computes one token: sampling, and the compute that
            reading the weights does not hide.
        context_token_s: each earlier token of each request in the pass, whose 131 kB of keys and
            values are read.
    """

    step_s: float = 6e-3
    prefill_token_s: float = 32e-6
    decode_token_s: float = 15e-6
    context_token_s: float = 40e-9

    def seconds(self, *, steps: float, prefill: float, decode: float, context: float) -> float:
        """For so many passes, prefill tokens, decode tokens and context tokens in all."""
        return (
            steps * self.step_s
            + prefill * self.prefill_token_s
            + decode * self.decode_token_s
            + context * self.context_token_s
        )

    def batch_s(self, batch: Batch) -> float:
        """For one pass."""
        return self.seconds(
            steps=1, prefill=batch.prefill, decode=batch.decode, context=batch.context
        )

    @classmethod
    def from_json(cls, path: Path) -> CostModel:
        """From what `benchmarks.calibrate --json` wrote, or any JSON object with such a part.

        Raises:
            OSError: there is no such file.
            ValueError: it holds no cost model.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            values = json.loads(path.read_text())["cost_model"]
            cost = cls(**{name: float(values[name]) for name in names})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f'{path} is no cost model: expected {{"cost_model": {{{", ".join(names)}}}}}, '
                f"as benchmarks.calibrate --json writes it ({error!r})"
            ) from error
        if not all(math.isfinite(value) and value >= 0 for value in dataclasses.astuple(cost)):
            raise ValueError(f"{path}: a coefficient is below 0 or not finite: {cost}")
        return cost


@dataclass(frozen=True, slots=True)
class Batch:
    """What of a pass the cost model looks at, in tokens.

    Attributes:
        prefill: of requests that compute several tokens in this pass.
        decode: of requests that compute one.
        context: computed before this pass, of all requests in it.
    """

    prefill: int
    decode: int
    context: int

    @classmethod
    def of(cls, requests: Iterable[tuple[int, int]]) -> Batch:
        """From each request's tokens: (computed before the pass, computed in it)."""
        prefill = decode = context = 0
        for num_before, num_new in requests:
            context += num_before
            if num_new > 1:
                prefill += num_new
            else:
                decode += num_new
        return cls(prefill, decode, context)


@dataclass(frozen=True, slots=True)
class Pass:
    """A batch and how long it took, in seconds."""

    batch: Batch
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A cost model and how well it tells the passes that it comes from.

    Attributes:
        relative_error_p50, relative_error_p90: of |predicted - measured| / measured.
        r_squared: the share of the measured times' variance that it explains, in seconds: the
            longest passes decide it.
    """

    cost: CostModel
    relative_error_p50: float
    relative_error_p90: float
    r_squared: float
    num_passes: int


def fit(passes: Sequence[Pass]) -> Fit:
    """The non-negative coefficients with the least sum of squared *relative* errors.

    Relative, because passes differ by a factor of hundreds, and a simulated second is made of many
    short ones. Batches must differ in prefill, decode and context independently.

    Raises:
        ValueError: fewer passes than coefficients, or their batches do not tell the coefficients
            apart.
    """
    batches = [one.batch for one in passes]
    features = np.array([(1, b.prefill, b.decode, b.context) for b in batches], dtype=float)
    seconds = np.array([one.seconds for one in passes])
    if len(passes) < 4 or np.linalg.matrix_rank(features / features.max(axis=0).clip(1)) < 4:
        raise ValueError(f"{len(passes)} passes are too few, or too much alike, for a fit")
    cost = CostModel(*nonnegative_least_squares(features / seconds[:, None], np.ones(len(passes))))
    predicted = np.array([cost.batch_s(batch) for batch in batches])
    errors = sorted(np.abs(predicted - seconds) / seconds)
    variance = float(((seconds - seconds.mean()) ** 2).sum())
    return Fit(
        cost=cost,
        relative_error_p50=float(statistics.median(errors)),
        relative_error_p90=float(errors[math.ceil(0.9 * len(errors)) - 1]),
        r_squared=1 - float(((predicted - seconds) ** 2).sum()) / variance if variance else 1.0,
        num_passes=len(passes),
    )


def nonnegative_least_squares(matrix: np.ndarray, right: np.ndarray) -> list[float]:
    """x >= 0 with the least |matrix x - right|; `matrix` has shape (m, n), m >= n, and full rank.

    Exact, for few columns: the solution is the unconstrained one over the columns where it is above
    0, so all 2**n sets of columns are tried.
    """
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / scale
    num_columns = matrix.shape[1]
    best, least = np.zeros(num_columns), float(np.linalg.norm(right))
    for size in range(1, num_columns + 1):
        for columns in itertools.combinations(range(num_columns), size):
            found, *_ = np.linalg.lstsq(scaled[:, columns], right, rcond=None)
            if (found < 0).any():
                continue
            solution = np.zeros(num_columns)
            solution[list(columns)] = found
            error = float(np.linalg.norm(scaled @ solution - right))
            if error < least:
                best, least = solution, error
    return [float(value) for value in best / scale]
