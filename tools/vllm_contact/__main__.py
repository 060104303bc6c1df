"""List the hooks that no longer fit a vLLM, our files that use them, and the likely new places.

A hook is a name of vLLM's that the plugin uses, overrides or wraps. Only source is read. A missing
hook is looked for by its name, by its body in the installed vLLM, and by the most similar body; if
no body is similar enough, the report says so.

    make next VLLM=vllm-0.34.0.whl               # from: pip download --no-deps vllm==0.34.0
    make next VLLM="../vllm vllm-0.34.0.whl"     # a checkout, then a wheel
    python -m tools.vllm_contact --json ../vllm

Then change our files and the stubs in sgl_vllm/vllm_api/stubs, and run it again. The exit status is
1 while anything does not fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from sgl_vllm.vllm_api.probe import MISSING
from sgl_vllm.vllm_api.stub_entries import read_entries
from sgl_vllm.vllm_api.vllm_source import UNKNOWN_RELEASE, VllmSource, installed_source
from tools.vllm_contact.contact import contact_problems
from tools.vllm_contact.likely import Place, Search
from tools.vllm_contact.ours import FOLDERS, ROOT


@dataclass(frozen=True)
class Moved:
    """A hook that does not fit: `parts` need it (empty if all do), `used_in` are our files with the
    first line that names it, `place` is where it is or is likely to be."""

    module: str
    path: str
    parts: tuple[str, ...]
    problems: tuple[str, ...]
    used_in: tuple[str, ...]
    place: Place | None

    def __str__(self) -> str:
        label = "likely now" if MISSING in self.problems else "still there"
        place, where, why = self.place or ("nothing is like it", "", "")
        more = f" and {len(self.used_in) - 6} more" if len(self.used_in) > 6 else ""
        return (
            f"{self.path} of {self.module}: {'; '.join(self.problems)}\n"
            f"  used in      {', '.join(self.used_in[:6])}{more}\n"
            f"  {label:<11}  {place}" + f"\n               {where}: {why}" * bool(where)
        )


def moved_hooks(vllm: VllmSource) -> list[Moved]:
    """The hooks that do not fit a vLLM, sorted by part."""
    parts_of = {(entry.module, entry.path): entry.parts for entry in read_entries()}
    problems: dict[tuple[str, str], list[str]] = {}
    for problem in contact_problems(vllm):
        is_stub = problem.where.startswith("vllm/")
        what = problem.what if is_stub else f"{problem.what} ({problem.where})"
        problems.setdefault(problem.hook, []).append(what)
    if not problems:
        return []
    search, moved = Search(installed_source() or vllm, vllm), []
    for (module, path), whats in problems.items():
        place = (search.elsewhere if MISSING in whats else search.here)(module, path)
        of_class = parts_of.get((module, path.rpartition(".")[0]), frozenset())
        parts = tuple(sorted(parts_of.get((module, path), of_class)))
        moved.append(Moved(module, path, parts, tuple(whats), _uses(module, path), place))
    return sorted(moved, key=lambda one: one.parts)


def _uses(module: str, path: str) -> tuple[str, ...]:
    """Our files that name both a hook and its class or module, or else the hook alone."""
    owner, _, name = path.rpartition(".")
    named = re.compile(rf"(?:[.\"']|def |\b(?={name}=)){name}\b" if owner else rf"\b{name}\b")
    head = re.compile(rf"\b{owner or module.rpartition('.')[2]}\b")
    found: dict[bool, list[str]] = {True: [], False: []}
    for file in sorted(one for folder in FOLDERS.values() for one in folder.rglob("*.py")):
        text = file.read_text()
        if (match := named.search(text)) is not None:
            line = text.count("\n", 0, match.start()) + 1
            found[bool(head.search(text))].append(f"{file.relative_to(ROOT)}:{line}")
    return tuple(found[True] or found[False])


def report(name: str, vllm: VllmSource, moved: list[Moved]) -> Iterator[str]:
    """Yield a heading, one paragraph per hook grouped by part, and the counts."""
    is_known = vllm.release != UNKNOWN_RELEASE
    yield f"# vLLM {'.'.join(map(str, vllm.release)) if is_known else '(no version)'}: {name}"
    for parts, hooks in itertools.groupby(moved, key=lambda one: one.parts):
        yield "\n\n".join([f"\n## {', '.join(parts) or 'every part'}", *map(str, hooks)])
    places = [one.place for one in moved if MISSING in one.problems]
    yield (
        f"\n{len(moved)} of {len(read_entries())} hooks do not fit: {len(places)} are missing, "
        f"{len(places) - places.count(None)} of them with a likely place; "
        f"{len(moved) - len(places)} have changed.\n"
    )


def source_at(name: str, unpacked: Path) -> VllmSource:
    """The vLLM in a folder, or in a wheel, whose Python files are unpacked.

    Raises:
        ValueError: there is none.
    """
    root = Path(name)
    if zipfile.is_zipfile(root):
        with zipfile.ZipFile(root) as wheel:
            wheel.extractall(unpacked, [one for one in wheel.namelist() if one.endswith(".py")])
        root = unpacked
    if not (root / "vllm" / "__init__.py").is_file():
        raise ValueError(f"no vLLM in {name}: give a wheel, or the folder that has vllm/")
    return VllmSource(root)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.vllm_contact", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("vllm", nargs="*", metavar="FOLDER_OR_WHEEL", help="default: the installed")
    parser.add_argument("--json", action="store_true", help="a list with an object for each vLLM")
    options = parser.parse_args()
    installed = installed_source()
    found = []
    for name in options.vllm or [str(installed.root if installed is not None else Path())]:
        with tempfile.TemporaryDirectory() as unpacked:
            try:
                vllm = source_at(name, Path(unpacked))
            except ValueError as error:
                parser.error(str(error))
            moved = moved_hooks(vllm)
            found.append({"vllm": name, "hooks": [asdict(one) for one in moved]})
            if not options.json:
                print("\n".join(report(name, vllm, moved)), flush=True)
    if options.json:
        print(json.dumps(found, indent=2))
    return int(any(one["hooks"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
