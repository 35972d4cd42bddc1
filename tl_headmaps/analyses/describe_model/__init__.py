"""What was found in a model."""
