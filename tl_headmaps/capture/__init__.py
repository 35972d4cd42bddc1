"""Models: loaded or on disk, their weights, and what they compute; the only room that knows TransformerLens."""
