"""A name for what each head does."""
