class IterationStats: ...  # [routes]

class PrefillStats:
    num_cached_tokens: int  # [routes, self_check]
    num_cache_creation_tokens: int  # [routes] since 0.32
