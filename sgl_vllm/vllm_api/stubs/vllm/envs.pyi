VLLM_BATCH_INVARIANT: bool  # [prefix_attention]
VLLM_SERVER_DEV_MODE: bool  # [routes]
