"""Draws a program's state as HTML: a fragment for a notebook, and a page.

Owns the HTML and its style. The fragment includes its style, limited to a class of its own, and no
script. Text of prompts and models is untrusted: all of it goes through `escaped`, and media are
shown only from http(s) URLs, and from ``data:`` URLs of their own kind.

The kinds of text also differ without color: each has its own kind of underline, and its variable's
name in front. Forced text is hatched and italic. Cached text has a shaded background and a line
above it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sgl_vllm.lang.backends.base import usage_facts
from sgl_vllm.lang.media import Media
from sgl_vllm.lang.views import timings
from sgl_vllm.lang.views.picture import (
    Block,
    Branch,
    Fork,
    Join,
    Picture,
    Piece,
    Slice,
    Turn,
    escaped,
    join_line,
)
from sgl_vllm.lang.views.svg import MAX_LANES, fork_tree_svg_of

ELIDE_FROM_CHARS = 2000
"""The middle of longer constant text is folded."""
KEPT_CHARS = 600
"""How much of it is shown at either end."""
MAX_FOLDED_CHARS = 50_000
"""How much of the middle can be unfolded. The rest is only counted."""
MAX_OPEN_LANES = 12
"""The picture of forks and joins is folded if it has more lanes."""
MAX_OPEN_BRANCHES = 6
"""In a fork of more branches, those that are done are folded."""
STYLE = """
.sgl-view {
  --surface: #ffffff; --ink: #16191f; --soft: #5a6272; --line: #d9dde4; --page: #f4f5f7;
  --gen: #0f766e; --select: #7e22ce; --tool: #b45309; --variable: #1d4ed8; --bad: #b91c1c;
  --media: #be185d;
  --cached: #e3e7ee; --cached-line: #98a2b3; --tint: 13%;
  color-scheme: light dark; background: var(--surface); color: var(--ink); padding: 14px 16px;
  border: 1px solid var(--line); border-radius: 11px; max-width: 1100px; text-align: left;
  font: 14px/1.65 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
@media (prefers-color-scheme: dark) {
  .sgl-view {
    --surface: #191d24; --ink: #e8eaee; --soft: #9aa3b2; --line: #303744; --page: #101318;
    --gen: #2cc5b5; --select: #c99bff; --tool: #f0a03c; --variable: #82aaff; --bad: #ff7a70;
    --media: #f472b6;
    --cached: #2d3440; --cached-line: #6b778c; --tint: 20%;
  }
}
.sgl-view * { box-sizing: border-box; }
.sgl-view .sgl-facts, .sgl-view .sgl-legend {
  display: flex; flex-wrap: wrap; gap: 3px 18px; margin: 0; padding: 0; list-style: none;
}
.sgl-view .sgl-facts { font-variant-numeric: tabular-nums; }
.sgl-view .sgl-facts li, .sgl-view .sgl-legend li {
  margin: 0; list-style: none; color: var(--soft);
}
.sgl-view .sgl-facts strong { color: var(--ink); font-weight: 600; }
.sgl-view .sgl-legend {
  margin-top: 12px; padding-top: 8px; border-top: 1px solid var(--line); font-size: 12px;
}
.sgl-view .sgl-text {
  white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; padding: 5px 0;
  font: 13px/1.75 ui-monospace, "SF Mono", Menlo, Consolas, monospace;
}
.sgl-view .sgl-turn { border-left: 3px solid var(--line); padding-left: 11px; margin: 9px 0; }
.sgl-view .sgl-turn[data-role="user"] { border-left: 3px double var(--soft); }
.sgl-view .sgl-turn[data-role="assistant"] { border-left-color: var(--gen); }
.sgl-view .sgl-turn[data-role="system"] { border-left: 3px dotted var(--soft); }
.sgl-view .sgl-role {
  font-size: 11px; font-weight: 600; color: var(--soft); text-transform: uppercase;
  letter-spacing: .05em;
}
.sgl-view .sgl-piece { unicode-bidi: isolate; }
.sgl-view .sgl-slice {
  --hue: transparent; -webkit-box-decoration-break: clone; box-decoration-break: clone;
  border-radius: 2px; padding: 1px 0;
  background-color: color-mix(in srgb, var(--hue) var(--tint), transparent);
  text-decoration: underline 1.5px var(--hue); text-underline-offset: 4px;
  text-decoration-skip-ink: none;
}
.sgl-view .sgl-cached {
  background-color: color-mix(in srgb, var(--hue) var(--tint), var(--cached));
  box-shadow: inset 0 1.5px 0 var(--cached-line);
}
.sgl-view .sgl-text-kind.sgl-slice { background-color: transparent; text-decoration: none; }
.sgl-view .sgl-text-kind.sgl-cached { background-color: var(--cached); }
.sgl-view .sgl-gen-kind { --hue: var(--gen); }
.sgl-view .sgl-select-kind { --hue: var(--select); text-decoration-style: double; }
.sgl-view .sgl-tool-kind { --hue: var(--tool); text-decoration-style: dashed; }
.sgl-view .sgl-variable-kind { --hue: var(--variable); text-decoration-style: dotted; }
.sgl-view .sgl-media-kind { --hue: var(--media); text-decoration-style: wavy; }
.sgl-view .sgl-forced {
  font-style: italic; background-image: repeating-linear-gradient(135deg,
    color-mix(in srgb, var(--hue) 42%, transparent) 0 1.5px, transparent 1.5px 6px);
}
.sgl-view .sgl-name {
  --hue: var(--soft); user-select: none; -webkit-user-select: none; cursor: help;
  font: 600 10.5px/1.3 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: var(--hue);
  border: 1px solid color-mix(in srgb, var(--hue) 55%, transparent); border-radius: 4px;
  padding: 0 4px; margin: 0 3px 0 1px; white-space: nowrap; display: inline-block;
  max-width: 20em; overflow: hidden; text-overflow: ellipsis; vertical-align: -2px;
}
.sgl-view .sgl-gen-kind.sgl-name { --hue: var(--gen); }
.sgl-view .sgl-select-kind.sgl-name { --hue: var(--select); }
.sgl-view .sgl-tool-kind.sgl-name { --hue: var(--tool); }
.sgl-view .sgl-variable-kind.sgl-name { --hue: var(--variable); }
.sgl-view .sgl-media-kind.sgl-name { --hue: var(--media); }
.sgl-view .sgl-note, .sgl-view .sgl-fold > summary { color: var(--soft); font-size: 12px; }
.sgl-view .sgl-note { user-select: none; -webkit-user-select: none; }
.sgl-view details > summary { cursor: pointer; }
.sgl-view :focus-visible { outline: 2px solid var(--variable); outline-offset: 2px; }
.sgl-view .sgl-fold { display: inline; }
.sgl-view .sgl-fold > summary {
  display: inline-block; border: 1px dashed var(--soft); border-radius: 6px; padding: 0 7px;
  margin: 2px 5px; font-family: system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
.sgl-view .sgl-fork {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(min(270px, 100%), 1fr));
  gap: 8px; align-items: start; margin: 7px 0; padding-left: 11px;
  border-left: 2px solid var(--soft);
}
.sgl-view .sgl-branch {
  background: var(--surface); border: 1px solid var(--line); border-radius: 8px;
  padding: 4px 11px; margin: 0; min-width: 0;
}
.sgl-view .sgl-branch > summary { font-size: 12px; overflow-wrap: anywhere; }
.sgl-view .sgl-branch > summary b { font-weight: 600; }
.sgl-view .sgl-branch[data-status="discarded"] { background: var(--page); border-style: dashed; }
.sgl-view .sgl-branch[data-status="discarded"] > :not(summary) {
  opacity: .55; filter: grayscale(1);
}
.sgl-view .sgl-branch[data-status="discarded"] > summary b { text-decoration: line-through; }
.sgl-view .sgl-branch[data-status="failed"] { border-color: var(--bad); }
.sgl-view .sgl-join { color: var(--soft); font-size: 12px; margin: 5px 0; }
.sgl-view .sgl-error {
  color: var(--bad); border: 1px solid var(--bad); border-left-width: 4px; border-radius: 6px;
  padding: 5px 10px; margin: 7px 0; white-space: pre-wrap; overflow-wrap: anywhere;
}
.sgl-view .sgl-media {
  max-width: 180px; max-height: 140px; border: 1px solid var(--line); border-radius: 6px;
  vertical-align: middle; margin: 3px; display: inline-block; background: var(--page);
}
.sgl-view audio.sgl-media { width: 280px; max-width: 100%; height: 34px; border-radius: 17px; }
.sgl-view .sgl-lanes { margin: 6px 0; }
.sgl-view .sgl-lanes > summary { font-size: 12px; color: var(--soft); }
.sgl-view .sgl-lanes > div { overflow-x: auto; }
@media print { .sgl-view { border: 0; } }
"""

_LABELS = {
    "gen": "generated",
    "select": "selected",
    "tool": "tool",
    "variable": "variable",
    "media": "media",
    "text": "constant",
}


def fragment_of(picture: Picture) -> str:
    """A self-contained fragment."""
    lanes = ""
    if picture.root.forks:
        opened = " open" * (len(picture.all_branches) <= MAX_OPEN_LANES)
        lanes = (
            f'<details class="sgl-lanes"{opened}><summary>forks and joins as a picture</summary>'
            f"<div>{fork_tree_svg_of(picture)}</div></details>"
        )
    failure = "" if picture.failure is None else _error(picture.failure)
    return (
        f'<div class="sgl-view"><style>{STYLE}{timings.STYLE}</style>'
        f"{timings.heading_of(picture)}{_usage_line(picture)}{timings.timings_of(picture)}{lanes}"
        f"{_branch_content(picture.root)}{failure}"
        f"{_legend(picture)}</div>"
    )


def page_of(picture: Picture, title: str) -> str:
    """A complete page with the fragment."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}</title>\n"
        '<link rel="icon" href="data:,">\n'
        "<style>body { margin: 0; padding: 20px clamp(12px, 3vw, 36px); background: #f4f5f7; "
        "color: #16191f; }\n"
        "@media (prefers-color-scheme: dark) { body { background: #101318; color: #e8eaee; } }\n"
        "h1 { max-width: 1100px; margin: 0 auto 14px; overflow-wrap: anywhere;\n"
        "  font: 600 20px/1.3 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif; }\n"
        "body > .sgl-view { margin: 0 auto; }</style>\n"
        f"</head>\n<body>\n<h1>{escaped(title)}</h1>\n{fragment_of(picture)}\n</body>\n</html>\n"
    )


def _usage_line(picture: Picture) -> str:
    items = [
        f"<li><strong>{number:,}</strong> {name}</li>"
        for name, number in usage_facts(picture.usage)
    ]
    return f'<ul class="sgl-facts" aria-label="usage">{"".join(items)}</ul>'


def _branch_content(branch: Branch) -> str:
    parts = [_block(block) for block in branch.blocks]
    if branch.num_deeper:
        parts.append(f'<div class="sgl-note">{branch.num_deeper:,} branches below</div>')
    if branch.busy is not None:
        parts.append(f'<div class="sgl-note">running: {escaped(branch.busy)} …</div>')
    if branch.error is not None:
        if branch.status == "discarded":
            parts.append(f'<div class="sgl-note">{escaped(branch.error)}</div>')
        else:
            parts.append(_error(branch.error))
    if not parts:
        nothing = "not started" if branch.status == "waiting" else "nothing written"
        parts.append(f'<div class="sgl-note">{nothing} yet</div>')
    return "".join(parts)


def _error(message: str) -> str:
    return f'<div class="sgl-error" role="alert">✗ {escaped(message)}</div>'


def _block(block: Block) -> str:
    match block:
        case Turn(role, pieces, is_continued):
            content = "".join(map(_piece, pieces))
            if role is None:
                return f'<div class="sgl-text">{content}</div>'
            label = f"{role} (continued)" if is_continued else role
            return (
                f'<div class="sgl-turn" data-role="{escaped(role)}">'
                f'<div class="sgl-role">{escaped(label)}</div>'
                f'<div class="sgl-text">{content}</div></div>'
            )
        case Fork(branches):
            shown = "".join(
                _branch(branch, is_open=_is_open(branch, len(branches)))
                for branch in branches[:MAX_LANES]
            )
            rest = len(branches) - MAX_LANES
            if rest > 0:
                shown += f'<div class="sgl-note">and {rest:,} more branches</div>'
            return f'<div class="sgl-fork" role="group" aria-label="branches">{shown}</div>'
        case Join():
            return f'<div class="sgl-join">{escaped(join_line(block))}</div>'


def _is_open(branch: Branch, num_branches: int) -> bool:
    if branch.status == "discarded":
        return False
    return num_branches <= MAX_OPEN_BRANCHES or branch.status in ("failed", "running")


def _branch(branch: Branch, *, is_open: bool) -> str:
    opened = " open" if is_open else ""
    return (
        f'<details class="sgl-branch" data-status="{branch.status}"{opened}>'
        f"<summary><b>{escaped(branch.label)}</b> "
        f'<span class="sgl-note">{branch.status}, {branch.num_chars:,} characters</span></summary>'
        f"{_branch_content(branch)}</details>"
    )


def _piece(piece: Piece) -> str:
    kind = _LABELS[piece.kind]
    called = f" {piece.name}" if piece.name else ""
    tooltip = escaped("\n".join((kind + called, *piece.facts)))
    label = ""
    if piece.name or piece.kind not in ("text", "media"):
        shown = (piece.name or kind) + (" …" if piece.unfinished else "")
        name_class = f"sgl-name sgl-{piece.kind}-kind"
        label = f'<span class="{name_class}" title="{tooltip}">{escaped(shown)}</span>'
    if piece.kind == "text" and len(piece.text) > ELIDE_FROM_CHARS:
        return f'<span class="sgl-piece">{_folded(piece)}</span>'
    title = "" if piece.kind == "text" else f' title="{tooltip}"'
    media = "" if piece.media is None else _media(piece.media, tooltip)
    slices = "".join(_slice(piece.kind, part) for part in piece.slices if part.text)
    return f'<span class="sgl-piece"{title}>{label}{media}{slices}</span>'


def _slice(kind: str, part: Slice) -> str:
    marks = f"sgl-slice sgl-{kind}-kind"
    marks += " sgl-forced" * part.forced + " sgl-cached" * part.cached
    return f'<span class="{marks}">{escaped(part.text)}</span>'


def _folded(piece: Piece) -> str:
    num_chars = len(piece.text)
    middle_end = num_chars - KEPT_CHARS
    reach = min(middle_end, KEPT_CHARS + MAX_FOLDED_CHARS)
    hidden = "".join(_slice(piece.kind, part) for part in _between(piece, KEPT_CHARS, reach))
    if reach < middle_end:
        hidden += f'<span class="sgl-note">… {middle_end - reach:,} more characters …</span>'
    count = f"… {middle_end - KEPT_CHARS:,} characters …"
    head, tail = _between(piece, 0, KEPT_CHARS), _between(piece, middle_end, num_chars)
    return (
        "".join(_slice(piece.kind, part) for part in head)
        + f'<details class="sgl-fold"><summary>{count}</summary>{hidden}</details>'
        + "".join(_slice(piece.kind, part) for part in tail)
    )


def _between(piece: Piece, begin: int, end: int) -> Iterable[Slice]:
    """The slices of ``piece.text[begin:end]``."""
    position = 0
    for part in piece.slices:
        first, last = max(begin - position, 0), min(end - position, len(part.text))
        if first < last:
            yield Slice(part.text[first:last], part.forced, part.cached)
        position += len(part.text)


def _media(media: Media, tooltip: str) -> str:
    url = media.url
    is_remote = url.startswith(("http://", "https://"))
    if media.kind == "image" and (is_remote or url.startswith("data:image/")):
        return (
            f'<img class="sgl-media" src="{escaped(url)}" alt="image" title="{tooltip}" '
            'loading="lazy" referrerpolicy="no-referrer">'
        )
    if media.kind == "video" and (is_remote or url.startswith("data:video/")):
        return (
            f'<video class="sgl-media" src="{escaped(url)}" title="{tooltip}" controls muted '
            'preload="metadata"></video>'
        )
    if media.kind == "audio" and (is_remote or url.startswith("data:audio/")):
        return (
            f'<audio class="sgl-media" src="{escaped(url)}" title="{tooltip}" controls '
            'preload="metadata"></audio>'
        )
    return f'<span class="sgl-note">[{escaped(repr(media))}]</span>'


def _legend(picture: Picture) -> str:
    branches = picture.all_branches
    pieces = [piece for branch in branches for piece in branch.pieces]
    kinds = {piece.kind for piece in pieces if piece.kind != "media" or piece.text}
    items = [
        _legend_item(f"sgl-{kind}-kind", "spoken" if kind == "media" else label)
        for kind, label in _LABELS.items()
        if kind in kinds
    ]
    slices = [part for piece in pieces for part in piece.slices]
    if any(part.forced for part in slices):
        items.append(_legend_item("sgl-gen-kind sgl-forced", "forced by the constraint"))
    if any(part.cached for part in slices):
        items.append(
            _legend_item(
                "sgl-text-kind sgl-cached",
                "found in the server's cache when first sent (estimated from the cached share of "
                "tokens)",
            )
        )
    if any(branch.status == "discarded" for branch in branches):
        items.append("<li><s>struck out</s> discarded: another branch was chosen</li>")
    return f'<ul class="sgl-legend" aria-label="legend">{"".join(items)}</ul>' if items else ""


def _legend_item(marks: str, label: str) -> str:
    return f'<li><span class="sgl-slice {marks}">text</span> {escaped(label)}</li>'
