"""Which heads implement a relation."""
