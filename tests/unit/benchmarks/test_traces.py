"""`benchmarks.traces`: what is in a trace, and what it allows at best."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.traces import Call, Program, Trace, read_mooncake, reuse


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def test_equal_hash_ids_are_equal_tokens_and_others_differ_from_the_first(tmp_path: Path) -> None:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    rows = (0, 1100, 40, [0, 1, 2]), (3000, 1536, 8, [0, 1, 3]), (9000, 700, 1, [0, 4])
    recorded = tmp_path / "recorded.jsonl"
    recorded.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    first, second, third = (one.prompt for one in read_mooncake(recorded).calls())
    assert [len(first), len(second), len(third)] == [1100, 1536, 700]
    assert common_prefix(first, second) == 1024
    assert common_prefix(first, third) == 512
    assert not set(first[1024:].tolist()) & set(second[1024:].tolist())


def test_the_bound_is_that_of_counting_prefixes_one_by_one() -> None:
    rng = np.random.default_rng(0)

    def tokens() -> NDArray[np.int32]:
        return rng.integers(0, 2, rng.integers(1, 9), dtype=np.int32)

    calls = [Call(tokens(), tokens()) for _ in range(60)]
    prompts: set[tuple[int, ...]] = set()
    replies: set[tuple[int, ...]] = set()
    for one in calls:
        prompt, reply = one.prompt.tolist(), one.reply.tolist()
        prompts |= {tuple(prompt[:n]) for n in range(1, len(prompt) + 1)}
        replies |= {tuple(prompt + reply[:n]) for n in range(1, len(reply))}
    ends = [tuple(one.prompt.tolist()) for one in calls]
    expected = sum(max(prefix not in replies, ends.count(prefix)) for prefix in prompts)
    bound = reuse(Trace("made by hand", tuple(Program((one,)) for one in calls)))
    assert bound.must_compute_tokens == expected
    assert bound.working_set_tokens == len(prompts | replies)
