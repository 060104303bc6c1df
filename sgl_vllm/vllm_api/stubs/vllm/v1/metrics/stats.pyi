class IterationStats: ...  # [traces]

class PrefillStats:
    num_cached_tokens: int  # [routes, self_check]
    num_cache_creation_tokens: int  # [routes] since 0.32
    num_local_cached_tokens: int  # [traces]
    num_external_cached_tokens: int  # [traces]
