"""A planner for code movement that asks a model for the order.

Owns the question to the model, and reading its answer. Which pieces can be moved, and checking the
order, is the job of `reordering.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from sgl_vllm.lang.api import gen
from sgl_vllm.lang.backends.base import Backend
from sgl_vllm.lang.program import function
from sgl_vllm.lang.reordering import Planner, PromptPiece, ReorderError
from sgl_vllm.lang.state import State


def model_planner(backend: Backend | None = None, max_new_tokens: int = 512) -> Planner:
    """A planner that asks a model for the order of a prompt's pieces.

    The model answers with the pieces' numbers as JSON, constrained by a schema. Raises
    ReorderError if the answer is not a permutation of them. `backend` is by default that of
    `set_default_backend`.
    """

    def plan(pieces: Sequence[PromptPiece]) -> Sequence[int]:
        listing = "\n".join(
            f"{piece.number} ({'constant' if piece.is_constant else 'varies'}): "
            f"{json.dumps(piece.text, ensure_ascii=False)}"
            for piece in pieces
        )
        state = _ask_for_order.run(
            listing=listing,
            count=len(pieces),
            backend=backend,
            max_new_tokens=max_new_tokens,
            temperature=0.0,
        )
        try:
            order = json.loads(state["order"])["order"]
            if not isinstance(order, list):
                raise TypeError("the order is not a list")
        except (ValueError, KeyError, TypeError) as error:
            raise ReorderError(f"the model's answer {state['order']!r} has no order") from error
        return order

    return plan


@function
def _ask_for_order(s: State, listing: str, count: int) -> None:
    number = {"type": "integer", "minimum": 0, "maximum": count - 1}
    order = {"type": "array", "items": number, "minItems": count, "maxItems": count}
    schema = {"type": "object", "properties": {"order": order}, "required": ["order"]}
    s.user(
        "A prompt is made of the numbered pieces below. Some are constant, the others vary from "
        "call to call. Reorder them so that constant pieces come as early as possible while the "
        "prompt keeps its meaning and its generations keep what they need before them. Answer "
        f'with JSON of the form {{"order": [...]}}, which has every number from 0 to {count - 1} '
        f"exactly once.\n\n{listing}"
    )
    s.assistant(gen("order", json_schema=schema))
