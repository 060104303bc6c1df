"""What the parts rely on in vLLM."""

import pytest

from sgl_vllm.vllm_api.probe import PARTS, missing_hooks


@pytest.mark.parametrize("part", [*PARTS, "rank_routing"])
def test_the_installed_vllm_has_all_that_a_part_needs(part):
    assert missing_hooks(part) == []
