"""`sgl-vllm tree`: a server's radix tree in a terminal, and its pins.

Owns the drawing. The server's answers are `client`'s.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from typing import Annotated

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from sgl_vllm.commands.arguments import ApiKey, PrintsJson, Url, option, server_at
from sgl_vllm.commands.client import Json, ServerError, SglServer
from sgl_vllm.commands.programs import (
    MEANINGS,
    context_in_words,
    counts_in_words,
    tools_in_words,
    turns_in_words,
)
from sgl_vllm.commands.terminal import age, plural, printable

MAX_CHILDREN = 16
"""Children of one node that are drawn. The others are counted in one line."""
TEXT_CHARACTERS = 48
MAX_PLACES = 4
"""States of one node that are printed, those nearest to its end."""

NOT_IN_TREE = "not in the tree yet"
"""Blocks that running requests use, and that no node holds."""

STYLES = {
    "in use": "blue",
    "pinned": "magenta",
    "evictable": "green",
    NOT_IN_TREE: "bright_black",
    "free": "dim",
}

DESCRIPTION = f"""\
Prints how full a server's prefix cache is, and its radix tree. For each
prefix: its own tokens, its hits (×3), the time since its last use, whether it
is pinned, in use by a running request, or wanted by a waiting one, and, if
the context of an ended request ends there, what its program is doing. In a
browser, open URL/sgl/tree.

{MEANINGS}
With windows or recurrent layers, also: which of its tokens all window layers
keep, after which tokens a recurrent state is kept, and, if that is not all of
its tokens, after how many a hit may end. Counted from the node's first token.

Text of prompts and names of tools are shown only if the server was started
with the option tree_text.

Exit status: 1 if there is no tree.
"""


def command(
    url: Url = None,
    max_nodes: Annotated[
        int | None,
        option(
            "N", "The most nodes to show per engine, nearest to the root (default: 1000).", min=1
        ),
    ] = None,
    watch: Annotated[float | None, option("SECONDS", "Update at this interval.", min=0.01)] = None,
    as_json: PrintsJson = False,
    api_key: ApiKey = None,
) -> int:
    server = server_at(url, api_key)
    console = Console(highlight=False)
    if as_json:
        print(json.dumps(server.tree(max_nodes)))
        return 0
    picture, has_tree = _look(server, max_nodes)
    if watch is None:
        console.print(picture)
        return 0 if has_tree else 1
    with Live(picture, console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(watch)
            try:
                live.update(_look(server, max_nodes)[0], refresh=True)
            except ServerError as error:  # the server may come back
                live.update(Text(f"{error}. Trying again.", "red"), refresh=True)


def _look(server: SglServer, max_nodes: int | None) -> tuple[Group, bool]:
    """The picture, and whether any engine has a tree."""
    answer = server.tree(max_nodes)
    engines = answer["engines"]
    has_tree = [bool(engine) for engine in engines]
    why_off = "" if all(has_tree) else server.why_tree_is_off()
    has_pins = any(engine.get("num_pinned_blocks") for engine in engines)
    return draw(answer, server.pins() if has_pins else [], why_off), any(has_tree)


# -- drawing


def draw(answer: Json, pins: list[Json], why_off: str = "") -> Group:
    """The answer of `GET /v1/sgl/tree` and the pins, engine by engine."""
    engines = answer["engines"]
    parts: list[RenderableType] = []
    for number, engine in enumerate(engines):
        if len(engines) > 1:
            parts.append(Text(f"Engine {number}", style="bold"))
        if "nodes" not in engine:
            parts.append(
                Text(f"The part radix is off: {printable(why_off) or 'see /v1/sgl/stats'}")
            )
            continue
        parts += [_summary(engine), SpaceBar(engine), _space_legend(engine), *_programs(engine)]
        empty = not engine["nodes"] and not engine.get("isolated", {}).get("num_tokens")
        parts.append(Text("Nothing is cached yet.") if empty else draw_nodes(engine))
        if engine["nodes_left_out"]:
            left_out = plural(engine["nodes_left_out"], "node")
            text = f"{left_out} farther from the root not shown: see --max-nodes"
            parts.append(Text(text, "dim"))
    for pin in pins:
        size = f"{plural(pin['num_tokens'], 'token')}, {plural(pin['num_blocks'], 'block')}"
        name, since = printable(str(pin["pin_id"])), (f"  {age(pin['age_s'])}", "dim")
        parts.append(Text.assemble(("pin ", "magenta"), name, f"  {size}", since))
    return Group(*parts)


class SpaceBar:
    """The cache's blocks as a bar, as wide as the terminal, up to 100 columns."""

    def __init__(self, engine: Json) -> None:
        self._shares = {name: blocks for name, blocks in space(engine).items() if blocks > 0}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 100)
        total = sum(self._shares.values())
        line, filled, seen = Text(), 0, 0
        for name, blocks in self._shares.items():
            seen += blocks
            end = max(filled + 1, round(width * seen / total))  # every share is visible
            line.append(("░" if name == "free" else "█") * (end - filled), STYLES[name])
            filled = end
        yield line


def space(engine: Json) -> dict[str, int]:
    """The number of blocks by state."""
    kept = engine["num_protected_blocks"]
    pinned = min(engine["num_pinned_blocks"], kept)
    used = engine["total_blocks"] - engine["free_blocks"]
    return {
        "in use": kept - pinned,
        "pinned": pinned,
        "evictable": engine["num_evictable_blocks"],
        NOT_IN_TREE: max(0, used - engine["num_blocks"]),
        "free": engine["free_blocks"],
    }


def _space_legend(engine: Json) -> Text:
    line = Text()
    for name, blocks in space(engine).items():
        if blocks or name != NOT_IN_TREE:
            line.append(f"{name} ", STYLES[name]).append(f"{blocks:,}  ")
    return line.append(f"of {engine['total_blocks']:,} blocks", "dim")


def _programs(engine: Json) -> list[Text]:
    """Lines about the programs, their tools, and how agents take turns; none that says nothing."""
    programs, admission = engine.get("programs", {}), engine.get("admission", {})
    lines = (
        ("programs: ", counts_in_words(programs)),
        ("in tools: ", tools_in_words(programs)),
        ("", turns_in_words(admission)),
    )
    return [Text(f"{name}{words}") for name, words in lines if words]


def _summary(engine: Json) -> Text:
    tokens, nodes = plural(engine["num_tokens"], "token"), plural(engine["num_nodes"], "node")
    policy, size = engine["policy"].upper(), engine["block_size"]
    return Text(f"{tokens}, {nodes}, evicts by {policy}, blocks of {size} tokens", "bold")


def draw_nodes(engine: Json, max_children: int = MAX_CHILDREN) -> Tree:
    """The nodes, with at most so many children of each, the largest first."""
    nodes = engine["nodes"]
    subtree = [node["num_tokens"] for node in nodes]
    for index in reversed(range(len(nodes))):  # parents come before children
        if nodes[index]["parent"] is not None:
            subtree[nodes[index]["parent"]] += subtree[index]
    children: dict[int | None, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        children[node["parent"]].append(index)

    several = any(node["namespace"] > 0 for node in nodes)
    root = Tree(Text("all prefixes", "dim"), guide_style="dim")
    to_draw: list[tuple[Tree, int | None]] = [(root, None)]
    while to_draw:
        branch, parent = to_draw.pop()
        ordered = sorted(children[parent], key=lambda index: subtree[index], reverse=True)
        for index in ordered[:max_children]:
            label = node_line(nodes[index], show_namespace=several and parent is None)
            to_draw.append((branch.add(label), index))
        if rest := ordered[max_children:]:
            tokens = sum(subtree[index] for index in rest)
            branch.add(Text(f"{len(rest):,} smaller: {plural(tokens, 'token')}", "dim"))
    isolated = engine.get("isolated", {})
    if isolated.get("num_tokens"):
        root.add(
            Text(
                f"isolated: {plural(isolated['namespaces'], 'tenant')}, "
                f"{plural(isolated['num_tokens'], 'token')} in "
                f"{plural(isolated['num_blocks'], 'block')}",
                "bright_black",
            )
        )
    return root


def node_line(node: Json, *, show_namespace: bool = False) -> Text:
    """One node: tokens, hits, age, marks, and the start of its text if the server shows it."""
    line = Text(no_wrap=True, overflow="ellipsis")
    if show_namespace:
        line.append(f"namespace {node['namespace']}: ", "dim")
    line.append(plural(node["num_tokens"], "token"), "bold")
    if node.get("hits"):
        line.append(f"  ×{node['hits']:,}", "yellow")
    if node.get("age_s") is not None:
        line.append(f"  {age(node['age_s'])}", "dim")
    pinned, locked = node.get("num_pinned_blocks", 0), node.get("num_locked_blocks", 0)
    if pinned:
        line.append("  pinned", "magenta")
    if locked > pinned:
        line.append("  in use", "blue")
    if node.get("wanted"):
        line.append("  wanted", "bold yellow")
    if node.get("ended"):
        line.append("  ended", "dim")
    if context := node.get("context"):
        line.append(f"  {context_in_words(context)}", "bright_blue")
    if states := states_of(node):
        line.append(f"  {states}", "cyan")
    if text := printable(node.get("text", ""))[:TEXT_CHARACTERS]:
        line.append(f"  {text}", "italic dim")
    return line


def states_of(node: Json) -> str:
    """After which of a node's tokens a state is kept; empty if the model keeps none."""
    states = node.get("states")
    if states is None:
        return ""
    positions = states["positions"]
    shown = [f"{position:,}" for position in positions[-MAX_PLACES:]]
    if len(shown) < len(positions) or states["left_out"]:
        shown.insert(0, "…")
    noun = "state" if len(positions) == 1 else "states"
    return f"{noun} at {', '.join(shown)}" if shown else "no state"
