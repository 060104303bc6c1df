"""What the tests of several benchmarks need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sgl_vllm.demo import MODEL_PATH

if TYPE_CHECKING:
    from benchmarks.ab.workloads.base import Vocabulary


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    """The demo model's."""
    from benchmarks.ab.workloads.base import Vocabulary

    return Vocabulary.of(MODEL_PATH)
