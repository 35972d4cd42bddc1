"""What one head does with a few chosen tokens."""
