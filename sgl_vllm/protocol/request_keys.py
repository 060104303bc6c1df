"""The keys that requests use to ask the plugin for something, in `vllm_xargs`.

The language writes them, the engine or a router reads them, and stock vLLM ignores them.
"""

from __future__ import annotations

PROGRAM, FORK_GROUP = "sgl_program", "sgl_fork_group"
"""Strings or integers. Of one tenant's requests, those with the same program and fork group stay
together in the queue; with several engines, a program's requests go to the same one."""

ENDS = "sgl_ends"
"""Any value but 0 says that no later prompt extends this request's: what only it has used is
evicted first. An integer n of 2 or more says this also of its context's earlier prompts, and that
the context had n - 1 requests: a prefix that n or more requests have used, counting the one that
computed it, was there before and goes on."""

NEXT_TOOL, NEXT_IN_S = "sgl_next_tool", "sgl_next_in_s"
"""What runs between this answer and the request that continues it: the tool's name, a string or an
integer, and how many seconds it is expected to take. Pauses are learned by tool; the seconds count
only until they are."""

AHEAD = "sgl_ahead"
"""Any value but 0 says that the answer is not needed: the request only has its prompt computed for
one that may follow. It is admitted when no other request waits."""

KEEP = "sgl_keep"
"""Prefixes of the prompt that should stay cached: by turns for how many seconds, and which share of
the prompt's tokens. [300, 1, 3600, 0.5] is all of it for 5 minutes, and its first half for an hour.
"""

REPORT, COUNT = "sgl_report", "count"
"""Any value but 0 asks which part of the output was forced. The answer is under the same key, in
`kv_transfer_params`. The value `COUNT` asks only for the number of forced tokens. The server sets
it by itself, and moves the answer to the field `FORCED` of the `completion_tokens_details` in
`usage`."""

FORCED = "accepted_prediction_tokens"
"""OpenAI's field for output tokens that were known before they were decoded. In an answer without
forced tokens there is none."""

SCORE_FROM = "sgl_score_from"
"""The index n >= 1 of the first prompt token whose log-probability is wanted. With it, a request
with `prompt_logprobs` may read its first n - 1 tokens from the cache. Its rows are vLLM's initial
None and those of the tokens from n on; leaving out the others saves microseconds per row."""

SEGMENTS = "sgl_segments"
"""Intervals of characters of the prompt, or of the contents of all messages, one after the other: a
start and an end by turns. They are segments whose order does not matter. Engines ignore them,
unless `approximate_reuse` is on."""

PROMPT_CHARS = "sgl_prompt_chars"
"""How many characters the prompt has, next to `SEGMENTS`. The server sets it: its tokenizer may
have put a token before the prompt, whose characters the marks do not count."""

REUSE, APPROXIMATE = "sgl_reuse", "approximate"
"""With this value, segments that are cached at another place may be reused from there, which is not
exact. Only where the server allows it (`approximate_reuse`). The answer is under the same key, in
`kv_transfer_params`."""

TOOLS_AND_FORMAT = "sgl_tools_and_format"
"""Any value but 0 asks for one grammar of the request's tools and its JSON `response_format`; 0
asks for vLLM's, where the server has the option `tools_and_format`."""

WHITESPACE = "sgl_whitespace"
"""The whitespace of an answer in JSON: one of `WHITESPACES`, instead of the server's."""

ANY, COMPACT, SPACED, FOLLOW = "any", "compact", "spaced", "follow"
WHITESPACES = {
    ANY: "any whitespace between JSON tokens",
    COMPACT: "none",
    SPACED: "a space after each comma and colon",
    FOLLOW: "compact, spaced or indented, as the answer begins",
}
