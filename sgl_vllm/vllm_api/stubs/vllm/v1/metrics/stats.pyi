class IterationStats: ...  # [traces]

class PrefillStats:
    num_local_cached_tokens: int  # [traces]
    num_external_cached_tokens: int  # [traces]
