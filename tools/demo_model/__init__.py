"""Parts of the demo model's training script: its world, texts, tokenizer, network and checks."""
