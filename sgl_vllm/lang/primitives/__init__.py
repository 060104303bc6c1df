"""What programs are often made of: tool loops, votes, judges, map and reduce, and retries.

Each is an expression that writes the prompt with gen, select, fork and tool, as a program would.
"""

from sgl_vllm.lang.primitives.agent import agent
from sgl_vllm.lang.primitives.contest import best_of, vote
from sgl_vllm.lang.primitives.judge import judge
from sgl_vllm.lang.primitives.map_reduce import map_reduce
from sgl_vllm.lang.primitives.retry_until import retry_until
from sgl_vllm.lang.primitives.tools import ToolCall

PRIMITIVES = ("agent", "best_of", "judge", "map_reduce", "retry_until", "vote")
"""The functions that make these expressions, by name."""

__all__ = [
    "PRIMITIVES",
    "ToolCall",
    "agent",
    "best_of",
    "judge",
    "map_reduce",
    "retry_until",
    "vote",
]
