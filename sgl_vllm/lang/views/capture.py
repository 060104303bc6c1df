"""Takes a picture of a run: snapshots of a stream and its branches, as values for drawing.

Owns where each piece of text comes from and what is known about it. Waits for nothing, so a
picture can be taken at any time and from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from typing import TypeAlias

from sgl_vllm.lang.errors import ProgramCancelled, ProgramError
from sgl_vllm.lang.ir import Role, Value
from sgl_vllm.lang.operations import JoinRecord
from sgl_vllm.lang.stream import Snapshot, Stream
from sgl_vllm.lang.transcript import GenMeta, SelectMeta, Span, Variable
from sgl_vllm.lang.usage import Usage, cached_in_words
from sgl_vllm.lang.views.picture import (
    MAX_DEPTH,
    DrawnBlock,
    DrawnBranch,
    DrawnFork,
    DrawnJoin,
    DrawnTurn,
    Picture,
    Piece,
    Slice,
    Status,
)
from sgl_vllm.protocol.causes import MEANINGS

Interval: TypeAlias = tuple[int, int]
"""Half-open, in characters of the prompt."""


def picture_of(stream: Stream) -> Picture:
    """A stream with all its branches, as they are now."""
    run = stream.run
    return Picture(_branch(stream), run.usage, _failure_of(stream), run.program)


def picture_of_group(parent: Stream, members: Sequence[Stream]) -> Picture:
    """The branches of one fork of `parent`, as they are now: `members`, and those that
    `ProgramGroup.first` discarded."""
    group = next((group for group in _groups(parent) if members[0] in group), list(members))
    fork = DrawnFork(tuple(_branch(stream) for stream in group))
    label = " ".join(filter(None, [parent.where, f"fork({len(group)})"]))
    status: Status = "running" if any(b.status == "running" for b in fork.branches) else "done"
    root, run = DrawnBranch(label, status, (fork,), 0), parent.run
    return Picture(root, run.usage, program=run.program)


def streams_below(stream: Stream) -> list[Stream]:
    """`stream` and all its branches, at any depth."""
    found = [stream]
    for each in found:
        found += list(each.children)
    return found


def _failure_of(stream: Stream) -> str | None:
    function_done = stream.run.function_done
    if stream.parent is not None or function_done is None or not function_done.done():
        return None
    error = function_done.exception()
    if error is None or isinstance(error, ProgramError):
        return None
    return f"the program raised {type(error).__name__}: {error}"


def _groups(stream: Stream) -> list[list[Stream]]:
    """A stream's branches, grouped by fork. The first branch of each fork has the number 0."""
    groups: list[list[Stream]] = []
    for child in list(stream.children):
        if child.where.endswith("[0]") or not groups:
            groups.append([])
        groups[-1].append(child)
    return groups


def _branch(stream: Stream, depth: int = 0) -> DrawnBranch:
    num_inherited = stream.num_inherited_spans  # read first: the snapshot then has these spans
    joins = list(stream.joins)
    groups = _groups(stream)
    num_deeper = len(streams_below(stream)) - 1 if depth >= MAX_DEPTH else 0
    snapshot = stream.snapshot()
    status = _status(stream, snapshot)
    error = None if snapshot.error is None else _error_of(stream, snapshot.error)
    busy = snapshot.busy if status == "running" and snapshot.busy != "read" else None
    if num_inherited is None:
        return DrawnBranch(stream.where, status, (), 0, busy, error)
    spans = snapshot.transcript.spans
    text = snapshot.transcript.text
    begin = spans[num_inherited - 1].end if num_inherited else 0
    shaded = _cached_intervals(stream, begin, groups, spans[num_inherited:])
    known = _known_by_usage(stream)
    markers = _markers([] if num_deeper else groups, joins, num_inherited, len(spans), depth)

    inherited = spans[num_inherited - 1] if num_inherited else None
    entries: list[_Entry] = []
    for index in range(num_inherited, len(spans) + 1):
        entries += [(None, block) for block in markers.get(index, ())]
        if index < len(spans):
            span = spans[index]
            piece = _piece(span, text, shaded, known.get(id(span.usage)), stream.run.missed_tokens)
            entries.append(((span.turn, span.role), piece))
    partial = snapshot.partial
    if partial:
        facts = ("still being generated",)
        piece = Piece("gen", (Slice(partial),), snapshot.partial_name, facts, unfinished=True)
        transcript = snapshot.transcript
        entries.append(((len(transcript.messages), transcript.role), piece))
    blocks = tuple(_grouped(entries, inherited))
    num_chars = len(text) + len(partial) - begin
    return DrawnBranch(stream.where, status, blocks, num_chars, busy, error, num_deeper)


_Entry: TypeAlias = tuple[tuple[int, Role | None] | None, Piece | DrawnBlock]
"""A piece with its turn, or a fork or join with None."""


def _grouped(entries: Iterable[_Entry], inherited: Span | None) -> Iterator[DrawnBlock]:
    """Neighboring pieces of a turn as one block. After a fork or join, and in a branch after
    `inherited`, the last span of its parent, a turn may continue."""
    last = None if inherited is None else (inherited.turn, inherited.role)
    for turn, group in groupby(entries, key=itemgetter(0)):
        parts: list[Value] = [part for _, part in group]
        if turn is None:
            yield from parts
        else:
            yield DrawnTurn(turn[1], tuple(parts), turn == last and turn[1] is not None)
            last = turn


def _status(stream: Stream, snapshot: Snapshot) -> Status:
    if stream.discarded:
        return "discarded"
    if snapshot.error is not None:
        return "failed"
    if stream.num_inherited_spans is None:
        return "waiting"
    has_returned = stream.run.has_returned or stream.parent is not None
    return "done" if stream.is_idle and has_returned else "running"


def _error_of(stream: Stream, error: ProgramError) -> str:
    if stream.discarded and isinstance(error.__cause__, ProgramCancelled):
        return str(error.__cause__)
    for branch in streams_below(stream)[1:]:
        if branch.snapshot().error is error and branch.num_inherited_spans is not None:
            return f"stopped by the error of {branch.where}"
    return str(error)


def _markers(
    groups: list[list[Stream]], joins: Sequence[JoinRecord], first: int, last: int, depth: int
) -> dict[int, list[DrawnBlock]]:
    """The forks and joins of a stream, by the number of spans before them."""
    # By place, fork, and join after fork.
    placed: list[tuple[tuple[int, int, int], DrawnBlock]] = []
    for number, group in enumerate(groups):
        forked_after = group[0].num_inherited_spans
        place = last if forked_after is None else min(max(forked_after, first), last)
        placed.append(
            ((place, number, 0), DrawnFork(tuple(_branch(child, depth + 1) for child in group)))
        )
    gathered: dict[tuple[int, int], DrawnJoin] = {}  # a join of several variables is shown as one
    for joined in joins:
        place = min(max(joined.num_spans, first), last)
        number = next((n for n, g in enumerate(groups) if joined.branches[0] in g), len(groups))
        labels = tuple(branch.where for branch in joined.branches)
        if joined.name is None:
            placed.append(((place, number, 1), DrawnJoin(labels, (), as_text=True)))
            continue
        so_far = gathered.get((place, number), DrawnJoin((), (), as_text=False))
        gathered[place, number] = DrawnJoin(
            tuple(dict.fromkeys((*so_far.labels, *labels))),
            (*so_far.names, joined.name),
            as_text=False,
        )
    placed += [((place, number, 1), join) for (place, number), join in gathered.items()]
    markers: dict[int, list[DrawnBlock]] = {}
    for (place, _, _), block in sorted(placed, key=lambda entry: entry[0]):
        markers.setdefault(place, []).append(block)
    return markers


def _known_by_usage(stream: Stream) -> dict[int, Variable]:
    """The variables of gens and selects, by the identity of their request's usage, which is also
    that of their span."""
    known = {}
    for future in list(stream.variables.values()):
        if future.done() and future.exception() is None:
            variable: Variable = future.result()
            if isinstance(variable.meta, (GenMeta, SelectMeta)):
                known[id(variable.meta.usage)] = variable
    return known


def _piece(
    span: Span,
    text: str,
    shaded: Sequence[Interval],
    variable: Variable | None,
    missed: Mapping[str, Mapping[str, int]],
) -> Piece:
    slices = tuple(_slices(span, text, shaded))
    facts = [*_facts(span.usage, variable, missed)]
    if span.media is not None and span.media.num_frames is not None:
        facts.append(f"{span.media.num_frames} frames")
    if span.media is not None and span.media.media_type is not None:
        facts.append(span.media.media_type)
    return Piece(span.kind, slices, span.name, tuple(facts), span.media)


def _facts(
    usage: Usage | None, variable: Variable | None, missed: Mapping[str, Mapping[str, int]]
) -> Iterable[str]:
    meta = variable.meta if variable is not None else None
    if isinstance(meta, GenMeta):
        if len(meta.finish_reason) > 1:
            yield f"the first of {len(meta.finish_reason)}"
        yield f"finish: {', '.join(dict.fromkeys(meta.finish_reason))}"
    if variable is not None and isinstance(variable.reasoning, str):
        yield f"reasoning: {len(variable.reasoning):,} characters"
    if isinstance(meta, SelectMeta):
        if not meta.scores:
            yield "of: " + ", ".join(map(repr, meta.choices))
        for choice, score in zip(meta.choices, meta.scores, strict=False):
            yield f"{choice!r}: {score:.3f}"
    if usage is None:
        return
    if usage.saved_calls:
        yield "no call: an earlier one generated this ahead"
    if usage.completion_tokens and not isinstance(meta, SelectMeta):
        forced = f", {usage.forced_tokens:,} of them forced" if usage.forced_tokens else ""
        yield f"generated: {usage.completion_tokens:,} tokens{forced}"
    if usage.prompt_tokens:
        cached = usage.cached_prompt_tokens
        told = "cached: unknown" if cached is None else f"{cached:,} {cached_in_words(usage)}"
        yield f"prompt: {usage.prompt_tokens:,} tokens, {told}"
    if isinstance(meta, GenMeta) and meta.request_id is not None:
        for cause, num_tokens in missed.get(meta.request_id, {}).items():
            yield f"computed: {num_tokens:,}, {MEANINGS.get(cause, cause)}"


def _slices(span: Span, text: str, shaded: Sequence[Interval]) -> Iterable[Slice]:
    cuts = {span.start, span.end}
    for begin, end in (*span.forced, *shaded):
        cuts |= {max(span.start, min(begin, span.end)), max(span.start, min(end, span.end))}
    slices: list[Slice] = []
    for begin, end in pairwise(sorted(cuts)):
        part = Slice(
            text[begin:end],
            any(a <= begin and end <= b for a, b in span.forced),
            any(a <= begin and end <= b for a, b in shaded),
        )
        if slices and (slices[-1].forced, slices[-1].cached) == (part.forced, part.cached):
            slices[-1] = replace(part, text=slices[-1].text + part.text)
        else:
            slices.append(part)
    return slices


def _cached_end(position: int, usage: Usage) -> int:
    """Where the cached part of a request's prompt ends, in characters. The prompt itself ends at
    `position`. 0 if the server does not tell how many tokens were cached."""
    return round(position * min(1.0, (usage.cached_prompt_tokens or 0) / usage.prompt_tokens))


def _first_cached_end(stream: Stream, depth: int = 0) -> int | None:
    """Where the cached part of a branch's first request ends; None if it has made none."""
    num_inherited = stream.num_inherited_spans
    if num_inherited is None or depth > MAX_DEPTH:
        return None
    for span in stream.snapshot().transcript.spans[num_inherited:]:
        if span.usage is not None and span.usage.prompt_tokens:
            return _cached_end(span.start, span.usage)
    ends = [_first_cached_end(child, depth + 1) for child in list(stream.children)]
    return min((end for end in ends if end is not None), default=None)


def _cached_intervals(
    stream: Stream, begin: int, groups: list[list[Stream]], spans: Sequence[Span]
) -> list[Interval]:
    """The text that was in the server's cache when a request of this prompt first sent it::

        text      |constant      |gen    |constant |gen  |
        1st call  |ccccccc.......^
        2nd call  |              |ccccccccccc......^        c: cached, of what this call added
        shaded     ^^^^^^^         ^^^^^^^^^^^

    For text after the last request, the first requests of all branches count.
    """
    requests = [
        (span.start, _cached_end(span.start, span.usage))
        for span in spans
        if span.usage is not None and span.usage.prompt_tokens
    ]
    for group in groups:
        if group[0].num_inherited_spans is not None:
            ends = [end for child in group if (end := _first_cached_end(child)) is not None]
            if ends:
                requests.append((group[0].forked_at, min(ends)))
    shaded = []
    for position, cached_end in sorted(requests):
        end = min(cached_end, position)
        if end > begin:
            shaded.append((begin, end))
        begin = max(begin, position)
    return shaded
