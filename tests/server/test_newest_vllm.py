"""The engine tests that matter most, on the newest supported vLLM.

Downloads that version the first time (0.34 GB). `make versions` runs all tests on all versions.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from sgl_vllm.vllm_api.versions import SUPPORTED_VERSIONS, release_of
from tools.vllm_versions import BUILDS, ROOT

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

TESTS = ("test_block_hashes.py", "test_radix.py", "test_select.py", "test_jump_forward.py")


def test_the_engine_tests_that_matter_most_pass_on_the_newest_vllm() -> None:
    newest = BUILDS[-1].version
    assert release_of(newest)[:2] == SUPPORTED_VERSIONS[1]
    command = [sys.executable, "-m", "tools.vllm_versions", "test", newest, "--only", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"[-5000:]
