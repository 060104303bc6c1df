"""The models that vLLM has recipes for, by families whose layers are of the same kinds.

Owns which recipe belongs to which family, and what is known of a family of which no model is built
here. Left out are recipes that are no language models (images, speech, embeddings, transcription)
and former names of others.

The names are the files under `models/` in https://github.com/vllm-project/recipes, as they were
stored in a public index of its history, which may lack some.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Models with the same kinds of layers.

    Attributes:
        layers: their kinds, for the table.
        recipes: names at Hugging Face.
        built: the known model that answers for the family.
        is_on: the answer where there is none, by vLLM's code of the model; None if that does not
            say enough.
        why: for such an answer.
    """

    layers: str
    recipes: tuple[str, ...]
    built: str | None = None
    is_on: bool | None = None
    why: str = ""


def _of(owner: str, names: str) -> tuple[str, ...]:
    return tuple(f"{owner}/{name}" for name in names.split())


_BY_CLASS = "read from vLLM's model class"

FAMILIES = (
    Family(
        "full attention: Llama",
        _of(
            "meta-llama",
            "Llama-3.1-8B Llama-3.1-8B-Instruct Llama-3.2-1B Llama-3.2-1B-Instruct "
            "Llama-3.2-3B-Instruct Llama-3.3-70B-Instruct",
        )
        + _of("deepseek-ai", "DeepSeek-R1-Distill-Llama-70B")
        + _of("TinyLlama", "TinyLlama-1.1B-Chat-v1.0")
        + _of("openbmb", "MiniCPM5-1B"),
        "meta-llama/Llama-3.3-70B-Instruct",
    ),
    Family(
        "full attention: Qwen 1.5 to Qwen3",
        _of(
            "Qwen",
            "Qwen1.5-0.5B-Chat Qwen2.5-32B QwQ-32B Qwen2.5-VL-7B-Instruct Qwen2.5-VL-72B-Instruct "
            "Qwen3-1.7B Qwen3-4B Qwen3-8B Qwen3-14B Qwen3-32B Qwen3Guard-Gen-8B Qwen3-ASR-1.7B",
        )
        + _of("OpenGVLab", "InternVL3_5-8B"),
        "Qwen/Qwen3-4B",
    ),
    Family(
        "full attention: Qwen3 MoE",
        _of(
            "Qwen",
            "Qwen3-30B-A3B Qwen3-235B-A22B-Instruct-2507 Qwen3-Coder-480B-A35B-Instruct "
            "Qwen3-VL-30B-A3B-Instruct Qwen3-VL-235B-A22B-Instruct",
        )
        + _of("ThaiLLM", "ThaiLLM-30B")
        + _of("internlm", "Intern-S1"),
        "Qwen/Qwen3-235B-A22B",
    ),
    Family(
        "full attention: Mistral",
        _of(
            "mistralai",
            "Ministral-3-14B-Instruct-2512 Ministral-3-8B-Reasoning-2512 Mistral-7B-Instruct-v0.2 "
            "Mistral-Medium-3.5-128B Pixtral-Large-Instruct-2411",
        ),
        "mistralai/Mistral-Small-24B-Instruct-2501",
    ),
    Family(
        "full attention: Phi-4",
        _of("microsoft", "Phi-4-reasoning"),
        "microsoft/phi-4",
    ),
    Family(
        "full attention: GLM-4",
        _of(
            "zai-org",
            "glm-4-9b-hf GLM-4.5 GLM-4.5V GLM-4.6 GLM-4.6V GLM-4.7 GLM-OCR GLM-GA Glyph "
            "GLM-ASR-Nano-2512",
        ),
        "zai-org/GLM-4.7",
    ),
    Family(
        "full attention: MiniMax M2",
        _of("MiniMaxAI", "MiniMax-M2 MiniMax-M2.1 MiniMax-M2.5 MiniMax-M2.7"),
        "MiniMaxAI/MiniMax-M2",
    ),
    Family(
        "full attention: Hunyuan",
        _of("tencent", "Hunyuan-A13B-Instruct HunyuanOCR Hy3-preview Hy3")
        + _of("RedHatAI", "Hy3-NVFP4-FP8"),
        "tencent/Hy3-preview",
    ),
    Family(
        "full attention: ERNIE 4.5",
        _of("baidu", "ERNIE-4.5-21B-A3B-PT ERNIE-4.5-VL-28B-A3B-PT")
        + _of("PaddlePaddle", "PaddleOCR-VL PaddleOCR-VL-1.5 PaddleOCR-VL-1.6"),
        "baidu/ERNIE-4.5-21B-A3B-PT",
    ),
    Family(
        "full attention: others",
        _of("ByteDance-Seed", "Seed-OSS-36B-Instruct")
        + _of("Google", "gemma-7b")
        + _of("ibm-granite", "granite-3.2-2b-instruct")
        + _of("inclusionAI", "Ring-1T-FP8")
        + _of("deepseek-ai", "DeepSeek-OCR DeepSeek-OCR-2")
        + _of(
            "IFM",
            "K2-Horizon-0.9B K2-Horizon-3.7B K2-Horizon-7B K2-Horizon-32B K2-Horizon-36B "
            "K2-Horizon-MoVA-36B-A4B K2-Horizon-375B K2-Horizon-375B-A23B",
        ),
        is_on=True,
        why=_BY_CLASS,
    ),
    Family(
        "MLA",
        _of("deepseek-ai", "DeepSeek-V3 DeepSeek-V3.1 DeepSeek-R1")
        + _of("moonshotai", "Kimi-K2-Instruct Kimi-K2-Thinking Kimi-K2.5 Kimi-K2.6 Kimi-K2.7-Code")
        + _of("mistralai", "Mistral-Large-3-675B-Instruct-2512 Mistral-Small-4-119B-2603"),
        "deepseek-ai/DeepSeek-V3",
    ),
    Family(
        "MLA with an index",
        _of("deepseek-ai", "DeepSeek-V3.2 DeepSeek-V3.2-Exp")
        + _of("zai-org", "GLM-5 GLM-5.1 GLM-5.2")
        + _of("tencent", "Hy4-preview"),
        "zai-org/GLM-5",
    ),
    Family(
        "windows beside full attention: gpt-oss",
        _of("openai", "gpt-oss-20b gpt-oss-120b"),
        "openai/gpt-oss-120b",
    ),
    Family(
        "windows beside full attention: Gemma 3",
        _of("Google", "gemma-3-4b-it gemma-3-12b-it translategemma-27b-it"),
        "google/gemma-3-27b-it",
    ),
    Family(
        "windows beside full attention: Step 3.5",
        _of("stepfun-ai", "Step-3.5-Flash Step-3.7-Flash"),
        "stepfun-ai/Step-3.5-Flash",
    ),
    Family(
        "windows beside full attention, of the same heads: others",
        _of("poolside", "Laguna-M.1 Laguna-S-2.1 Laguna-XS.2 Laguna-XS-2.1")
        + _of("arcee-ai", "Trinity-Large-Thinking")
        + _of("JetBrains", "Mellum2-12B-A2.5B-Instruct Mellum2-12B-A2.5B-Thinking")
        + _of("CohereLabs", "North-Mini-Code-1.0")
        + _of("pfnet", "plamo-3-nict-31b-base"),
        is_on=True,
        why=_BY_CLASS,
    ),
    Family(
        "chunks beside full attention: Llama 4",
        _of("meta-llama", "Llama-4-Scout-17B-16E-Instruct"),
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    ),
    Family(
        "recurrent beside full attention: Qwen3-Next, Qwen3.5 to 3.8",
        _of(
            "Qwen",
            "Qwen3-Next-80B-A3B-Instruct Qwen3.5-0.8B Qwen3.5-2B Qwen3.5-4B Qwen3.5-9B Qwen3.5-27B "
            "Qwen3.5-35B-A3B Qwen3.5-122B-A10B Qwen3.5-397B-A17B Qwen3.6-27B Qwen3.6-35B-A3B "
            "Qwen3.8-27B Qwen3.8-2.4T-A95B",
        )
        + _of("nvidia", "Qwen3.6-35B-A3B-NVFP4")
        + _of("internlm", "Intern-S2-Preview Intern-S2-397B")
        + _of("openbmb", "MiniCPM-V-4.6"),
        "Qwen/Qwen3.5-397B-A17B",
    ),
    Family(
        "recurrent beside full attention: Nemotron",
        _of(
            "nvidia",
            "NVIDIA-Nemotron-Nano-9B-v2 NVIDIA-Nemotron-Nano-12B-v2-VL-BF16 "
            "NVIDIA-Nemotron-3-Nano-4B-BF16 NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 "
            "Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16 NVIDIA-Nemotron-3-Super-120B-A12B-BF16 "
            "NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16 NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
        ),
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    ),
    Family(
        "recurrent beside full attention: LFM2",
        _of(
            "LiquidAI",
            "LFM2.5-230M LFM2.5-350M LFM2.5-1.2B-Base LFM2.5-1.2B-Instruct LFM2.5-1.2B-JP "
            "LFM2.5-1.2B-JP-202606 LFM2.5-1.2B-Thinking LFM2.5-8B-A1B LFM2.5-VL-450M "
            "LFM2.5-VL-1.6B",
        ),
        "LiquidAI/LFM2-1.2B",
    ),
    Family(
        "recurrent beside MLA: Kimi Linear, Kimi K3",
        _of("moonshotai", "Kimi-Linear-48B-A3B-Instruct Kimi-K3")
        + _of("RedHatAI", "Kimi-K3-NVFP4 Kimi-K3-FP8-BLOCK"),
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    ),
    Family(
        "recurrent beside MLA: Ling, Ring",
        _of(
            "inclusionAI",
            "Ling-2.6-flash Ling-2.6-1T Ring-2.6-1T Ling-3.0-tiny Ling-3.0-flash Ling-3.0-flash-VL "
            "Ling-3.0-flash-FP8",
        ),
        is_on=True,
        why=_BY_CLASS,
    ),
    Family(
        "a window in all layers, longer than the context: Phi-4-mini",
        _of("microsoft", "Phi-4-mini-instruct Phi-4-multimodal-instruct"),
        "microsoft/Phi-4-mini-instruct",
    ),
    # -- off
    Family(
        "windows beside full attention, of other head sizes: Gemma 4",
        _of(
            "Google",
            "gemma-4-E2B-it gemma-4-E4B-it gemma-4-12B-it gemma-4-26B-A4B-it gemma-4-31B-it",
        ),
        "google/gemma-4-31B-it",
    ),
    Family(
        "windows beside full attention, with more heads: MiMo V2",
        _of(
            "XiaomiMiMo",
            "MiMo-V2-Flash MiMo-V2.5 MiMo-V2.5-Pro MiMo-V2.5-Omni MiMo-V2.6-Flash-RL "
            "MiMo-V2.6-Pro-RL",
        ),
        "XiaomiMiMo/MiMo-V2-Flash",
    ),
    Family(
        "recurrent beside MLA with an index of several tokens: GLM-5.3-Flash",
        _of("zai-org", "GLM-5.3-Flash"),
        is_on=False,
        why=_BY_CLASS,
    ),
    Family(
        "states of several tokens: DeepSeek V4",
        _of(
            "deepseek-ai",
            "DeepSeek-V4-Flash DeepSeek-V4-Flash-Vision-Exp DeepSeek-V4-Pro DeepSeek-V4.1-Flash",
        ),
        is_on=False,
        why=_BY_CLASS,
    ),
    Family(
        "tokens dropped between the prompt and the last ones: Unlimited-OCR",
        _of("baidu", "Unlimited-OCR"),
        is_on=False,
        why=_BY_CLASS,
    ),
    # -- not known
    Family(
        "not classified",
        _of("thinkingmachines", "Inkling Inkling-Small")
        + _of("Qwen", "Qwen3.8-Flash-Next")
        + _of("MiniMaxAI", "MiniMax-M3")
        + _of("pfnet", "plamo-2-translate")
        + _of("openbmb", "MiniCPM5-2B")
        + _of("zai-org", "GLM-5.3")
        + _of("mistralai", "Voxtral-Mini-4B-Realtime-2602")
        + _of("MegatronPrimer", "dots3note"),
        why="their configurations were not found",
    ),
)
