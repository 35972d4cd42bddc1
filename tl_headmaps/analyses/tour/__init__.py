"""A tour of a model."""
