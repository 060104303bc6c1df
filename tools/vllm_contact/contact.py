"""What of our code does not fit a vLLM.

`sgl_vllm/vllm_api/probe.py` asks whether vLLM has what we call. This is the other direction. vLLM
calls its own methods as they are defined, so ours have to take what those take:

- each method of ours that overrides or wraps one of vLLM's takes its parameters, and None where
  vLLM's says None;
- it looks at no argument that it only passes on (`*args`, `**kwargs`), whose meaning is vLLM's;
- the stubs have the method, so that mypy and the probe compare it too;
- no other module of vLLM's imports a function that we wrap when it is itself imported, because it
  would keep vLLM's own;
- a class of ours implements every abstract method of its bases.

Reads source only, so any version of vLLM can be checked, an unpacked wheel too.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from sgl_vllm.vllm_api.probe import problem_of
from sgl_vllm.vllm_api.signatures import Function, differences, signature_of
from sgl_vllm.vllm_api.stub_entries import Entry, read_entries
from sgl_vllm.vllm_api.vllm_source import VllmSource, statements
from tools.vllm_contact.ours import FOLDERS, Replacement, Sources, our_classes, replacements


@dataclass(frozen=True)
class Problem:
    """A place where vLLM and our code do not fit: file and line of our function, class or stub,
    what differs, and the hook: vLLM's module and the path in it."""

    where: str
    what: str
    hook: tuple[str, str]

    def __str__(self) -> str:
        return f"{self.where}: {self.hook[1]}: {self.what}"


def contact_problems(vllm: VllmSource, folders: Mapping[str, Path] = FOLDERS) -> list[Problem]:
    """Everything in which a vLLM does not fit our packages. Takes about 2.5 s of CPU time."""
    gc.disable()  # syntax trees are many objects and no garbage: collecting takes half of the time
    try:
        return [*dict.fromkeys(_all_problems(Sources(vllm, folders)))]
    finally:
        gc.enable()


def _all_problems(sources: Sources) -> Iterator[Problem]:
    entries = read_entries()
    for entry in entries:
        if (problem := problem_of(entry, sources)) is not None:
            yield Problem(entry.where, problem, (entry.module, entry.path))
    for module, owner in our_classes(sources):
        for name in sorted(sources.abstract_methods(owner)):
            where = sources.where(module, owner.node)
            base = sources.vllm_ancestry(owner)[0]
            what = f"{owner.name} does not implement {name}"
            yield Problem(where, what, (base.module, base.name))
    found = [*replacements(sources)]
    modules = {entry.path: entry.module for entry in entries}
    for one in found:
        path = one.method if one.owner.is_module else f"{one.owner.name}.{one.method}"
        for what in _problems_of(one, sources, entries):
            hook = modules.get(path, one.owner.module), path
            yield Problem(one.where, f"{one.name}: {what}", hook)
    yield from _early_imports([one for one in found if one.owner.is_module], sources)


def _problems_of(one: Replacement, sources: Sources, entries: list[Entry]) -> Iterator[str]:
    path = f"{one.owner.name}.{one.method}"
    member = sources.member(one.owner, one.method)
    if one.adds:
        if member is not None:
            yield f"is added to a class that has a {path} of its own now"
        return
    if member is None:
        if one.method != "__init__":  # pydantic makes one for its models
            yield f"stands in for {path}, which does not exist"
        return
    if not _is_in_stubs(one, sources, entries):
        yield f"changes {path}, which the stubs do not have"
    stock = member.owner.methods.get(one.method)
    if stock is not None and not (one.method == "__init__" and one.how == "overrides"):
        yield from _rejections(one, stock)
    if _reads_what_it_passes_on(one.function):
        yield f"reads *args or **kwargs, whose meaning is {path}'s to say"


def _rejections(one: Replacement, stock: Function) -> Iterator[str]:
    """Why a call that vLLM's own function takes fails on ours."""
    signature = signature_of(stock, is_method=not one.owner.is_module)
    if "self" in [parameter.name for parameter in signature.positional[:1]]:  # a static method's
        signature = replace(signature, num_positional_only=1)
    ours = one.signature
    if ours.varargs:  # passes on what is given by position, whatever else it takes by name
        required = tuple(parameter for parameter in ours.keyword_only if not parameter.has_default)
        ours = replace(ours, keyword_only=required)
    yield from differences(signature, ours)
    if one.how == "overrides" and ours.is_async and not signature.is_async:
        yield "is a coroutine function, unlike vLLM's"
    nullable = {name for name, says_none in _none_by_parameter(stock).items() if says_none}
    for name, says_none in _none_by_parameter(one.function).items():
        if name in nullable and says_none is False:
            yield f"takes no None as {name!r}"


def _none_by_parameter(function: Function) -> dict[str, bool | None]:
    """By parameter, whether its annotation or default names None; None if it has neither."""
    arguments = function.args
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults]
    found: dict[str, bool | None] = {}
    for one, default in zip(
        [*plain, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True
    ):
        is_vague = one.annotation is None or ast.unparse(one.annotation) in ("Any", "object")
        is_none = isinstance(default, ast.Constant) and default.value is None
        found[one.arg] = is_none or (None if is_vague else _names_none(one.annotation))
    return found


def _names_none(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        node = ast.parse(node.value, mode="eval").body
    if isinstance(node, ast.BinOp):
        return _names_none(node.left) or _names_none(node.right)
    return node is not None and ast.unparse(node).startswith(("None", "Optional["))


def _reads_what_it_passes_on(function: Function) -> bool:
    """Whether a function uses its `*args` or `**kwargs` other than as those of a call."""
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


def _is_in_stubs(one: Replacement, sources: Sources, entries: list[Entry]) -> bool:
    if one.method.startswith("__"):
        return True
    if one.owner.is_module:
        return any(
            (one.owner.module, one.method) == (entry.module, entry.path) for entry in entries
        )
    paths = {f"{base.name}.{one.method}" for base in sources.ancestry(one.owner)}
    return any(entry.path in paths for entry in entries)


def _early_imports(wrapped: list[Replacement], sources: Sources) -> Iterator[Problem]:
    """Where vLLM imports a function of a module at the top level of another one."""
    for path in sorted((sources.root / "vllm").rglob("*.py")) if wrapped else ():
        text = path.read_text()
        for one in wrapped:
            if one.method not in text or one.owner.module not in text:
                continue
            for node in statements(ast.parse(text).body):
                if (
                    isinstance(node, ast.ImportFrom)
                    and node.module == one.owner.module
                    and any(alias.name == one.method for alias in node.names)
                ):
                    importer = f"{path.relative_to(sources.root)}:{node.lineno}"
                    what = f"{one.name}: comes after {importer} has imported {one.method}"
                    yield Problem(one.where, what, (one.owner.module, one.method))
