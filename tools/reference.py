"""Writes docs/reference.md from the signatures and docstrings of the language.

Owns the page's order and form; its content is in the code. The group of a public name follows from
its module, so a new name needs no change here. ``make reference`` runs it.

    python tools/reference.py [--check]
"""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.generated import main_writing  # noqa: E402

PAGE = ROOT / "docs" / "reference.md"
MAX_LINE = 96

HEAD = """\
# Reference

Every public name of `import sgl_vllm as sgl`, generated from signatures and docstrings by
`make reference`. For an introduction, read the [guide](guide.md).

"""

EXPRESSIONS, STATE, PROGRAMS = "Expressions", "The prompt and its state", "Programs"
GROUPS_OF_FORKS, BACKENDS, VIEWS = "Groups of branches", "Backends", "Views and graphs"
TYPES, ERRORS, MORE = "Types", "Errors", "More"
ORDER = (EXPRESSIONS, STATE, GROUPS_OF_FORKS, PROGRAMS, BACKENDS, VIEWS, TYPES, ERRORS, MORE)

# Per group, prefixes of "module.name" below sgl_vllm.lang; the first match counts.
PLACES = {
    GROUPS_OF_FORKS: ("group.",),
    STATE: ("state.",),
    TYPES: ("primitives.tools.", "backends.requests.", "usage.", "media.", "transcript."),
    EXPRESSIONS: ("api.", "media_api.", "choices.", "primitives."),
    PROGRAMS: ("program.", "settings.", "planner."),
    ERRORS: ("errors.",),
    BACKENDS: ("backends.",),
    VIEWS: ("view", "graph", "trace"),
}

# Special methods that are shown, because they are how the objects are used.
OPERATORS = {
    "__iadd__": "{self} += value",
    "__getitem__": "{self}[{0}]",
    "__setitem__": "{self}[{0}] = {1}",
    "__contains__": "{0} in {self}",
    "__call__": "{self}(...)",
}


def group_of(name: str, value: Any) -> str:
    kind = value if isinstance(value, type) or inspect.isfunction(value) else type(value)
    if isinstance(value, type) and issubclass(value, BaseException):
        return ERRORS
    place = f"{kind.__module__.removeprefix('sgl_vllm.lang.')}.{kind.__name__}"
    if place.startswith("backends.base.Backend"):
        return BACKENDS
    return next((group for group, starts in PLACES.items() if place.startswith(starts)), MORE)


def annotation_text(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else str(annotation)


def parameter_text(parameter: inspect.Parameter) -> str:
    stars = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}
    text = stars.get(parameter.kind.name, "") + parameter.name
    is_typed = parameter.annotation is not parameter.empty
    if is_typed:
        text += f": {annotation_text(parameter.annotation)}"
    if parameter.default is not parameter.empty:
        default = getattr(parameter.default, "__name__", None) or repr(parameter.default)
        text += f" = {default}" if is_typed else f"={default}"
    return text


def options_of(parameter: inspect.Parameter, function: Any) -> dict[str, Any]:
    """The keywords that ``**options: Unpack[...]`` stands for."""
    named = re.fullmatch(r"Unpack\[(.*)\]", str(parameter.annotation))
    return inspect.unwrap(function).__globals__[named[1]].__annotations__ if named else {}


def pieces_of(parameter: inspect.Parameter, function: Any) -> list[str]:
    options = options_of(parameter, function)
    return [f"{name}: {kind.__forward_arg__} = ..." for name, kind in options.items()] or [
        parameter_text(parameter)
    ]


def signature_text(name: str, function: Any, *, is_method: bool = False) -> str:
    """On one line if it fits, otherwise with a line per parameter."""
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())[is_method:]
    pieces = [piece for one in parameters for piece in pieces_of(one, function)]
    kinds = [parameter.kind for parameter in parameters]
    by_name = [i for i, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY]
    by_name += [i for i, one in enumerate(parameters) if options_of(one, function)]
    if by_name and inspect.Parameter.VAR_POSITIONAL not in kinds:
        pieces.insert(by_name[0], "*")
    if by_position := kinds.count(inspect.Parameter.POSITIONAL_ONLY):
        pieces.insert(by_position, "/")
    returned = signature.return_annotation
    end = ")"
    if returned is not signature.empty and not isinstance(function, type):
        end += f" -> {annotation_text(returned)}"
    line = f"{name}({', '.join(pieces)}{end}"
    if len(line) <= MAX_LINE:
        return line
    return "\n".join([f"{name}(", *(f"    {piece}," for piece in pieces), end])


def doc_text(value: Any) -> str:
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.getdoc(value) or "")


def code(text: str) -> str:
    return f"```py\n{text}\n```\n"


def members_of(owner: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order of the source, the base classes' first.

    What several classes have in common is shown once: at `ProgramState`, `Program` and `Backend`.
    """
    import sgl_vllm

    if issubclass(owner, sgl_vllm.Backend) and owner is not sgl_vllm.Backend:
        return
    of_its_own = (sgl_vllm.AsyncProgramState, sgl_vllm.CompiledProgram)
    bases = [owner] if owner in of_its_own else reversed(owner.__mro__)
    seen: dict[str, Any] = {}
    for base in bases:
        if not base.__module__.startswith("sgl_vllm"):
            continue
        for name, value in vars(base).items():
            if isinstance(value, property | classmethod) or inspect.isfunction(value):
                seen[name] = value
    for name, value in seen.items():
        if (not name.startswith("_") or name in OPERATORS) and doc_text(value):
            yield name, value


def member_lines(owner: type, name: str, value: Any) -> Iterator[str]:
    names = {
        "Program": "program",
        "ProgramWithOptions": "program.with_options(...)",
        "CompiledProgram": "compiled",
        "ProgramGroup": "forks",
    }
    me = names.get(owner.__name__, "s" if "State" in owner.__name__ else owner.__name__.lower())
    if isinstance(value, property):
        assert value.fget is not None
        yield code(
            f"{me}.{name}: {annotation_text(inspect.signature(value.fget).return_annotation)}"
        )
    elif name in OPERATORS:
        arguments = list(inspect.signature(value).parameters)[1:]
        yield code(OPERATORS[name].format(*arguments, self=me))
    else:
        function = inspect.unwrap(value.__func__ if isinstance(value, classmethod) else value)
        prefix = "await " if inspect.iscoroutinefunction(function) else ""
        yield code(prefix + signature_text(f"{me}.{name}", function, is_method=True))
    yield doc_text(value) + "\n"


def entry_lines(name: str, value: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    if isinstance(value, type):
        if value.__name__ != name:
            yield f"Another name for `{value.__name__}`.\n"
            return
        if "Program" not in name and not issubclass(value, BaseException):
            yield code(signature_text(name, value))
        yield doc_text(value) + "\n"
        for member, its_value in members_of(value):
            yield from member_lines(value, member, its_value)
    elif inspect.isfunction(value):
        yield code(signature_text(name, value))
        yield doc_text(value) + "\n"
    else:
        yield doc_text(type(value)) + "\n"


def page_text() -> str:
    import sgl_vllm

    grouped: dict[str, list[str]] = defaultdict(list)
    for name in sorted(sgl_vllm.__all__, key=lambda name: (name.islower(), name.lower())):
        value = getattr(sgl_vllm, name)
        if not inspect.ismodule(value):
            grouped[group_of(name, value)].append(name)
    groups = [group for group in ORDER if group in grouped]
    lines = [HEAD]
    for group in groups:
        links = ", ".join(f"[`{name}`](#{name.lower()})" for name in grouped[group])
        lines.append(f"- [{group}](#{group.lower().replace(' ', '-')}): {links}\n")
    lines.append("\n")
    for group in groups:
        lines.append(f"## {group}\n\n")
        for name in grouped[group]:
            lines += [f"{line}\n" for line in entry_lines(name, getattr(sgl_vllm, name))]
    return "".join(lines).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.exit(main_writing("make reference", lambda: {PAGE: page_text()}))
