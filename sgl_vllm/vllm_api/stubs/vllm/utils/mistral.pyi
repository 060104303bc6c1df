# [engine_backend]
from vllm.tokenizers import TokenizerLike

def is_mistral_tokenizer(obj: TokenizerLike | None) -> bool: ...
