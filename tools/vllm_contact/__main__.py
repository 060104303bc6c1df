"""`python -m tools.vllm_contact [FOLDER]`: what of our code does not fit a vLLM, the installed one
or the one unpacked in a folder. The exit status is 1 if anything does not."""

from __future__ import annotations

import sys
from pathlib import Path

from sgl_vllm.vllm_api.vllm_source import VllmSource, installed_source
from tools.vllm_contact.contact import contact_problems


def main() -> int:
    vllm = VllmSource(Path(sys.argv[1])) if sys.argv[1:] else installed_source()
    if vllm is None:
        print("vLLM is not installed here.", file=sys.stderr)
        return 1
    problems = contact_problems(vllm)
    for problem in problems:
        print(problem)
    print(f"vLLM {'.'.join(map(str, vllm.release))}: {len(problems)} problems")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
