"""Whether vLLM still calls our code in a way that our code accepts.

`probe.py` asks whether vLLM has what we call. This is the other direction: for each method of ours
that overrides or wraps one of vLLM's,

- it takes the parameters of vLLM's own method,
- it takes the number and the names of the arguments at every call in vLLM's source,
- where it wraps a function of a module, no other module of vLLM's imports the function when it is
  itself imported, because it would keep vLLM's own,
- where vLLM says that an argument may be None, our annotation allows None,
- it looks at no argument that it only passes on (`*args`, `**kwargs`), whose meaning is vLLM's;

and a class of ours implements every abstract method of its base. Reads source only, so any version
of vLLM can be checked, an unpacked wheel too. Takes about 5 s of CPU time: a test runs it, not the
server.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sgl_vllm.vllm_api.call_sites import CallSites
from sgl_vllm.vllm_api.overrides import How, OurSource, Replacement, Subclass
from sgl_vllm.vllm_api.probe import problem_of
from sgl_vllm.vllm_api.signatures import (
    Argument,
    Function,
    allows_none,
    is_none,
    rejections,
    signature_of,
)
from sgl_vllm.vllm_api.stub_entries import Entry, read_entries
from sgl_vllm.vllm_api.vllm_source import VllmSource

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Problem:
    """A place where vLLM and our code do not fit.

    Attributes:
        vllm: file and line of vLLM's source.
        ours: file and line of our function, class or stub.
        what: what differs, in a few words.
    """

    vllm: str
    ours: str
    what: str

    def __str__(self) -> str:
        return f"{self.vllm}: {self.what} ({self.ours})"


def our_folders() -> dict[str, Path]:
    """Our code by package name. In a checkout the kernels have a folder of their own."""
    folders = {"sgl_vllm": PACKAGE}
    beside = PACKAGE.parent / "kernels"
    if beside.is_dir():
        folders["sgl_vllm.kernels"] = beside
    return folders


def contact_problems(
    source: VllmSource, folders: Mapping[str, Path] | None = None
) -> list[Problem]:
    """Everything in which a vLLM does not fit our code. Takes about 5 s of CPU time.

    Args:
        source: the vLLM to check.
        folders: our packages by name; by default, this one.

    Raises:
        UnknownTarget: what one of our patches changes cannot be told from the source.
    """
    was_enabled = gc.isenabled()
    gc.disable()  # syntax trees are many objects and no garbage: collecting takes most of the time
    try:
        return [*dict.fromkeys(_all_problems(source, folders or our_folders()))]
    finally:
        if was_enabled:
            gc.enable()


def _all_problems(source: VllmSource, folders: Mapping[str, Path]) -> Iterator[Problem]:
    ours = OurSource(source, folders)
    entries = read_entries()
    replacements = [*ours.replacements()]
    sites = CallSites(
        source,
        {one.method for one in replacements if one.how is not How.ADDS},
        {one.owner.name for one in replacements if one.method == "__init__"}
        | {one.method for one in replacements if one.owner.is_module},
    )
    yield from _missing(entries, source)
    for subclass in ours.subclasses():
        yield from _not_implemented(subclass, source)
    for one in replacements:
        yield from _problems_of(one, source, sites, entries)


def _missing(entries: list[Entry], source: VllmSource) -> Iterator[Problem]:
    for entry in entries:
        problem = problem_of(entry, source)
        if problem is not None:
            yield Problem(_module_path(entry.module), entry.where, f"{entry.path}: {problem}")


def _not_implemented(subclass: Subclass, source: VllmSource) -> Iterator[Problem]:
    for base in subclass.bases:
        for name in sorted(source.abstract_methods(base) - subclass.methods):
            where = _where_in_vllm(base.module, base.node, source)
            yield Problem(
                where, subclass.where, f"{subclass.name} does not implement {base.name}.{name}"
            )


def _problems_of(
    one: Replacement, source: VllmSource, sites: CallSites, entries: list[Entry]
) -> Iterator[Problem]:
    path = f"{one.owner.name}.{one.method}"
    here = _where_in_vllm(one.owner.module, one.owner.node, source)
    member = source.member(one.owner, one.method)
    if one.how is How.ADDS:
        if member is not None:
            yield Problem(here, one.where, f"vLLM has a {path} of its own now")
        return
    if member is None:
        if one.method == "__init__":
            return
        yield Problem(here, one.where, f"there is no {path} that {one.name} could stand in for")
        return
    if not _is_in_stubs(one, source, entries):
        yield Problem(here, one.where, f"the stubs do not have {path}, which {one.name} changes")
    stock = member.owner.methods.get(one.method)
    if stock is not None:
        where = _where_in_vllm(member.owner.module, stock, source)
        for what in dict.fromkeys(_of_definition(one, stock)):
            yield Problem(where, one.where, f"{one.name} {what}")
    for where in sites.early_imports_of(one):
        yield Problem(where, one.where, f"{path} is imported before {one.name} can replace it")
    for call in sites.calls_of(one):
        for what in rejections(one.signature, call.arguments, is_complete=call.is_complete):
            yield Problem(call.where, one.where, f"{one.name} {what}")
    if _reads_what_it_passes_on(one.function):
        yield Problem(
            here, one.where, f"{one.name} reads *args or **kwargs, whose meaning is {path}'s to say"
        )


def _of_definition(one: Replacement, stock: Function) -> Iterator[str]:
    """Why a call that vLLM's own method takes fails on ours."""
    signature = signature_of(stock, is_method=not one.owner.is_module)
    if signature.kind != one.signature.kind:
        yield f"is not a {signature.kind or 'plain method'}, as vLLM's is"
    if signature.is_async != one.signature.is_async and one.how is How.OVERRIDES:
        yield f"is {'not ' if signature.is_async else ''}a coroutine function, unlike vLLM's"
    if one.method == "__init__":
        return  # may take other arguments than its base; how vLLM constructs it counts
    none = _named_none(stock)
    by_position = [Argument(None, none[one.name]) for one in signature.positional]
    by_name = [Argument(one.name, none[one.name]) for one in signature.keyword_only]
    can_be_named = [
        Argument(parameter.name, False)
        for parameter in signature.positional[signature.num_positional_only :]
        if parameter.name != "self"  # of a static method that asks for it
    ]
    fewest = [
        Argument(parameter.name if parameter in signature.keyword_only else None, False)
        for parameter in signature
        if not parameter.has_default
    ]
    yield from rejections(one.signature, [*by_position, *by_name])
    yield from rejections(one.signature, fewest)
    yield from rejections(one.signature, can_be_named, is_complete=False)


def _named_none(function: Function) -> dict[str, bool]:
    """By parameter, whether its annotation or default names None."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    num_required = len(plain) - len(arguments.defaults)
    defaults = [*[None] * num_required, *arguments.defaults, *arguments.kw_defaults]
    return {
        one.arg: _names_none(one.annotation) or is_none(default)
        for one, default in zip([*plain, *arguments.kwonlyargs], defaults, strict=True)
    }


def _names_none(annotation: ast.expr | None) -> bool:
    if annotation is None or ast.unparse(annotation) in ("Any", "object"):
        return False
    return allows_none(annotation)


def _reads_what_it_passes_on(function: Function) -> bool:
    """Whether a function uses its `*args` or `**kwargs` other than as `*args` and `**kwargs` of a
    call."""
    arguments = function.args
    names = {one.arg for one in (arguments.vararg, arguments.kwarg) if one is not None}
    passed_on: set[ast.expr] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            passed_on.update(arg.value for arg in node.args if isinstance(arg, ast.Starred))
            passed_on.update(keyword.value for keyword in node.keywords if keyword.arg is None)
    return any(
        isinstance(node, ast.Name) and node.id in names and node not in passed_on
        for node in ast.walk(function)
    )


def _is_in_stubs(one: Replacement, source: VllmSource, entries: list[Entry]) -> bool:
    if one.method.startswith("__"):
        return True
    if one.owner.is_module:
        return any(
            (one.owner.module, one.method) == (entry.module, entry.path) for entry in entries
        )
    paths = {f"{base.name}.{one.method}" for base in source.ancestry(one.owner)}
    return any(entry.path in paths for entry in entries)


def _where_in_vllm(module: str, node: ast.stmt, source: VllmSource) -> str:
    """File and line. A definition that was parsed by itself counts its lines from its own first."""
    found = source.module(module)
    assert found is not None
    name = getattr(node, "name", "")
    path = found.path.relative_to(source.root)
    for number, line in enumerate(found.text.splitlines(), 1):
        words = line.replace("(", " ").replace(":", " ").split()
        if name in words[1:3] and words[0] in ("class", "def", "async"):
            return f"{path}:{number}"
    return str(path)


def _module_path(module: str) -> str:
    return module.replace(".", "/")
