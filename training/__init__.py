"""Rebuilds the demo model of Onward: corpus, tokenizer, target, draft, evaluation and model card."""
