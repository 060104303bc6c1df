"""Records of requests that have not ended, and the outputs that they go out with.

Owns how long a record is kept, not what it says (`report.py`, `traces.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

from vllm.v1.engine import EngineCoreOutput
from vllm.v1.request import Request

Record = TypeVar("Record")


def follow(
    records: dict[str, Record],
    outputs: Iterable[EngineCoreOutput],
    unfinished: Mapping[str, Request],
) -> Iterator[tuple[EngineCoreOutput, Record, bool]]:
    """Each output whose request has a record, with it, and whether the output has to carry it.

    A request's last output has to. A stop string ends a request outside of the engine, so with one
    every output has to carry what there is so far. Removes the records of requests that have ended.
    """
    if not records:
        return
    for output in outputs:
        if (record := records.get(output.request_id)) is None:
            continue
        request = unfinished.get(output.request_id)
        params = request.sampling_params if request is not None else None
        yield output, record, output.finished or bool(params is not None and params.stop)
        if output.finished:
            del records[output.request_id]
    if len(records) > len(unfinished):  # some were aborted
        for request_id in records.keys() - unfinished.keys():
            del records[request_id]
