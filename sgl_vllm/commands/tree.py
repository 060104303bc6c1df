"""A server's radix tree in a terminal, and its pins.

Owns the asking (the routes under `/v1/sgl/`) and the drawing. Knows no vLLM: it works from any
machine that reaches the server. Text of prompts is untrusted: what could steer a terminal is
taken out of it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text
from rich.tree import Tree

MOST_CHILDREN = 16
"""Of one node. Further ones are counted in one line, the smallest first."""
TEXT_CHARACTERS = 48
TIMEOUT_S = 30.0
PIN_TIMEOUT_S = 600.0
"""A pin may have a long prompt to compute behind a queue."""

STYLES = {
    "in use": "blue",
    "pinned": "magenta",
    "evictable": "green",
    "cached": "green",
    "running": "bright_black",
    "free": "dim",
}


class ServerError(Exception):
    """The server could not be asked, or refused; the message is one line for people."""


class NoPluginError(ServerError):
    """It answers, without our routes."""


@dataclass(frozen=True, slots=True)
class SglServer:
    """The plugin's routes of the server at `url` (with or without a final `/v1`)."""

    url: str
    api_key: str | None = None

    def tree(self, max_nodes: int | None = None) -> dict[str, Any]:
        parameters = {} if max_nodes is None else {"max_nodes": max_nodes}
        return self._ask("GET", "tree", params=parameters)

    def why_off(self) -> str:
        """Why the tree is off, as far as the server knows."""
        reason = self.stats().get("parts", {}).get("radix", "on")
        return "no tree" if reason == "on" else str(reason)

    def stats(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        """`GET /v1/sgl/stats`. Raises NoPluginError if the server is stock vLLM."""
        return self._ask("GET", "stats", timeout=timeout_s)

    def metrics(self, timeout_s: float = TIMEOUT_S) -> str:
        """`/metrics`, of stock vLLM too, in Prometheus' text format."""
        answer = self._send("GET", "/metrics", timeout=timeout_s)
        if answer.is_error:
            raise ServerError(f"{self.base} has no /metrics: error {answer.status_code}")
        return answer.text

    def pins(self) -> list[dict[str, Any]]:
        """All engines' pins."""
        return [pin for engine in self._ask("GET", "pins")["engines"] for pin in engine["pins"]]

    def pin(
        self,
        text: str,
        *,
        is_system_prompt: bool = False,
        cache_salt: str | None = None,
        model: str | None = None,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"cache_salt": cache_salt, "model": model}
        if is_system_prompt:
            body["messages"] = [{"role": "system", "content": text}]
        else:
            body["prompt"] = text
        given = {name: value for name, value in body.items() if value is not None}
        return self._ask("POST", "pin", json=given, timeout=PIN_TIMEOUT_S)

    def unpin(self, pin_id: str) -> None:
        self._ask("POST", "unpin", json={"pin_id": pin_id})

    @property
    def base(self) -> str:
        base = self.url if "://" in self.url else f"http://{self.url}"
        return base.rstrip("/").removesuffix("/sgl/tree").removesuffix("/v1")

    def _send(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        options = {"timeout": TIMEOUT_S, "headers": headers, **options}
        try:
            return httpx.request(method, f"{self.base}{path}", **options)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServerError(f"{self.url} is no address: {error}") from None
        except httpx.TransportError as error:
            raise ServerError(
                f"{self.base} does not answer: {str(error) or type(error).__name__}"
            ) from None

    def _ask(self, method: str, route: str, **options: Any) -> dict[str, Any]:
        base = self.base
        answer = self._send(method, f"/v1/sgl/{route}", **options)
        if answer.status_code == 401:
            have = "refuses this API key" if self.api_key else "wants an API key"
            raise ServerError(f"{base} {have}: give the server's as --api-key or in VLLM_API_KEY")
        message = _message_of(answer)
        if answer.status_code == 404 and message in ("Not Found", ""):
            raise NoPluginError(
                f"{base} has no /v1/sgl/{route}: was it started with --plugin sgl_vllm?"
            )
        if answer.is_error:
            raise ServerError(f"{base}: {message or f'error {answer.status_code}'}")
        try:
            content = answer.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ServerError(f"{base} answers, but not as a vLLM server does")
        return content


def _message_of(answer: httpx.Response) -> str:
    """What an error says, in vLLM's form or FastAPI's; "" if it is in neither."""
    if not answer.is_error:
        return ""
    try:
        content = answer.json()
        said = content["error"] if "error" in content else content["detail"]
        said = said["message"] if isinstance(said, dict) else said
    except (ValueError, KeyError, TypeError):
        return ""
    return " ".join(str(said).split())


# -- drawing


def draw(answer: dict[str, Any], pins: list[dict[str, Any]], why_off: str = "") -> Group:
    """Everything of `GET /v1/sgl/tree`; engines of a data-parallel server one below the other."""
    engines = answer["engines"]
    parts: list[Any] = []
    for number, engine in enumerate(engines):
        if len(engines) > 1:
            parts.append(Text(f"Engine {number}", style="bold"))
        if "nodes" not in engine:
            parts.append(Text(f"The part radix is off: {printable(why_off) or 'see stats'}"))
            continue
        parts += [_summary(engine), SpaceBar(engine), _space_legend(engine)]
        empty = not engine["nodes"] and not engine.get("isolated", {}).get("num_tokens")
        parts.append(Text("Nothing is cached yet.") if empty else _tree(engine))
        left_out = engine.get("nodes_left_out", 0)
        if left_out:
            parts.append(
                Text(
                    f"further from the root, {plural(left_out, 'node')} left out: --max-nodes",
                    "dim",
                )
            )
    for pin in pins:
        parts.append(
            Text.assemble(
                ("pin ", "magenta"),
                printable(str(pin["pin_id"])),
                f"  {plural(pin['num_tokens'], 'token')}, {plural(pin['num_blocks'], 'block')}",
                (f"  {age(pin['age_s'])}" if "age_s" in pin else "", "dim"),
            )
        )
    return Group(*parts)


class SpaceBar:
    """The cache's blocks as one line, as wide as the terminal but at most 100 columns."""

    def __init__(self, engine: dict[str, Any]) -> None:
        self._shares = {name: blocks for name, blocks in space(engine).items() if blocks > 0}

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 100)
        total = sum(self._shares.values())
        line, filled, seen = Text(), 0, 0
        for name, blocks in self._shares.items():
            seen += blocks
            end = max(filled + 1, round(width * seen / total))  # whatever there is can be seen
            line.append(("░" if name == "free" else "█") * (end - filled), STYLES[name])
            filled = end
        yield line


def space(engine: dict[str, Any]) -> dict[str, int]:
    """Blocks by what they are; what an engine does not tell is not there."""
    held = engine.get("num_blocks", 0)
    shares: dict[str, int] = {}
    if "num_protected_blocks" in engine:
        kept = engine["num_protected_blocks"]
        pinned = min(engine.get("num_pinned_blocks", 0), kept)
        shares |= {"in use": kept - pinned, "pinned": pinned}
        shares["evictable"] = engine.get("num_evictable_blocks", held - kept)
    else:
        shares["cached"] = held
    if "total_blocks" in engine and "free_blocks" in engine:
        shares["running"] = max(0, engine["total_blocks"] - engine["free_blocks"] - held)
        shares["free"] = engine["free_blocks"]
    return shares


def _space_legend(engine: dict[str, Any]) -> Text:
    line = Text()
    for name, blocks in space(engine).items():
        if blocks or name != "running":
            line.append(f"{name} ", STYLES[name]).append(f"{blocks:,}  ")
    total = f"of {engine['total_blocks']:,} blocks" if "total_blocks" in engine else "(blocks)"
    return line.append(total, "dim")


def _summary(engine: dict[str, Any]) -> Text:
    facts = [plural(engine["num_tokens"], "token"), plural(engine["num_nodes"], "node")]
    if "policy" in engine:
        facts.append(f"evicts by {engine['policy'].upper()}")
    if "block_size" in engine:
        facts.append(f"blocks of {engine['block_size']} tokens")
    return Text(", ".join(facts), "bold")


def _tree(engine: dict[str, Any]) -> Tree:
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
    waiting: list[tuple[Tree, int | None]] = [(root, None)]
    while waiting:
        branch, parent = waiting.pop()
        ordered = sorted(children[parent], key=lambda index: subtree[index], reverse=True)
        for index in ordered[:MOST_CHILDREN]:
            label = node_line(nodes[index], show_namespace=several and parent is None)
            waiting.append((branch.add(label), index))
        if rest := ordered[MOST_CHILDREN:]:
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


def node_line(node: dict[str, Any], *, show_namespace: bool = False) -> Text:
    """One node: tokens, hits, age, marks, and the beginning of its text if the server shows it."""
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
    if text := printable(node.get("text", ""))[:TEXT_CHARACTERS]:
        line.append(f"  {text}", "italic dim")
    return line


def printable(text: str) -> str:
    """`text` on one line, without what could steer a terminal or turn the direction of a line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def age(seconds: float) -> str:
    if seconds < 1:
        return "now"
    for unit, length_s, most in (("s", 1, 100), ("min", 60, 100), ("h", 3600, 48)):
        if seconds < most * length_s:
            return f"{seconds / length_s:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"
