"""What a model computes on prompts, read through hooks."""
