"""Which habits of a client keep its prompts from being shared, and what each of them costs"""
