"""The workloads: each is a program of the language, its inputs, and the server it is meant for.

Owns the type and the list. A new workload is a module here with a `WORKLOAD`, an entry in
`workloads.toml`, and a line below; a module may have several. Knows no server: the same inputs go
to both arms.
"""

from __future__ import annotations

from benchmarks.ab.workloads import (
    agent_sessions,
    api_speculation,
    chat,
    generative_agents,
    gsm8k,
    hellaswag,
    image_qa,
    json_fields,
    json_regex,
    json_schema,
    llm_judge,
    mmlu,
    no_sharing,
    rag,
    react,
    skeleton_of_thought,
    tight_cache,
    tool_calls,
    tree_of_thought,
)
from benchmarks.ab.workloads.base import Workload

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        tight_cache.WORKLOAD,
        json_regex.WORKLOAD,
        json_fields.WORKLOAD,
        json_schema.WORKLOAD,
        tool_calls.WORKLOAD,
        mmlu.WORKLOAD,
        mmlu.BEST,
        hellaswag.WORKLOAD,
        hellaswag.BEST,
        gsm8k.FEW_SHOT,
        gsm8k.MULTI_CHAIN,
        rag.WORKLOAD,
        react.WORKLOAD,
        agent_sessions.WORKLOAD,
        generative_agents.WORKLOAD,
        tree_of_thought.WORKLOAD,
        skeleton_of_thought.WORKLOAD,
        llm_judge.WORKLOAD,
        image_qa.IMAGE,
        image_qa.VIDEO,
        chat.SHORT,
        chat.LONG,
        api_speculation.WORKLOAD,
        no_sharing.WORKLOAD,
    )
}

__all__ = ["WORKLOADS", "Workload"]
