"""Prints what is foreseen for an engine, as one line of JSON after a mark.

It is a process of its own because importing vLLM logs, takes seconds and can crash, and because it
may pretend to have another device.

    python -m sgl_vllm.preview [--as-on-gpu] MODEL [FLAGS of vllm serve]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import httpx

from sgl_vllm.preview.outlook import AS_ON_GPU, MARK
from sgl_vllm.vllm_api.probe import missing_hooks

HUB_TIMEOUT_S = 10


def main(arguments: list[str]) -> int:
    """The exit status: 0 with an outlook, 2 with the reason why there is none."""
    is_prediction = arguments[:1] == [AS_ON_GPU]
    model, *flags = arguments[is_prediction:]
    if missing := missing_hooks("preview"):
        print(MARK + json.dumps({"refused": f"this vLLM lacks {', '.join(missing)}"}))
        return 2
    if model.startswith(("/", "./", "../")) and not Path(model).exists():
        print(MARK + json.dumps({"refused": f"there is no folder {model}"}))
        return 2
    if not Path(model).exists() and not _reaches_the_hub():
        os.environ["HF_HUB_OFFLINE"] = "1"  # what is cached counts; vLLM would try for minutes
    if is_prediction:
        from sgl_vllm.preview import gpu

        gpu.pretend()
    from sgl_vllm.preview.engine import preview
    from sgl_vllm.preview.resolve import Refused

    try:
        outlook = preview(model, flags, is_prediction=is_prediction)
    except Refused as refusal:
        print(MARK + json.dumps({"refused": str(refusal)}))
        return 2
    print(MARK + outlook.to_json())
    return 0


def _reaches_the_hub() -> bool:
    try:
        httpx.head(os.environ.get("HF_ENDPOINT", "https://huggingface.co"), timeout=HUB_TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
