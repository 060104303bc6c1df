# [jump_graph_tokens]

class InputBatch:
    max_query_len: int | None
