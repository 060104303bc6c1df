"""Records of live requests, and the outputs that carry them to the client.

Owns how long a record is kept. Does not own its content.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

Record = TypeVar("Record")


def follow(
    records: dict[str, Record],
    outputs: Iterable[EngineCoreOutput],
    unfinished: Mapping[str, Request],
) -> Iterator[tuple[EngineCoreOutput, Record, bool]]:
    """Each output whose request has a record, with the record and whether the output must carry it.

    A request's last output must. A stop string ends a request outside the engine, so if a request
    has one, each of its outputs must carry the record so far. Removes the records of requests that
    have ended. Cost: O(1) without records, otherwise O(outputs).
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
    if len(records) > len(unfinished):  # some requests were aborted
        for request_id in records.keys() - unfinished.keys():
            del records[request_id]
