"""SGLang's `sglang.global_config`: the settings of the language, which are those of `sgl_vllm`.

Settings of SGLang's server can be assigned and have no effect.
"""

from sgl_vllm.lang.settings import GlobalConfig, global_config

__all__ = ["GlobalConfig", "global_config"]
