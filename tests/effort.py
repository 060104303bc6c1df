"""How many random examples the tests of pure parts try.

Owns one number: with `SGL_VLLM_TEST_EFFORT=10` there are ten times as many as in a usual run, which
is to be short. They are other ones in each run, so that many usual runs see as much as a long one.
"""

from __future__ import annotations

import os

_EFFORT = int(os.environ.get("SGL_VLLM_TEST_EFFORT", "1"))


def examples(usual: int) -> int:
    """For `hypothesis.settings(max_examples=...)`."""
    return usual * _EFFORT
