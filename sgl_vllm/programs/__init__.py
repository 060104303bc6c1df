"""What is known of running programs: contexts, pauses, tools, steps, and admission by them."""
