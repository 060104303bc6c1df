"""The workloads: each is a program of the language, its inputs, and the server it is meant for.

Owns the type and the list. A new workload is a module here with a `WORKLOAD`, and a line below.
Knows no server: the same inputs go to both arms.
"""

from __future__ import annotations

from benchmarks.ab.workloads import (
    few_shot_gsm8k,
    hellaswag,
    json_fields,
    json_regex,
    json_schema,
    mmlu,
    mmlu_best,
    multi_chain,
    no_sharing,
    rag,
    tight_cache,
)
from benchmarks.ab.workloads.base import Workload

WORKLOADS: dict[str, Workload] = {
    module.WORKLOAD.name: module.WORKLOAD
    for module in (
        tight_cache,
        json_regex,
        json_fields,
        json_schema,
        mmlu,
        mmlu_best,
        hellaswag,
        few_shot_gsm8k,
        multi_chain,
        rag,
        no_sharing,
    )
}

__all__ = ["WORKLOADS", "Workload"]
