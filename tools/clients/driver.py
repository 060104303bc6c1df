"""Runs programs of docs/clients.md in an environment of clients, one after the other.

Each line of JSON on standard input names a client, a server's URL and its key. The answer is a line
of JSON with the output of the page's program and the client's answers in `uses`, or the error.
Clients' own output goes to standard error.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

from tests.pages import blocks_of, printed_by
from tests.server import client_uses

ROOT = Path(__file__).resolve().parents[2]
MODEL_PATH = str(ROOT / "sgl_vllm" / "demo" / "model")
PAGE = ROOT / "docs" / "clients.md"
_COMMAND = re.compile(r"^```sh\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def section_of(client: str) -> str:
    return PAGE.read_text().split(f"\n### {client}\n")[1].split("\n### ")[0]


def answers_of(client: str, url: str, key: str, use: str | None = None) -> dict[str, Any]:
    """The output and the answers of the client, run in a folder of its own."""
    namespace: dict[str, Any] = {"__name__": "page"}
    uses = getattr(client_uses, use or re.sub("[- ]", "_", client))
    section = section_of(client)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        if command := _COMMAND.search(section):
            words = {"SERVER": url, "URL": f"{url}/v1", "KEY": key, "MODEL": "demo"}
            return {"uses": uses(command[1], {"MODEL_PATH": MODEL_PATH, **words})}
        setup, *programs = blocks_of(PAGE)
        program = next(one for one in programs if one.code in section)
        printed_by(setup, namespace, Path("program.py"))
        namespace |= {"URL": f"{url}/v1", "KEY": key}
        printed = printed_by(program, namespace, Path("program.py"))
        return {"printed": printed, "uses": uses(namespace)}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            answer = answers_of(**json.loads(line))
        except BaseException:
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer, default=str), file=answers, flush=True)


if __name__ == "__main__":
    main()
