"""`sgl-vllm migrate`: rewrites programs written for SGLang's language."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path
from typing import Annotated

from sgl_vllm.commands.arguments import argument, flag
from sgl_vllm.commands.migration import migrate
from sgl_vllm.commands.terminal import plural, reason_of

DESCRIPTION = """\
Rewrites programs written for SGLang's language so that they import
sgl_vllm.sglang, which has SGLang's names and meanings. Prints the changes as
a diff, and what is left to do by hand. Changes no file without --write.

Besides the imports, it changes the port of RuntimeEndpoint from SGLang's to
vLLM's (30000 to 8000), leaves out chat_template_name, because the server has
its own template, and writes get_model_name() for model_info["model_path"].

examples:
  sgl-vllm migrate program.py
  sgl-vllm migrate --write examples/*.py
"""


def command(
    files: Annotated[list[Path], argument("FILE...", "Python files.")],
    write: Annotated[bool, flag("--write", "Write the changes to the files.")] = False,
) -> int:
    """Returns 1 if a file cannot be read, and changes the others even so."""
    num_changed = num_failed = 0
    for path in files:
        try:
            text = path.read_bytes().decode()
            migrated = migrate(text)
        except (OSError, SyntaxError, ValueError) as error:
            print(f"sgl-vllm: {path} cannot be read as Python: {reason_of(error)}", file=sys.stderr)
            num_failed += 1
            continue
        print(_diff(text, migrated.text, path), end="")
        for remark in migrated.remarks:
            print(f"{path}, {remark}", file=sys.stderr)
        if migrated.text != text:
            num_changed += 1
            if write:
                path.write_bytes(migrated.text.encode())
    done = "changed" if write else "to change (--write changes them)"
    print(f"{plural(num_changed, 'file')} {done}", file=sys.stderr)
    return int(num_failed > 0)


def _diff(before: str, after: str, path: Path) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), str(path), str(path)
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)
