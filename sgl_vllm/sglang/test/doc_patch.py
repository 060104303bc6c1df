"""What SGLang's notebooks import of `sglang.test.doc_patch`."""

from sgl_vllm.sglang.utils import launch_server_cmd

__all__ = ["launch_server_cmd"]
