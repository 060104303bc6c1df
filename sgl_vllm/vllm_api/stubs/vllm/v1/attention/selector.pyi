# [preview]
class AttentionSelectorConfig:
    use_mla: bool
    use_sparse: bool
