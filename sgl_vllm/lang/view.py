"""Looking at a program's state: in a notebook, in a terminal, on a page, while it runs.

Owns the functions that people call; what there is to see is told by `views/picture.py` and drawn by
what is beside it. Nothing here waits for
a run but `live`: a view in the middle of a run, or of one that has failed, shows what there is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from sgl_vllm.lang.state import ProgramGroup, State
from sgl_vllm.lang.views.html import fragment_of, page_of
from sgl_vllm.lang.views.live import follow_in_notebook, follow_in_terminal, runs_in_notebook
from sgl_vllm.lang.views.picture import picture_of
from sgl_vllm.lang.views.svg import fork_tree_svg_of
from sgl_vllm.lang.views.terminal import TerminalView

if TYPE_CHECKING:
    from rich.console import Console

Seen: TypeAlias = State | ProgramGroup[Any]


def to_html(state: Seen) -> str:
    """The state as a fragment of HTML that stands by itself: style inline, no script, light or
    dark as the reader's system is. This is what a notebook shows of a state or a fork's group.

    Constant, generated, selected, tool and variable text are told apart by colour and by line;
    forced text is hatched; what the server found cached is on a shade (an estimate: the cached
    share of the prompt's tokens, taken of its characters). Branches stand where they were forked.
    """
    return fragment_of(picture_of(state))


def to_page(state: Seen, title: str = "A program's run") -> str:
    """`to_html` as a whole page, for a file."""
    return page_of(picture_of(state), title)


def to_rich(state: Seen) -> TerminalView:
    """What rich prints of the state, as it is now."""
    return TerminalView(picture_of(state))


def fork_tree_svg(state: Seen) -> str:
    """Fork and join as an ``<svg>`` element: a lane per branch, a block per operation, its kind by
    colour and pattern, its text when the pointer is on it."""
    return fork_tree_svg_of(picture_of(state))


def show(state: Seen, console: Console | None = None) -> None:
    """Print the state in the terminal, or to `console`. Without colour the marks are words:
    ``[gen name]...[/gen]``."""
    from rich.console import Console

    (console or Console(highlight=False)).print(to_rich(state))


def live(state: State, console: Console | None = None) -> None:
    """Show the state while it runs, all branches included, until the run has ended.

    For ``state = program.run(..., stream=True)``. Draws in a notebook's output if there is one,
    otherwise in the terminal (or `console`), at most 8 times a second and only when something
    has changed. Blocks until the end, and does not raise what has failed: it shows that.
    """
    if console is None and runs_in_notebook():
        follow_in_notebook(state)
    else:
        follow_in_terminal(state, console)
