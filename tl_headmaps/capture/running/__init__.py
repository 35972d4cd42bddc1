"""Running a model: prompts and batches in, activations and logits out, layer by layer."""
