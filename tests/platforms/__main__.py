"""Runs what matters most of tests/engine on pairs of model runner and scheduling that vLLM does not
choose on a CPU: `make test-platforms`. With `--all` first, as in `make soak`, on every pair, and
more of it. The other arguments go to pytest.

Owns which files run where. They are those that run a model; the others see the same everywhere.
test_self_check.py is not among them: with `make test` its engines are on v1-async already.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ENGINE_TESTS = Path(__file__).parents[1] / "engine"

# The longest first, because `make` has pytest-xdist hand files out in this order: both workers end
# together.
IN_CI = {
    "v1-async": ("jump_pressure", "jump_forward"),
    "v2-async": (
        *("programs", "json_passes", "jump_forward", "jump_pressure", "jump_graphs", "radix"),
        *("jump_images", "recurrent_drafts"),
    ),
}
"""On a GPU, vLLM chooses v2-async."""

ALL = {
    "v1-async": (
        *("programs", "speculation", "approximate_reuse", "jump_pressure", "json_passes"),
        *("jump_forward", "radix", "jump_images"),
    ),
    "v2-sync": ("speculation", "jump_forward", "radix", "recurrent_drafts"),
    "v2-async": (
        *("recurrent_models", "programs", "speculation", "approximate_reuse", "jump_pressure"),
        *("json_passes", "jump_forward", "jump_graphs", "radix", "jump_images"),
        "recurrent_drafts",
    ),
}


def main() -> int:
    """The exit status: 1 if a test of any platform fails."""
    arguments = sys.argv[1:]
    is_all = arguments[:1] == ["--all"]
    files = ALL if is_all else IN_CI
    failed = []
    for platform, names in files.items():
        command = [sys.executable, "-m", "pytest"]
        command += ["-p", "tests.platforms.plugin", "--vllm-platform", platform]
        command += ["-m", "not nightly" if is_all else "not slow and not nightly"]
        command += ["--durations", "10", "-o", "timeout=300", *arguments[is_all:]]
        command += [str(ENGINE_TESTS / f"test_{name}.py") for name in names]
        if subprocess.run(command, cwd=ENGINE_TESTS.parents[1], check=False).returncode != 0:
            failed.append(platform)
    print(f"failed on {', '.join(failed)}" if failed else f"passed on {', '.join(files)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
