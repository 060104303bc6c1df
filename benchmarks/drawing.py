"""What pictures of measurements have in common. matplotlib is needed to draw, not to import this.

Owns the style, and the message for those who have no matplotlib.
"""

from __future__ import annotations

import importlib.util
from typing import Any

# The same file from the same numbers; text stays text in an SVG.
STYLE: Any = {
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "sgl-vllm",
}


def require_matplotlib(option: str) -> None:
    """Raises ValueError, which says what to do, if the option could not be followed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} needs matplotlib: pip install matplotlib")
