"""Views of a program's state: in a notebook, in a terminal, and on a page.

Owns the public functions. `views/capture.py` takes the picture, and the modules beside it draw it.
Only `why` asks the server. All the others show what there is, also during a run and after a
failure.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, TypeAlias  # Any: groups of any kind of state

from sgl_vllm.lang.group import ProgramGroup
from sgl_vllm.lang.run import Run
from sgl_vllm.lang.state import State
from sgl_vllm.lang.transcript import GenMeta
from sgl_vllm.lang.views.html import fragment_of, page_of
from sgl_vllm.lang.views.svg import fork_tree_svg_of
from sgl_vllm.protocol.scoring import all_answers

if TYPE_CHECKING:
    from rich.console import Console

MAX_AT_ONCE = 8
"""Requests of `why` to the server at a time: its engine answers between two steps."""

Seen: TypeAlias = State | ProgramGroup[Any]


def to_html(state: Seen) -> str:
    """The state as a self-contained HTML fragment, with inline style and without scripts, in light
    or dark colors as the reader's system prefers. Notebooks show this for a state or a group.

    Constant, generated, selected, tool and variable text differ in color and underline. Forced
    text is hatched. Text that the server found in its cache has a shaded background; this is an
    estimate, because the cached share of the prompt's tokens is applied to its characters.
    Branches are shown where they were forked.
    """
    return fragment_of(state._picture())


def to_page(state: Seen, title: str = "A program's run") -> str:
    """`to_html` as a complete page, to be written to a file."""
    return page_of(state._picture(), title)


def fork_tree_svg(state: Seen) -> str:
    """Forks and joins as an ``<svg>`` element: a lane per branch and a block per operation. The
    color and pattern of a block show its kind, and its tooltip shows its text."""
    return fork_tree_svg_of(state._picture())


def show(state: Seen, console: Console | None = None) -> None:
    """Print the state in the terminal, or to `console`. Without color, text is marked with words:
    ``[gen name]...[/gen]``."""
    from rich.console import Console

    from sgl_vllm.lang.views.terminal import TerminalView

    (console or Console(highlight=False)).print(TerminalView(state._picture()))


def why(state: Seen) -> dict[str, int]:
    """Ask the server why prompt tokens of the run's generations were not read from its cache.

    From then on, views of the run show the causes of each named generation. Returns the tokens by
    cause, of all of them together. Empty without the plugin; a server knows its last 1,000
    requests. Waits for nothing but the server's answers: one request for each generation that has
    ended by now. Raises BackendError if the server does not answer.
    """
    run = (state._parent if isinstance(state, ProgramGroup) else state)._stream.run
    background = run.background
    background.wait_for(background.start(_ask_why(run)))
    missed: Counter[str] = Counter()
    for by_cause in run.missed_tokens.values():
        missed.update(by_cause)
    return dict(missed)


async def _ask_why(run: Run) -> None:
    """Add to `run.missed_tokens` what the server knows of the generations that have ended and that
    it was not asked about before."""
    request_ids = [name for name in _request_ids(run) if name not in run.missed_tokens]
    for start in range(0, len(request_ids), MAX_AT_ONCE):
        names = request_ids[start : start + MAX_AT_ONCE]
        answers = await all_answers([run.backend.missed_tokens(name) for name in names])
        run.missed_tokens.update(zip(names, answers, strict=True))


def _request_ids(run: Run) -> list[str]:
    """Of the named generations that have ended, without repetitions."""
    metas = [
        future.result().meta
        for stream in list(run.streams)
        for future in list(stream.variables.values())
        if future.done() and not future.cancelled() and future.exception() is None
    ]
    ids = [meta.request_id for meta in metas if isinstance(meta, GenMeta)]
    return list(dict.fromkeys(name for name in ids if name is not None))
