"""Which parts of the plugin the installed vLLM can carry.

Derived from the stubs: whatever a part calls, overrides or reads must be in vLLM's source, with the
parameters that we use. Neither side is imported. The first question costs about 0.4 s of CPU time
for all parts together (0.05 s for the stubs, the rest to parse vLLM's files); later ones cost
nothing. Whether ours take what vLLM calls *us* with is left to `tools/vllm_contact`.
"""

from __future__ import annotations

import ast
import functools

from sgl_vllm.vllm_api.signatures import differences, signature_of
from sgl_vllm.vllm_api.stub_entries import Entry, Kind, read_entries
from sgl_vllm.vllm_api.vllm_source import SourceClass, VllmSource, installed_source

PARTS = ("radix", "schedule", "fsm", "jump_forward", "select")
"""What `doctor` and the server report on. The stubs name more: options, and what runs outside the
scheduler."""


def missing_hooks(part: str) -> list[str]:
    """What a part needs of the installed vLLM and does not find, such as `BlockPool.touch`."""
    source = installed_source()
    return [] if source is None else missing_in(source, part)


@functools.cache
def _entries() -> tuple[Entry, ...]:
    return tuple(read_entries())


@functools.cache
def missing_in(source: VllmSource, part: str) -> list[str]:
    """The same for any source tree. Not to be changed."""
    return [
        f"{entry.path}{f' ({problem})' if problem != MISSING else ''}"
        for entry in _entries()
        if (not entry.parts or part in entry.parts)
        and (problem := problem_of(entry, source)) is not None
    ]


MISSING = "missing"


def problem_of(entry: Entry, source: VllmSource) -> str | None:
    """Why vLLM does not have an entry of the stubs as it is written there; None if it does."""
    needed = entry.for_release(source.release)
    if needed is None:
        return None
    if not needed.owner:
        return _problem_at_top_level(needed, source)
    owner = source.find_class(needed.module, needed.owner)
    if owner is None:
        return None  # reported once, for the class
    return _problem_of_member(needed, owner, source)


def _problem_at_top_level(entry: Entry, source: VllmSource) -> str | None:
    found = source.find(entry.module, entry.name)
    if found is None:
        return None if source.module(f"{entry.module}.{entry.name}") else MISSING
    _, definition = found
    if entry.kind is Kind.CLASS:
        return _problem_of_class(entry, source)
    if entry.kind is Kind.FUNCTION:
        if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
            return "not a function"
        assert entry.signature is not None
        actual = signature_of(definition, is_method=False)
        return "; ".join(differences(entry.signature, actual)) or None
    return None


def _problem_of_class(entry: Entry, source: VllmSource) -> str | None:
    owner = source.find_class(entry.module, entry.name)
    if owner is None:
        return "not a class"
    if any(one.is_abstract for one in _members_of(entry)):
        known = {one.name for one in _members_of(entry)}
        if unknown := sorted(source.abstract_methods(owner) - known):
            return f"also requires {', '.join(unknown)}"
    names = {one.name for one in source.ancestry(owner)}
    missing = [base for base in entry.bases if base in _classes() and base not in names]
    return f"does not derive from {', '.join(missing)}" if missing else None


@functools.cache
def _classes() -> set[str]:
    return {one.name for one in _entries() if one.kind is Kind.CLASS}


@functools.cache
def _members() -> dict[tuple[str, str], list[Entry]]:
    """By the module and the path of their class."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for one in _entries():
        found.setdefault((one.module, one.owner), []).append(one)
    return found


def _members_of(owner: Entry) -> list[Entry]:
    return _members().get((owner.module, owner.path), [])


def _problem_of_member(entry: Entry, owner: SourceClass, source: VllmSource) -> str | None:
    member = source.member(owner, entry.name)
    if member is None:
        if entry.name != "__init__" or entry.signature is None:
            return MISSING
        # A dataclass or the like: the parameters are its fields.
        missing = [one.name for one in entry.signature if not source.member(owner, one.name)]
        return f"no field {', '.join(missing)}" if missing else None
    if entry.kind is not Kind.FUNCTION:
        is_method = member.signature is not None and member.signature.kind != "property"
        return "a method, not an attribute" if is_method else None
    if member.signature is None:
        return "an attribute, not a method"
    assert entry.signature is not None
    return "; ".join(differences(entry.signature, member.signature)) or None
