# [prefix_attention]
VLLM_BATCH_INVARIANT: bool
